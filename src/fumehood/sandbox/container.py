"""One container over the sandboxes that it has one after another; imports `interfaces`, `protocol` and siblings."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fumehood.interfaces import Clock, Sandbox, SandboxProvider, SandboxRef, Store
from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.sandbox import AnyOutput, End, ExecuteRequest, Note, SandboxSpec, Tenant
from fumehood.protocol.sandbox_errors import (
    AtCapacity,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxStartFailed,
    TryLater,
    Unreachable,
)
from fumehood.sandbox.executions import followed, lost
from fumehood.sandbox.kept_files import FileLimits, KeptFiles, Placed, in_words

logger = logging.getLogger(__name__)

type Isolation = Literal["container", "execution"]

_RELEASE_SECONDS = 10.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0

_NEW_SANDBOX = (
    "A new sandbox: variables, imports and packages of earlier calls are gone, files in /mnt/data are there."
)
_BEGINS_ANEW = "The next call begins in a new sandbox, with the files of earlier calls."
_NO_VARIABLES = "The next call begins without variables."


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """
    isolation: `container`: one container has one sandbox, with variables, until it expires. `execution`: every call
        has a fresh one, and only files are carried from call to call.
    claim_timeout: seconds until a sandbox that is not to be had is given up.
    containers_per_tenant: how many may run.
    sweep_seconds: how often somebody looks for containers that nobody uses any more.
    orphan_seconds: how long a sandbox that belongs to no container may have been idle.
    """

    isolation: Isolation = "container"
    claim_timeout: float = 30.0
    containers_per_tenant: int = 50
    files: FileLimits = field(default_factory=FileLimits)
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


@dataclass(slots=True, eq=False)
class Living:
    """A container as this process knows it.

    record: how things stand. stored: how the store was last seen; what differs is `mark` and `last_active_at`, which
        are written now and then, since losing them costs a longer listing and a little of the container's time.
    turn: calls come one after another, so that each finds its own files; across processes the sandbox server sees to
        their order. users: calls that run or wait.
    """

    record: ContainerRecord
    stored: ContainerRecord
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0

    def change(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)

    async def write(self, store: Store) -> None:
        if (record := self.record) != self.stored:
            await store.put_container(record)
            self.stored = record


class SandboxContainer:
    """A `Container`, for one call: what `collect` gives is what that call left."""

    def __init__(self, house: House, living: Living) -> None:
        self._house = house
        self._living = living
        self._found: Sequence[ContainerFileRecord] = ()
        self._just_opened = True

    @property
    def id(self) -> str:
        return self._living.record.id

    async def execute(self, request: ExecuteRequest) -> AsyncGenerator[AnyOutput]:
        execution_id = request.execution_id or secrets.token_hex(12)
        request = msgspec.structs.replace(request, execution_id=execution_id)
        alone = self._house.settings.isolation == "execution"
        run = self._alone if alone else self._in_turn
        self._living.users += 1
        try:
            async with aclosing(run(request, execution_id)) as events:
                async for event in events:
                    yield event
        finally:
            self._living.users -= 1

    async def collect(self) -> Sequence[ContainerFileRecord]:
        found, self._found = self._found, ()
        return found

    async def save(self, path: str, content: bytes) -> ContainerFileRecord:
        async with self._living.saving:
            sandbox: Sandbox | None = None
            with suppress(SandboxError):
                sandbox = await attached(self._house.provider, self._living.record)
            return await self._house.files.add(self.id, path, content, sandbox)

    # ---- one sandbox for all calls --------------------------------------------------------------------------------

    async def _in_turn(self, request: ExecuteRequest, execution_id: str) -> AsyncGenerator[AnyOutput]:
        waiting = self._living.turn.locked()
        async with self._living.turn:
            if not await self._still_runs(waiting):
                yield _over("The container has expired.")
                return
            try:
                sandbox, notes = await self._bound()
            except SandboxError as error:
                yield not_to_be_had(error)
                return
            for text in notes:
                yield Note(text)
            async with aclosing(followed(sandbox, request, execution_id, self._house.clock)) as events:
                async for event in events:
                    if isinstance(event, End):
                        for text in await self._after(sandbox, event):
                            yield Note(text)
                        if not event.state_kept:
                            event = _with(event, _BEGINS_ANEW)
                    yield event

    async def _bound(self) -> tuple[Sandbox, list[str]]:
        """The container's sandbox, a new one if there is none; raises SandboxError."""
        try:
            async with asyncio.timeout(self._house.settings.claim_timeout):
                living = await attached(self._house.provider, self._living.record)
        except TimeoutError:
            raise Unreachable("The sandbox server does not answer.") from None
        return (living, []) if living is not None else await self._reborn()

    async def _reborn(self) -> tuple[Sandbox, list[str]]:
        record = self._living.record
        # The name tells which of the container's sandboxes it is: whoever tries again finds the same one.
        number = record.incarnation + 1
        ref = await claimed(self._house, record, f"{record.id}-{number}")
        sandbox = await self._house.provider.attach(ref)
        restored = await self._house.files.restore(record.id, sandbox)
        await self._house.files.settle(record.id, restored)
        self._living.change(sandbox=ref.id, address=ref.address, incarnation=number, mark=restored.mark)
        await self._living.write(self._house.store)
        notes = [_NEW_SANDBOX] if number > 1 else []
        if restored.missing:
            notes.append(f"Not to be had any more: {in_words(restored.missing)}.")
        return sandbox, notes

    async def _after(self, sandbox: Sandbox, end: End) -> Sequence[str]:
        """Look for files, note how things stand; what there is to tell."""
        self._living.change(last_active_at=self._house.clock.now())
        if not end.state_kept:
            self._living.change(sandbox="", address="", mark="")
            await self._living.write(self._house.store)
            return ()
        if end.status == "lost":  # nobody answers
            return ()
        mark, notes = await self._look(sandbox, self._living.record.mark)
        self._living.change(mark=mark)
        return notes

    async def _look(
        self, sandbox: Sandbox, mark: str, began: dict[str, Placed] | None = None
    ) -> tuple[str, Sequence[str]]:
        try:
            look = await self._house.files.look(self.id, sandbox, mark, began)
        except SandboxError as error:
            logger.warning("The files of %s could not be listed: %s", self.id, error.message)
            return mark, ["The files of this call could not be listed."]
        self._found = look.changed
        return look.mark, look.notes

    # ---- a sandbox for every call ---------------------------------------------------------------------------------

    async def _alone(self, request: ExecuteRequest, execution_id: str) -> AsyncGenerator[AnyOutput]:
        if not await self._still_runs():
            yield _over("The container has expired.")
            return
        record = self._living.record
        ref = SandboxRef(f"{record.id}-{secrets.token_hex(4)}")
        released = False
        try:
            try:
                ref = await claimed(self._house, record, ref.id)
            except SandboxError as error:
                released = True  # there is none
                yield not_to_be_had(error)
                return
            async with aclosing(self._in(ref, request, execution_id)) as events:
                async for event in events:
                    if isinstance(event, End):
                        released = True
                        await release(self._house.provider, ref)
                        self._living.change(last_active_at=self._house.clock.now())
                    yield event
        finally:
            if not released:
                await release(self._house.provider, ref)

    async def _in(
        self, ref: SandboxRef, request: ExecuteRequest, execution_id: str
    ) -> AsyncGenerator[AnyOutput]:
        try:
            sandbox = await self._house.provider.attach(ref)
            restored = await self._house.files.restore(self.id, sandbox)
        except SandboxError as error:
            yield not_to_be_had(error)
            return
        if restored.missing:
            yield Note(f"Not to be had in this call: {in_words(restored.missing)}.")
        async with aclosing(followed(sandbox, request, execution_id, self._house.clock)) as events:
            async for event in events:
                if isinstance(event, End):
                    if event.state_kept and event.status != "lost":
                        _, notes = await self._look(sandbox, restored.mark, restored.placed)
                        for text in notes:
                            yield Note(text)
                    event = msgspec.structs.replace(_with(event, _NO_VARIABLES), state_kept=False)
                yield event

    # ---- the record -----------------------------------------------------------------------------------------------

    async def _still_runs(self, waited: bool = False) -> bool:
        """Whether there is a container; where time has passed since it was opened, the record is looked at again."""
        fresh, self._just_opened = self._just_opened and not waited, False
        if fresh:
            return True
        record = await self._house.store.container(self.id)
        if record is None or record.status != "running":
            return False
        if record != self._living.stored:  # another process has changed it
            self._living.record = self._living.stored = record
        return True


async def attached(provider: SandboxProvider, record: ContainerRecord) -> Sandbox | None:
    """The sandbox of a container if it lives; raises Unreachable."""
    if not record.sandbox:
        return None
    try:
        return await provider.attach(SandboxRef(record.sandbox, record.address))
    except (SandboxGone, SandboxNotFound):
        return None


async def claimed(house: House, record: ContainerRecord, name: str) -> SandboxRef:
    """A sandbox of that name, as soon as there is one to be had; raises SandboxError when it takes too long."""
    clock, patience = house.clock, house.settings.claim_timeout
    until = clock.monotonic() + patience
    pause = _FIRST_PAUSE
    spec = sandbox_spec(record.tenant, record.spec)
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


def sandbox_spec(tenant: str, spec: ContainerSpec) -> SandboxSpec:
    return SandboxSpec(memory=spec.memory, network=spec.network, tenant=_tenant_name(tenant))


def _tenant_name(tenant: str) -> str:
    """As sandbox servers spell tenants."""
    try:
        return msgspec.convert(tenant, Tenant)
    except msgspec.ValidationError:
        return hashlib.sha256(tenant.encode()).hexdigest()


def not_to_be_had(error: SandboxError) -> End:
    """The code did not run."""
    if isinstance(error, TryLater):
        return _over(f"No sandbox is free at the moment, try again later: {error.message}")
    return lost(error)


def _over(reason: str) -> End:
    return End(status="lost", exit_code=-1, duration_ms=0, state_kept=True, reason=reason)


def _with(end: End, words: str) -> End:
    """Say what comes next, where a reason is given at all."""
    return msgspec.structs.replace(end, reason=f"{end.reason} {words}") if end.reason else end
