"""An open container, for the calls of one request."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass

import msgspec

from fumehood.containers.container_runtime_state import ContainerContext, ContainerRuntimeState
from fumehood.containers.file_sync import FileChanges, RestoreResult, format_file_names
from fumehood.containers.running_call import RunningCall
from fumehood.containers.sandbox_acquisition import (
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
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    ExecutionNote,
    make_execution_end,
)
from fumehood.timed_steps import TimedStep, start_timing

logger = logging.getLogger(__name__)

_NEW_SANDBOX_NOTICE = (
    "A new sandbox: variables, imports and packages of earlier calls are gone, files in /mnt/data are there."
)
_CONTAINER_ENDED = "The container is not there any more: it has expired, or was deleted."
_INTERRUPTED_STATUSES = frozenset({"timeout", "interrupted"})
_FINISHED_STATUSES = frozenset({"ok", "error"})


@dataclass(frozen=True, slots=True)
class AcquiredSandbox:
    """A sandbox for one call.

    notices: for the model. is_cached: whether it may be gone by now. restored: the files in an ephemeral sandbox.
    """

    sandbox: Sandbox
    notices: Sequence[str] = ()
    is_cached: bool = False
    restored: RestoreResult | None = None


class ContainerHandle:
    """A `Container`; `collect_files` returns what the last call left."""

    def __init__(self, context: ContainerContext, state: ContainerRuntimeState) -> None:
        self._context = context
        self._state = state
        self._collected = CollectedFiles()
        self._is_ephemeral = context.settings.isolation == "execution"
        self._just_opened = True
        self._is_open = True
        state.open_handles += 1

    @property
    def id(self) -> str:
        return self._state.record.id

    async def execute(
        self, request: ExecuteRequest, timeout: float = math.inf
    ) -> AsyncGenerator[ContainerEvent]:
        if timeout <= 0:
            reason = f"The time for this response was over before the {request.noun} began."
            yield make_execution_end("timeout", reason)
            return
        notices: Sequence[str] = ()
        # Leaving the stack closes the events, then stops the code, then releases the sandbox or the turn.
        with self._state.keep_in_use(), RunningCall(self._context, request, timeout) as call:
            try:
                async with AsyncExitStack() as stack:
                    await call.wait_for(self._wait_for_turn(stack))
                    while call.end is None:
                        lease = await call.wait_for(self._acquire_sandbox(stack))
                        for text in lease.notices:
                            yield ExecutionNote(text)
                        yield ExecutionStarted()
                        call.begin()
                        stack.push_async_callback(call.stop, lease.sandbox)
                        try:
                            events = lease.sandbox.execute(call.request)
                            await stack.enter_async_context(aclosing(events))
                            event = await call.next_event(events)
                            while not isinstance(event, ExecutionEnd):
                                yield event
                                event = await call.next_event(events)
                        except SandboxError as error:
                            call.fail(error)
                            if lease.is_cached and _is_gone(error) and not call.may_have_run:
                                self._state.sandbox = None  # acquire another one, once
                                continue
                            event = call.lost_end(error)
                        call.measure(event)
                        call.end, notices = await call.wait_for(self._finish_call(lease, event))
            except TimeoutError:
                call.end = call.timeout_end()
            except SandboxError as error:
                call.end = self._unavailable_end(call, error)
            for text in notices:
                yield ExecutionNote(text)
            yield call.end

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

    # ---- before the code runs -----------------------------------------------------------------------------------

    async def _wait_for_turn(self, stack: AsyncExitStack) -> None:
        """Wait for earlier calls in the same sandbox. Raises SandboxGone if the container has ended.

        The record is read again if time has passed since the container was opened.
        """
        is_fresh, self._just_opened = self._just_opened, False
        if not self._is_ephemeral:
            is_fresh = is_fresh and not self._state.call_lock.locked()
            await stack.enter_async_context(self._state.call_lock)
        if is_fresh:
            return
        record = await self._context.store.get_container(self.id)
        if record is None or record.status != "running":
            self._state.has_ended = True
            raise SandboxGone(_CONTAINER_ENDED)
        if record != self._state.stored:
            self._state.merge_stored(record)

    async def _acquire_sandbox(self, stack: AsyncExitStack) -> AcquiredSandbox:
        """Return the container's sandbox, a new one if there is none. Raises SandboxError.

        Whether a cached sandbox still runs is not checked: that would cost as much as the call.
        """
        if self._is_ephemeral:
            sandbox = await stack.enter_async_context(ephemeral_sandbox(self._context, self._state))
            with self._context.time_file_sync():
                restored = await self._context.files.restore(self.id, sandbox)
            return AcquiredSandbox(sandbox, restored.notices(), restored=restored)
        with start_timing("acquire") as timing:
            timing.set_attribute("start", "reused")
            cached = self._state.sandbox
            if cached is not None and cached.id == self._state.record.sandbox:
                return AcquiredSandbox(cached, is_cached=True)
            check_network_allowed(self._context, self._state.record)
            sandbox = await self._attach()
            if sandbox is not None:
                return AcquiredSandbox(sandbox)
            async with self._state.files_lock:  # so that an upload meanwhile is not missed
                return await self._replace_sandbox(timing)

    async def _attach(self) -> Sandbox | None:
        try:
            async with asyncio.timeout(self._context.settings.claim_timeout):
                return await attach_sandbox(self._context.provider, self._state.record)
        except TimeoutError:
            raise SandboxServerUnreachable("The sandbox server does not answer.") from None

    async def _replace_sandbox(self, timing: TimedStep) -> AcquiredSandbox:
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
                    return AcquiredSandbox(sandbox)
                gone = self._state.record.sandbox
            created = await self._recreate_sandbox(timing)
            if created is not None:
                return created

    async def _recreate_sandbox(self, timing: TimedStep) -> AcquiredSandbox | None:
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
        if (self._state.record.sandbox, self._state.record.address) != (ref.id, ref.address):
            await release_sandbox(self._context.provider, ref)
            return None
        return AcquiredSandbox(
            sandbox, [*([_NEW_SANDBOX_NOTICE] if incarnation > 1 else []), *restored.notices()]
        )

    # ---- after the code has run ---------------------------------------------------------------------------------

    async def _finish_call(
        self, lease: AcquiredSandbox, end: ExecutionEnd
    ) -> tuple[ExecutionEnd, Sequence[str]]:
        """Collect files and update the record. Returns the end, changed if files were lost, and notices."""
        self._state.update(last_active_at=self._context.clock.now())
        notices: Sequence[str] = ()
        if end.state_kept and end.status != "lost":
            changes = await self._collect_files(lease)
            notices = changes.notices
            if not self._collected.is_complete:
                if self._is_ephemeral or await self._is_sandbox_gone(changes.failure):
                    end = _mark_files_lost(end, self._collected)
                else:
                    notices = [*notices, _describe_missing_files(self._collected)]
        if self._is_ephemeral:
            return _describe_ephemeral_end(end), notices
        self._state.sandbox = lease.sandbox if end.state_kept and end.status != "lost" else None
        # Another process may have made the next one already.
        if not end.state_kept and self._state.record.sandbox == lease.sandbox.id:
            self._state.update(sandbox="", address="", mark="")
            await self._state.save(self._context.store)
        sentence = _CONTAINER_ENDED if self._state.has_ended else _describe_persistent_state(end)
        return _append_reason(end, sentence), notices

    async def _is_sandbox_gone(self, failure: SandboxError | None) -> bool:
        """Whether the sandbox has ended, after a failure to fetch its files."""
        if failure is not None and _is_gone(failure):
            return True
        try:
            return await self._attach() is None
        except SandboxError:
            return False  # unknown

    async def _collect_files(self, lease: AcquiredSandbox) -> FileChanges:
        """Record what a call wrote, for `collect_files`."""
        restored = lease.restored
        mark = self._state.record.mark if restored is None else restored.mark
        try:
            with self._context.time_file_sync():
                async with self._state.files_lock:
                    changes = await self._context.files.capture_changes(
                        self.id, lease.sandbox, mark, None if restored is None else restored.files
                    )
        except SandboxError as error:
            logger.warning("Could not list the files of %s: %s", self.id, error.message)
            self._collected = CollectedFiles(is_complete=False)
            return FileChanges(mark, failure=error)
        if restored is None:
            self._state.update(mark=changes.mark)
        self._collected = CollectedFiles(
            files=changes.changed, missing=changes.missing, is_complete=not changes.missing
        )
        return changes

    def _unavailable_end(self, call: RunningCall, error: SandboxError) -> ExecutionEnd:
        """Return the end of a call that got no sandbox."""
        if self._state.has_ended:
            return make_execution_end("lost", _CONTAINER_ENDED)
        if isinstance(error, RetryLater):
            reason = f"No sandbox is free at the moment, try again later: {error.message}"
            end = make_execution_end("lost", reason)
        else:
            end = call.lost_end(error)
        return _describe_ephemeral_end(end) if self._is_ephemeral else end


def _is_gone(error: SandboxError) -> bool:
    return isinstance(error, SandboxGone | SandboxNotFound)


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


def _describe_ephemeral_end(end: ExecutionEnd) -> ExecutionEnd:
    """Say what the next call finds if every call has its own sandbox."""
    if end.state_kept and end.status in _INTERRUPTED_STATUSES:
        sentence = "Files are kept; the next call begins in a new sandbox, without variables."
    else:
        sentence = (
            "The next call begins in a new sandbox, without variables, with the files of earlier calls."
        )
    return msgspec.structs.replace(_append_reason(end, sentence), state_kept=False)


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
