"""How containers end: idle ones, old ones, deleted ones, and what each leaves."""

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from fumehood.containers.container_state import ContainerContext, ContainerState
from fumehood.containers.network_policy import strip_secrets
from fumehood.containers.sandbox_claims import next_sandbox_name, release_sandbox
from fumehood.interfaces import SandboxRef
from fumehood.protocol.openai.container_objects import ContainerRecord, ContainerStatus
from fumehood.protocol.sandbox.sandbox_errors import SandboxError

logger = logging.getLogger(__name__)

ACTIVITY_WRITE_INTERVAL = 60.0  # a use that comes sooner after another one need not be written down
_FINAL_GRACE_SECONDS = 3600.0  # for what still goes on when a container has lived as long as it may
_TOMBSTONE_SECONDS = 3600.0  # in which leftovers of a deleted container are still known for what they are

type EndReason = Literal["idle", "old", "evicted", "lost", "deleted"]


class ContainerReaper:
    """For all containers of one process; `living` is what it knows of them."""

    def __init__(self, context: ContainerContext, states: dict[str, ContainerState]) -> None:
        self._context = context
        self._states = states
        # Where no sandbox was ever needed, none is looked for: that alone could start a server.
        self._may_have_orphans = (
            context.settings.sandboxes_survive_restart or context.settings.isolation == "execution"
        )

    # ---- one container ------------------------------------------------------------------------------------------

    def is_expired(self, record: ContainerRecord) -> bool:
        """Whether its time is over, though it may be that nobody has ended it yet."""
        now = self._context.clock.now()
        if record.status != "running" or self._expiry_reason(record) == "old":
            return True
        living = self._states.get(record.id)
        if living is not None and living.in_use:
            return False
        minutes = record.spec.idle_minutes or self._context.settings.idle_minutes
        return now >= self.last_active_at(record) + 60 * minutes

    def _expiry_reason(self, record: ContainerRecord) -> EndReason:
        """By which of the two bounds its time is over, if it is: that of its whole life, or that of being idle."""
        oldest = self._context.clock.now() - 3600 * self._context.settings.max_lifetime_hours
        return "old" if record.created_at <= oldest else "idle"

    def last_active_at(self, record: ContainerRecord) -> float:
        """When it was last used; the store may not have been told yet."""
        living = self._states.get(record.id)
        return max(record.last_active_at, living.record.last_active_at if living else 0)

    async def expire(self, record: ContainerRecord, reason: EndReason | None = None) -> bool:
        """The files of users stay, for whoever continues the conversation. `because`: if its time is not over. False
        if somebody is in it, or another process has used it since the record was read.
        """
        if record.status != "running":
            return True
        files = await self._context.store.list_container_files(record.id)
        if self._is_in_use(record):  # now: somebody may have opened it meanwhile
            return False
        kept = [file for file in files if file.source == "user" and file.blob]
        retained = sum(file.bytes for file in kept) if self._context.settings.retention_hours else 0
        if not await self._end_container(record, "expired", reason or self._expiry_reason(record), retained):
            return False
        await self._trim_retained_files(record.tenant)
        return True

    def _is_in_use(self, record: ContainerRecord) -> bool:
        """So that nothing is cut off; but whoever sends a file byte by byte must not keep it for ever."""
        living = self._states.get(record.id)
        longest = 3600 * self._context.settings.max_lifetime_hours + _FINAL_GRACE_SECONDS
        return (
            living is not None and living.in_use and self._context.clock.now() < record.created_at + longest
        )

    async def evict_idle(self, running: Sequence[ContainerRecord], limit: int) -> bool:
        """End those that were idle longest, of those that nobody asked for by itself, until there is room for one more
        among so many; where there cannot be, none ends for it.
        """
        excess = len(running) - limit + 1
        idle = [record for record in running if record.automatic and self._is_idle(record)]
        if len(idle) < excess:
            return False
        for record in sorted(idle, key=self.last_active_at):
            if excess > 0 and await self.expire(record, "evicted"):
                excess -= 1
        return excess <= 0

    def _is_idle(self, record: ContainerRecord) -> bool:
        living = self._states.get(record.id)
        if living is not None and living.in_use:
            return False
        # Another process may be in it, whoever was there last, and writes that down now and then.
        quiet = 0 if self._context.settings.single_process else 2 * ACTIVITY_WRITE_INTERVAL
        return self.last_active_at(record) <= self._context.clock.now() - quiet

    async def delete(self, record: ContainerRecord) -> None:
        await self._end_container(record, "deleted", "deleted", 0)

    async def _end_container(
        self, found: ContainerRecord, status: ContainerStatus, reason: EndReason, retained: int
    ) -> bool:
        """False if somebody else was faster: with an end, or with a use of what should have expired."""
        record, seen = found, found if status == "expired" else None
        active_at, living = self.last_active_at(record), self._states.pop(record.id, None)
        if living is not None:
            living.has_ended = True
            # Or another process has given it a later one.
            if living.record.incarnation >= record.incarnation:
                record = msgspec.structs.replace(
                    record, sandbox=living.record.sandbox, address=living.record.address
                )
        ended = msgspec.structs.replace(
            record,
            spec=strip_secrets(record.spec),
            status=status,
            last_active_at=active_at,
            ended_at=self._context.clock.now(),
            secrets="",
            sandbox="",
            address="",
            mark="",
            retained=retained,
        )
        files = await self._context.store.list_container_files(record.id)
        gone = [file for file in files if not retained or file.source == "assistant" or not file.blob]
        if not await self._context.store.update_container(ended, [file.id for file in gone], expected=seen):
            return False
        if record.status == "running":
            figures = self._context.metrics
            figures.ended[reason] += 1
            figures.live_containers = max(figures.live_containers - 1, 0)  # another process may have begun it
        bound = [] if reason == "lost" else self._sandbox_refs(record)
        for ref in (*bound, *(living.ephemeral_sandboxes if living else ())):
            await release_sandbox(self._context.provider, ref)
        await self._context.files.drop_blobs(gone)
        return True

    def _sandbox_refs(self, record: ContainerRecord) -> list[SandboxRef]:
        """The one that it has, or the one that a process which died may have made for it and not written down."""
        if record.sandbox:
            return [SandboxRef(record.sandbox, record.address)]
        settings = self._context.settings
        if settings.sandboxes_survive_restart and settings.isolation == "container":
            return [SandboxRef(next_sandbox_name(record))]
        return []

    async def _trim_retained_files(self, tenant: str) -> None:
        """Let go of the oldest files that are kept beyond the end of their containers, until they are few enough."""
        store = self._context.store
        retaining = await store.list_retaining_containers(tenant)
        excess = sum(record.retained for record in retaining) - self._context.settings.retained_bytes
        for record in retaining:
            if excess <= 0:
                return
            excess -= record.retained
            self._context.metrics.purged += 1
            files = await store.list_container_files(record.id)
            await store.update_container(
                msgspec.structs.replace(record, retained=0), [file.id for file in files]
            )
            await self._context.files.drop_blobs(files)

    # ---- all of them --------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """End what nobody uses any more; keep what is in use from being ended by another process."""
        store, clock = self._context.store, self._context.clock
        running = await store.find_containers(running=True)
        self._context.metrics.live_containers = len(running)
        for record in running:  # all of them before any ends: that may take longer than others wait
            living = self._states.get(record.id)
            if living is not None and self._is_in_use(record):
                living.update(last_active_at=clock.now())
                await living.save(store)
        for record in running:
            if self.is_expired(record) and not self._is_in_use(record):
                await self.expire(record)
        await self._delete_tombstones()
        self._may_have_orphans |= any(record.incarnation for record in running)
        if self._may_have_orphans:
            await self._destroy_orphans({record.sandbox: record for record in running})

    async def _delete_tombstones(self) -> None:
        """Forget those that ended long ago, with everything that still hangs on them."""
        store, now = self._context.store, self._context.clock.now()
        while ended := await store.list_ended_containers(
            expired_before=now - 3600 * self._context.settings.retention_hours,
            deleted_before=now - _TOMBSTONE_SECONDS,
        ):
            for record in ended:
                files = await store.list_container_files(record.id)
                await store.delete_container(record.id)
                await self._context.files.drop_blobs(files)

    async def expire_lost_containers(self) -> None:
        """Those that were bound to a server which is no more have ended with it."""
        for record in await self._context.store.find_containers(running=True):
            if record.sandbox:
                await self.expire(record, "lost")

    async def destroy_orphans_at_startup(self) -> None:
        """Those that a process before this one made for single calls, or had not written down yet. They are nobody's,
        if no other process makes any.
        """
        running = await self._context.store.find_containers(running=True)
        await self._destroy_orphans({record.sandbox: record for record in running}, include_active=True)

    async def _destroy_orphans(
        self, bound: Mapping[str, ContainerRecord], *, include_active: bool = False
    ) -> None:
        """Sandboxes of our containers that no record points to: a process died between two steps.

        at_once: also those that somebody may be about to use, or uses.
        """
        try:
            sandboxes = await self._context.provider.list_sandboxes()
        except SandboxError as error:
            logger.warning("Sandboxes could not be listed: %s", error.message)
            return
        idle_since = self._context.clock.now() - self._context.settings.orphan_idle_seconds
        for info in sandboxes:
            in_use = info.running or info.waiting or info.last_used_at > idle_since
            if info.id in bound or (in_use and not include_active):
                continue
            container_id = info.id.rpartition("-")[0]
            record = await self._context.store.get_container(container_id)
            living = self._states.get(container_id)
            # Other gateways may use the same server: what is not in our store is not ours.
            if record is not None and record.sandbox != info.id and (living is None or not living.in_use):
                await release_sandbox(self._context.provider, SandboxRef(info.id))
