"""One container over the sandboxes that it has one after another; imports `interfaces`, what is below, and siblings."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fumehood.figures import ContainerFigures
from fumehood.interfaces import (
    Clock,
    Collected,
    ContainerEvent,
    Sandbox,
    SandboxProvider,
    SandboxRef,
    Started,
    Store,
)
from fumehood.phases import Phase, phase
from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord
from fumehood.protocol.sandbox import End, ExecuteRequest, Note, SandboxSpec, Tenant
from fumehood.protocol.sandbox_errors import (
    AtCapacity,
    RequestRefused,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxStartFailed,
    TryLater,
    Unreachable,
)
from fumehood.sandbox.ceiling import beyond
from fumehood.sandbox.domain_secrets import DomainSecrets
from fumehood.sandbox.executions import followed, lost
from fumehood.sandbox.kept_files import FileLimits, KeptFiles, Look, Placed, name_files

logger = logging.getLogger(__name__)

type Isolation = Literal["container", "execution"]

_RELEASE_SECONDS = 10.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0

_NEW_SANDBOX = (
    "A new sandbox: variables, imports and packages of earlier calls are gone, files in /mnt/data are there."
)
_OVER = "The container is not there any more: it has expired, or was deleted."
_INTERRUPTED = frozenset({"timeout", "interrupted"})
_RAN = frozenset({"ok", "error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """How containers live, and what they may be.

    isolation: `container`: one container has one sandbox, with variables, until it expires. `execution`: every call
        has a fresh one, and only files are carried from call to call.
    claim_timeout: seconds until a sandbox that is not to be had is given up.
    containers_per_tenant: how many may run.
    allowed_domains: the most that a container may reach; `*` stands for every domain.
    idle_minutes, longest_idle_minutes: how long a container lives that nobody uses, unless its caller chose otherwise,
        and what it may choose at most.
    life_hours: how long it lives at most, however much it is used.
    retention_hours: how long an expired one can be looked at, and the files that users put there are kept for the
        container that takes its place.
    uploads_at_once: how many files may be on their way into containers of one tenant; further ones wait.
    retained_bytes: how much of such files is kept for one tenant; the oldest go first.
    sandboxes_outlive: whether those of an earlier process may still be there; else containers that had one expire.
    alone: whether no other process uses the containers of the same store, so that what is found at the start, and no
        record knows, is nobody's, and what is idle here is idle.
    sweep_seconds: how often somebody looks for containers that nobody uses any more.
    orphan_seconds: how long a sandbox that belongs to no container may have been idle.
    """

    isolation: Isolation = "container"
    claim_timeout: float = 30.0
    containers_per_tenant: int = 50
    allowed_domains: frozenset[str] = frozenset()
    idle_minutes: int = 20
    longest_idle_minutes: int = 60
    life_hours: float = 24.0
    retention_hours: float = 168.0
    retained_bytes: int = 2 << 30
    uploads_at_once: int = 16
    files: FileLimits = field(default_factory=FileLimits)
    sandboxes_outlive: bool = True
    alone: bool = False
    sweep_seconds: float = 30.0
    orphan_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class House:
    """What all containers of one process share."""

    provider: SandboxProvider
    store: Store
    files: KeptFiles
    clock: Clock
    settings: ContainerSettings
    secrets: DomainSecrets
    figures: ContainerFigures

    @contextmanager
    def filing(self) -> Generator[None]:
        """While the files of a call are put there or looked for."""
        with phase("files"), self.figures.files.timed(self.clock.monotonic):
            yield


@dataclass(slots=True, eq=False)
class Living:
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
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    filing: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    stays: int = 0
    sandbox: Sandbox | None = None
    passing: set[SandboxRef] = field(default_factory=set[SandboxRef])
    over: bool = False

    def change(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)

    async def write(self, store: Store) -> bool:
        """False if there is no such container any more."""
        while (record := self.record) != self.stored and not self.over:
            if await store.change_container(record, seen=self.stored):
                self.stored = record
                break
            latest = await store.container(record.id)
            if latest is None or latest.status != "running":
                self.over = True
            else:
                self.learn(latest)
        return not self.over

    @contextmanager
    def used(self) -> Generator[None]:
        """Meanwhile it does not expire."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    def learn(self, latest: ContainerRecord) -> None:
        """Another process has changed it. Its sandbox is the one that was written down last, unless this process has
        changed that since or has made a later one; it was used when either has used it.
        """
        ours, before = self.record, self.stored
        record = msgspec.structs.replace(
            latest, last_active_at=max(latest.last_active_at, ours.last_active_at)
        )
        if ours.incarnation > latest.incarnation or _bound(latest) == _bound(before):
            record = msgspec.structs.replace(
                record,
                sandbox=ours.sandbox,
                address=ours.address,
                incarnation=ours.incarnation,
                mark=latest.mark if ours.mark == before.mark else ours.mark,
            )
        self.record, self.stored, self.over = record, latest, False

    @property
    def in_use(self) -> bool:
        return self.users > 0 or self.stays > 0


def _bound(record: ContainerRecord) -> tuple[int, str, str]:
    return record.incarnation, record.sandbox, record.address


class SandboxContainer:
    """A `Container`, for one call: what `collect` gives is what that call left."""

    def __init__(self, house: House, living: Living) -> None:
        self._house = house
        self._living = living
        self._found = Collected()
        self._just_opened = True
        self._stays = True
        living.stays += 1

    @property
    def id(self) -> str:
        return self._living.record.id

    async def execute(self, request: ExecuteRequest) -> AsyncGenerator[ContainerEvent]:
        execution_id = request.execution_id or secrets.token_hex(12)
        request = msgspec.structs.replace(request, execution_id=execution_id)
        every_call_alone = self._house.settings.isolation == "execution"
        run = self._in_fresh_sandbox if every_call_alone else self._in_kept_sandbox
        figures = self._house.figures
        figures.running += 1
        event: ContainerEvent | None = None
        try:
            with self._living.used():
                async with aclosing(run(request, execution_id)) as events:
                    async for event in events:
                        yield event
        finally:
            figures.running -= 1
            figures.calls[event.status if isinstance(event, End) else "abandoned"] += 1

    def leave(self) -> None:
        if self._stays:
            self._stays = False
            self._living.stays -= 1
            self._living.change(last_active_at=self._house.clock.now())

    async def collect(self) -> Collected:
        found, self._found = self._found, Collected()
        return found

    async def save(self, path: str, content: bytes) -> ContainerFileRecord:
        async with self._living.filing:
            sandbox: Sandbox | None = None
            with suppress(SandboxError):
                sandbox = await attached(self._house.provider, self._living.record)
            return await self._house.files.add(self.id, path, content, sandbox)

    # ---- one sandbox for all calls --------------------------------------------------------------------------------

    async def _in_kept_sandbox(
        self, request: ExecuteRequest, execution_id: str
    ) -> AsyncGenerator[ContainerEvent]:
        waiting = self._living.turn.locked()
        async with self._living.turn:
            if not await self._still_runs(waiting):
                yield _over(_OVER)
                return
            while True:
                try:
                    async with aclosing(self._call(request, execution_id)) as events:
                        async for event in events:
                            yield event
                    return
                except SandboxError as error:
                    is_gone = isinstance(error, SandboxGone | SandboxNotFound)
                    if not is_gone or self._living.sandbox is None:
                        yield _over(_OVER) if self._living.over else not_to_be_had(error, request)
                        return
                    self._living.sandbox = None  # it was only taken to live: once more, with another

    async def _call(self, request: ExecuteRequest, execution_id: str) -> AsyncGenerator[ContainerEvent]:
        """Raises SandboxError if the call could not begin."""
        sandbox, notes = await self._kept_sandbox()
        for text in notes:
            yield Note(text)
        yield Started()
        began = self._house.clock.monotonic()
        async with aclosing(followed(sandbox, request, execution_id, self._house.clock)) as events:
            async for event in events:
                if isinstance(event, End):
                    self._house.figures.run.add(self._house.clock.monotonic() - began)
                    event, notes = await self._after(sandbox, event)
                    for text in notes:
                        yield Note(text)
                    event = _with(event, _OVER if self._living.over else _describe_kept_sandbox(event))
                yield event

    async def _kept_sandbox(self) -> tuple[Sandbox, list[str]]:
        """The container's sandbox, a new one if there is none, and what there is to tell of that; raises SandboxError.
        One that was used before is not asked whether it lives: that would cost as much as the call.
        """
        with phase("acquire") as acquiring:
            known = self._living.sandbox
            if known is not None and known.id == self._living.record.sandbox:
                acquiring.note("start", "kept")
                return known, []
            _check_ceiling(self._house, self._living.record)
            sandbox = await self._attached()
            if sandbox is not None:
                acquiring.note("start", "kept")
                return sandbox, []
            async with self._living.filing:  # what is put there meanwhile must be in one or the other
                return await self._next_sandbox(acquiring)

    async def _attached(self) -> Sandbox | None:
        try:
            async with asyncio.timeout(self._house.settings.claim_timeout):
                return await attached(self._house.provider, self._living.record)
        except TimeoutError:
            raise Unreachable("The sandbox server does not answer.") from None

    async def _next_sandbox(self, acquiring: Phase) -> tuple[Sandbox, list[str]]:
        """The one that another process has made since this one looked, which is not filled once more: that could undo
        what code is writing there. Else a new one.
        """
        gone = self._living.record.sandbox
        while True:
            latest = await self._house.store.container(self.id)
            if latest is not None and latest.status == "running" and latest != self._living.stored:
                self._living.learn(latest)
            if self._living.record.sandbox != gone:
                sandbox = await self._attached()
                if sandbox is not None:
                    acquiring.note("start", "kept")
                    return sandbox, []
                gone = self._living.record.sandbox
            born = await self._reborn(acquiring)
            if born is not None:
                return born

    async def _reborn(self, acquiring: Phase) -> tuple[Sandbox, list[str]] | None:
        """None if another process is further by now."""
        record = self._living.record
        number = record.incarnation + 1
        ref = await claimed(self._house, record, next_name(record))
        sandbox = await self._house.provider.attach(ref)
        acquiring.note("start", _start_of(ref))
        acquiring.end()
        with self._house.filing():
            restored = await self._house.files.restore(record.id, sandbox)
            await self._house.files.settle(record.id, restored)
        self._living.change(sandbox=ref.id, address=ref.address, incarnation=number, mark=restored.mark)
        if not await self._living.write(self._house.store):
            await release(self._house.provider, ref)
            raise SandboxGone(_OVER)
        if self._living.record.sandbox != ref.id:
            await release(self._house.provider, ref)
            return None
        return sandbox, [*([_NEW_SANDBOX] if number > 1 else []), *restored.notes()]

    async def _after(self, sandbox: Sandbox, end: End) -> tuple[End, Sequence[str]]:
        """Look for files, note how things stand; the end, as it is when files are lost, and what there is to tell."""
        self._living.change(last_active_at=self._house.clock.now())
        notes: Sequence[str] = ()
        if end.state_kept and end.status != "lost":  # else nobody answers
            look = await self._look(sandbox, self._living.record.mark)
            self._living.change(mark=look.mark)
            notes = look.notes
            if not self._found.complete:
                if await self._is_gone(look.failure):
                    end = _with_files_lost(end, self._found)
                else:
                    notes = [*notes, _describe_not_fetched(self._found)]
        self._living.sandbox = sandbox if end.state_kept and end.status != "lost" else None
        # Or another process has made the next one already.
        if not end.state_kept and self._living.record.sandbox == sandbox.id:
            self._living.change(sandbox="", address="", mark="")
            await self._living.write(self._house.store)
        return end, notes

    async def _is_gone(self, failure: SandboxError | None) -> bool:
        """Whether the container's sandbox has ended, where its files could not be fetched."""
        if isinstance(failure, SandboxGone | SandboxNotFound):
            return True
        try:
            return await self._attached() is None
        except SandboxError:
            return False  # nobody knows

    async def _look(self, sandbox: Sandbox, mark: str, began: dict[str, Placed] | None = None) -> Look:
        """Find what a call has written, for `collect`."""
        try:
            with self._house.filing():
                async with self._living.filing:
                    look = await self._house.files.look(self.id, sandbox, mark, began)
        except SandboxError as error:
            logger.warning("The files of %s could not be listed: %s", self.id, error.message)
            self._found = Collected(complete=False)
            return Look(mark, failure=error)
        self._found = Collected(files=look.changed, missing=look.missing, complete=not look.missing)
        return look

    # ---- a sandbox for every call ---------------------------------------------------------------------------------

    async def _in_fresh_sandbox(
        self, request: ExecuteRequest, execution_id: str
    ) -> AsyncGenerator[ContainerEvent]:
        if not await self._still_runs():
            yield _over(_OVER)
            return
        end: End | None = None
        try:
            async with fresh_sandbox(self._house, self._living) as sandbox:
                with self._house.filing():
                    restored = await self._house.files.restore(self.id, sandbox)
                for text in restored.notes():
                    yield Note(text)
                yield Started()
                began = self._house.clock.monotonic()
                async with aclosing(followed(sandbox, request, execution_id, self._house.clock)) as events:
                    async for event in events:
                        if not isinstance(event, End):
                            yield event
                            continue
                        end = event
                        self._house.figures.run.add(self._house.clock.monotonic() - began)
                        if end.state_kept and end.status != "lost":
                            look = await self._look(sandbox, restored.mark, restored.placed)
                            for text in look.notes:
                                yield Note(text)
        except SandboxError as error:
            end = not_to_be_had(error, request)
        self._living.change(last_active_at=self._house.clock.now())
        if end is not None:
            if not self._found.complete:  # they end with their sandbox
                end = _with_files_lost(end, self._found)
            yield msgspec.structs.replace(_with(end, _describe_passing_sandbox(end)), state_kept=False)

    # ---- the record -----------------------------------------------------------------------------------------------

    async def _still_runs(self, waited: bool = False) -> bool:
        """Whether there is a container; where time has passed since it was opened, the record is looked at again."""
        fresh, self._just_opened = self._just_opened and not waited, False
        if fresh:
            return True
        record = await self._house.store.container(self.id)
        if record is None or record.status != "running":
            return False
        if record != self._living.stored:
            self._living.learn(record)
        return True


@asynccontextmanager
async def fresh_sandbox(house: House, living: Living) -> AsyncGenerator[Sandbox]:
    """An empty sandbox of the container's kind, which ends with the block. Raises SandboxError."""
    with phase("acquire") as acquiring:
        ref = await claimed(house, living.record, f"{living.record.id}-{secrets.token_hex(4)}")
        living.passing.add(ref)
        acquiring.note("start", _start_of(ref))
    try:
        yield await house.provider.attach(ref)
    finally:
        living.passing.discard(ref)
        await release(house.provider, ref)


def _start_of(ref: SandboxRef) -> str:
    """How a new sandbox came to be."""
    return "new" if ref.warm is None else "warm" if ref.warm else "cold"


def next_name(record: ContainerRecord) -> str:
    """The name of the container's next sandbox. It has the number of that one: whoever tries again finds the same."""
    return f"{record.id}-{record.incarnation + 1}"


async def attached(provider: SandboxProvider, record: ContainerRecord) -> Sandbox | None:
    """The sandbox of a container if it lives; raises Unreachable."""
    if not record.sandbox:
        return None
    try:
        return await provider.attach(SandboxRef(record.sandbox, record.address))
    except (SandboxGone, SandboxNotFound):
        return None


def _check_ceiling(house: House, record: ContainerRecord) -> None:
    """An operator may have lowered it since the container was made. Raises RequestRefused."""
    if beyond(record.spec.network, house.settings.allowed_domains) is not None:
        raise RequestRefused("The network of this container is not allowed any more; create another one.")


async def claimed(house: House, record: ContainerRecord, name: str) -> SandboxRef:
    """A sandbox of that name, as soon as there is one to be had; raises SandboxError when it takes too long."""
    _check_ceiling(house, record)
    with house.figures.acquire.timed(house.clock.monotonic):
        ref = await _claim(house, record, name)
    house.figures.starts[_start_of(ref)] += 1
    return ref


async def _claim(house: House, record: ContainerRecord, name: str) -> SandboxRef:
    clock, patience = house.clock, house.settings.claim_timeout
    until = clock.monotonic() + patience
    pause = _FIRST_PAUSE
    spec = SandboxSpec(
        memory=record.spec.memory,
        network=house.secrets.network(record),
        tenant=_tenant_name(record.tenant),
    )
    while True:
        try:
            async with asyncio.timeout(patience):
                return await house.provider.create(spec, name)
        except TimeoutError:
            raise AtCapacity(f"no sandbox was ready within {patience:g} s.") from None
        except (TryLater, SandboxStartFailed):
            if clock.monotonic() + pause > until:
                raise
        await clock.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


async def release(provider: SandboxProvider, ref: SandboxRef) -> None:
    """End a sandbox; should that fail, whoever sweeps will find it."""
    with suppress(TimeoutError):
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await provider.destroy(ref)
        except SandboxError as error:
            logger.warning("The sandbox %s could not be ended: %s", ref.id, error.message)


def _tenant_name(tenant: str) -> str:
    """The tenant as sandbox servers spell it."""
    try:
        return msgspec.convert(tenant, Tenant)
    except msgspec.ValidationError:
        return hashlib.sha256(tenant.encode()).hexdigest()


def not_to_be_had(error: SandboxError, request: ExecuteRequest) -> End:
    """The code did not run."""
    if isinstance(error, TryLater):
        return _over(f"No sandbox is free at the moment, try again later: {error.message}")
    return lost(error, request.noun)


def _over(reason: str) -> End:
    return End(status="lost", exit_code=-1, duration_ms=0, state_kept=True, reason=reason)


def _with(end: End, words: str) -> End:
    """Say what comes next, where a reason is given at all."""
    if not end.reason or not words:
        return end
    return msgspec.structs.replace(end, reason=f"{end.reason} {words}")


def _describe_kept_sandbox(end: End) -> str:
    """What the next call finds in the sandbox that calls share."""
    if not end.state_kept:
        return "Variables are gone: the next call begins in a new sandbox, with the files of earlier calls."
    return "Variables and files are kept." if end.status in _INTERRUPTED else ""


def _describe_passing_sandbox(end: End) -> str:
    """What the next call finds where every call has a sandbox of its own."""
    if end.state_kept and end.status in _INTERRUPTED:
        return "Files are kept; the next call begins in a new sandbox, without variables."
    return "The next call begins in a new sandbox, without variables, with the files of earlier calls."


def _with_files_lost(end: End, found: Collected) -> End:
    """The end of a call whose sandbox was lost with its files. The exit code stays what the code left."""
    if found.missing:
        names = name_files([file.path for file in found.missing])
        words = f"The sandbox was lost while the files of this call were fetched, and with it: {names}."
    else:
        words = "The sandbox was lost before the files of this call could be listed: those that it wrote are lost."
    return msgspec.structs.replace(
        end,
        status="lost" if end.status in _RAN else end.status,
        state_kept=False,
        reason=f"{end.reason} {words}" if end.reason else words,
    )


def _describe_not_fetched(found: Collected) -> str:
    if not found.missing:
        return "The files of this call could not be listed; they are looked for again after the next call."
    names = name_files([file.path for file in found.missing])
    return f"These files could not be fetched yet, and are looked for again after the next call: {names}."
