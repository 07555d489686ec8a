"""The container reaper: expires, evicts and deletes containers, and destroys orphaned sandboxes."""

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from fumehood.containers.container_runtime_state import ContainerContext, ContainerRuntimeState
from fumehood.containers.domain_secret_sealer import strip_secrets
from fumehood.containers.sandbox_acquisition import next_sandbox_name, release_sandbox
from fumehood.interfaces import SandboxRef
from fumehood.protocol.openai.container_objects import ContainerRecord, ContainerStatus
from fumehood.protocol.sandbox.sandbox_errors import SandboxError

logger = logging.getLogger(__name__)

ACTIVITY_WRITE_INTERVAL = 60.0  # seconds between two writes of `last_active_at`
_FINAL_GRACE_SECONDS = 3600.0  # for calls that still run when the maximum lifetime is over
_TOMBSTONE_SECONDS = 3600.0  # in which orphans of a deleted container are still recognised

type EndReason = Literal["idle", "old", "evicted", "lost", "deleted"]


class ContainerReaper:
    """Ends containers of one process; `states` are those that it has in memory."""

    def __init__(self, context: ContainerContext, states: dict[str, ContainerRuntimeState]) -> None:
        self._context = context
        self._states = states
        # If no sandbox was ever needed, none is listed: that alone could start a server.
        self._may_have_orphans = (
            context.settings.sandboxes_survive_restart or context.settings.isolation == "execution"
        )

    # ---- one container ------------------------------------------------------------------------------------------

    def is_expired(self, record: ContainerRecord) -> bool:
        """Whether the container's time is over, even if no sweep has ended it yet."""
        now = self._context.clock.now()
        if record.status != "running" or self._expiry_reason(record) == "old":
            return True
        state = self._states.get(record.id)
        if state is not None and state.in_use:
            return False
        minutes = record.spec.idle_minutes or self._context.settings.idle_minutes
        return now >= self.last_active_at(record) + 60 * minutes

    def _expiry_reason(self, record: ContainerRecord) -> EndReason:
        """Return which limit an expired container has reached: its lifetime or its idle time."""
        oldest = self._context.clock.now() - 3600 * self._context.settings.max_lifetime_hours
        return "old" if record.created_at <= oldest else "idle"

    def last_active_at(self, record: ContainerRecord) -> float:
        """Return the time of the last use, which may not be stored yet."""
        state = self._states.get(record.id)
        return max(record.last_active_at, state.record.last_active_at if state else 0)

    async def expire(self, record: ContainerRecord, reason: EndReason | None = None) -> bool:
        """Expire the container; files of users are retained for the container that replaces it.

        Returns False if it is in use, or if another process has used it since the record was read.

        reason: default: the limit that it has reached.
        """
        if record.status != "running":
            return True
        files = await self._context.store.list_container_files(record.id)
        if self._is_in_use(record):  # checked now: it may have been opened meanwhile
            return False
        retainable = [file for file in files if file.source == "user" and file.blob]
        retained = sum(file.bytes for file in retainable) if self._context.settings.retention_hours else 0
        if not await self._end_container(record, "expired", reason or self._expiry_reason(record), retained):
            return False
        await self._trim_retained_files(record.tenant)
        return True

    def _is_in_use(self, record: ContainerRecord) -> bool:
        """Whether a call or transfer is active. An endless upload does not count beyond the final grace period."""
        state = self._states.get(record.id)
        longest = 3600 * self._context.settings.max_lifetime_hours + _FINAL_GRACE_SECONDS
        return state is not None and state.in_use and self._context.clock.now() < record.created_at + longest

    async def evict_idle(self, running: Sequence[ContainerRecord], limit: int) -> bool:
        """Evict the longest idle automatic containers until one more fits below the limit.

        Returns False, and evicts none, if there are not enough of them.
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
        state = self._states.get(record.id)
        if state is not None and state.in_use:
            return False
        # Another process may use it, and saves that only now and then.
        quiet_seconds = 2 * ACTIVITY_WRITE_INTERVAL if self._context.store.is_shared else 0
        return self.last_active_at(record) <= self._context.clock.now() - quiet_seconds

    async def delete(self, record: ContainerRecord) -> None:
        await self._end_container(record, "deleted", "deleted", 0)

    async def _end_container(
        self, found: ContainerRecord, status: ContainerStatus, reason: EndReason, retained: int
    ) -> bool:
        """Write the end, release the sandboxes, delete files. False if another process has ended or used it first."""
        record, expected = found, found if status == "expired" else None
        active_at, state = self.last_active_at(record), self._states.pop(record.id, None)
        if state is not None:
            state.has_ended = True
            # Unless another process has made a later sandbox.
            if state.record.incarnation >= record.incarnation:
                record = msgspec.structs.replace(
                    record, sandbox=state.record.sandbox, address=state.record.address
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
        deleted = [file for file in files if not retained or file.source == "assistant" or not file.blob]
        if not await self._context.store.update_container(
            ended, [file.id for file in deleted], expected=expected
        ):
            return False
        if record.status == "running":
            stats = self._context.stats
            stats.ended[reason] += 1
            stats.live_containers = max(stats.live_containers - 1, 0)  # another process may have created it
        refs = [] if reason == "lost" else self._sandbox_refs(record)
        for ref in (*refs, *(state.ephemeral_sandboxes if state else ())):
            await release_sandbox(self._context.provider, ref)
        await self._context.files.drop_blobs(deleted)
        return True

    def _sandbox_refs(self, record: ContainerRecord) -> list[SandboxRef]:
        """Return the container's sandbox, or the one that a crashed process may have made without recording it."""
        if record.sandbox:
            return [SandboxRef(record.sandbox, record.address)]
        settings = self._context.settings
        if settings.sandboxes_survive_restart and settings.isolation == "container":
            return [SandboxRef(next_sandbox_name(record))]
        return []

    async def _trim_retained_files(self, tenant: str) -> None:
        """Delete the oldest retained files of the tenant until they fit into `retained_bytes`."""
        store = self._context.store
        retaining = await store.list_retaining_containers(tenant)
        excess = sum(record.retained for record in retaining) - self._context.settings.retained_bytes
        for record in retaining:
            if excess <= 0:
                return
            excess -= record.retained
            self._context.stats.purged += 1
            files = await store.list_container_files(record.id)
            await store.update_container(
                msgspec.structs.replace(record, retained=0), [file.id for file in files]
            )
            await self._context.files.drop_blobs(files)

    # ---- sweep --------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Expire idle containers, delete tombstones, destroy orphans; save the activity of containers in use, and
        extend their sandboxes.
        """
        store, clock = self._context.store, self._context.clock
        running = await store.find_containers(running=True)
        self._context.stats.live_containers = len(running)
        for record in running:  # first all of them: ending one may take longer than other processes wait
            state = self._states.get(record.id)
            if state is not None and self._is_in_use(record):
                state.update(last_active_at=clock.now())
                await state.save(store)
        for record in running:
            if not self.is_expired(record) or self._is_in_use(record):
                await self._extend_sandbox(record)
            else:
                await self.expire(record)
        await self._delete_tombstones()
        self._may_have_orphans |= any(record.incarnation for record in running)
        if self._may_have_orphans:
            await self._destroy_orphans({record.sandbox: record for record in running})

    async def _extend_sandbox(self, record: ContainerRecord) -> None:
        """Let the container's sandbox live as long as the container, if nobody uses it from now on."""
        if not record.sandbox:
            return
        minutes = record.spec.idle_minutes or self._context.settings.idle_minutes
        until = self.last_active_at(record) + 60 * minutes
        try:
            await self._context.provider.extend_lifetime(SandboxRef(record.sandbox, record.address), until)
        except SandboxError as error:
            logger.warning("Could not extend the sandbox of %s: %s", record.id, error.message)

    async def _delete_tombstones(self) -> None:
        """Delete the records, files and blobs of containers that ended long ago."""
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
        """Expire containers whose sandboxes ended with their server."""
        for record in await self._context.store.find_containers(running=True):
            if record.sandbox:
                await self.expire(record, "lost")

    async def destroy_orphans_at_startup(self) -> None:
        """Destroy sandboxes that an earlier process left unrecorded; only if no other process makes any."""
        running = await self._context.store.find_containers(running=True)
        await self._destroy_orphans({record.sandbox: record for record in running}, include_active=True)

    async def _destroy_orphans(
        self, bound: Mapping[str, ContainerRecord], *, include_active: bool = False
    ) -> None:
        """Destroy sandboxes of our containers that no record refers to, left by a process that crashed.

        include_active: also those used recently.
        """
        try:
            sandboxes = await self._context.provider.list_sandboxes()
        except SandboxError as error:
            logger.warning("Could not list sandboxes: %s", error.message)
            return
        idle_since = self._context.clock.now() - self._context.settings.orphan_idle_seconds
        for info in sandboxes:
            in_use = info.running or info.waiting or info.last_used_at > idle_since
            if info.id in bound or (in_use and not include_active):
                continue
            container_id = info.id.rpartition("-")[0]
            record = await self._context.store.get_container(container_id)
            state = self._states.get(container_id)
            # Another gateway may use the same server: a sandbox without a record in our store is not ours.
            if record is not None and record.sandbox != info.id and (state is None or not state.in_use):
                self._context.stats.orphans += 1
                await release_sandbox(self._context.provider, SandboxRef(info.id))
