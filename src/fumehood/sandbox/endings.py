"""How containers end: idle ones, old ones, deleted ones, and what each leaves; imports `interfaces` and siblings."""

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from fumehood.interfaces import SandboxRef
from fumehood.protocol.containers import ContainerRecord, ContainerStatus
from fumehood.protocol.sandbox_errors import SandboxError
from fumehood.sandbox.container import House, Living, next_name, release
from fumehood.sandbox.domain_secrets import without_secrets

logger = logging.getLogger(__name__)

ACTIVE_SECONDS = 60.0  # a use that comes sooner after another one need not be written down
_LAST_SECONDS = 3600.0  # for what still goes on when a container has lived as long as it may
_TOMBSTONE_SECONDS = 3600.0  # in which leftovers of a deleted container are still known for what they are

type Ending = Literal["idle", "old", "evicted", "lost", "deleted"]


class Endings:
    """For all containers of one process; `living` is what it knows of them."""

    def __init__(self, house: House, living: dict[str, Living]) -> None:
        self._house = house
        self._living = living
        # Where no sandbox was ever needed, none is looked for: that alone could start a server.
        self._may_have_orphans = house.settings.sandboxes_outlive or house.settings.isolation == "execution"

    # ---- one container --------------------------------------------------------------------------------------------

    def is_over(self, record: ContainerRecord) -> bool:
        """Whether its time is over, though it may be that nobody has ended it yet."""
        now = self._house.clock.now()
        if record.status != "running" or self._time_over(record) == "old":
            return True
        living = self._living.get(record.id)
        if living is not None and living.in_use:
            return False
        minutes = record.spec.idle_minutes or self._house.settings.idle_minutes
        return now >= self.active_at(record) + 60 * minutes

    def _time_over(self, record: ContainerRecord) -> Ending:
        """By which of the two bounds its time is over, if it is: that of its whole life, or that of being idle."""
        oldest = self._house.clock.now() - 3600 * self._house.settings.life_hours
        return "old" if record.created_at <= oldest else "idle"

    def active_at(self, record: ContainerRecord) -> float:
        """When it was last used; the store may not have been told yet."""
        living = self._living.get(record.id)
        return max(record.last_active_at, living.record.last_active_at if living else 0)

    async def expire(self, record: ContainerRecord, because: Ending | None = None) -> bool:
        """The files of users stay, for whoever continues the conversation. `because`: if its time is not over. False
        if somebody is in it, or another process has used it since the record was read.
        """
        if record.status != "running":
            return True
        files = await self._house.store.files(record.id)
        if self._is_in_use(record):  # now: somebody may have opened it meanwhile
            return False
        kept = [file for file in files if file.source == "user" and file.blob]
        retained = sum(file.bytes for file in kept) if self._house.settings.retention_hours else 0
        if not await self._end(record, "expired", because or self._time_over(record), retained):
            return False
        await self._trim(record.tenant)
        return True

    def _is_in_use(self, record: ContainerRecord) -> bool:
        """So that nothing is cut off; but whoever sends a file byte by byte must not keep it for ever."""
        living = self._living.get(record.id)
        longest = 3600 * self._house.settings.life_hours + _LAST_SECONDS
        return living is not None and living.in_use and self._house.clock.now() < record.created_at + longest

    async def make_room(self, running: Sequence[ContainerRecord], most: int) -> bool:
        """End those that were idle longest, of those that nobody asked for by itself, until there is room for one more
        among so many; where there cannot be, none ends for it.
        """
        excess = len(running) - most + 1
        idle = [record for record in running if record.automatic and self._is_idle(record)]
        if len(idle) < excess:
            return False
        for record in sorted(idle, key=self.active_at):
            if excess > 0 and await self.expire(record, "evicted"):
                excess -= 1
        return excess <= 0

    def _is_idle(self, record: ContainerRecord) -> bool:
        living = self._living.get(record.id)
        if living is not None and living.in_use:
            return False
        # Another process may be in it, whoever was there last, and writes that down now and then.
        quiet = 0 if self._house.settings.alone else 2 * ACTIVE_SECONDS
        return self.active_at(record) <= self._house.clock.now() - quiet

    async def delete(self, record: ContainerRecord) -> None:
        await self._end(record, "deleted", "deleted", 0)

    async def _end(
        self, found: ContainerRecord, status: ContainerStatus, because: Ending, retained: int
    ) -> bool:
        """False if somebody else was faster: with an end, or with a use of what should have expired."""
        record, seen = found, found if status == "expired" else None
        active_at, living = self.active_at(record), self._living.pop(record.id, None)
        if living is not None:
            living.over = True
            # Or another process has given it a later one.
            if living.record.incarnation >= record.incarnation:
                record = msgspec.structs.replace(
                    record, sandbox=living.record.sandbox, address=living.record.address
                )
        ended = msgspec.structs.replace(
            record,
            spec=without_secrets(record.spec),
            status=status,
            last_active_at=active_at,
            ended_at=self._house.clock.now(),
            secrets="",
            sandbox="",
            address="",
            mark="",
            retained=retained,
        )
        files = await self._house.store.files(record.id)
        gone = [file for file in files if not retained or file.source == "assistant" or not file.blob]
        if not await self._house.store.change_container(ended, [file.id for file in gone], seen=seen):
            return False
        if record.status == "running":
            figures = self._house.figures
            figures.ended[because] += 1
            figures.live = max(figures.live - 1, 0)  # another process may have begun it
        bound = [] if because == "lost" else self._sandboxes_of(record)
        for ref in (*bound, *(living.passing if living else ())):
            await release(self._house.provider, ref)
        await self._house.files.drop(gone)
        return True

    def _sandboxes_of(self, record: ContainerRecord) -> list[SandboxRef]:
        """The one that it has, or the one that a process which died may have made for it and not written down."""
        if record.sandbox:
            return [SandboxRef(record.sandbox, record.address)]
        settings = self._house.settings
        if settings.sandboxes_outlive and settings.isolation == "container":
            return [SandboxRef(next_name(record))]
        return []

    async def _trim(self, tenant: str) -> None:
        """Let go of the oldest files that are kept beyond the end of their containers, until they are few enough."""
        store = self._house.store
        retaining = await store.retaining_containers(tenant)
        excess = sum(record.retained for record in retaining) - self._house.settings.retained_bytes
        for record in retaining:
            if excess <= 0:
                return
            excess -= record.retained
            self._house.figures.trimmed += 1
            files = await store.files(record.id)
            await store.change_container(
                msgspec.structs.replace(record, retained=0), [file.id for file in files]
            )
            await self._house.files.drop(files)

    # ---- all of them ----------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """End what nobody uses any more; keep what is in use from being ended by another process."""
        store, clock = self._house.store, self._house.clock
        running = await store.containers(running=True)
        self._house.figures.live = len(running)
        for record in running:  # all of them before any ends: that may take longer than others wait
            living = self._living.get(record.id)
            if living is not None and self._is_in_use(record):
                living.change(last_active_at=clock.now())
                await living.write(store)
        for record in running:
            if self.is_over(record) and not self._is_in_use(record):
                await self.expire(record)
        await self._bury()
        self._may_have_orphans |= any(record.incarnation for record in running)
        if self._may_have_orphans:
            await self._end_orphans({record.sandbox: record for record in running})

    async def _bury(self) -> None:
        """Forget those that ended long ago, with everything that still hangs on them."""
        store, now = self._house.store, self._house.clock.now()
        while ended := await store.ended_containers(
            expired_before=now - 3600 * self._house.settings.retention_hours,
            deleted_before=now - _TOMBSTONE_SECONDS,
        ):
            for record in ended:
                files = await store.files(record.id)
                await store.delete_container(record.id)
                await self._house.files.drop(files)

    async def lose_sandboxes(self) -> None:
        """Those that were bound to a server which is no more have ended with it."""
        for record in await self._house.store.containers(running=True):
            if record.sandbox:
                await self.expire(record, "lost")

    async def end_strays(self) -> None:
        """Those that a process before this one made for single calls, or had not written down yet. They are nobody's,
        if no other process makes any.
        """
        running = await self._house.store.containers(running=True)
        await self._end_orphans({record.sandbox: record for record in running}, at_once=True)

    async def _end_orphans(self, bound: Mapping[str, ContainerRecord], *, at_once: bool = False) -> None:
        """Sandboxes of our containers that no record points to: a process died between two steps.

        at_once: also those that somebody may be about to use, or uses.
        """
        try:
            sandboxes = await self._house.provider.sandboxes()
        except SandboxError as error:
            logger.warning("Sandboxes could not be listed: %s", error.message)
            return
        idle_since = self._house.clock.now() - self._house.settings.orphan_seconds
        for info in sandboxes:
            in_use = info.running or info.waiting or info.last_used_at > idle_since
            if info.id in bound or (in_use and not at_once):
                continue
            container_id = info.id.rpartition("-")[0]
            record = await self._house.store.container(container_id)
            living = self._living.get(container_id)
            # Other gateways may use the same server: what is not in our store is not ours.
            if record is not None and record.sandbox != info.id and (living is None or not living.in_use):
                await release(self._house.provider, SandboxRef(info.id))
