"""`SqliteStore`, beyond its kit."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from fumehood.interfaces import ResponseLeaseLost
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.responses import Response
from fumehood.store import response_rows
from fumehood.store.database import Database
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing.conformance_kits.store_fixtures import (
    list_user_texts,
    load_segments,
    make_response,
    store_response,
)


def _query(path: Path, question: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(question).fetchall()


async def test_what_ran_when_the_process_ended_has_failed(path: Path, store: SqliteStore) -> None:
    before = await store_response(store, "before")
    one = make_response(store, "lost", after=before)
    lease = await one.begin()
    await store.close()
    again = await SqliteStore.open(path)
    assert await again.fail_orphaned_responses() == 1
    found = await again.get_response("tenant", one.response.id)
    assert found is not None
    assert found.error is not None
    assert (found.status, found.error.code) == ("failed", "server_error")
    with pytest.raises(ResponseLeaseLost):
        await again.commit_response(lease, "tenant", one.response, one.entries)
    assert list_user_texts(await again.get_conversation("tenant", before.id)) == ["before"]
    await again.close()


async def test_a_running_response_is_in_the_file_soon(path: Path, store: SqliteStore) -> None:
    one = make_response(store, "long")
    lease = await one.begin()
    async with asyncio.timeout(10):
        while _query(path, "SELECT id FROM running_responses") != [(one.response.id,)]:
            await asyncio.sleep(0.01)
    await one.complete(lease)
    assert _query(path, "SELECT id FROM running_responses") == []


async def test_bytes_per_turn_stay_the_same(path: Path, store: SqliteStore) -> None:
    tip: Response | None = None
    for number in range(60):
        tip = await store_response(store, f"{number:03}" + "x" * 500, after=tip)
    sizes = _query(
        path,
        "SELECT length(body) + (SELECT sum(length(raw)) FROM items WHERE pos >= start_pos AND pos < end_pos)"
        " FROM responses ORDER BY end_pos",
    )
    # The first has no previous response.
    assert len(set(sizes[1:])) == 1
    assert _query(path, "SELECT count(*) FROM threads") == [(1,)]


async def test_a_cached_conversation_asks_no_database(database: Database, store: SqliteStore) -> None:
    tip: Response | None = None
    for number in range(100):
        tip = await store_response(store, str(number), after=tip)
    assert tip is not None
    await database.close()
    assert len(await load_segments(store, tip)) == 100


async def test_a_conversation_that_was_not_cached_is_cached_then(path: Path, store: SqliteStore) -> None:
    first = await store_response(store, "first")
    second = await store_response(store, "second", after=first)
    await store.close()
    store = await SqliteStore.open(path)
    loaded = await load_segments(store, second)
    assert (await load_segments(store, first))[0] is loaded[0]
    again = await load_segments(store, await store_response(store, "third", after=second))
    assert again[:2] == loaded
    await store.close()


async def test_a_deletion_during_a_read_is_not_cached_over(path: Path, store: SqliteStore) -> None:
    response = await store_response(store, "first")
    for _ in range(20):
        await store.close()
        store = await SqliteStore.open(path)
        reading = asyncio.create_task(store.get_conversation("tenant", response.id))
        await asyncio.sleep(0)
        assert await store.delete_response("tenant", response.id)
        assert list_user_texts(await reading) in (["first"], None)
        assert await store.get_conversation("tenant", response.id) is None
        response = await store_response(store, "first")
    await store.close()


async def test_forks_are_never_deeper_than_bound(path: Path, store: SqliteStore) -> None:
    tip = await store_response(store, "0")
    for number in range(1, 3 * response_rows.MAX_FORK_DEPTH):
        await store_response(store, "other", after=tip)
        tip = await store_response(store, str(number), after=tip)
    assert _query(path, "SELECT max(depth) FROM threads") == [(response_rows.MAX_FORK_DEPTH,)]
    assert len(await load_segments(store, tip)) == 3 * response_rows.MAX_FORK_DEPTH


async def test_items_of_one_id_are_not_all_looked_at(database: Database, store: SqliteStore) -> None:
    made = make_response(store, "made")
    mine = made.entries[1]
    assert mine.id
    await made.complete(await made.begin())
    many = make_response(store, "many")
    many.entries += [msgspec.structs.replace(mine, turn=0, raw=b"{}")] * 10_000
    await many.complete(await many.begin())
    other = make_response(store, "other", tenant="other")
    other.entries.append(msgspec.structs.replace(mine, turn=0, raw=b'"newest"'))
    await other.complete(await other.begin())

    def steps(db: sqlite3.Connection) -> int:
        count = 0

        def step() -> int:
            nonlocal count
            count += 1
            return 0

        db.set_progress_handler(step, 10)
        response_rows.find_items(db, "tenant", {mine.id or ""})
        db.set_progress_handler(None, 0)
        return 10 * count

    assert await database.read(steps) < 10_000
    assert await store.find_items("tenant", [mine.id] * 10_000) == {mine.id: mine}
    theirs = await store.find_items("other", [mine.id])
    assert theirs[mine.id].raw == b'"newest"'


async def test_no_more_is_read_at_once_than_fits_into_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqliteStore.open(path, cache_bytes=0)
    one, two = make_response(store, "x" * 1000), make_response(store, "y" * 1000)
    first = await one.complete(await one.begin())
    two.response.previous_response_id = first.id
    second = await two.complete(await two.begin())
    ids = [entry.id or "" for entry in (*one.entries, *two.entries)]
    monkeypatch.setattr(response_rows, "MAX_READ_BYTES", 3000)
    assert len(await load_segments(store, first)) == 1
    assert len(await store.find_items("tenant", ids[:2] * 10)) == 2
    with pytest.raises(InvalidRequest, match="3,000 bytes") as refused:
        await store.find_items("tenant", ids)
    assert refused.value.param == "input"
    with pytest.raises(InvalidRequest, match="3,000 bytes") as refused:
        await store.get_conversation("tenant", second.id)
    assert refused.value.param == "previous_response_id"
    await store.close()
