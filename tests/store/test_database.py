"""The database file, its threads, its lock and its migrations."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from fumehood.gateway_stats import StoreStats
from fumehood.interfaces import ResponseLease, ResponseLeaseLost
from fumehood.protocol.openai.api_errors import ServiceUnavailable, StorageUnavailable
from fumehood.store.database import Database
from fumehood.store.migrations import MIGRATIONS, Migration, StoreOpenError, migrate
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock
from fumehood.testing.conformance_kits.store_fixtures import list_user_texts, make_response, store_response
from tests.support.small_disk import free_disk, mount_small_disk

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def database(database: Database) -> Database:
    await database.write(lambda db: db.execute("CREATE TABLE t (n INTEGER PRIMARY KEY)") and None)
    return database


def _select_all(db: sqlite3.Connection) -> list[int]:
    return [number for (number,) in db.execute("SELECT n FROM t ORDER BY n")]


async def test_what_waits_is_one_transaction(database: Database) -> None:
    busy = threading.Event()
    started: list[int] = []
    blocked = database.write(lambda db: busy.wait(10))

    def insert(number: int) -> asyncio.Future[None]:
        def work(db: sqlite3.Connection) -> None:
            started.append(number)
            db.execute("INSERT INTO t VALUES (?)", (number,))

        return database.write(work)

    jobs = [insert(number) for number in range(50)]
    found = await database.read(_select_all)
    busy.set()
    assert await blocked
    await asyncio.gather(*jobs)
    assert found == []
    assert started == list(range(50))
    assert await database.read(_select_all) == list(range(50))


async def test_transactions_are_counted_with_what_shared_them(tmp_path: Path) -> None:
    stats = StoreStats()
    database = await Database.open(tmp_path / "test.db", stats=stats)
    await asyncio.gather(*(database.write(lambda db: None) for _ in range(3)))
    await database.write(lambda db: None)
    await database.close()
    assert stats.batch_sizes.sum == 4
    assert 2 <= stats.write_seconds.count == stats.batch_sizes.count <= 4
    assert stats.write_seconds.sum > 0


async def test_a_bad_job_does_not_harm_its_neighbours(database: Database) -> None:
    busy = threading.Event()
    blocked = database.write(lambda db: busy.wait(10))

    def insert(number: int, *, broken: bool = False) -> asyncio.Future[None]:
        def work(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO t VALUES (?)", (number,))
            if broken:
                raise RuntimeError("broken")

        return database.write(work)

    jobs = [insert(1), insert(2, broken=True), insert(1), insert(3)]
    busy.set()
    await blocked
    first, broken, twice, last = await asyncio.gather(*jobs, return_exceptions=True)
    assert (first, last) == (None, None)
    assert isinstance(broken, RuntimeError)
    assert isinstance(twice, sqlite3.IntegrityError)
    assert await database.read(_select_all) == [1, 3]


async def test_a_failing_callback_does_not_block_others(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    async with asyncio.timeout(60):
        assert await database.write(lambda db: 1, broken) == 1
        assert await database.write(lambda db: 2) == 2
        assert await database.read(lambda db: 3, broken) == 3
    assert caplog.text.count("RuntimeError: a bug") == 2


async def test_the_event_loop_does_not_wait_for_another_writer(database: Database, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = database.write(lambda db: db.execute("INSERT INTO t VALUES (7)") and None)
        for _ in range(20):
            assert await database.read(_select_all) == []
        assert not waiting.done()
        other.execute("COMMIT")
    await waiting
    assert await database.read(_select_all) == [7]


async def test_readers_cannot_write(database: Database) -> None:
    with pytest.raises(ServiceUnavailable, match="readonly"):
        await database.read(lambda db: db.execute("INSERT INTO t VALUES (1)"))
    assert await database.read(_select_all) == []


async def test_close_finishes_queued_jobs(database: Database, path: Path) -> None:
    jobs = [
        database.write(lambda db, number=number: db.execute("INSERT INTO t VALUES (?)", (number,)).rowcount)
        for number in range(100)
    ]
    await database.close()
    assert await asyncio.gather(*jobs) == [1] * 100
    with closing(sqlite3.connect(path)) as connection:
        assert len(_select_all(connection)) == 100
    assert sorted(os.listdir(path.parent)) == ["store.db", "store.db.lock"]


async def test_the_writer_waits_for_the_disk(database: Database) -> None:
    def settings(db: sqlite3.Connection) -> list[object]:
        return [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]

    assert await database.write(settings) == ["wal", 2]


async def test_the_files_are_the_owners_alone(path: Path) -> None:
    path.touch(0o644)
    store = await SqliteStore.open(path)
    await store_response(store)
    assert len(list(path.parent.iterdir())) == 4
    for file in path.parent.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600, file
    await store.close()


async def test_a_second_process_is_refused(path: Path, store: SqliteStore) -> None:
    response = await store_response(store, "first")
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from fumehood.store.sqlite_store import SqliteStore, StoreOpenError\n"
        "try:\n"
        "    asyncio.run(SqliteStore.open(Path(sys.argv[1])))\n"
        "except StoreOpenError as error:\n"
        "    sys.exit(str(error))\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program, str(path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"The database {path} cannot be opened: another gateway is using it (process {os.getpid()}). "
        "Stop it, or configure another file."
    )
    with pytest.raises(StoreOpenError, match="another gateway is using it"):
        await SqliteStore.open(path)
    assert list_user_texts(await store.get_conversation("tenant", response.id)) == ["first"]
    await store.close()
    again = await SqliteStore.open(path)
    assert list_user_texts(await again.get_conversation("tenant", response.id)) == ["first"]
    await again.close()


async def test_files_that_are_none_of_ours(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database at all, but long enough to be taken for one" * 100)
    with pytest.raises(StoreOpenError, match="not a database"):
        await SqliteStore.open(garbage)
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreOpenError, match="another program"):
        await SqliteStore.open(tmp_path / "other.db")
    with pytest.raises(StoreOpenError, match="cannot be opened"):
        await SqliteStore.open(garbage / "store.db")
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]


async def test_a_file_that_cannot_be_opened_is_closed_again(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database at all, but long enough to be taken for one" * 100)
    with pytest.raises(StoreOpenError) as refused:
        await SqliteStore.open(garbage)
    assert refused.value.__traceback__ is not None  # keeps the frames of the error alive
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if os.path.lexists(entry)]
    assert [path for path in opened if path.startswith(str(garbage))] == []


async def test_the_writer_is_the_last_to_close_so_that_the_log_is_folded(path: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    database = await Database.open(path)
    (writer,) = [one for one in threading.enumerate() if one not in before and one.name == "store-writer"]
    go_on = threading.Event()
    reading = database.read(lambda _: go_on.wait(60))
    closing_it = asyncio.ensure_future(database.close())
    await asyncio.to_thread(writer.join, 0.2)
    assert writer.is_alive()
    go_on.set()
    assert await reading
    await closing_it
    assert not writer.is_alive()
    assert [one.name for one in tmp_path.iterdir() if "-wal" in one.name] == []


# --- migrations ---------------------------------------------------------------------------------------

ADDS = Migration(
    "ALTER TABLE responses ADD COLUMN extra TEXT; CREATE TABLE more (x); INSERT INTO more VALUES (';');"
)
BREAKS = Migration("DROP TABLE more;", is_breaking=True)
FAILS = Migration("CREATE TABLE half (x); SELECT * FROM nowhere;")


def _create_migrated(path: Path, *more: Migration) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, [*MIGRATIONS, *more])


def _list_tables(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}


async def test_an_older_file_is_brought_up_to_date(path: Path, store: SqliteStore) -> None:
    response = await store_response(store, "old")
    await store.close()
    _create_migrated(path, ADDS)
    _create_migrated(path, ADDS)
    assert "more" in _list_tables(path)
    again = await SqliteStore.open(path)  # the older release can still use it
    after = await store_response(again, "new", after=response)
    assert list_user_texts(await again.get_conversation("tenant", after.id)) == ["old", "new"]
    await again.close()


async def test_items_of_an_older_file_are_found_by_id(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, MIGRATIONS[:2])
        connection.execute("INSERT INTO threads (id, tenant, depth, tip) VALUES (1, 'tenant', 0, 1)")
        connection.execute(
            "INSERT INTO items (thread, pos, start, turn, ours, type, id, raw)"
            " VALUES (1, 0, 0, 0, 0, 'message', 'msg_old', x'7b7d')"
        )
    store = await SqliteStore.open(path)
    assert set(await store.find_items("tenant", ["msg_old"])) == {"msg_old"}
    assert await store.find_items("other", ["msg_old"]) == {}
    await store.close()


async def test_a_newer_file_is_refused(path: Path) -> None:
    _create_migrated(path, ADDS, BREAKS)
    known = len(MIGRATIONS)
    with pytest.raises(
        StoreOpenError,
        match=rf"newer release \(its tables are at step {known + 2}, this release knows {known}\)",
    ):
        await SqliteStore.open(path)


async def test_a_migration_that_fails_leaves_everything(path: Path, store: SqliteStore) -> None:
    response = await store_response(store, "kept")
    await store.close()
    before = _list_tables(path)
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        _create_migrated(path, ADDS, FAILS)
    assert _list_tables(path) == before
    again = await SqliteStore.open(path)
    assert list_user_texts(await again.get_conversation("tenant", response.id)) == ["kept"]
    await again.close()


# --- a disk that is full ------------------------------------------------------------------------------


async def _limit_pages(database: Database, pages: int) -> None:
    def bound(db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA max_page_count = {pages}")

    await database.write(bound)


async def test_a_full_file_loses_nothing_but_what_it_refused(database: Database, store: SqliteStore) -> None:
    first = await store_response(store, "first")
    await _limit_pages(database, 100)
    refused = make_response(store, "x" * 1_000_000, after=first)
    lease = await refused.begin()
    with pytest.raises(ServiceUnavailable, match="full"):
        await refused.complete(lease)
    found = await store.get_response("tenant", refused.response.id)
    assert found is not None
    assert (found.status, found.output) == ("in_progress", [])
    assert await store.find_items("tenant", [entry.id or "" for entry in refused.entries]) == {}
    assert list_user_texts(await store.get_conversation("tenant", first.id)) == ["first"]
    small = await store_response(store, "small", after=first)
    assert list_user_texts(await store.get_conversation("tenant", small.id)) == ["first", "small"]
    await _limit_pages(database, 1_000_000)
    await refused.complete(lease)
    assert len(await store.get_conversation("tenant", refused.response.id) or ()) == 2


async def test_what_could_not_end_has_failed_once_its_lease_ran_out(database: Database) -> None:
    clock = FakeClock()
    store = SqliteStore(database, monotonic=clock.monotonic)
    await _limit_pages(database, 100)
    refused = make_response(store, "x" * 1_000_000)
    lease = await refused.begin()
    with pytest.raises(ServiceUnavailable, match="full"):
        await refused.complete(lease)
    assert await store.fail_orphaned_responses() == 0
    clock.advance(31)
    assert await store.fail_orphaned_responses() == 1
    found = await store.get_response("tenant", refused.response.id)
    assert found is not None
    assert found.status == "failed"
    with pytest.raises(ResponseLeaseLost):
        await refused.complete(lease)


async def test_what_could_neither_begin_nor_end_is_forgotten(database: Database) -> None:
    clock = FakeClock()
    store = SqliteStore(database, monotonic=clock.monotonic)
    await _limit_pages(database, 100)
    refused = make_response(store)
    refused.response.instructions = "i" * 1_000_000
    lease = await refused.begin()
    with pytest.raises(ServiceUnavailable, match="full"):
        await refused.complete(lease)
    assert await store.get_response("tenant", refused.response.id) is not None
    clock.advance(31)
    assert await store.fail_orphaned_responses() == 0
    assert await store.get_response("tenant", refused.response.id) is None
    with pytest.raises(ResponseLeaseLost):
        await refused.complete(lease)


async def test_while_the_file_is_full_nothing_is_begun(database: Database, store: SqliteStore) -> None:
    await store.check_writable()
    await _limit_pages(database, 1)
    refused = make_response(store, "x" * 1_000_000)
    with pytest.raises(StorageUnavailable, match="full"):
        await refused.complete(await refused.begin())
    await store.check_writable()  # small writes still succeed
    await database.write(lambda db: db.execute("PRAGMA query_only = ON") and None)  # no write succeeds
    with pytest.raises(StorageUnavailable):
        await refused.complete(ResponseLease(refused.response.id, 1))
    with pytest.raises(StorageUnavailable) as caught:
        await store.check_writable()
    assert caught.value.retry_after


@pytest.mark.root
async def test_a_disk_without_space(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", "8m") as disk:
        store = await SqliteStore.open(disk / "store.db")
        first = await store_response(store, "first")
        (disk / "filler").write_bytes(b"x" * 7_000_000)
        refused = make_response(store, "z" * 900_000, after=first)
        refused.response.instructions = "i" * 2_000_000
        lease = await refused.begin()
        assert await store.fail_orphaned_responses() == 0  # writing its beginning has failed
        with pytest.raises(ServiceUnavailable, match="cannot be used now"):
            await refused.complete(lease)
        assert list_user_texts(await store.get_conversation("tenant", first.id)) == ["first"]
        free_disk(disk)
        await refused.complete(lease)
        assert len(await store.get_conversation("tenant", refused.response.id) or ()) == 2
        await store.close()
        with closing(sqlite3.connect(disk / "store.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
