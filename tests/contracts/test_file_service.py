"""The file service passes its kit, in memory and on a disk."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fumehood.files.upload_file_service import UploadFileService, UploadSettings
from fumehood.store.disk_blob_store import DiskBlobStore
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock, MemoryBlobStore, MemoryStore
from fumehood.testing.conformance_kits.file_service_kit import (
    MAX_FILE_BYTES,
    MAX_TENANT_BYTES,
    MAX_TENANT_FILES,
    FileServiceKit,
    FileServiceSubject,
)

SETTINGS = UploadSettings(
    file_bytes=MAX_FILE_BYTES, tenant_files=MAX_TENANT_FILES, tenant_bytes=MAX_TENANT_BYTES
)


class TestInMemory(FileServiceKit):
    @pytest.fixture
    def subject(self) -> FileServiceSubject:
        clock = FakeClock()
        store, blobs = MemoryStore(clock), MemoryBlobStore(clock)
        files = UploadFileService(store, GarbageCollectedBlobs(blobs, store), clock, SETTINGS)
        return FileServiceSubject(files, clock, lambda: len(blobs.contents))


class TestOnDisk(FileServiceKit):
    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncGenerator[FileServiceSubject]:
        clock, directory = FakeClock(), tmp_path / "blobs"
        store = await SqliteStore.open(tmp_path / "store.db")
        files = UploadFileService(
            store, GarbageCollectedBlobs(DiskBlobStore(directory), store), clock, SETTINGS
        )
        yield FileServiceSubject(
            files, clock, lambda: sum(path.is_file() for path in directory.glob("??/*/*"))
        )
        await store.close()
