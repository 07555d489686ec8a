"""The store of a gateway that runs alone: one SQLite file.

Everything is written by one thread, in groups. What begins is written a moment later, and not at all if it has ended
by then. docs/storage.md tells the rest.
"""

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from fumehood.interfaces import FileTotals, IdempotencyClaim, Lease, LeaseLost
from fumehood.metrics import StoreStats
from fumehood.protocol.api_keys import ApiKeyRecord
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.api_errors import ServiceUnavailable, StorageCorrupted
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.protocol.openai.page_query import PageQuery
from fumehood.protocol.openai.responses import Response
from fumehood.store import container_rows, response_rows, upload_rows
from fumehood.store.conversation_cache import ConversationCache, ThreadPosition
from fumehood.store.database import Database, DatabaseJob, Work
from fumehood.store.migrations import StoreOpenError

__all__ = ["SqliteStore", "StoreOpenError"]

_FIRST_EPOCH = 1
_BEGIN_DELAY_SECONDS = 0.025
_LEASE_SECONDS = 30.0
_CACHE_BYTES = 64 << 20


@dataclass(slots=True)
class _RunningResponse:
    """A response of this process that runs. Its beginning is in the database once the job is applied.

    expires: when its lease does, for one of which the database does not know.
    """

    tenant: str
    response: Response
    job: DatabaseJob[None]
    expires_at: float


@dataclass(frozen=True, slots=True)
class _CommitResult:
    """A response is committed; its items are at the place, if it has any."""

    position: ThreadPosition | None


class SqliteStore:
    """A `Store` in one file. One process at a time: a second one is refused when it opens the file.

    Items of conversations that were used lately are kept in memory, up to `cache_bytes`.
    """

    def __init__(
        self,
        database: Database,
        *,
        exclusive: bool = True,
        lease_seconds: float = _LEASE_SECONDS,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self._database = database
        self._owner = secrets.token_hex(8)
        self._exclusive = exclusive
        self._lease_seconds = lease_seconds
        self._cache = ConversationCache(cache_bytes)
        self._deletions = 0
        self._running: dict[str, _RunningResponse] = {}
        self._pending_begins: dict[str, DatabaseJob[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        lease_seconds: float = _LEASE_SECONDS,
        cache_bytes: int = _CACHE_BYTES,
        shared: bool = False,
        stats: StoreStats | None = None,
    ) -> Self:
        """Make the file if there is none; raises StoreOpenError.

        shared: leave out the lock and the cache, and trust leases alone; slow, for short visits to a file that a
            gateway may be using.
        """
        database = await Database.open(path, shared=shared, stats=stats)
        return cls(
            database,
            exclusive=not shared,
            lease_seconds=lease_seconds,
            cache_bytes=0 if shared else cache_bytes,
        )

    async def get_database_id(self) -> str:
        """What no other database is called."""
        return await self._database.read(response_rows.get_database_id)

    async def close(self) -> None:
        self._flush_begins()
        await self._database.close()

    # --- responses ------------------------------------------------------------------------------------

    async def check_writable(self) -> None:
        await self._database.check_writable()

    async def begin_response(self, tenant: str, response: Response) -> Lease:
        self._database.check_open()
        response = msgspec.structs.replace(response, output=[])

        head = response_rows.make_response_row(tenant, response)

        def work(db: sqlite3.Connection) -> None:
            response_rows.insert_running(db, head, self._owner, _FIRST_EPOCH, self._lease_seconds)

        job = DatabaseJob(work, size=len(head.body))
        self._running[response.id] = _RunningResponse(tenant, response, job, self._lease_deadline())
        self._schedule_begin(response.id, job)
        return Lease(response.id, _FIRST_EPOCH)

    async def renew_leases(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        begun = [(lease, self._running.get(lease.response_id)) for lease in leases]
        for lease, ours in begun:
            if ours is not None and lease.epoch == _FIRST_EPOCH:
                ours.expires_at = self._lease_deadline()

        def work(db: sqlite3.Connection) -> list[Lease]:
            return [
                lease
                for lease, ours in begun
                if _is_unwritten(ours, lease)
                or response_rows.renew_lease(db, lease.response_id, lease.epoch, self._lease_seconds)
            ]

        return await self._database.write(work)

    async def commit_response(
        self, lease: Lease | None, tenant: str, response: Response, entries: Sequence[ConversationEntry]
    ) -> None:
        response_id = response.id
        begun = self._running.get(response_id)
        if begun is not None and lease is not None and (begun.tenant, _FIRST_EPOCH) != (tenant, lease.epoch):
            raise LeaseLost(response_id)
        ending = response_rows.make_completed_response(tenant, response, entries)

        def work(db: sqlite3.Connection) -> _CommitResult | None:
            if lease is None or _is_unwritten(begun, lease):
                return _CommitResult(response_rows.insert_completed(db, ending))
            if response_rows.get_epoch(db, tenant, response_id) != lease.epoch:
                return None
            return _CommitResult(response_rows.complete_running(db, ending))

        def update_cache(ended: _CommitResult | None) -> None:
            self._running.pop(response_id, None)
            if ended is not None and ended.position is not None:
                self._cache.append(
                    tenant, response_id, ending.row.previous_id, ended.position, ending.entries
                )

        beginning = self._pending_begins.pop(response_id, None)
        try:
            ended = await self._database.write(
                work, update_cache, ending.memory_bytes, subject=f"response {response_id}"
            )
        except sqlite3.IntegrityError:  # there is one of that id
            raise LeaseLost(response_id) from None
        except (ServiceUnavailable, StorageCorrupted):
            if beginning is not None:
                self._schedule_begin(response_id, beginning)
            raise
        if ended is None:
            raise LeaseLost(response_id)

    async def fail_orphaned_responses(self) -> int:
        self._flush_begins()
        only_owner = self._owner if self._exclusive else None
        failed = await self._database.write(lambda db: response_rows.fail_orphaned(db, only_owner))
        now = time.monotonic()
        never_written = [
            response_id
            for response_id, begun in self._running.items()
            if begun.expires_at <= now and not begun.job.is_applied
        ]
        for response_id in (*failed, *never_written):
            self._running.pop(response_id, None)
        return len(failed)

    async def get_response(self, tenant: str, response_id: str) -> Response | None:
        # What was shown to somebody has to be there after a crash, so its beginning is written before it is read.
        found = await self._read_response(
            response_id, lambda db: response_rows.get_response(db, tenant, response_id)
        )
        begun = self._running.get(response_id)
        if found is None and begun is not None and not begun.job.is_applied and begun.tenant == tenant:
            return msgspec.structs.replace(begun.response, output=[])  # the disk did not take it
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
        if deletions != self._deletions:  # perhaps of this one: what was read must not be kept
            return [ConversationSegment(tuple(turn.entries)) for turn in turns]
        return self._cache.load(tenant, response_id, turns)

    async def list_input_items(self, tenant: str, response_id: str) -> Sequence[ConversationEntry] | None:
        return await self._read_response(
            response_id, lambda db: response_rows.list_input_items(db, tenant, response_id)
        )

    async def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, ConversationEntry]:
        asked = {item_id for item_id in item_ids if _is_storable(item_id)}
        return (
            await self._database.read(lambda db: response_rows.find_items(db, tenant, asked)) if asked else {}
        )

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        if not _is_storable(response_id):
            return False

        def remove_from_cache(deleted: bool) -> None:
            if deleted:
                self._deletions += 1
                self._cache.remove(response_id)
                self._running.pop(response_id, None)

        self._flush_begins()  # what runs stands on what it continues, from before this
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
        return await self._database.read_inline(
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
        """By the writer: a reader might not see what somebody asked for who was cancelled then."""
        return await self._database.write(lambda db: response_rows.find_unreferenced_blobs(db, names))

    # --- uploads --------------------------------------------------------------------------------------

    async def add_upload(self, record: UploadedFileRecord, quota: FileTotals | None = None) -> bool:
        return await self._database.write(lambda db: upload_rows.insert(db, record, quota))

    async def get_upload(self, tenant: str, file_id: str) -> UploadedFileRecord | None:
        if not _is_storable(file_id):
            return None
        return await self._database.read(
            lambda db: upload_rows.get(db, tenant, file_id), subject=f"upload {file_id}"
        )

    async def list_uploads(
        self, tenant: str, query: PageQuery, *, purpose: str | None = None, now: float
    ) -> Sequence[UploadedFileRecord]:
        if purpose is not None and not _is_storable(purpose):
            return []
        return await self._database.read(lambda db: upload_rows.list_page(db, tenant, query, purpose, now))

    async def get_upload_totals(self, tenant: str) -> FileTotals:
        return await self._database.read(lambda db: upload_rows.get_totals(db, tenant))

    async def delete_upload(self, tenant: str, file_id: str) -> UploadedFileRecord | None:
        if not _is_storable(file_id):
            return None
        return await self._database.write(
            lambda db: upload_rows.delete(db, tenant, file_id), deletes=True, subject=f"upload {file_id}"
        )

    async def list_expired_uploads(self, now: float, limit: int) -> Sequence[UploadedFileRecord]:
        return await self._database.read(lambda db: upload_rows.list_expired(db, now, limit))

    # --- claims ---------------------------------------------------------------------------------------

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

    # --- keys -----------------------------------------------------------------------------------------

    async def add_api_key(self, key: ApiKeyRecord) -> None:
        await self._database.write(lambda db: response_rows.insert_api_key(db, key))

    async def revoke_api_key(self, key_id: str, now: float) -> bool:
        return _is_storable(key_id) and await self._database.write(
            lambda db: response_rows.revoke_api_key(db, key_id, now)
        )

    async def list_api_keys(self) -> Sequence[ApiKeyRecord]:
        return await self._database.read(response_rows.list_api_keys)

    async def get_api_keys_revision(self) -> int:
        return await self._database.read(response_rows.get_api_keys_revision)

    # --- inside ---------------------------------------------------------------------------------------

    def _lease_deadline(self) -> float:
        return time.monotonic() + self._lease_seconds

    def _schedule_begin(self, response_id: str, beginning: DatabaseJob[None]) -> None:
        self._pending_begins[response_id] = beginning
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_BEGIN_DELAY_SECONDS, self._flush_begins)

    def _flush_begins(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        beginnings, self._pending_begins = self._pending_begins, {}
        for beginning in beginnings.values() if not self._database.is_closed else ():
            self._database.post(beginning)

    async def _read_response[T](self, response_id: str, work: Work[T | None]) -> T | None:
        """By the writer for what runs here: a reader might not see it yet."""
        if not _is_storable(response_id):
            return None
        if response_id in self._running:
            self._flush_begins()
            return await self._database.write(work, subject=f"response {response_id}")
        return await self._database.read(work, subject=f"response {response_id}")


def _is_unwritten(begun: _RunningResponse | None, lease: Lease) -> bool:
    """Whether it is ours and only we know of it. Asked by jobs, so that all before them were done."""
    return begun is not None and not begun.job.is_applied and lease.epoch == _FIRST_EPOCH


def _is_storable(name: str) -> bool:
    """What cannot be written as UTF-8 names nothing that is kept."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
