"""What the SQLite store promises beyond the kit; imports pytest and fumehood."""

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from fumehood.interfaces import Fenced
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.responses import Response
from fumehood.store import rows
from fumehood.store.database import Database, leave_event_loop
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


async def test_what_a_fork_copies_is_not_copied_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqliteStore.open(tmp_path / "store.db")
    tip = await stored(store, "0")
    for number in range(1, rows.DEEPEST_FORK + 1):
        await stored(store, "other", after=tip)
        tip = await stored(store, str(number), after=tip)
    await stored(store, "other", after=tip)
    left: list[bool] = []

    def leave() -> None:
        left.append(threading.current_thread() is threading.main_thread())
        leave_event_loop()

    monkeypatch.setattr(rows, "leave_event_loop", leave)
    copied = await stored(store, "copied", after=tip)
    assert left == [True, False]
    assert len(await segments(store, copied)) == rows.DEEPEST_FORK + 2
    await store.close()


async def test_items_of_one_id_are_not_all_looked_at(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "store.db")
    store = SqliteStore(database)
    made = turn(store, "made")
    mine = made.entries[1]
    assert mine.id
    await made.end(await made.begin())
    many = turn(store, "many")
    many.entries += [msgspec.structs.replace(mine, turn=0, raw=b"{}")] * 10_000
    await many.end(await many.begin())
    other = turn(store, "other", tenant="other")
    other.entries.append(msgspec.structs.replace(mine, turn=0, raw=b'"newest"'))
    await other.end(await other.begin())

    def steps(db: sqlite3.Connection) -> int:
        count = 0

        def step() -> int:
            nonlocal count
            count += 1
            return 0

        db.set_progress_handler(step, 10)
        rows.entries(db, "tenant", {mine.id or ""})
        db.set_progress_handler(None, 0)
        return 10 * count

    assert await database.read(steps) < 10_000
    assert await store.entries("tenant", [mine.id] * 10_000) == {mine.id: mine}
    theirs = await store.entries("other", [mine.id])
    assert theirs[mine.id].raw == b'"newest"'
    await store.close()


async def test_no_more_is_read_at_once_than_fits_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqliteStore.open(tmp_path / "store.db", cache_bytes=0)
    one, two = turn(store, "x" * 1000), turn(store, "y" * 1000)
    first = await one.end(await one.begin())
    two.response.previous_response_id = first.id
    second = await two.end(await two.begin())
    ids = [entry.id or "" for entry in (*one.entries, *two.entries)]
    monkeypatch.setattr(rows, "LARGEST_READ", 3000)
    assert len(await segments(store, first)) == 1
    assert len(await store.entries("tenant", ids[:2] * 10)) == 2
    with pytest.raises(InvalidRequest, match="3,000 bytes") as refused:
        await store.entries("tenant", ids)
    assert refused.value.param == "input"
    with pytest.raises(InvalidRequest, match="3,000 bytes") as refused:
        await store.conversation("tenant", second.id)
    assert refused.value.param == "previous_response_id"
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
