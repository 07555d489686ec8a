"""Every store passes its kit."""

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path

import pytest

from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock, MemoryStore
from fumehood.testing.kits.lease_kit import SharedStoreKit
from fumehood.testing.kits.store_fixtures import StoreSubject
from fumehood.testing.kits.store_kit import SegmentCacheKit, StoreKit


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
        store = await SqliteStore.open(tmp_path / "store.db")
        yield StoreSubject(store, lambda: _expire_leases(tmp_path / "store.db", store))
        await store.close()


class TestSharedSqliteStore(StoreKit, SharedStoreKit):
    """Two stores on one file, as in two processes."""

    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncGenerator[StoreSubject]:
        stores = [await SqliteStore.open(tmp_path / "store.db", shared=True) for _ in range(2)]
        yield StoreSubject(stores[0], lambda: _expire_leases(tmp_path / "store.db", *stores), stores[1])
        for store in stores:
            await store.close()


async def _expire_leases(path: Path, *stores: SqliteStore) -> None:
    for store in stores:
        await store.fail_orphaned_responses()  # writes pending beginnings
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE leases SET expires = expires - 1")
