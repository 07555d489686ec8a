"""Every blob store passes its kit."""

import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import override

import pytest

from fumehood.interfaces import BlobStore, GarbageCollectedBlobStore, Store
from fumehood.store.disk_blob_store import DiskBlobStore
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock, MemoryBlobStore, MemoryStore
from fumehood.testing.conformance_kits.blob_store_kit import BlobStoreKit, ReferencedBlobsKit


class TestMemoryBlobs(BlobStoreKit):
    @pytest.fixture
    def blobs(self) -> BlobStore:
        return MemoryBlobStore()


class TestDiskBlobs(BlobStoreKit):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> BlobStore:
        return DiskBlobStore(tmp_path / "blobs")


class _GarbageCollectedKit(ReferencedBlobsKit):
    @pytest.fixture
    def blobs(self, primitive: BlobStore, store: Store) -> GarbageCollectedBlobStore:
        return GarbageCollectedBlobs(primitive, store, grace_seconds=3600)


class TestReferredMemoryBlobs(_GarbageCollectedKit):
    clock = FakeClock()

    @pytest.fixture
    def primitive(self) -> BlobStore:
        return MemoryBlobStore(self.clock)

    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(self.clock)

    @override
    async def age_blobs(self, blobs: GarbageCollectedBlobStore, seconds: float) -> None:
        self.clock.advance(seconds)


class TestReferredDiskBlobs(_GarbageCollectedKit):
    @pytest.fixture
    def primitive(self, tmp_path: Path) -> BlobStore:
        self.directory = tmp_path / "blobs"
        return DiskBlobStore(self.directory)

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncGenerator[Store]:
        store = await SqliteStore.open(tmp_path / "store.db")
        yield store
        await store.close()

    @override
    async def age_blobs(self, blobs: GarbageCollectedBlobStore, seconds: float) -> None:
        then = time.time() - seconds
        for path in self.directory.rglob("*"):
            os.utime(path, (then, then))
