"""What happens to uploads by themselves: they expire, and what nothing refers to goes; imports fumehood."""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import override

import pytest

from fumehood.files.uploads import UploadedFiles, UploadSettings
from fumehood.interfaces import Amount, Caller
from fumehood.protocol.errors import InvalidRequest, NotFound, Unavailable
from fumehood.protocol.files import FileRecord, NewFile
from fumehood.protocol.listing import Window
from fumehood.store.blobs import DiskBlobs
from fumehood.store.migrations import StoreRefused
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.store.sqlite import SqliteStore
from fumehood.testing import FakeClock, MemoryBlobs, MemoryStore
from fumehood.testing.files_kit import ANN, pieces
from tests.support.uploads import files_below

NEW = NewFile(filename="a.txt", purpose="user_data")


async def test_what_has_expired_is_deleted_by_itself() -> None:
    clock = FakeClock()
    store, blobs = MemoryStore(clock), MemoryBlobs(clock)
    files = UploadedFiles(store, ReferredBlobs(blobs, store), clock)
    for number in range(250):
        new = NewFile(filename="a.txt", purpose="user_data", expires_after=3600)
        await files.create(Caller(f"tenant {number % 3}"), new, pieces(b"%d" % number))
    kept = await files.create(ANN, NEW, pieces(b"kept"))
    clock.advance(3600)
    async with files:
        for _ in range(10_000):
            if len(blobs.blobs) == 1:
                break
            await asyncio.sleep(0)
    assert [*blobs.blobs] == [kept.blob]
    assert await store.uploaded("tenant 0") == Amount(0, 0)


async def test_a_sweep_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        failing = True

        @override
        async def expired_uploads(self, now: float, limit: int) -> Sequence[FileRecord]:
            if self.failing:
                raise Unavailable("The disk is full.")
            return await super().expired_uploads(now, limit)

    clock = FakeClock()
    store, blobs = Broken(clock), MemoryBlobs(clock)
    files = UploadedFiles(store, ReferredBlobs(blobs, store), clock)
    await files.create(ANN, NewFile(filename="a.txt", purpose="batch"), pieces(b"x"))
    clock.advance(31 * 86_400)
    with caplog.at_level(logging.WARNING):
        async with files:
            await asyncio.sleep(0)
            assert "The disk is full." in caplog.text
            store.failing = False
            for _ in range(100):
                clock.advance(60)
                await asyncio.sleep(0)
    assert blobs.blobs == {}


async def test_content_that_is_lost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    store, blobs = MemoryStore(), MemoryBlobs()
    files = UploadedFiles(store, ReferredBlobs(blobs, store), FakeClock())
    record = await files.create(ANN, NEW, pieces(b"x"))
    blobs.blobs.clear()
    with pytest.raises(NotFound), caplog.at_level(logging.ERROR):
        await anext(files.read(ANN, record.id))
    assert record.id in caplog.text


async def test_a_record_that_cannot_be_written_leaves_no_content() -> None:
    class Full(MemoryStore):
        @override
        async def add_upload(self, record: FileRecord, most: Amount | None = None) -> bool:
            raise Unavailable("database or disk is full")

    store, blobs = Full(), MemoryBlobs()
    files = UploadedFiles(store, ReferredBlobs(blobs, store), FakeClock())
    with pytest.raises(Unavailable):
        await files.create(ANN, NEW, pieces(b"x"))
    assert blobs.blobs == {}


async def test_who_is_cancelled_while_the_record_is_written(tmp_path: Path) -> None:
    """Then it is there whole or not at all, at whatever moment it was."""
    store = await SqliteStore.open(tmp_path / "store.db")
    files = UploadedFiles(store, ReferredBlobs(DiskBlobs(tmp_path / "blobs"), store), FakeClock())
    for steps in range(0, 60, 2):
        upload = asyncio.create_task(files.create(ANN, NEW, pieces(b"%d" % steps)))
        for _ in range(steps):
            await asyncio.sleep(0.0002)
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
    async with asyncio.timeout(30):
        while files_below(tmp_path / "blobs" / "incoming"):
            await asyncio.sleep(0.01)
    found = await store.uploads("ann", Window(limit=100), now=0)
    await store.close()
    assert {record.blob for record in found} == {path.name for path in files_below(tmp_path / "blobs")}


async def test_room_that_is_freed_while_a_file_comes_can_be_used() -> None:
    store, blobs = MemoryStore(), MemoryBlobs()
    settings = UploadSettings(tenant=Amount(10, 100))
    files = UploadedFiles(store, ReferredBlobs(blobs, store), FakeClock(), settings)
    old = await files.create(ANN, NEW, pieces(b"x" * 60))

    async def content():
        yield b"y" * 30
        await files.delete(ANN, old.id)
        yield b"y" * 60

    assert (await files.create(ANN, NEW, content())).bytes == 90
    with pytest.raises(InvalidRequest):
        await files.create(ANN, NEW, pieces(b"z" * 11))


# --- orphans ------------------------------------------------------------------------------------------


async def test_orphans_go_at_the_start_and_then_when_they_are_old(tmp_path: Path) -> None:
    store, clock = await SqliteStore.open(tmp_path / "store.db"), FakeClock()
    disk = DiskBlobs(tmp_path / "blobs")
    files = UploadedFiles(store, ReferredBlobs(disk, store), clock)
    kept = await files.create(ANN, NEW, pieces(b"kept"))
    for number in range(5):
        await disk.put(b"%d" % number)  # as if a process had died before it could write the record
    _age(tmp_path, 1)
    async with ReferredBlobs(disk, store).swept(clock) as blobs:
        async with asyncio.timeout(30):
            while len(files_below(tmp_path / "blobs")) > 1:
                await asyncio.sleep(0.01)
        young, old = [await disk.put(content) for content in (b"young", b"old")]
        async with blobs.keep(b"held") as held:
            _age(tmp_path, 7200)
            os.utime(tmp_path / "blobs" / young[:2] / young[2:4] / young)
            assert await blobs.sweep() == 1
            left = {path.name for path in files_below(tmp_path / "blobs")}
            assert left == {kept.blob, young, held.name}
            assert old not in left
    await store.close()


def _age(directory: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in files_below(directory / "blobs"):
        os.utime(path, (then, then))


async def test_blobs_of_another_database_are_not_touched(tmp_path: Path) -> None:
    one, two = [await SqliteStore.open(tmp_path / name) for name in ("one.db", "two.db")]
    name = await DiskBlobs(tmp_path / "blobs", await one.identity()).put(b"one's")
    with pytest.raises(StoreRefused, match="of another database"):
        DiskBlobs(tmp_path / "blobs", await two.identity())
    assert await DiskBlobs(tmp_path / "blobs", await one.identity()).size(name) == 5
    await one.close()
    again = await SqliteStore.open(tmp_path / "one.db")
    DiskBlobs(tmp_path / "blobs", await again.identity())
    for store in (again, two):
        await store.close()
