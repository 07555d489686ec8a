"""The conformance kit on every store; imports pytest and fumehood."""

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path

import pytest

from fumehood.store.sqlite import SqliteStore
from fumehood.testing import FakeClock, MemoryStore
from fumehood.testing.store_kit import CachingKit, StoreKit
from fumehood.testing.store_kit_leases import SharedKit
from fumehood.testing.turns import StoreSubject


class TestMemoryStore(StoreKit, SharedKit, CachingKit):
    @pytest.fixture
    async def subject(self) -> StoreSubject:
        clock = FakeClock()

        async def lapse() -> None:
            clock.advance(31)

        store = MemoryStore(clock, lease_seconds=30)
        return StoreSubject(store, lapse, store.another())


class TestSqliteStore(StoreKit, CachingKit):
    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncGenerator[StoreSubject]:
        store = await SqliteStore.open(tmp_path / "store.db")
        yield StoreSubject(store, lambda: _lapse(tmp_path / "store.db", store))
        await store.close()


class TestSharedSqliteStore(StoreKit, SharedKit):
    """Two of them on one file, as if they were two processes: nothing but leases between them."""

    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncGenerator[StoreSubject]:
        stores = [await SqliteStore.open(tmp_path / "store.db", shared=True) for _ in range(2)]
        yield StoreSubject(stores[0], lambda: _lapse(tmp_path / "store.db", *stores), stores[1])
        for store in stores:
            await store.close()


async def _lapse(path: Path, *stores: SqliteStore) -> None:
    for store in stores:
        await store.recover()  # writes what has begun
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE leases SET expires = expires - 1")
