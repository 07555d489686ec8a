"""What happens to uploads by themselves: they expire, and what nothing refers to goes."""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import override

import pytest

from fumehood.files.upload_file_service import UploadFileService, UploadSettings
from fumehood.interfaces import Caller, FileTotals
from fumehood.protocol.openai.api_errors import InvalidRequest, NotFound, ServiceUnavailable
from fumehood.protocol.openai.file_objects import FileUploadMetadata, UploadedFileRecord
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.store.disk_blob_store import DiskBlobStore
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.migrations import StoreOpenError
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock, MemoryBlobStore, MemoryStore
from fumehood.testing.conformance_kits.file_service_kit import ANN
from fumehood.testing.conformance_kits.payloads import stream_chunks
from tests.support.upload_gateway import list_files
from tests.support.waiting import wait_until

NEW = FileUploadMetadata(filename="a.txt", purpose="user_data")


async def test_what_has_expired_is_deleted_by_itself() -> None:
    clock = FakeClock()
    store, blobs = MemoryStore(clock), MemoryBlobStore(clock)
    files = UploadFileService(store, GarbageCollectedBlobs(blobs, store), clock)
    for number in range(250):
        new = FileUploadMetadata(filename="a.txt", purpose="user_data", expires_after=3600)
        await files.create_file(Caller(f"tenant {number % 3}"), new, stream_chunks(b"%d" % number))
    kept = await files.create_file(ANN, NEW, stream_chunks(b"kept"))
    clock.advance(3600)
    async with files:
        for _ in range(10_000):
            if len(blobs.contents) == 1:
                break
            await asyncio.sleep(0)
    assert [*blobs.contents] == [kept.blob]
    assert await store.get_upload_totals("tenant 0") == FileTotals(0, 0)


async def test_a_sweep_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        failing = True

        @override
        async def list_expired_uploads(self, now: float, limit: int) -> Sequence[UploadedFileRecord]:
            if self.failing:
                raise ServiceUnavailable("The disk is full.")
            return await super().list_expired_uploads(now, limit)

    clock = FakeClock()
    store, blobs = Broken(clock), MemoryBlobStore(clock)
    files = UploadFileService(store, GarbageCollectedBlobs(blobs, store), clock)
    await files.create_file(ANN, FileUploadMetadata(filename="a.txt", purpose="batch"), stream_chunks(b"x"))
    clock.advance(31 * 86_400)
    with caplog.at_level(logging.WARNING):
        async with files:
            await asyncio.sleep(0)
            assert "The disk is full." in caplog.text
            store.failing = False
            for _ in range(100):
                clock.advance(60)
                await asyncio.sleep(0)
    assert blobs.contents == {}


async def test_content_that_is_lost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    store, blobs = MemoryStore(), MemoryBlobStore()
    files = UploadFileService(store, GarbageCollectedBlobs(blobs, store), FakeClock())
    record = await files.create_file(ANN, NEW, stream_chunks(b"x"))
    blobs.contents.clear()
    with pytest.raises(NotFound), caplog.at_level(logging.ERROR):
        await anext(files.read_file(ANN, record.id))
    assert record.id in caplog.text


async def test_a_record_that_cannot_be_written_leaves_no_content() -> None:
    class Full(MemoryStore):
        @override
        async def add_upload(self, record: UploadedFileRecord, quota: FileTotals | None = None) -> bool:
            raise ServiceUnavailable("database or disk is full")

    store, blobs = Full(), MemoryBlobStore()
    files = UploadFileService(store, GarbageCollectedBlobs(blobs, store), FakeClock())
    with pytest.raises(ServiceUnavailable):
        await files.create_file(ANN, NEW, stream_chunks(b"x"))
    assert blobs.contents == {}


async def test_who_is_cancelled_while_the_record_is_written(tmp_path: Path) -> None:
    """Then it is there whole or not at all, at whatever moment it was."""
    store = await SqliteStore.open(tmp_path / "store.db")
    files = UploadFileService(
        store, GarbageCollectedBlobs(DiskBlobStore(tmp_path / "blobs"), store), FakeClock()
    )
    for steps in range(0, 60, 2):
        upload = asyncio.create_task(files.create_file(ANN, NEW, stream_chunks(b"%d" % steps)))
        for _ in range(steps):
            await asyncio.sleep(0.0002)
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
    await wait_until(lambda: not list_files(tmp_path / "blobs" / "incoming"))
    found = await store.list_uploads("ann", PageQuery(limit=100), now=0)
    await store.close()
    assert {record.blob for record in found} == {path.name for path in list_files(tmp_path / "blobs")}


async def test_room_that_is_freed_while_a_file_comes_can_be_used() -> None:
    store, blobs = MemoryStore(), MemoryBlobStore()
    settings = UploadSettings(tenant_files=10, tenant_bytes=100)
    files = UploadFileService(store, GarbageCollectedBlobs(blobs, store), FakeClock(), settings)
    old = await files.create_file(ANN, NEW, stream_chunks(b"x" * 60))

    async def content():
        yield b"y" * 30
        await files.delete_file(ANN, old.id)
        yield b"y" * 60

    assert (await files.create_file(ANN, NEW, content())).bytes == 90
    with pytest.raises(InvalidRequest):
        await files.create_file(ANN, NEW, stream_chunks(b"z" * 11))


# --- orphans ------------------------------------------------------------------------------------------


async def test_orphans_go_at_the_start_and_then_when_they_are_old(tmp_path: Path) -> None:
    store, clock = await SqliteStore.open(tmp_path / "store.db"), FakeClock()
    disk = DiskBlobStore(tmp_path / "blobs")
    files = UploadFileService(store, GarbageCollectedBlobs(disk, store), clock)
    kept = await files.create_file(ANN, NEW, stream_chunks(b"kept"))
    for number in range(5):
        await disk.put(b"%d" % number)  # as if a process had died before it could write the record
    _age(tmp_path, 1)
    async with GarbageCollectedBlobs(disk, store).run_garbage_collector(clock) as blobs:
        await wait_until(lambda: len(list_files(tmp_path / "blobs")) <= 1)
        young, old = [await disk.put(content) for content in (b"young", b"old")]
        async with blobs.put_pinned(b"held") as held:
            _age(tmp_path, 7200)
            os.utime(tmp_path / "blobs" / young[:2] / young[2:4] / young)
            assert await blobs.collect_garbage() == 1
            left = {path.name for path in list_files(tmp_path / "blobs")}
            assert left == {kept.blob, young, held.name}
            assert old not in left
    await store.close()


def _age(directory: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in list_files(directory / "blobs"):
        os.utime(path, (then, then))


async def test_blobs_of_another_database_are_not_touched(tmp_path: Path) -> None:
    one, two = [await SqliteStore.open(tmp_path / name) for name in ("one.db", "two.db")]
    name = await DiskBlobStore(tmp_path / "blobs", await one.get_database_id()).put(b"one's")
    with pytest.raises(StoreOpenError, match="of another database"):
        DiskBlobStore(tmp_path / "blobs", await two.get_database_id())
    assert await DiskBlobStore(tmp_path / "blobs", await one.get_database_id()).get_size(name) == 5
    await one.close()
    again = await SqliteStore.open(tmp_path / "one.db")
    DiskBlobStore(tmp_path / "blobs", await again.get_database_id())
    for store in (again, two):
        await store.close()
