"""A gateway with uploads in a real database and on a real disk."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.files.upload_file_service import UploadFileService, UploadSettings
from fumehood.store.disk_blob_store import DiskBlobStore
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock
from tests.support.scripted_gateway import ScriptedGateway, run_gateway


@dataclass
class UploadGateway:
    """A gateway and what is behind its files."""

    gateway: ScriptedGateway
    store: SqliteStore
    blobs: GarbageCollectedBlobs
    files: UploadFileService
    clock: FakeClock
    directory: Path

    def stored_files(self) -> list[Path]:
        """The files that hold content, whole ones and such as are on their way."""
        return list_files(self.directory)


def list_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "owner")


@asynccontextmanager
async def run_upload_gateway(
    directory: Path, settings: UploadSettings | None = None, **options: Any
) -> AsyncGenerator[UploadGateway]:
    """`options` are those of `Gateway`."""
    clock, blobs_directory = FakeClock(), directory / "blobs"
    store = await SqliteStore.open(directory / "files.db")
    blobs = GarbageCollectedBlobs(DiskBlobStore(blobs_directory, await store.get_database_id()), store)
    chosen = settings or UploadSettings()
    files = UploadFileService(store, blobs, clock, chosen)
    try:
        async with run_gateway(files=files, max_file_bytes=chosen.file_bytes, **options) as gateway:
            yield UploadGateway(gateway, store, blobs, files, clock, blobs_directory)
    finally:
        await store.close()
