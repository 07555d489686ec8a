"""The store of a gateway that runs alone: one SQLite file; imports msgspec, `interfaces`, `protocol`, siblings.

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

from fumehood.figures import StoreFigures
from fumehood.interfaces import Amount, Fenced, IdempotencyClaim, Lease
from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord
from fumehood.protocol.conversation import Entry, Segment
from fumehood.protocol.errors import StorageCorrupted, Unavailable
from fumehood.protocol.files import FileRecord
from fumehood.protocol.keys import ApiKey
from fumehood.protocol.listing import Window
from fumehood.protocol.responses import Response
from fumehood.store import container_rows, rows, upload_rows
from fumehood.store.cached import CachedConversations, Place
from fumehood.store.database import Database, Job, Work
from fumehood.store.migrations import StoreRefused

__all__ = ["SqliteStore", "StoreRefused"]

_FIRST_EPOCH = 1
_BEGIN_DELAY_SECONDS = 0.025
_LEASE_SECONDS = 30.0
_CACHE_BYTES = 64 << 20


@dataclass(slots=True)
class _Begun:
    """A response of this process that runs. Its beginning is in the database once the job is applied.

    expires: when its lease does, for one of which the database does not know.
    """

    tenant: str
    response: Response
    job: Job[None]
    expires: float


@dataclass(frozen=True, slots=True)
class _Ended:
    """A response is committed; its items are at the place, if it has any."""

    place: Place | None


class SqliteStore:
    """A `Store` in one file. One process at a time: a second one is refused when it opens the file.

    Items of conversations that were used lately are kept in memory, up to `cache_bytes`.
    """

    def __init__(
        self,
        database: Database,
        *,
        sole: bool = True,
        lease_seconds: float = _LEASE_SECONDS,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self._database = database
        self._owner = secrets.token_hex(8)
        self._sole = sole
        self._lease_seconds = lease_seconds
        self._cached = CachedConversations(cache_bytes)
        self._deletions = 0
        self._running: dict[str, _Begun] = {}
        self._unwritten: dict[str, Job[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        lease_seconds: float = _LEASE_SECONDS,
        cache_bytes: int = _CACHE_BYTES,
        shared: bool = False,
        figures: StoreFigures | None = None,
    ) -> Self:
        """Make the file if there is none; raises StoreRefused.

        shared: leave out the lock and the cache, and trust leases alone; slow, for short visits to a file that a
            gateway may be using.
        """
        database = await Database.open(path, shared=shared, figures=figures)
        return cls(
            database, sole=not shared, lease_seconds=lease_seconds, cache_bytes=0 if shared else cache_bytes
        )

    async def identity(self) -> str:
        """What no other database is called."""
        return await self._database.read(rows.identity)

    async def close(self) -> None:
        self._write_begun()
        await self._database.close()

    # --- responses ------------------------------------------------------------------------------------

    async def check_writable(self) -> None:
        await self._database.check_writable()

    async def begin(self, tenant: str, response: Response) -> Lease:
        self._database.check()
        response = msgspec.structs.replace(response, output=[])

        head = rows.head_of(tenant, response)

        def work(db: sqlite3.Connection) -> None:
            rows.begin(db, head, self._owner, _FIRST_EPOCH, self._lease_seconds)

        job = Job(work, size=len(head.body))
        self._running[response.id] = _Begun(tenant, response, job, self._expiry())
        self._write_soon(response.id, job)
        return Lease(response.id, _FIRST_EPOCH)

    async def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        begun = [(lease, self._running.get(lease.response_id)) for lease in leases]
        for lease, ours in begun:
            if ours is not None and lease.epoch == _FIRST_EPOCH:
                ours.expires = self._expiry()

        def work(db: sqlite3.Connection) -> list[Lease]:
            return [
                lease
                for lease, ours in begun
                if _unwritten(ours, lease)
                or rows.renew(db, lease.response_id, lease.epoch, self._lease_seconds)
            ]

        return await self._database.write(work)

    async def commit(
        self, lease: Lease | None, tenant: str, response: Response, entries: Sequence[Entry]
    ) -> None:
        response_id = response.id
        begun = self._running.get(response_id)
        if begun is not None and lease is not None and (begun.tenant, _FIRST_EPOCH) != (tenant, lease.epoch):
            raise Fenced(response_id)
        ending = rows.ending_of(tenant, response, entries)

        def work(db: sqlite3.Connection) -> _Ended | None:
            if lease is None or _unwritten(begun, lease):
                return _Ended(rows.end_at_once(db, ending))
            if rows.epoch(db, tenant, response_id) != lease.epoch:
                return None
            return _Ended(rows.end_begun(db, ending))

        def remember(ended: _Ended | None) -> None:
            self._running.pop(response_id, None)
            if ended is not None and ended.place is not None:
                self._cached.append(tenant, response_id, ending.head.previous, ended.place, ending.entries)

        beginning = self._unwritten.pop(response_id, None)
        try:
            ended = await self._database.write(work, remember, ending.weight, about=f"response {response_id}")
        except sqlite3.IntegrityError:  # there is one of that id
            raise Fenced(response_id) from None
        except (Unavailable, StorageCorrupted):
            if beginning is not None:
                self._write_soon(response_id, beginning)
            raise
        if ended is None:
            raise Fenced(response_id)

    async def recover(self) -> int:
        self._write_begun()
        only_owner = self._owner if self._sole else None
        failed = await self._database.write(lambda db: rows.recover(db, only_owner))
        now = time.monotonic()
        never_written = [
            response_id
            for response_id, begun in self._running.items()
            if begun.expires <= now and not begun.job.applied
        ]
        for response_id in (*failed, *never_written):
            self._running.pop(response_id, None)
        return len(failed)

    async def response(self, tenant: str, response_id: str) -> Response | None:
        # What was shown to somebody has to be there after a crash, so its beginning is written before it is read.
        found = await self._read(response_id, lambda db: rows.response(db, tenant, response_id))
        begun = self._running.get(response_id)
        if found is None and begun is not None and not begun.job.applied and begun.tenant == tenant:
            return msgspec.structs.replace(begun.response, output=[])  # the disk did not take it
        return found

    async def conversation(self, tenant: str, response_id: str) -> Sequence[Segment] | None:
        cached = self._cached.find(tenant, response_id)
        if cached is not None:
            return cached
        deletions = self._deletions
        turns = await self._read(response_id, lambda db: rows.conversation(db, tenant, response_id))
        if turns is None:
            return None
        if deletions != self._deletions:  # perhaps of this one: what was read must not be kept
            return [Segment(tuple(turn.entries)) for turn in turns]
        return self._cached.load(tenant, response_id, turns)

    async def input_entries(self, tenant: str, response_id: str) -> Sequence[Entry] | None:
        return await self._read(response_id, lambda db: rows.input_entries(db, tenant, response_id))

    async def entries(self, tenant: str, item_ids: Sequence[str]) -> dict[str, Entry]:
        asked = {item_id for item_id in item_ids if _storable(item_id)}
        return await self._database.read(lambda db: rows.entries(db, tenant, asked)) if asked else {}

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        if not _storable(response_id):
            return False

        def forget(deleted: bool) -> None:
            if deleted:
                self._deletions += 1
                self._cached.drop(response_id)
                self._running.pop(response_id, None)

        self._write_begun()  # what runs stands on what it continues, from before this
        return await self._database.write(
            lambda db: rows.delete(db, tenant, response_id),
            forget,
            deletes=True,
            about=f"response {response_id}",
        )

    # --- containers -----------------------------------------------------------------------------------

    async def put_container(self, record: ContainerRecord, *, beside: Collection[str] | None = None) -> bool:
        return await self._database.write(lambda db: container_rows.put(db, record, beside))

    async def change_container(
        self,
        record: ContainerRecord,
        deleted_files: Sequence[str] = (),
        *,
        seen: ContainerRecord | None = None,
    ) -> bool:
        return await self._database.write(
            lambda db: container_rows.change(db, record, deleted_files, seen),
            deletes=bool(deleted_files) or record.status != "running",
            about=f"container {record.id}",
        )

    async def container(self, container_id: str) -> ContainerRecord | None:
        if not _storable(container_id):
            return None
        return await self._database.glance(
            lambda db: container_rows.one(db, container_id), about=f"container {container_id}"
        )

    async def containers(
        self, tenant: str | None = None, *, running: bool = False
    ) -> Sequence[ContainerRecord]:
        return await self._database.read(lambda db: container_rows.all_of(db, tenant, running))

    async def list_containers(
        self, tenant: str, window: Window, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        if name is not None and not _storable(name):
            return []
        return await self._database.read(lambda db: container_rows.some(db, tenant, window, name))

    async def retaining_containers(self, tenant: str) -> Sequence[ContainerRecord]:
        return await self._database.read(lambda db: container_rows.retaining(db, tenant))

    async def ended_containers(
        self, *, expired_before: float, deleted_before: float
    ) -> Sequence[ContainerRecord]:
        return await self._database.read(lambda db: container_rows.ended(db, expired_before, deleted_before))

    async def delete_container(self, container_id: str) -> None:
        await self._database.write(
            lambda db: container_rows.delete(db, container_id),
            deletes=True,
            about=f"container {container_id}",
        )

    async def put_files(self, changed: Sequence[ContainerFileRecord], deleted: Sequence[str] = ()) -> bool:
        return await self._database.write(
            lambda db: container_rows.put_files(db, changed, deleted), deletes=bool(deleted)
        )

    async def file(self, container_id: str, file_id: str) -> ContainerFileRecord | None:
        if not _storable(file_id):
            return None
        return await self._database.read(
            lambda db: container_rows.file(db, container_id, file_id), about=f"file {file_id}"
        )

    async def files(self, container_id: str, window: Window | None = None) -> Sequence[ContainerFileRecord]:
        return await self._database.read(
            lambda db: container_rows.files(db, container_id, window), about=f"files of {container_id}"
        )

    async def unused_blobs(self, names: Sequence[str]) -> Sequence[str]:
        """By the writer: a reader might not see what somebody asked for who was cancelled then."""
        return await self._database.write(lambda db: rows.unused_blobs(db, names))

    # --- uploads --------------------------------------------------------------------------------------

    async def add_upload(self, record: FileRecord, most: Amount | None = None) -> bool:
        return await self._database.write(lambda db: upload_rows.add(db, record, most))

    async def upload(self, tenant: str, file_id: str) -> FileRecord | None:
        if not _storable(file_id):
            return None
        return await self._database.read(
            lambda db: upload_rows.one(db, tenant, file_id), about=f"upload {file_id}"
        )

    async def uploads(
        self, tenant: str, window: Window, *, purpose: str | None = None, now: float
    ) -> Sequence[FileRecord]:
        if purpose is not None and not _storable(purpose):
            return []
        return await self._database.read(lambda db: upload_rows.some(db, tenant, window, purpose, now))

    async def uploaded(self, tenant: str) -> Amount:
        return await self._database.read(lambda db: upload_rows.total(db, tenant))

    async def delete_upload(self, tenant: str, file_id: str) -> FileRecord | None:
        if not _storable(file_id):
            return None
        return await self._database.write(
            lambda db: upload_rows.delete(db, tenant, file_id), deletes=True, about=f"upload {file_id}"
        )

    async def expired_uploads(self, now: float, limit: int) -> Sequence[FileRecord]:
        return await self._database.read(lambda db: upload_rows.expired(db, now, limit))

    # --- claims ---------------------------------------------------------------------------------------

    async def claim(
        self, tenant: str, key: str, claim: IdempotencyClaim, seconds: float
    ) -> IdempotencyClaim | None:
        return await self._database.write(lambda db: rows.claim(db, tenant, key, claim, seconds))

    async def claimed(self, tenant: str, key: str) -> IdempotencyClaim | None:
        return await self._database.read(lambda db: rows.claimed(db, tenant, key))

    async def release(self, tenant: str, key: str, response_id: str) -> None:
        await self._database.write(lambda db: rows.release(db, tenant, key, response_id))

    # --- keys -----------------------------------------------------------------------------------------

    async def put_key(self, key: ApiKey) -> None:
        await self._database.write(lambda db: rows.put_key(db, key))

    async def revoke_key(self, key_id: str, now: float) -> bool:
        return _storable(key_id) and await self._database.write(lambda db: rows.revoke_key(db, key_id, now))

    async def keys(self) -> Sequence[ApiKey]:
        return await self._database.read(rows.keys)

    async def keys_revision(self) -> int:
        return await self._database.read(rows.keys_revision)

    # --- inside ---------------------------------------------------------------------------------------

    def _expiry(self) -> float:
        return time.monotonic() + self._lease_seconds

    def _write_soon(self, response_id: str, beginning: Job[None]) -> None:
        self._unwritten[response_id] = beginning
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_BEGIN_DELAY_SECONDS, self._write_begun)

    def _write_begun(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        beginnings, self._unwritten = self._unwritten, {}
        for beginning in beginnings.values() if not self._database.closed else ():
            self._database.post(beginning)

    async def _read[T](self, response_id: str, work: Work[T | None]) -> T | None:
        """By the writer for what runs here: a reader might not see it yet."""
        if not _storable(response_id):
            return None
        if response_id in self._running:
            self._write_begun()
            return await self._database.write(work, about=f"response {response_id}")
        return await self._database.read(work, about=f"response {response_id}")


def _unwritten(begun: _Begun | None, lease: Lease) -> bool:
    """Whether it is ours and only we know of it. Asked by jobs, so that all before them were done."""
    return begun is not None and not begun.job.applied and lease.epoch == _FIRST_EPOCH


def _storable(name: str) -> bool:
    """What cannot be written as UTF-8 names nothing that is kept."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
