"""One container over the sandboxes that it has one after another."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fumehood.containers.execution_recovery import execute_with_recovery, lost_execution_end
from fumehood.containers.file_sync import (
    ContainerFileLimits,
    FileChanges,
    FileSnapshot,
    FileSync,
    format_file_names,
)
from fumehood.containers.network_policy import DomainSecretVault, find_forbidden_domain
from fumehood.interfaces import (
    Clock,
    CollectedFiles,
    ContainerEvent,
    ExecutionStarted,
    Sandbox,
    SandboxProvider,
    SandboxRef,
    Store,
)
from fumehood.metrics import ContainerStats
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord
from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidSandboxRequest,
    RetryLater,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxServerAtCapacity,
    SandboxServerUnreachable,
    SandboxStartFailed,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    ExecutionNote,
    SandboxSpec,
    Tenant,
)
from fumehood.timings import Timing, start_timing

logger = logging.getLogger(__name__)

type IsolationScope = Literal["container", "execution"]

_RELEASE_TIMEOUT = 10.0
_INITIAL_BACKOFF = 0.05
_MAX_BACKOFF = 1.0

_NEW_SANDBOX_NOTICE = (
    "A new sandbox: variables, imports and packages of earlier calls are gone, files in /mnt/data are there."
)
_CONTAINER_ENDED = "The container is not there any more: it has expired, or was deleted."
_INTERRUPTED_STATUSES = frozenset({"timeout", "interrupted"})
_FINISHED_STATUSES = frozenset({"ok", "error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """How containers live, and what they may be.

    isolation: `container`: one container has one sandbox, with variables, until it expires. `execution`: every call
        has a fresh one, and only files are carried from call to call.
    claim_timeout: seconds until a sandbox that is not to be had is given up.
    containers_per_tenant: how many may run.
    allowed_domains: the most that a container may reach; `*` stands for every domain.
    idle_minutes, max_idle_minutes: how long a container lives that nobody uses, unless its caller chose otherwise,
        and what it may choose at most.
    max_lifetime_hours: how long it lives at most, however much it is used.
    retention_hours: how long an expired one can be looked at, and the files that users put there are kept for the
        container that takes its place.
    concurrent_uploads: how many files may be on their way into containers of one tenant; further ones wait.
    retained_bytes: how much of such files is kept for one tenant; the oldest go first.
    sandboxes_outlive: whether those of an earlier process may still be there; else containers that had one expire.
    alone: whether no other process uses the containers of the same store, so that what is found at the start, and no
        record knows, is nobody's, and what is idle here is idle.
    sweep_seconds: how often somebody looks for containers that nobody uses any more.
    orphan_seconds: how long a sandbox that belongs to no container may have been idle.
    """

    isolation: IsolationScope = "container"
    claim_timeout: float = 30.0
    containers_per_tenant: int = 50
    allowed_domains: frozenset[str] = frozenset()
    idle_minutes: int = 20
    max_idle_minutes: int = 60
    max_lifetime_hours: float = 24.0
    retention_hours: float = 168.0
    retained_bytes: int = 2 << 30
    concurrent_uploads: int = 16
    file_limits: ContainerFileLimits = field(default_factory=ContainerFileLimits)
    sandboxes_survive_restart: bool = True
    single_process: bool = False
    sweep_interval_seconds: float = 30.0
    orphan_idle_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class ContainerContext:
    """What all containers of one process share."""

    provider: SandboxProvider
    store: Store
    files: FileSync
    clock: Clock
    settings: ContainerSettings
    domain_secrets: DomainSecretVault
    metrics: ContainerStats

    @contextmanager
    def time_file_sync(self) -> Generator[None]:
        """While the files of a call are put there or looked for."""
        with start_timing("files"), self.metrics.file_seconds.time(self.clock.monotonic):
            yield


@dataclass(slots=True, eq=False)
class ContainerState:
    """A container as this process knows it.

    record: how things stand. stored: how the store was last seen; what differs is `mark` and `last_active_at`, which
        are written now and then, since losing them costs a longer listing and a little of the container's time. Where
        another process has written meanwhile, the two are brought together.
    turn: calls come one after another, so that each finds its own files; across processes the sandbox server sees to
        their order.
    filing: for whoever changes both the sandbox's files and what is recorded of them.
    users: calls and transfers that run or wait. stays: those that have opened it and not left yet.
    sandbox: the one that was used last, and most likely lives.
    passing: sandboxes that end with what they are used for.
    over: whether the store has said that there is no such container any more.
    """

    record: ContainerRecord
    stored: ContainerRecord
    call_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    files_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    active_operations: int = 0
    open_handles: int = 0
    sandbox: Sandbox | None = None
    ephemeral_sandboxes: set[SandboxRef] = field(default_factory=set[SandboxRef])
    has_ended: bool = False

    def update(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)

    async def save(self, store: Store) -> bool:
        """False if there is no such container any more."""
        while (record := self.record) != self.stored and not self.has_ended:
            if await store.update_container(record, expected=self.stored):
                self.stored = record
                break
            latest = await store.get_container(record.id)
            if latest is None or latest.status != "running":
                self.has_ended = True
            else:
                self.merge_stored(latest)
        return not self.has_ended

    @contextmanager
    def keep_in_use(self) -> Generator[None]:
        """Meanwhile it does not expire."""
        self.active_operations += 1
        try:
            yield
        finally:
            self.active_operations -= 1

    def merge_stored(self, stored: ContainerRecord) -> None:
        """Another process has changed it. Its sandbox is the one that was written down last, unless this process has
        changed that since or has made a later one; it was used when either has used it.
        """
        ours, before = self.record, self.stored
        record = msgspec.structs.replace(
            stored, last_active_at=max(stored.last_active_at, ours.last_active_at)
        )
        if ours.incarnation > stored.incarnation or _sandbox_binding(stored) == _sandbox_binding(before):
            record = msgspec.structs.replace(
                record,
                sandbox=ours.sandbox,
                address=ours.address,
                incarnation=ours.incarnation,
                mark=stored.mark if ours.mark == before.mark else ours.mark,
            )
        self.record, self.stored, self.has_ended = record, stored, False

    @property
    def in_use(self) -> bool:
        return self.active_operations > 0 or self.open_handles > 0


def _sandbox_binding(record: ContainerRecord) -> tuple[int, str, str]:
    return record.incarnation, record.sandbox, record.address


class ContainerHandle:
    """A `Container`, for one call: what `collect` gives is what that call left."""

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
        every_call_alone = self._context.settings.isolation == "execution"
        run = self._execute_in_ephemeral_sandbox if every_call_alone else self._execute_in_persistent_sandbox
        figures = self._context.metrics
        figures.running_calls += 1
        event: ContainerEvent | None = None
        try:
            with self._state.keep_in_use():
                async with aclosing(run(request, execution_id)) as events:
                    async for event in events:
                        yield event
        finally:
            figures.running_calls -= 1
            figures.ended_calls[event.status if isinstance(event, ExecutionEnd) else "abandoned"] += 1

    def release(self) -> None:
        if self._is_open:
            self._is_open = False
            self._state.open_handles -= 1
            self._state.update(last_active_at=self._context.clock.now())

    async def collect_files(self) -> CollectedFiles:
        found, self._collected = self._collected, CollectedFiles()
        return found

    async def save_file(self, path: str, content: bytes) -> ContainerFileRecord:
        async with self._state.files_lock:
            sandbox: Sandbox | None = None
            with suppress(SandboxError):
                sandbox = await attach_sandbox(self._context.provider, self._state.record)
            return await self._context.files.add_assistant_file(self.id, path, content, sandbox)

    # ---- one sandbox for all calls --------------------------------------------------------------------------------

    async def _execute_in_persistent_sandbox(
        self, request: ExecuteRequest, execution_id: str
    ) -> AsyncGenerator[ContainerEvent]:
        waiting = self._state.call_lock.locked()
        async with self._state.call_lock:
            if not await self._is_running(waiting):
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
                    self._state.sandbox = None  # it was only taken to live: once more, with another

    async def _execute_once(
        self, request: ExecuteRequest, execution_id: str
    ) -> AsyncGenerator[ContainerEvent]:
        """Raises SandboxError if the call could not begin."""
        sandbox, notes = await self._acquire_sandbox()
        for text in notes:
            yield ExecutionNote(text)
        yield ExecutionStarted()
        began = self._context.clock.monotonic()
        async with aclosing(
            execute_with_recovery(sandbox, request, execution_id, self._context.clock)
        ) as events:
            async for event in events:
                if isinstance(event, ExecutionEnd):
                    self._context.metrics.run_seconds.observe(self._context.clock.monotonic() - began)
                    event, notes = await self._finish_call(sandbox, event)
                    for text in notes:
                        yield ExecutionNote(text)
                    event = _append_reason(
                        event,
                        _CONTAINER_ENDED if self._state.has_ended else _describe_persistent_state(event),
                    )
                yield event

    async def _acquire_sandbox(self) -> tuple[Sandbox, list[str]]:
        """The container's sandbox, a new one if there is none, and what there is to tell of that; raises SandboxError.
        One that was used before is not asked whether it lives: that would cost as much as the call.
        """
        with start_timing("acquire") as acquiring:
            known = self._state.sandbox
            if known is not None and known.id == self._state.record.sandbox:
                acquiring.set_attribute("start", "kept")
                return known, []
            _check_network_allowed(self._context, self._state.record)
            sandbox = await self._attach()
            if sandbox is not None:
                acquiring.set_attribute("start", "kept")
                return sandbox, []
            async with self._state.files_lock:  # what is put there meanwhile must be in one or the other
                return await self._replace_sandbox(acquiring)

    async def _attach(self) -> Sandbox | None:
        try:
            async with asyncio.timeout(self._context.settings.claim_timeout):
                return await attach_sandbox(self._context.provider, self._state.record)
        except TimeoutError:
            raise SandboxServerUnreachable("The sandbox server does not answer.") from None

    async def _replace_sandbox(self, timing: Timing) -> tuple[Sandbox, list[str]]:
        """The one that another process has made since this one looked, which is not filled once more: that could undo
        what code is writing there. Else a new one.
        """
        gone = self._state.record.sandbox
        while True:
            latest = await self._context.store.get_container(self.id)
            if latest is not None and latest.status == "running" and latest != self._state.stored:
                self._state.merge_stored(latest)
            if self._state.record.sandbox != gone:
                sandbox = await self._attach()
                if sandbox is not None:
                    timing.set_attribute("start", "kept")
                    return sandbox, []
                gone = self._state.record.sandbox
            born = await self._recreate_sandbox(timing)
            if born is not None:
                return born

    async def _recreate_sandbox(self, timing: Timing) -> tuple[Sandbox, list[str]] | None:
        """None if another process is further by now."""
        record = self._state.record
        number = record.incarnation + 1
        ref = await claim_sandbox(self._context, record, next_sandbox_name(record))
        sandbox = await self._context.provider.attach(ref)
        timing.set_attribute("start", _start_kind(ref))
        timing.end()
        with self._context.time_file_sync():
            restored = await self._context.files.restore(record.id, sandbox)
            await self._context.files.record_restored(record.id, restored)
        self._state.update(sandbox=ref.id, address=ref.address, incarnation=number, mark=restored.mark)
        if not await self._state.save(self._context.store):
            await release_sandbox(self._context.provider, ref)
            raise SandboxGone(_CONTAINER_ENDED)
        if self._state.record.sandbox != ref.id:
            await release_sandbox(self._context.provider, ref)
            return None
        return sandbox, [*([_NEW_SANDBOX_NOTICE] if number > 1 else []), *restored.notes()]

    async def _finish_call(self, sandbox: Sandbox, end: ExecutionEnd) -> tuple[ExecutionEnd, Sequence[str]]:
        """Look for files, note how things stand; the end, as it is when files are lost, and what there is to tell."""
        self._state.update(last_active_at=self._context.clock.now())
        notes: Sequence[str] = ()
        if end.state_kept and end.status != "lost":  # else nobody answers
            look = await self._collect_files(sandbox, self._state.record.mark)
            self._state.update(mark=look.mark)
            notes = look.notes
            if not self._collected.is_complete:
                if await self._is_sandbox_gone(look.failure):
                    end = _mark_files_lost(end, self._collected)
                else:
                    notes = [*notes, _describe_missing_files(self._collected)]
        self._state.sandbox = sandbox if end.state_kept and end.status != "lost" else None
        # Or another process has made the next one already.
        if not end.state_kept and self._state.record.sandbox == sandbox.id:
            self._state.update(sandbox="", address="", mark="")
            await self._state.save(self._context.store)
        return end, notes

    async def _is_sandbox_gone(self, failure: SandboxError | None) -> bool:
        """Whether the container's sandbox has ended, where its files could not be fetched."""
        if isinstance(failure, SandboxGone | SandboxNotFound):
            return True
        try:
            return await self._attach() is None
        except SandboxError:
            return False  # nobody knows

    async def _collect_files(
        self, sandbox: Sandbox, mark: str, initial_files: dict[str, FileSnapshot] | None = None
    ) -> FileChanges:
        """Find what a call has written, for `collect`."""
        try:
            with self._context.time_file_sync():
                async with self._state.files_lock:
                    look = await self._context.files.capture_changes(self.id, sandbox, mark, initial_files)
        except SandboxError as error:
            logger.warning("The files of %s could not be listed: %s", self.id, error.message)
            self._collected = CollectedFiles(is_complete=False)
            return FileChanges(mark, failure=error)
        self._collected = CollectedFiles(
            files=look.changed, missing=look.missing, is_complete=not look.missing
        )
        return look

    # ---- a sandbox for every call ---------------------------------------------------------------------------------

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
                for text in restored.notes():
                    yield ExecutionNote(text)
                yield ExecutionStarted()
                began = self._context.clock.monotonic()
                async with aclosing(
                    execute_with_recovery(sandbox, request, execution_id, self._context.clock)
                ) as events:
                    async for event in events:
                        if not isinstance(event, ExecutionEnd):
                            yield event
                            continue
                        end = event
                        self._context.metrics.run_seconds.observe(self._context.clock.monotonic() - began)
                        if end.state_kept and end.status != "lost":
                            look = await self._collect_files(sandbox, restored.mark, restored.files)
                            for text in look.notes:
                                yield ExecutionNote(text)
        except SandboxError as error:
            end = sandbox_unavailable_end(error, request)
        self._state.update(last_active_at=self._context.clock.now())
        if end is not None:
            if not self._collected.is_complete:  # they end with their sandbox
                end = _mark_files_lost(end, self._collected)
            yield msgspec.structs.replace(
                _append_reason(end, _describe_ephemeral_state(end)), state_kept=False
            )

    # ---- the record -----------------------------------------------------------------------------------------------

    async def _is_running(self, waited: bool = False) -> bool:
        """Whether there is a container; where time has passed since it was opened, the record is looked at again."""
        fresh, self._just_opened = self._just_opened and not waited, False
        if fresh:
            return True
        record = await self._context.store.get_container(self.id)
        if record is None or record.status != "running":
            return False
        if record != self._state.stored:
            self._state.merge_stored(record)
        return True


@asynccontextmanager
async def ephemeral_sandbox(context: ContainerContext, state: ContainerState) -> AsyncGenerator[Sandbox]:
    """An empty sandbox of the container's kind, which ends with the block. Raises SandboxError."""
    with start_timing("acquire") as acquiring:
        ref = await claim_sandbox(context, state.record, f"{state.record.id}-{secrets.token_hex(4)}")
        state.ephemeral_sandboxes.add(ref)
        acquiring.set_attribute("start", _start_kind(ref))
    try:
        yield await context.provider.attach(ref)
    finally:
        state.ephemeral_sandboxes.discard(ref)
        await release_sandbox(context.provider, ref)


def _start_kind(ref: SandboxRef) -> str:
    """How a new sandbox came to be."""
    return "new" if ref.from_warm_pool is None else "warm" if ref.from_warm_pool else "cold"


def next_sandbox_name(record: ContainerRecord) -> str:
    """The name of the container's next sandbox. It has the number of that one: whoever tries again finds the same."""
    return f"{record.id}-{record.incarnation + 1}"


async def attach_sandbox(provider: SandboxProvider, record: ContainerRecord) -> Sandbox | None:
    """The sandbox of a container if it lives; raises Unreachable."""
    if not record.sandbox:
        return None
    try:
        return await provider.attach(SandboxRef(record.sandbox, record.address))
    except (SandboxGone, SandboxNotFound):
        return None


def _check_network_allowed(context: ContainerContext, record: ContainerRecord) -> None:
    """An operator may have lowered it since the container was made. Raises RequestRefused."""
    if find_forbidden_domain(record.spec.network, context.settings.allowed_domains) is not None:
        raise InvalidSandboxRequest(
            "The network of this container is not allowed any more; create another one."
        )


async def claim_sandbox(context: ContainerContext, record: ContainerRecord, name: str) -> SandboxRef:
    """A sandbox of that name, as soon as there is one to be had; raises SandboxError when it takes too long."""
    _check_network_allowed(context, record)
    with context.metrics.acquire_seconds.time(context.clock.monotonic):
        ref = await _claim_with_backoff(context, record, name)
    context.metrics.sandbox_starts[_start_kind(ref)] += 1
    return ref


async def _claim_with_backoff(context: ContainerContext, record: ContainerRecord, name: str) -> SandboxRef:
    clock, patience = context.clock, context.settings.claim_timeout
    until = clock.monotonic() + patience
    pause = _INITIAL_BACKOFF
    spec = SandboxSpec(
        memory=record.spec.memory,
        network=context.domain_secrets.open_network(record),
        tenant=_to_sandbox_tenant(record.tenant),
    )
    while True:
        try:
            async with asyncio.timeout(patience):
                return await context.provider.create(spec, name)
        except TimeoutError:
            raise SandboxServerAtCapacity(f"no sandbox was ready within {patience:g} s.") from None
        except (RetryLater, SandboxStartFailed):
            if clock.monotonic() + pause > until:
                raise
        await clock.sleep(pause)
        pause = min(pause * 2, _MAX_BACKOFF)


async def release_sandbox(provider: SandboxProvider, ref: SandboxRef) -> None:
    """End a sandbox; should that fail, whoever sweeps will find it."""
    with suppress(TimeoutError):
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await provider.destroy(ref)
        except SandboxError as error:
            logger.warning("The sandbox %s could not be ended: %s", ref.id, error.message)


def _to_sandbox_tenant(tenant: str) -> str:
    """The tenant as sandbox servers spell it."""
    try:
        return msgspec.convert(tenant, Tenant)
    except msgspec.ValidationError:
        return hashlib.sha256(tenant.encode()).hexdigest()


def sandbox_unavailable_end(error: SandboxError, request: ExecuteRequest) -> ExecutionEnd:
    """The code did not run."""
    if isinstance(error, RetryLater):
        return _lost_end(f"No sandbox is free at the moment, try again later: {error.message}")
    return lost_execution_end(error, request.noun)


def _lost_end(reason: str) -> ExecutionEnd:
    return ExecutionEnd(status="lost", exit_code=-1, duration_ms=0, state_kept=True, reason=reason)


def _append_reason(end: ExecutionEnd, sentence: str) -> ExecutionEnd:
    """Say what comes next, where a reason is given at all."""
    if not end.reason or not sentence:
        return end
    return msgspec.structs.replace(end, reason=f"{end.reason} {sentence}")


def _describe_persistent_state(end: ExecutionEnd) -> str:
    """What the next call finds in the sandbox that calls share."""
    if not end.state_kept:
        return "Variables are gone: the next call begins in a new sandbox, with the files of earlier calls."
    return "Variables and files are kept." if end.status in _INTERRUPTED_STATUSES else ""


def _describe_ephemeral_state(end: ExecutionEnd) -> str:
    """What the next call finds where every call has a sandbox of its own."""
    if end.state_kept and end.status in _INTERRUPTED_STATUSES:
        return "Files are kept; the next call begins in a new sandbox, without variables."
    return "The next call begins in a new sandbox, without variables, with the files of earlier calls."


def _mark_files_lost(end: ExecutionEnd, collected: CollectedFiles) -> ExecutionEnd:
    """The end of a call whose sandbox was lost with its files. The exit code stays what the code left."""
    if collected.missing:
        names = format_file_names([file.path for file in collected.missing])
        words = f"The sandbox was lost while the files of this call were fetched, and with it: {names}."
    else:
        words = "The sandbox was lost before the files of this call could be listed: those that it wrote are lost."
    return msgspec.structs.replace(
        end,
        status="lost" if end.status in _FINISHED_STATUSES else end.status,
        state_kept=False,
        reason=f"{end.reason} {words}" if end.reason else words,
    )


def _describe_missing_files(collected: CollectedFiles) -> str:
    if not collected.missing:
        return "The files of this call could not be listed; they are looked for again after the next call."
    names = format_file_names([file.path for file in collected.missing])
    return f"These files could not be fetched yet, and are looked for again after the next call: {names}."
