"""An open container, for the calls of one request."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

import msgspec

from fumehood.containers.container_state import ContainerContext, ContainerState
from fumehood.containers.execution_recovery import execute_with_recovery, lost_execution_end
from fumehood.containers.file_sync import FileChanges, format_file_names
from fumehood.containers.sandbox_claims import (
    attach_sandbox,
    check_network_allowed,
    claim_sandbox,
    ephemeral_sandbox,
    next_sandbox_name,
    release_sandbox,
    start_kind,
)
from fumehood.interfaces import CollectedFiles, ContainerEvent, ExecutionStarted, Sandbox
from fumehood.protocol.openai.container_objects import ContainerFileRecord
from fumehood.protocol.sandbox.sandbox_errors import (
    RetryLater,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, ExecutionNote
from fumehood.timings import Timing, start_timing

logger = logging.getLogger(__name__)

_NEW_SANDBOX_NOTICE = (
    "A new sandbox: variables, imports and packages of earlier calls are gone, files in /mnt/data are there."
)
_CONTAINER_ENDED = "The container is not there any more: it has expired, or was deleted."
_INTERRUPTED_STATUSES = frozenset({"timeout", "interrupted"})
_FINISHED_STATUSES = frozenset({"ok", "error"})


class ContainerHandle:
    """A `Container`; `collect_files` returns what the last call left."""

    def __init__(self, context: ContainerContext, state: ContainerState) -> None:
        self._context = context
        self._state = state
        self._collected = CollectedFiles()
        self._just_opened = True
        self._is_open = True
        state.open_handles += 1

    @property
    def id(self) -> str:
        return self._state.record.id

    async def execute(self, request: ExecuteRequest) -> AsyncGenerator[ContainerEvent]:
        execution_id = request.execution_id or secrets.token_hex(12)
        request = msgspec.structs.replace(request, execution_id=execution_id)
        is_ephemeral = self._context.settings.isolation == "execution"
        run = self._execute_in_ephemeral_sandbox if is_ephemeral else self._execute_in_persistent_sandbox
        metrics = self._context.metrics
        metrics.running_calls += 1
        event: ContainerEvent | None = None
        try:
            with self._state.keep_in_use():
                async with aclosing(run(request, execution_id)) as events:
                    async for event in events:
                        yield event
        finally:
            metrics.running_calls -= 1
            metrics.ended_calls[event.status if isinstance(event, ExecutionEnd) else "abandoned"] += 1

    def release(self) -> None:
        if self._is_open:
            self._is_open = False
            self._state.open_handles -= 1
            self._state.update(last_active_at=self._context.clock.now())

    async def collect_files(self) -> CollectedFiles:
        collected, self._collected = self._collected, CollectedFiles()
        return collected

    async def save_file(self, path: str, content: bytes) -> ContainerFileRecord:
        async with self._state.files_lock:
            sandbox: Sandbox | None = None
            with suppress(SandboxError):
                sandbox = await attach_sandbox(self._context.provider, self._state.record)
            return await self._context.files.add_assistant_file(self.id, path, content, sandbox)

    # ---- persistent sandbox: one for all calls ------------------------------------------------------------------

    async def _execute_in_persistent_sandbox(
        self, request: ExecuteRequest, execution_id: str
    ) -> AsyncGenerator[ContainerEvent]:
        has_waited = self._state.call_lock.locked()
        async with self._state.call_lock:
            if not await self._is_running(has_waited):
                yield _lost_end(_CONTAINER_ENDED)
                return
            while True:
                try:
                    async with aclosing(self._execute_once(request, execution_id)) as events:
                        async for event in events:
                            yield event
                    return
                except SandboxError as error:
                    is_gone = isinstance(error, SandboxGone | SandboxNotFound)
                    if not is_gone or self._state.sandbox is None:
                        yield (
                            _lost_end(_CONTAINER_ENDED)
                            if self._state.has_ended
                            else sandbox_unavailable_end(error, request)
                        )
                        return
                    self._state.sandbox = None  # the cached one is gone: try once more with another

    async def _execute_once(
        self, request: ExecuteRequest, execution_id: str
    ) -> AsyncGenerator[ContainerEvent]:
        """Raises SandboxError if the call could not start."""
        sandbox, notices = await self._acquire_sandbox()
        for text in notices:
            yield ExecutionNote(text)
        yield ExecutionStarted()
        started_at = self._context.clock.monotonic()
        async with aclosing(
            execute_with_recovery(sandbox, request, execution_id, self._context.clock)
        ) as events:
            async for event in events:
                if isinstance(event, ExecutionEnd):
                    self._context.metrics.run_seconds.observe(self._context.clock.monotonic() - started_at)
                    event, notices = await self._finish_call(sandbox, event)
                    for text in notices:
                        yield ExecutionNote(text)
                    event = _append_reason(
                        event,
                        _CONTAINER_ENDED if self._state.has_ended else _describe_persistent_state(event),
                    )
                yield event

    async def _acquire_sandbox(self) -> tuple[Sandbox, list[str]]:
        """Return the container's sandbox, a new one if there is none, and notices for the model. Raises SandboxError.

        Whether a cached sandbox still runs is not checked: that would cost as much as the call.
        """
        with start_timing("acquire") as timing:
            cached = self._state.sandbox
            if cached is not None and cached.id == self._state.record.sandbox:
                timing.set_attribute("start", "reused")
                return cached, []
            check_network_allowed(self._context, self._state.record)
            sandbox = await self._attach()
            if sandbox is not None:
                timing.set_attribute("start", "reused")
                return sandbox, []
            async with self._state.files_lock:  # so that an upload meanwhile is not missed
                return await self._replace_sandbox(timing)

    async def _attach(self) -> Sandbox | None:
        try:
            async with asyncio.timeout(self._context.settings.claim_timeout):
                return await attach_sandbox(self._context.provider, self._state.record)
        except TimeoutError:
            raise SandboxServerUnreachable("The sandbox server does not answer.") from None

    async def _replace_sandbox(self, timing: Timing) -> tuple[Sandbox, list[str]]:
        """Attach to the sandbox that another process has made meanwhile, or make one.

        Files are not restored into the other's sandbox: that could undo what code is writing there.
        """
        gone = self._state.record.sandbox
        while True:
            latest = await self._context.store.get_container(self.id)
            if latest is not None and latest.status == "running" and latest != self._state.stored:
                self._state.merge_stored(latest)
            if self._state.record.sandbox != gone:
                sandbox = await self._attach()
                if sandbox is not None:
                    timing.set_attribute("start", "reused")
                    return sandbox, []
                gone = self._state.record.sandbox
            created = await self._recreate_sandbox(timing)
            if created is not None:
                return created

    async def _recreate_sandbox(self, timing: Timing) -> tuple[Sandbox, list[str]] | None:
        """Make the next sandbox and restore the files. None if another process was faster."""
        record = self._state.record
        incarnation = record.incarnation + 1
        ref = await claim_sandbox(self._context, record, next_sandbox_name(record))
        sandbox = await self._context.provider.attach(ref)
        timing.set_attribute("start", start_kind(ref))
        timing.end()
        with self._context.time_file_sync():
            restored = await self._context.files.restore(record.id, sandbox)
            await self._context.files.record_restored(record.id, restored)
        self._state.update(sandbox=ref.id, address=ref.address, incarnation=incarnation, mark=restored.mark)
        if not await self._state.save(self._context.store):
            await release_sandbox(self._context.provider, ref)
            raise SandboxGone(_CONTAINER_ENDED)
        if self._state.record.sandbox != ref.id:
            await release_sandbox(self._context.provider, ref)
            return None
        return sandbox, [*([_NEW_SANDBOX_NOTICE] if incarnation > 1 else []), *restored.notices()]

    async def _finish_call(self, sandbox: Sandbox, end: ExecutionEnd) -> tuple[ExecutionEnd, Sequence[str]]:
        """Collect files and update the record. Returns the end, changed if files were lost, and notices."""
        self._state.update(last_active_at=self._context.clock.now())
        notices: Sequence[str] = ()
        if end.state_kept and end.status != "lost":
            changes = await self._collect_files(sandbox, self._state.record.mark)
            self._state.update(mark=changes.mark)
            notices = changes.notices
            if not self._collected.is_complete:
                if await self._is_sandbox_gone(changes.failure):
                    end = _mark_files_lost(end, self._collected)
                else:
                    notices = [*notices, _describe_missing_files(self._collected)]
        self._state.sandbox = sandbox if end.state_kept and end.status != "lost" else None
        # Another process may have made the next one already.
        if not end.state_kept and self._state.record.sandbox == sandbox.id:
            self._state.update(sandbox="", address="", mark="")
            await self._state.save(self._context.store)
        return end, notices

    async def _is_sandbox_gone(self, failure: SandboxError | None) -> bool:
        """Whether the sandbox has ended, after a failure to fetch its files."""
        if isinstance(failure, SandboxGone | SandboxNotFound):
            return True
        try:
            return await self._attach() is None
        except SandboxError:
            return False  # unknown

    async def _collect_files(
        self, sandbox: Sandbox, mark: str, initial_files: dict[str, ContainerFileRecord] | None = None
    ) -> FileChanges:
        """Record what a call wrote, for `collect_files`."""
        try:
            with self._context.time_file_sync():
                async with self._state.files_lock:
                    changes = await self._context.files.capture_changes(self.id, sandbox, mark, initial_files)
        except SandboxError as error:
            logger.warning("Could not list the files of %s: %s", self.id, error.message)
            self._collected = CollectedFiles(is_complete=False)
            return FileChanges(mark, failure=error)
        self._collected = CollectedFiles(
            files=changes.changed, missing=changes.missing, is_complete=not changes.missing
        )
        return changes

    # ---- ephemeral sandbox: one for every call ------------------------------------------------------------------

    async def _execute_in_ephemeral_sandbox(
        self, request: ExecuteRequest, execution_id: str
    ) -> AsyncGenerator[ContainerEvent]:
        if not await self._is_running():
            yield _lost_end(_CONTAINER_ENDED)
            return
        end: ExecutionEnd | None = None
        try:
            async with ephemeral_sandbox(self._context, self._state) as sandbox:
                with self._context.time_file_sync():
                    restored = await self._context.files.restore(self.id, sandbox)
                for text in restored.notices():
                    yield ExecutionNote(text)
                yield ExecutionStarted()
                started_at = self._context.clock.monotonic()
                async with aclosing(
                    execute_with_recovery(sandbox, request, execution_id, self._context.clock)
                ) as events:
                    async for event in events:
                        if not isinstance(event, ExecutionEnd):
                            yield event
                            continue
                        end = event
                        self._context.metrics.run_seconds.observe(
                            self._context.clock.monotonic() - started_at
                        )
                        if end.state_kept and end.status != "lost":
                            changes = await self._collect_files(sandbox, restored.mark, restored.files)
                            for text in changes.notices:
                                yield ExecutionNote(text)
        except SandboxError as error:
            end = sandbox_unavailable_end(error, request)
        self._state.update(last_active_at=self._context.clock.now())
        if end is not None:
            if not self._collected.is_complete:  # the sandbox is gone, and its files with it
                end = _mark_files_lost(end, self._collected)
            yield msgspec.structs.replace(
                _append_reason(end, _describe_ephemeral_state(end)), state_kept=False
            )

    # ---- record -------------------------------------------------------------------------------------------------

    async def _is_running(self, has_waited: bool = False) -> bool:
        """Whether the container still runs; reads the record again if time has passed since it was opened."""
        is_fresh, self._just_opened = self._just_opened and not has_waited, False
        if is_fresh:
            return True
        record = await self._context.store.get_container(self.id)
        if record is None or record.status != "running":
            return False
        if record != self._state.stored:
            self._state.merge_stored(record)
        return True


def sandbox_unavailable_end(error: SandboxError, request: ExecuteRequest) -> ExecutionEnd:
    """Return the end of a call that never ran."""
    if isinstance(error, RetryLater):
        return _lost_end(f"No sandbox is free at the moment, try again later: {error.message}")
    return lost_execution_end(error, request.noun)


def _lost_end(reason: str) -> ExecutionEnd:
    return ExecutionEnd(status="lost", exit_code=-1, duration_ms=0, state_kept=True, reason=reason)


def _append_reason(end: ExecutionEnd, sentence: str) -> ExecutionEnd:
    """Add a sentence to the reason, if there is one."""
    if not end.reason or not sentence:
        return end
    return msgspec.structs.replace(end, reason=f"{end.reason} {sentence}")


def _describe_persistent_state(end: ExecutionEnd) -> str:
    """Say what the next call finds in a persistent sandbox."""
    if not end.state_kept:
        return "Variables are gone: the next call begins in a new sandbox, with the files of earlier calls."
    return "Variables and files are kept." if end.status in _INTERRUPTED_STATUSES else ""


def _describe_ephemeral_state(end: ExecutionEnd) -> str:
    """Say what the next call finds if every call has its own sandbox."""
    if end.state_kept and end.status in _INTERRUPTED_STATUSES:
        return "Files are kept; the next call begins in a new sandbox, without variables."
    return "The next call begins in a new sandbox, without variables, with the files of earlier calls."


def _mark_files_lost(end: ExecutionEnd, collected: CollectedFiles) -> ExecutionEnd:
    """Turn the end into that of a lost sandbox, with the exit code of the code."""
    if collected.missing:
        names = format_file_names([file.path for file in collected.missing])
        sentence = f"The sandbox was lost while the files of this call were fetched, and with it: {names}."
    else:
        sentence = "The sandbox was lost before the files of this call could be listed: those that it wrote are lost."
    return msgspec.structs.replace(
        end,
        status="lost" if end.status in _FINISHED_STATUSES else end.status,
        state_kept=False,
        reason=f"{end.reason} {sentence}" if end.reason else sentence,
    )


def _describe_missing_files(collected: CollectedFiles) -> str:
    if not collected.missing:
        return "The files of this call could not be listed; they are looked for again after the next call."
    names = format_file_names([file.path for file in collected.missing])
    return f"These files could not be fetched yet, and are looked for again after the next call: {names}."
