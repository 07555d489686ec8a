"""The conformance kit on every store of blobs; imports pytest and fumehood."""

from pathlib import Path

import pytest

from fumehood.interfaces import BlobStore
from fumehood.store.blobs import DiskBlobs
from fumehood.testing import MemoryBlobs
from fumehood.testing.blob_kit import BlobKit


class TestMemoryBlobs(BlobKit):
    @pytest.fixture
    def blobs(self) -> BlobStore:
        return MemoryBlobs()


class TestDiskBlobs(BlobKit):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> BlobStore:
        return DiskBlobs(tmp_path / "blobs")
