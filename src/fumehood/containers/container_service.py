"""The container service: creates, opens, lists and deletes containers and their files.

docs/containers.md describes the behaviour for users.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Self
from weakref import WeakValueDictionary

import msgspec

from fumehood.containers.container_handle import ContainerHandle
from fumehood.containers.container_reaper import ACTIVITY_WRITE_INTERVAL, ContainerReaper
from fumehood.containers.container_runtime_state import (
    ContainerContext,
    ContainerRecordStore,
    ContainerRuntimeState,
)
from fumehood.containers.container_settings import ContainerSettings
from fumehood.containers.container_validation import (
    check_container_spec,
    choose_file_name,
    validate_file_path,
)
from fumehood.containers.domain_secret_sealer import DomainSecretSealer
from fumehood.containers.file_sync import FileSync
from fumehood.containers.file_transfer import FileUpload
from fumehood.containers.sandbox_acquisition import attach_sandbox
from fumehood.containers.user_file_writer import UserFileWriter
from fumehood.gateway_stats import ContainerStats
from fumehood.interfaces import (
    BlobRef,
    Caller,
    Clock,
    FileService,
    GarbageCollectedBlobStore,
    Sandbox,
    SandboxProvider,
    Sealer,
    UnlistedFiles,
)
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import (
    ContainerExpired,
    InvalidRequest,
    NotFound,
    RateLimited,
    ServiceUnavailable,
)
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.sandbox.sandbox_errors import SandboxError, SandboxGone, SandboxNotFound
from fumehood.protocol.sandbox.sandbox_messages import ArchiveFormat

logger = logging.getLogger(__name__)

_PREFIX = "cntr_"
_RANDOM_DIGITS = 32
_SIGNATURE_DIGITS = 16
_MAX_CACHED_STATES = 4096


class SandboxContainerService:
    """A `ContainerService` whose sandboxes come from a provider.

    `async with` runs the sweeper; leaving it does not close the provider.

    sealer: encrypts domain secrets; without one, containers with secrets are rejected.
    uploads: the Files API, for `file_ids`; without it every file id is unknown.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        store: ContainerRecordStore,
        blobs: GarbageCollectedBlobStore,
        clock: Clock,
        settings: ContainerSettings | None = None,
        *,
        sealer: Sealer | None = None,
        uploads: FileService | None = None,
        stats: ContainerStats | None = None,
    ) -> None:
        settings = settings or ContainerSettings()
        files = FileSync(store, blobs, clock, settings.file_limits)
        self._stats = stats or ContainerStats()
        self._context = ContainerContext(
            provider, store, files, clock, settings, DomainSecretSealer(sealer), self._stats
        )
        self._uploads = uploads
        self._user_files = UserFileWriter(self._context, blobs)
        self._states: OrderedDict[str, ContainerRuntimeState] = OrderedDict()  # least recently used first
        self._reaper = ContainerReaper(self._context, self._states)
        self._id_key = secrets.token_bytes(32)
        self._creation_locks = WeakValueDictionary[str, asyncio.Lock]()
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._stats.live_containers = len(await self._context.store.find_containers(running=True))
        if not self._context.settings.sandboxes_survive_restart:
            await self._reaper.expire_lost_containers()
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="containers: sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Save all container records; sandboxes keep running."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None
        for state in list(self._states.values()):
            await state.save(self._context.store)

    async def _sweep_forever(self) -> None:
        settings = self._context.settings
        # In a shared store, sandboxes without a record may be those that another process is making.
        if settings.sandboxes_survive_restart and not self._context.store.is_shared:
            await self._log_sweep_failure(self._reaper.destroy_orphans_at_startup)
        while True:
            await self._context.clock.sleep(settings.sweep_interval_seconds)
            await self._log_sweep_failure(self.sweep)

    async def _log_sweep_failure(self, sweep: Callable[[], Awaitable[None]]) -> None:
        try:
            await sweep()
        except Exception:
            logger.exception("Sweeping containers failed.")

    async def sweep(self) -> None:
        """Expire idle containers and destroy orphaned sandboxes."""
        await self._reaper.sweep()

    # ---- containers ---------------------------------------------------------------------------------------------

    def reserve_id(self) -> str:
        """Return a signed id. Nothing is stored: this process recognises its own signature."""
        digits = secrets.token_hex(_RANDOM_DIGITS // 2)
        return f"{_PREFIX}{digits}{self._sign_id(digits)}"

    def _sign_id(self, digits: str) -> str:
        return hmac.new(self._id_key, digits.encode(), hashlib.sha256).hexdigest()[:_SIGNATURE_DIGITS]

    def _is_reserved(self, container_id: str) -> bool:
        digits = container_id.removeprefix(_PREFIX)
        body, signature = digits[:_RANDOM_DIGITS], digits[_RANDOM_DIGITS:]
        return hmac.compare_digest(signature.encode(), self._sign_id(body).encode())

    def validate_spec(self, spec: ContainerSpec) -> ContainerSpec:
        return check_container_spec(spec, self._context.settings)

    async def create_container(self, caller: Caller, spec: ContainerSpec) -> ContainerRecord:
        spec = self.validate_spec(spec)
        try:
            uploads = await self._find_uploads(caller, spec.file_ids)
        except NotFound as error:
            raise InvalidRequest(error.message, param="file_ids", code="invalid_value") from None
        record = await self._create_record(caller, self.reserve_id(), spec)
        try:
            await self._user_files.add_uploads(self._get_state(record), uploads)
        except BaseException:
            await self._reaper.delete(record)
            raise
        return record

    async def check_active(self, caller: Caller, container_id: str) -> ContainerRecord:
        record = await self._expire_if_due(await self._get_owned(caller, container_id))
        if record.status == "expired":
            raise ContainerExpired("Container is expired.")
        return record

    async def open_container(
        self, caller: Caller, container_id: str, spec: ContainerSpec, replaces: str | None = None
    ) -> ContainerHandle:
        try:
            record = await self.check_active(caller, container_id)
        except NotFound:
            if not self._is_reserved(container_id):
                raise
            record = await self._create_record(caller, container_id, self.validate_spec(spec), automatic=True)
        else:
            replaces = None
        handle = ContainerHandle(self._context, self._get_state(record))
        try:
            if replaces is not None and not record.incarnation:
                await self._copy_user_files(caller, record, replaces)
            if (await self._mark_used(record)).has_ended:
                raise ContainerExpired("Container is expired.")  # in this very moment
        except BaseException:
            handle.release()
            raise
        return handle

    async def get_container(self, caller: Caller, container_id: str) -> ContainerRecord:
        record = await self._expire_if_due(await self._get_owned(caller, container_id))
        return record if record.status == "expired" else (await self._mark_used(record)).record

    async def list_containers(
        self, caller: Caller, query: PageQuery, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        records = await self._context.store.list_containers(caller.tenant, query, name)
        return [self._with_current_status(record) for record in records]

    async def delete_container(self, caller: Caller, container_id: str) -> None:
        await self._reaper.delete(await self._get_owned(caller, container_id))

    async def _get_owned(self, caller: Caller, container_id: str) -> ContainerRecord:
        record = await self._context.store.get_container(container_id)
        if record is None or record.tenant != caller.tenant or record.status == "deleted":
            raise NotFound(f"Container with id '{sanitize_name(container_id, 80)}' not found.")
        return record

    async def _expire_if_due(self, record: ContainerRecord) -> ContainerRecord:
        """Expire the container if its time is over, or mark the record expired while it is still in use."""
        if record.status != "running" or not self._reaper.is_expired(record):
            return record
        if not await self._reaper.expire(record):
            latest = await self._context.store.get_container(record.id)
            if latest is not None and not self._reaper.is_expired(latest):
                return latest  # another process has used it meanwhile
        return msgspec.structs.replace(record, status="expired")

    def _with_current_status(self, record: ContainerRecord) -> ContainerRecord:
        """Return the record with its status as of now, even if no sweep has expired it yet."""
        if self._reaper.is_expired(record):
            return msgspec.structs.replace(record, status="expired")
        return msgspec.structs.replace(record, last_active_at=self._reaper.last_active_at(record))

    async def _mark_used(self, record: ContainerRecord) -> ContainerRuntimeState:
        """Record a use of the container; return its state."""
        state = self._get_state(record)
        now = self._context.clock.now()
        state.update(last_active_at=now)
        if now - state.stored.last_active_at > ACTIVITY_WRITE_INTERVAL and not state.active_operations:
            await state.save(self._context.store)
        return state

    def _get_state(self, record: ContainerRecord) -> ContainerRuntimeState:
        state = self._states.get(record.id)
        if state is None:
            state = self._states[record.id] = ContainerRuntimeState(record, record)
        elif state.stored != record and not state.active_operations:
            state.merge_stored(record)
        self._states.move_to_end(record.id)
        if len(self._states) > _MAX_CACHED_STATES:
            idle = next((key for key, known in self._states.items() if not known.in_use), record.id)
            del self._states[idle]
        return state

    async def _create_record(
        self, caller: Caller, container_id: str, spec: ContainerSpec, *, automatic: bool = False
    ) -> ContainerRecord:
        store, tenant = self._context.store, caller.tenant
        async with self._creation_lock(tenant):  # so that creations in this process do not conflict
            while True:
                if await store.get_container(container_id) is not None:
                    return await self.check_active(caller, container_id)
                running = await store.find_containers(tenant, running=True)
                await self._enforce_container_limit(caller, running)
                now = self._context.clock.now()
                public, sealed = self._context.domain_secrets.seal_spec(tenant, container_id, spec)
                record = ContainerRecord(
                    id=container_id,
                    tenant=tenant,
                    spec=public,
                    secrets=sealed,
                    automatic=automatic,
                    created_at=now,
                    last_active_at=now,
                )
                # False if another process has created a container since they were counted.
                if await store.put_container(record, known_running=[known.id for known in running]):
                    self._stats.created += 1
                    self._stats.live_containers += 1
                    return record

    async def _enforce_container_limit(self, caller: Caller, running: Sequence[ContainerRecord]) -> None:
        """Make room for one more container; raises RateLimited."""
        limit = caller.limits.containers or self._context.settings.containers_per_tenant
        if len(running) >= limit:
            running = [known for known in running if (await self._expire_if_due(known)).status == "running"]
        if len(running) >= limit and not await self._reaper.evict_idle(running, limit):
            self._stats.rejected += 1
            raise RateLimited(
                f"Container limit reached ({limit}): delete a container, or wait for one to expire.",
                code="container_limit_exceeded",
            )

    def _creation_lock(self, tenant: str) -> asyncio.Lock:
        """Return the tenant's lock: evicting containers takes time, and other tenants do not wait for it."""
        lock = self._creation_locks.get(tenant)
        if lock is None:
            lock = self._creation_locks[tenant] = asyncio.Lock()
        return lock

    async def _copy_user_files(self, caller: Caller, record: ContainerRecord, earlier_id: str) -> None:
        """Copy the files that users had put into an expired container."""
        try:
            earlier = await self._expire_if_due(await self._get_owned(caller, earlier_id))
        except NotFound:
            return
        if earlier.status != "expired":
            return
        files = [
            file
            for file in await self._context.store.list_container_files(earlier_id)
            if file.source == "user" and file.blob
        ]
        uploads = [FileUpload(file.path, BlobRef(file.blob, file.bytes), file.executable) for file in files]
        try:
            await self._user_files.add_uploads(self._get_state(record), uploads)
        except NotFound:  # deleted in this very moment
            logger.warning("Could not copy the files of %s to %s.", earlier_id, record.id)

    # ---- files --------------------------------------------------------------------------------------------------

    async def write_file(
        self, caller: Caller, container_id: str, path: str, content: bytes | AsyncIterable[bytes]
    ) -> ContainerFileRecord:
        path = validate_file_path(path)
        state = await self._use_for_files(caller, container_id)
        with state.keep_in_use():
            return await self._user_files.write_file(state, path, content)

    async def copy_uploads(
        self, caller: Caller, container_id: str, file_ids: Sequence[str]
    ) -> Sequence[ContainerFileRecord]:
        state = await self._use_for_files(caller, container_id)
        with state.keep_in_use():
            return await self._user_files.add_uploads(state, await self._find_uploads(caller, file_ids))

    async def unpack_archive(
        self,
        caller: Caller,
        container_id: str,
        content: bytes | AsyncIterable[bytes],
        kind: ArchiveFormat,
        into: str = "",
    ) -> Sequence[ContainerFileRecord]:
        into = validate_file_path(into) if into else ""
        state = await self._use_for_files(caller, container_id)
        with state.keep_in_use():
            return await self._user_files.unpack(state, content, kind, into)

    async def _find_uploads(self, caller: Caller, file_ids: Sequence[str]) -> list[FileUpload]:
        """Find the caller's uploads; raises NotFound."""
        if file_ids and self._uploads is None:
            raise NotFound("This server has no Files API.")
        uploads = [
            await self._uploads.get_file(caller, file_id)
            for file_id in dict.fromkeys(file_ids)
            if self._uploads
        ]
        return [
            FileUpload(choose_file_name(upload.filename, upload.id), BlobRef(upload.blob, upload.bytes))
            for upload in uploads
        ]

    async def get_file(self, caller: Caller, container_id: str, file_id: str) -> ContainerFileRecord:
        await self._use_for_files(caller, container_id)
        record = await self._context.store.get_container_file(container_id, file_id)
        if record is None:
            raise _file_not_found(container_id, file_id)
        return record

    async def list_files(
        self, caller: Caller, container_id: str, query: PageQuery | None = None
    ) -> Sequence[ContainerFileRecord]:
        await self._use_for_files(caller, container_id)
        return await self._context.store.list_container_files(container_id, query)

    async def find_unlisted_files(self, caller: Caller, container_id: str) -> UnlistedFiles:
        state = await self._use_for_files(caller, container_id)
        with state.keep_in_use():
            try:
                sandbox = await attach_sandbox(self._context.provider, state.record)
                if sandbox is None:
                    return UnlistedFiles()
                listing = await sandbox.list_files()
            except (SandboxGone, SandboxNotFound):
                return UnlistedFiles()
            except SandboxError as error:
                raise ServiceUnavailable(f"The container's files cannot be listed now: {error}") from error
            listed = {record.path for record in await self._context.store.list_container_files(container_id)}
        paths = [file.path for file in listing.files if file.path not in listed]
        return UnlistedFiles(links=listing.links, paths=paths, truncated=listing.truncated)

    async def read_file(
        self, caller: Caller, container_id: str, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        state = await self._use_for_files(caller, container_id)
        record = await self._context.store.get_container_file(container_id, file_id)
        if record is None:
            raise _file_not_found(container_id, file_id)

        async def find_sandbox() -> Sandbox | None:
            return await attach_sandbox(self._context.provider, state.record)

        with state.keep_in_use():
            try:
                async with aclosing(self._context.files.read(record, find_sandbox, start, end)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except KeyError:
                raise _file_not_found(container_id, file_id) from None
            except SandboxError as error:
                raise ServiceUnavailable(
                    "The container's sandbox cannot be reached; try again later."
                ) from error

    async def delete_file(self, caller: Caller, container_id: str, file_id: str) -> None:
        state = await self._use_for_files(caller, container_id)
        with state.keep_in_use():
            if not await self._user_files.delete(state, file_id):
                raise _file_not_found(container_id, file_id)

    async def _use_for_files(self, caller: Caller, container_id: str) -> ContainerRuntimeState:
        try:
            return await self._mark_used(await self.check_active(caller, container_id))
        except ContainerExpired:
            raise NotFound("Container is expired; its files are gone.") from None


def _file_not_found(container_id: str, file_id: str) -> NotFound:
    return NotFound(
        f"No file '{sanitize_name(file_id, 80)}' in container '{sanitize_name(container_id, 80)}'."
    )
