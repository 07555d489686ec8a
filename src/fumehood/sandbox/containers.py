"""Containers over sandboxes: who owns them, how long they live, which files they have; imports `interfaces`, siblings.

docs/code-interpreter.md tells what users may expect of them.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Self

import msgspec

from fumehood.interfaces import Blobs, Caller, Clock, Sandbox, SandboxProvider, SandboxRef, Store
from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.errors import ContainerExpired, NotFound, RateLimited, Unavailable
from fumehood.protocol.names import clean_name
from fumehood.protocol.sandbox_errors import SandboxError
from fumehood.sandbox.container import (
    ContainerSettings,
    House,
    Living,
    SandboxContainer,
    attached,
    release,
)
from fumehood.sandbox.kept_files import KeptFiles

logger = logging.getLogger(__name__)

_PREFIX = "cntr_"
_RANDOM_DIGITS = 32
_SEAL_DIGITS = 16
_ACTIVE_SECONDS = 60.0  # opening one more often than this need not be written down
_MOST_KNOWN = 4096


class SandboxContainers:
    """`Containers` whose sandboxes come from a provider. `async with` sweeps meanwhile; the provider stays open."""

    def __init__(
        self,
        provider: SandboxProvider,
        store: Store,
        blobs: Blobs,
        clock: Clock,
        settings: ContainerSettings | None = None,
    ) -> None:
        chosen = settings or ContainerSettings()
        self._house = House(provider, store, KeptFiles(store, blobs, clock, chosen.files), clock, chosen)
        self._living: OrderedDict[str, Living] = OrderedDict()  # those used last at the end
        self._seal = secrets.token_bytes(32)
        self._beginning = asyncio.Lock()
        self._sweeper: asyncio.Task[None] | None = None
        # Where no sandbox was ever needed, none is looked for: that alone could start a server.
        self._may_have_orphans = chosen.isolation == "execution"

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to sweep."""
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep_forever(), name="containers: sweeper")

    async def close(self) -> None:
        """Write down what is not written yet; sandboxes stay."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None
        for living in list(self._living.values()):
            await living.write(self._house.store)

    # ---- containers -----------------------------------------------------------------------------------------------

    def reserve(self) -> str:
        """Nothing is kept of it: the id says itself, to this process alone, that it was given out here."""
        digits = secrets.token_hex(_RANDOM_DIGITS // 2)
        return f"{_PREFIX}{digits}{self._sealed(digits)}"

    def _sealed(self, digits: str) -> str:
        return hmac.new(self._seal, digits.encode(), hashlib.sha256).hexdigest()[:_SEAL_DIGITS]

    def _was_reserved(self, container_id: str) -> bool:
        digits = container_id.removeprefix(_PREFIX)
        body, seal = digits[:_RANDOM_DIGITS], digits[_RANDOM_DIGITS:]
        return hmac.compare_digest(seal.encode(), self._sealed(body).encode())

    async def check(self, caller: Caller, container_id: str) -> ContainerRecord:
        record = await self._owned(caller, container_id)
        if record.status == "expired" or await self._has_expired(record):
            raise ContainerExpired("Container is expired.")
        return record

    async def open(self, caller: Caller, container_id: str, spec: ContainerSpec) -> SandboxContainer:
        try:
            record = await self.check(caller, container_id)
        except NotFound:
            if not self._was_reserved(container_id):
                raise
            record = await self._begun(caller, container_id, spec)
        living = self._known(record)
        now = self._house.clock.now()
        if now - living.stored.last_active_at > _ACTIVE_SECONDS and not living.users:
            living.change(last_active_at=now)
            await living.write(self._house.store)
        return SandboxContainer(self._house, living)

    def _known(self, record: ContainerRecord) -> Living:
        """What this process knows of the container, beyond what the store says."""
        living = self._living.pop(record.id, None)
        if living is None or (living.stored != record and not living.users):
            living = Living(record, record)
        self._living[record.id] = living
        if len(self._living) > _MOST_KNOWN:
            idle = next((name for name, one in self._living.items() if not one.users), record.id)
            del self._living[idle]
        return living

    async def _begun(self, caller: Caller, container_id: str, spec: ContainerSpec) -> ContainerRecord:
        async with self._beginning:  # else several at once could be one too many
            known = await self._house.store.container(container_id)
            if known is not None:
                return await self.check(caller, container_id)
            running = await self._house.store.containers(caller.tenant, running=True)
            most = caller.limits.containers or self._house.settings.containers_per_tenant
            if len(running) >= most:
                running = [record for record in running if not await self._has_expired(record)]
            if len(running) >= most:
                raise RateLimited(
                    f"As many containers are running as are allowed ({most}); "
                    "those that nobody uses expire by themselves.",
                    code="container_limit_exceeded",
                )
            now = self._house.clock.now()
            record = ContainerRecord(
                id=container_id, tenant=caller.tenant, spec=spec, created_at=now, last_active_at=now
            )
            await self._house.store.put_container(record)
            return record

    async def _owned(self, caller: Caller, container_id: str) -> ContainerRecord:
        record = await self._house.store.container(container_id)
        if record is None or record.tenant != caller.tenant:
            raise NotFound(f"Container with id '{clean_name(container_id, 80)}' not found.")
        return record

    # ---- files ----------------------------------------------------------------------------------------------------

    async def file(self, caller: Caller, container_id: str, file_id: str) -> ContainerFileRecord:
        for record in await self.files(caller, container_id):
            if record.id == file_id:
                return record
        raise _no_file(container_id, file_id)

    async def files(self, caller: Caller, container_id: str) -> Sequence[ContainerFileRecord]:
        try:
            await self.check(caller, container_id)
        except ContainerExpired:
            raise NotFound("Container is expired; its files are gone.") from None
        return await self._house.store.files(container_id)

    async def read(self, caller: Caller, container_id: str, file_id: str) -> AsyncGenerator[bytes]:
        record = await self.file(caller, container_id, file_id)

        async def find_sandbox() -> Sandbox | None:
            return await attached(self._house.provider, await self._owned(caller, container_id))

        try:
            async with aclosing(self._house.files.read(record, find_sandbox)) as pieces:
                async for piece in pieces:
                    yield piece
        except KeyError:
            raise _no_file(container_id, file_id) from None
        except SandboxError as error:
            raise Unavailable("The container's sandbox cannot be reached; try again later.") from error

    # ---- the end of a container -----------------------------------------------------------------------------------

    async def _sweep_forever(self) -> None:
        while True:
            await self._house.clock.sleep(self._house.settings.sweep_seconds)
            try:
                await self.sweep()
            except Exception:
                logger.exception("Containers could not be swept.")

    async def sweep(self) -> None:
        """End what nobody uses any more; keep what is in use from being ended by another process."""
        running = await self._house.store.containers(running=True)
        for record in running:
            living = self._living.get(record.id)
            if living is not None and living.users:
                living.record = msgspec.structs.replace(living.record, last_active_at=self._house.clock.now())
                await self._house.store.put_container(living.record)
            else:
                await self._has_expired(record)
        if self._may_have_orphans or any(record.incarnation for record in running):
            self._may_have_orphans = True
            await self._end_orphans({record.sandbox for record in running})

    async def _has_expired(self, record: ContainerRecord) -> bool:
        """Whether its time is over; then it ends now."""
        living = self._living.get(record.id)
        if living is not None and living.users:
            return False
        active_at = max(record.last_active_at, living.record.last_active_at if living else 0)
        if self._house.clock.now() < active_at + 60 * record.spec.idle_minutes:
            return False
        self._living.pop(record.id, None)
        expired = msgspec.structs.replace(record, status="expired", sandbox="", address="", mark="")
        await self._house.store.put_container(expired)
        if record.sandbox:
            await release(self._house.provider, SandboxRef(record.sandbox, record.address))
        await self._house.files.forget(record.id)
        return True

    async def _end_orphans(self, bound: set[str]) -> None:
        """Sandboxes of our containers that no record points to: a process died between two steps."""
        try:
            sandboxes = await self._house.provider.sandboxes()
        except SandboxError as error:
            logger.warning("Sandboxes could not be listed: %s", error.message)
            return
        idle_since = self._house.clock.now() - self._house.settings.orphan_seconds
        for info in sandboxes:
            container_id = info.id.rpartition("-")[0]
            living = self._living.get(container_id)
            in_use = info.running or info.waiting or (living is not None and living.users)
            if info.id in bound or in_use or info.last_used_at > idle_since:
                continue
            # Other gateways may use the same server: what is not in our store is not ours.
            if await self._house.store.container(container_id) is not None:
                await release(self._house.provider, SandboxRef(info.id))


def _no_file(container_id: str, file_id: str) -> NotFound:
    return NotFound(
        f"There is no file '{clean_name(file_id, 80)}' in container '{clean_name(container_id, 80)}'."
    )
