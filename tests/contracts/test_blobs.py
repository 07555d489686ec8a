"""The conformance kits on every store of blobs; imports pytest and fumehood."""

import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import override

import pytest

from fumehood.interfaces import Blobs, BlobStore, Store
from fumehood.store.blobs import DiskBlobs
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.store.sqlite import SqliteStore
from fumehood.testing import FakeClock, MemoryBlobs, MemoryStore
from fumehood.testing.blob_kit import BlobKit, ReferencesKit


class TestMemoryBlobs(BlobKit):
    @pytest.fixture
    def blobs(self) -> BlobStore:
        return MemoryBlobs()


class TestDiskBlobs(BlobKit):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> BlobStore:
        return DiskBlobs(tmp_path / "blobs")


class _ReferredKit(ReferencesKit):
    @pytest.fixture
    def blobs(self, primitive: BlobStore, store: Store) -> Blobs:
        return ReferredBlobs(primitive, store, grace_seconds=3600)


class TestReferredMemoryBlobs(_ReferredKit):
    clock = FakeClock()

    @pytest.fixture
    def primitive(self) -> BlobStore:
        return MemoryBlobs(self.clock)

    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(self.clock)

    @override
    async def let_pass(self, blobs: Blobs, seconds: float) -> None:
        self.clock.advance(seconds)


class TestReferredDiskBlobs(_ReferredKit):
    @pytest.fixture
    def primitive(self, tmp_path: Path) -> BlobStore:
        self.directory = tmp_path / "blobs"
        return DiskBlobs(self.directory)

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncGenerator[Store]:
        store = await SqliteStore.open(tmp_path / "store.db")
        yield store
        await store.close()

    @override
    async def let_pass(self, blobs: Blobs, seconds: float) -> None:
        then = time.time() - seconds
        for path in self.directory.rglob("*"):
            os.utime(path, (then, then))
