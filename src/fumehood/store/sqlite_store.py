"""The store of a single gateway: one SQLite file.

One thread writes, with group commit. See docs/storage.md.
"""

import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from fumehood.gateway_stats import StoreStats
from fumehood.interfaces import FileTotals, IdempotencyClaim, ResponseLease, ResponseLeaseLost
from fumehood.protocol.api_keys import ApiKeyRecord
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.openai.responses import Response
from fumehood.store import api_key_rows, container_rows, response_rows, uploaded_file_rows
from fumehood.store.conversation_cache import ConversationCache, ThreadPosition
from fumehood.store.database import Database, DatabaseJob, Work
from fumehood.store.migrations import StoreOpenError

__all__ = ["SqliteStore", "StoreOpenError"]

_EPOCH = 1  # of every lease: no other process can take over a response
_LEASE_SECONDS = 30.0
_CACHE_BYTES = 64 << 20


@dataclass(slots=True)
class _RunningResponse:
    """A running response and its lease.

    job: writes its beginning to the database.
    expires_at: monotonic time at which its lease expires.
    """

    tenant: str
    response: Response
    job: DatabaseJob[None]
    expires_at: float


class SqliteStore:
    """A `Store` in one SQLite file. One process at a time runs responses, so their leases are in its memory.

    cache_bytes: memory for recently used conversations.
    monotonic: the clock by which leases expire.
    """

    def __init__(
        self,
        database: Database,
        *,
        cache_bytes: int = _CACHE_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_shared = False
        self._database = database
        self._monotonic = monotonic
        self._cache = ConversationCache(cache_bytes)
        self._deletions = 0
        self._running: dict[str, _RunningResponse] = {}

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        cache_bytes: int = _CACHE_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
        shared: bool = False,
        stats: StoreStats | None = None,
    ) -> Self:
        """Open the database, and create it if it does not exist.

        shared: without the lock, for short access to a file that a gateway may be using; not for responses.

        Raises StoreOpenError if it is in use by another process, or cannot be used by this release.
        """
        database = await Database.open(path, shared=shared, stats=stats)
        store = cls(database, cache_bytes=cache_bytes, monotonic=monotonic)
        store.is_shared = shared
        return store

    async def get_database_id(self) -> str:
        """Return the unique id of this database."""
        return await self._database.read(response_rows.get_database_id)

    async def close(self) -> None:
        await self._database.close()

    # --- responses ------------------------------------------------------------------------------------

    async def check_writable(self) -> None:
        await self._database.check_writable()

    async def begin_response(self, tenant: str, response: Response) -> ResponseLease:
        response = msgspec.structs.replace(response, output=[])
        row = response_rows.make_response_row(tenant, response)
        job = DatabaseJob(lambda db: response_rows.insert_running(db, row))
        self._database.post(job)
        self._running[response.id] = _RunningResponse(tenant, response, job, self._lease_deadline())
        return ResponseLease(response.id, _EPOCH)

    async def renew_leases(self, leases: Sequence[ResponseLease]) -> Sequence[ResponseLease]:
        self._database.check_open()
        held = [lease for lease in leases if lease.response_id in self._running and lease.epoch == _EPOCH]
        for lease in held:
            self._running[lease.response_id].expires_at = self._lease_deadline()
        return held

    async def commit_response(
        self,
        lease: ResponseLease | None,
        tenant: str,
        response: Response,
        entries: Sequence[ConversationEntry],
    ) -> None:
        response_id = response.id
        running = None if lease is None else self._running.get(response_id)
        if lease is not None and (running is None or (running.tenant, _EPOCH) != (tenant, lease.epoch)):
            raise ResponseLeaseLost(response_id)
        completed = response_rows.make_completed_response(tenant, response, entries)

        def work(db: sqlite3.Connection) -> ThreadPosition | None:
            if running is None or not running.job.is_applied:
                return response_rows.insert_completed(db, completed)
            if not response_rows.is_running(db, response_id):
                raise ResponseLeaseLost(response_id)
            return response_rows.complete_running(db, completed)

        def update_cache(position: ThreadPosition | None) -> None:
            self._running.pop(response_id, None)
            if position is not None:
                self._cache.append(
                    tenant, response_id, completed.row.previous_id, position, completed.entries
                )

        try:
            await self._database.write(work, update_cache, subject=f"response {response_id}")
        except sqlite3.IntegrityError:  # the id exists
            raise ResponseLeaseLost(response_id) from None

    async def fail_orphaned_responses(self) -> int:
        now = self._monotonic()
        expired = {name for name, running in self._running.items() if running.expires_at <= now}
        leased = self._running.keys() - expired
        failed = await self._database.write(lambda db: response_rows.fail_orphaned(db, leased))
        for response_id in expired:
            self._running.pop(response_id, None)
        return failed

    async def get_response(self, tenant: str, response_id: str) -> Response | None:
        found = await self._read_response(
            response_id, lambda db: response_rows.get_response(db, tenant, response_id)
        )
        running = self._running.get(response_id)
        if found is None and running is not None and not running.job.is_applied and running.tenant == tenant:
            return msgspec.structs.replace(running.response, output=[])  # it could not be written
        return found

    async def get_conversation(self, tenant: str, response_id: str) -> Sequence[ConversationSegment] | None:
        cached = self._cache.get(tenant, response_id)
        if cached is not None:
            return cached
        deletions = self._deletions
        turns = await self._read_response(
            response_id, lambda db: response_rows.list_turns(db, tenant, response_id)
        )
        if turns is None:
            return None
        if deletions != self._deletions:  # perhaps of this one: do not cache it
            return [ConversationSegment(tuple(turn.entries)) for turn in turns]
        return self._cache.load(tenant, response_id, turns)

    async def list_input_items(self, tenant: str, response_id: str) -> Sequence[ConversationEntry] | None:
        return await self._read_response(
            response_id, lambda db: response_rows.list_input_items(db, tenant, response_id)
        )

    async def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, ConversationEntry]:
        wanted = {item_id for item_id in item_ids if _is_storable(item_id)}
        if not wanted:
            return {}
        return await self._database.read(lambda db: response_rows.find_items(db, tenant, wanted))

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        if not _is_storable(response_id):
            return False

        def remove_from_cache(deleted: bool) -> None:
            if deleted:
                self._deletions += 1
                self._cache.remove(response_id)
                self._running.pop(response_id, None)

        return await self._database.write(
            lambda db: response_rows.delete(db, tenant, response_id),
            remove_from_cache,
            deletes=True,
            subject=f"response {response_id}",
        )

    # --- containers -----------------------------------------------------------------------------------

    async def put_container(
        self, record: ContainerRecord, *, known_running: Collection[str] | None = None
    ) -> bool:
        return await self._database.write(lambda db: container_rows.put(db, record, known_running))

    async def update_container(
        self,
        record: ContainerRecord,
        deleted_files: Sequence[str] = (),
        *,
        expected: ContainerRecord | None = None,
    ) -> bool:
        return await self._database.write(
            lambda db: container_rows.update(db, record, deleted_files, expected),
            deletes=bool(deleted_files) or record.status != "running",
            subject=f"container {record.id}",
        )

    async def get_container(self, container_id: str) -> ContainerRecord | None:
        if not _is_storable(container_id):
            return None
        return await self._database.read(
            lambda db: container_rows.get(db, container_id), subject=f"container {container_id}"
        )

    async def find_containers(
        self, tenant: str | None = None, *, running: bool = False
    ) -> Sequence[ContainerRecord]:
        return await self._database.read(lambda db: container_rows.find_all(db, tenant, running))

    async def list_containers(
        self, tenant: str, query: PageQuery, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        if name is not None and not _is_storable(name):
            return []
        return await self._database.read(lambda db: container_rows.list_page(db, tenant, query, name))

    async def list_retaining_containers(self, tenant: str) -> Sequence[ContainerRecord]:
        return await self._database.read(lambda db: container_rows.list_retaining(db, tenant))

    async def list_ended_containers(
        self, *, expired_before: float, deleted_before: float
    ) -> Sequence[ContainerRecord]:
        return await self._database.read(
            lambda db: container_rows.list_ended(db, expired_before, deleted_before)
        )

    async def delete_container(self, container_id: str) -> None:
        await self._database.write(
            lambda db: container_rows.delete(db, container_id),
            deletes=True,
            subject=f"container {container_id}",
        )

    async def put_container_files(
        self, changed: Sequence[ContainerFileRecord], deleted: Sequence[str] = ()
    ) -> bool:
        return await self._database.write(
            lambda db: container_rows.put_files(db, changed, deleted), deletes=bool(deleted)
        )

    async def get_container_file(self, container_id: str, file_id: str) -> ContainerFileRecord | None:
        if not _is_storable(file_id):
            return None
        return await self._database.read(
            lambda db: container_rows.get_file(db, container_id, file_id), subject=f"file {file_id}"
        )

    async def list_container_files(
        self, container_id: str, query: PageQuery | None = None
    ) -> Sequence[ContainerFileRecord]:
        return await self._database.read(
            lambda db: container_rows.list_files(db, container_id, query), subject=f"files of {container_id}"
        )

    async def find_unreferenced_blobs(self, names: Sequence[str]) -> Sequence[str]:
        """Ask the writer: a reader might not see the write of a caller that was cancelled."""
        return await self._database.write(lambda db: response_rows.find_unreferenced_blobs(db, names))

    # --- uploads --------------------------------------------------------------------------------------

    async def add_upload(self, record: UploadedFileRecord, quota: FileTotals | None = None) -> bool:
        return await self._database.write(lambda db: uploaded_file_rows.insert(db, record, quota))

    async def get_upload(self, tenant: str, file_id: str) -> UploadedFileRecord | None:
        if not _is_storable(file_id):
            return None
        return await self._database.read(
            lambda db: uploaded_file_rows.get(db, tenant, file_id), subject=f"upload {file_id}"
        )

    async def list_uploads(
        self, tenant: str, query: PageQuery, *, purpose: str | None = None, now: float
    ) -> Sequence[UploadedFileRecord]:
        if purpose is not None and not _is_storable(purpose):
            return []
        return await self._database.read(
            lambda db: uploaded_file_rows.list_page(db, tenant, query, purpose, now)
        )

    async def get_upload_totals(self, tenant: str) -> FileTotals:
        return await self._database.read(lambda db: uploaded_file_rows.get_totals(db, tenant))

    async def delete_upload(self, tenant: str, file_id: str) -> UploadedFileRecord | None:
        if not _is_storable(file_id):
            return None
        return await self._database.write(
            lambda db: uploaded_file_rows.delete(db, tenant, file_id),
            deletes=True,
            subject=f"upload {file_id}",
        )

    async def list_expired_uploads(self, now: float, limit: int) -> Sequence[UploadedFileRecord]:
        return await self._database.read(lambda db: uploaded_file_rows.list_expired(db, now, limit))

    # --- idempotency keys ---------------------------------------------------------------------------------------

    async def claim_idempotency_key(
        self, tenant: str, key: str, claim: IdempotencyClaim, seconds: float
    ) -> IdempotencyClaim | None:
        return await self._database.write(
            lambda db: response_rows.claim_idempotency_key(db, tenant, key, claim, seconds)
        )

    async def get_idempotency_claim(self, tenant: str, key: str) -> IdempotencyClaim | None:
        return await self._database.read(lambda db: response_rows.get_idempotency_claim(db, tenant, key))

    async def release_idempotency_key(self, tenant: str, key: str, response_id: str) -> None:
        await self._database.write(
            lambda db: response_rows.release_idempotency_key(db, tenant, key, response_id)
        )

    # --- API keys -----------------------------------------------------------------------------------------

    async def add_api_key(self, key: ApiKeyRecord) -> None:
        await self._database.write(lambda db: api_key_rows.insert(db, key))

    async def revoke_api_key(self, key_id: str, now: float) -> bool:
        return _is_storable(key_id) and await self._database.write(
            lambda db: api_key_rows.revoke(db, key_id, now)
        )

    async def list_api_keys(self) -> Sequence[ApiKeyRecord]:
        return await self._database.read(api_key_rows.list_all)

    async def get_api_keys_revision(self) -> int:
        return await self._database.read(api_key_rows.get_revision)

    # --- internals ---------------------------------------------------------------------------------------

    def _lease_deadline(self) -> float:
        return self._monotonic() + _LEASE_SECONDS

    async def _read_response[T](self, response_id: str, work: Work[T | None]) -> T | None:
        """Ask the writer for a response that runs here: a reader might not see it yet."""
        if not _is_storable(response_id):
            return None
        if response_id in self._running:
            return await self._database.write(work, subject=f"response {response_id}")
        return await self._database.read(work, subject=f"response {response_id}")


def _is_storable(name: str) -> bool:
    """Whether it is valid UTF-8; nothing stored has another name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
