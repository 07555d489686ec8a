"""Every store passes its kit."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock, MemoryStore
from fumehood.testing.conformance_kits.lease_kit import SharedStoreKit
from fumehood.testing.conformance_kits.store_fixtures import StoreSubject
from fumehood.testing.conformance_kits.store_kit import SegmentCacheKit, StoreKit


class TestMemoryStore(StoreKit, SharedStoreKit, SegmentCacheKit):
    @pytest.fixture
    async def subject(self) -> StoreSubject:
        clock = FakeClock()

        async def lapse() -> None:
            clock.advance(31)

        store = MemoryStore(clock, lease_seconds=30)
        return StoreSubject(store, lapse, store.open_second())


class TestSqliteStore(StoreKit, SegmentCacheKit):
    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncGenerator[StoreSubject]:
        clock = FakeClock()

        async def lapse() -> None:
            clock.advance(31)

        store = await SqliteStore.open(tmp_path / "store.db", monotonic=clock.monotonic)
        yield StoreSubject(store, lapse)
        await store.close()
