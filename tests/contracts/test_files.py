"""The conformance kit on our files, in memory and on a disk; imports pytest and fumehood."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fumehood.files.uploads import UploadedFiles, UploadSettings
from fumehood.interfaces import Amount
from fumehood.store.blobs import DiskBlobs
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.store.sqlite import SqliteStore
from fumehood.testing import FakeClock, MemoryBlobs, MemoryStore
from fumehood.testing.files_kit import FILE_BYTES, TENANT_BYTES, TENANT_FILES, FilesKit, Subject

SETTINGS = UploadSettings(file_bytes=FILE_BYTES, tenant=Amount(TENANT_FILES, TENANT_BYTES))


class TestInMemory(FilesKit):
    @pytest.fixture
    def subject(self) -> Subject:
        clock = FakeClock()
        store, blobs = MemoryStore(clock), MemoryBlobs(clock)
        files = UploadedFiles(store, ReferredBlobs(blobs, store), clock, SETTINGS)
        return Subject(files, clock, lambda: len(blobs.blobs))


class TestOnDisk(FilesKit):
    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncGenerator[Subject]:
        clock, directory = FakeClock(), tmp_path / "blobs"
        store = await SqliteStore.open(tmp_path / "store.db")
        files = UploadedFiles(store, ReferredBlobs(DiskBlobs(directory), store), clock, SETTINGS)
        yield Subject(files, clock, lambda: sum(path.is_file() for path in directory.glob("??/*/*")))
        await store.close()
