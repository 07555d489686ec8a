"""A store in a file of its own."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fumehood.store.database import Database
from fumehood.store.sqlite_store import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def database(path: Path) -> AsyncGenerator[Database]:
    database = await Database.open(path)
    yield database
    await database.close()


@pytest.fixture
def store(database: Database) -> SqliteStore:
    return SqliteStore(database)
