"""What the SQLite store promises beyond the kit; imports pytest and fumehood."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fumehood.interfaces import Fenced
from fumehood.protocol.responses import Response
from fumehood.store import rows
from fumehood.store.database import Database
from fumehood.store.sqlite import SqliteStore
from fumehood.testing.turns import segments, stored, texts, turn


def _ask(path: Path, question: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(question).fetchall()


async def test_what_ran_when_the_process_ended_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path, lease_seconds=1000)
    before = await stored(store, "before")
    one = turn(store, "lost", after=before)
    lease = await one.begin()
    await store.close()
    again = await SqliteStore.open(path)
    assert await again.recover() == 1  # the lease has time left, and nobody to hold it
    found = await again.response("tenant", one.response.id)
    assert found is not None
    assert found.error is not None
    assert (found.status, found.error.code) == ("failed", "server_error")
    with pytest.raises(Fenced):
        await again.commit(lease, "tenant", one.response, one.entries)
    assert texts(await again.conversation("tenant", before.id)) == ["before"]
    await again.close()


async def test_a_short_response_is_written_once(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "store.db")
    store = SqliteStore(database)
    statements: list[str] = []
    await database.write(lambda db: db.set_trace_callback(statements.append))
    statements.clear()
    await stored(store, "short")
    assert [statement for statement in statements if statement == "COMMIT" or "leases" in statement] == [
        "COMMIT"
    ]
    await store.close()


async def test_a_longer_one_is_in_the_file_soon(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    one = turn(store, "long")
    lease = await one.begin()
    async with asyncio.timeout(10):
        while _ask(path, "SELECT response FROM leases") != [(one.response.id,)]:
            await asyncio.sleep(0.01)
    await one.end(lease)
    assert _ask(path, "SELECT response FROM leases") == []
    await store.close()


async def test_bytes_per_turn_stay_the_same(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    tip: Response | None = None
    for number in range(60):
        tip = await stored(store, f"{number:03}" + "x" * 500, after=tip)
    sizes = _ask(
        path,
        "SELECT length(body) + (SELECT sum(length(raw)) FROM items WHERE pos >= start_pos AND pos < end_pos)"
        " FROM responses ORDER BY end_pos",
    )
    # The first has no previous response to name.
    assert len(set(sizes[1:])) == 1
    assert _ask(path, "SELECT count(*) FROM threads") == [(1,)]
    await store.close()


async def test_a_cached_conversation_asks_no_database(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "store.db")
    store = SqliteStore(database)
    tip: Response | None = None
    for number in range(100):
        tip = await stored(store, str(number), after=tip)
    assert tip is not None
    await database.close()
    assert len(await segments(store, tip)) == 100


async def test_a_conversation_that_was_not_cached_is_cached_then(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    first = await stored(store, "first")
    second = await stored(store, "second", after=first)
    await store.close()
    store = await SqliteStore.open(path)
    loaded = await segments(store, second)
    assert (await segments(store, first))[0] is loaded[0]
    again = await segments(store, await stored(store, "third", after=second))
    assert again[:2] == loaded
    await store.close()


async def test_a_deletion_during_a_read_is_not_cached_over(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    response = await stored(store, "first")
    for _ in range(20):
        await store.close()
        store = await SqliteStore.open(path)
        reading = asyncio.create_task(store.conversation("tenant", response.id))
        await asyncio.sleep(0)
        assert await store.delete_response("tenant", response.id)
        assert texts(await reading) in (["first"], None)
        assert await store.conversation("tenant", response.id) is None
        response = await stored(store, "first")
    await store.close()


async def test_forks_are_never_deeper_than_bound(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    tip = await stored(store, "0")
    for number in range(1, 3 * rows.DEEPEST_FORK):
        await stored(store, "other", after=tip)
        tip = await stored(store, str(number), after=tip)
    assert _ask(path, "SELECT max(depth) FROM threads") == [(rows.DEEPEST_FORK,)]
    assert len(await segments(store, tip)) == 3 * rows.DEEPEST_FORK
    await store.close()


async def test_what_was_deleted_is_not_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    secret = await stored(store, "a secret " * 5000)
    kept = await stored(store, "kept", after=None)
    await store.delete_response("tenant", secret.id)
    await store.close()
    content = path.read_bytes()
    assert b"a secret" not in content
    assert b"A SECRET" not in content
    assert kept.id.encode() in content
