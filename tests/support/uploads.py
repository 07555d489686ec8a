"""A gateway with uploads in a real database and on a real disk; imports fumehood and siblings."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.files.uploads import UploadedFiles, UploadSettings
from fumehood.store.blobs import DiskBlobs
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.store.sqlite import SqliteStore
from fumehood.testing import FakeClock
from tests.support.gateway import Served, serving_gateway


@dataclass
class Desk:
    """A gateway and what is behind its files."""

    served: Served
    store: SqliteStore
    blobs: ReferredBlobs
    files: UploadedFiles
    clock: FakeClock
    directory: Path

    def on_disk(self) -> list[Path]:
        """The files that hold content, whole ones and such as are on their way."""
        return files_below(self.directory)


def files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "owner")


@asynccontextmanager
async def serving_files(
    directory: Path, settings: UploadSettings | None = None, **options: Any
) -> AsyncGenerator[Desk]:
    """`options` are those of `Gateway`."""
    clock, blobs_directory = FakeClock(), directory / "blobs"
    store = await SqliteStore.open(directory / "files.db")
    blobs = ReferredBlobs(DiskBlobs(blobs_directory, await store.identity()), store)
    chosen = settings or UploadSettings()
    files = UploadedFiles(store, blobs, clock, chosen)
    try:
        async with serving_gateway(files=files, file_bytes=chosen.file_bytes, **options) as served:
            yield Desk(served, store, blobs, files, clock, blobs_directory)
    finally:
        await store.close()
