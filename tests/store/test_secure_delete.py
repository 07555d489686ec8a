"""Deleted content is in no file of the store."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.store import database
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing.conformance_kits.store_fixtures import store_response

ROOT = Path(__file__).resolve().parents[2]
MARK = "text-that-must-go"
SECONDS = 20  # half a second, on a busy machine


def find_files_with_text(directory: Path) -> list[str]:
    """Return the files that contain the text, or the answer to it, which is in capitals."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    found = [path for path in files if MARK.encode() in path.read_bytes().lower()]
    return sorted(path.name for path in found)


async def wait_until_erased(directory: Path) -> None:
    async with asyncio.timeout(SECONDS):
        while find_files_with_text(directory):
            await asyncio.sleep(0.02)


async def test_a_deleted_response_leaves_file_and_log(store: SqliteStore, tmp_path: Path) -> None:
    texts = [f"{MARK} {number} " + "x" * size for number, size in enumerate([10, 1_000, 10_000, 300_000] * 5)]
    responses = [await store_response(store, text) for text in texts]
    kept = await store_response(store, "what stays")
    assert "store.db-wal" in find_files_with_text(tmp_path)
    for response in responses:
        assert await store.delete_response("tenant", response.id)
    await wait_until_erased(tmp_path)
    assert (tmp_path / "store.db-wal").stat().st_size == 0
    assert await store.get_response("tenant", kept.id) is not None
    await store_response(store, "what comes after")
    await store.close()
    assert find_files_with_text(tmp_path) == []


async def test_a_deleted_container_and_a_deleted_upload_leave_file_and_log(
    store: SqliteStore, tmp_path: Path
) -> None:
    record = ContainerRecord(
        id="cntr_1", tenant="tenant", spec=ContainerSpec(name=MARK), created_at=1.0, last_active_at=1.0
    )
    await store.put_container(record)
    file = ContainerFileRecord(
        id="cfile_1",
        container_id="cntr_1",
        path=f"/mnt/data/{MARK}",
        created_at=1.0,
        bytes=1,
        source="user",
        modified_ns=1,
    )
    await store.put_container_files([file])
    upload = UploadedFileRecord(
        id="file-1", tenant="tenant", filename=MARK, purpose="user_data", created_at=1.0, bytes=1, blob="b"
    )
    await store.add_upload(upload)
    assert find_files_with_text(tmp_path) == ["store.db-wal"]
    await store.put_container_files([], ["cfile_1"])
    await store.delete_container("cntr_1")
    await store.delete_upload("tenant", "file-1")
    await wait_until_erased(tmp_path)


async def test_a_reader_only_delays_the_erasure(path: Path, store: SqliteStore, tmp_path: Path) -> None:
    response = await store_response(store, MARK)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM responses").fetchone()
        assert await store.delete_response("tenant", response.id)
        async with asyncio.timeout(SECONDS):
            await store_response(store, "others are served meanwhile")
            await asyncio.sleep(1)
        assert find_files_with_text(tmp_path) != []  # the reader may still read it
        reader.execute("COMMIT")
    await wait_until_erased(tmp_path)


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from fumehood.store import database
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing.conformance_kits.store_fixtures import store_response
async def main():
    store = await SqliteStore.open(Path(sys.argv[1]))
    response = await store_response(store, sys.argv[2])
    await store.delete_response("tenant", response.id)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_the_next_start_erases_what_a_killed_process_deleted(path: Path, tmp_path: Path) -> None:
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", _KILLED, str(path), MARK], cwd=ROOT, env={**os.environ}
    )
    assert done.returncode == -signal.SIGKILL
    assert "store.db-wal" in find_files_with_text(tmp_path)
    store = await SqliteStore.open(path)
    assert find_files_with_text(tmp_path) == []
    await store.close()


async def test_many_deletions_share_few_checkpoints(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    empty_log = database.truncate_wal

    def count(connection: sqlite3.Connection) -> bool:
        emptied.append(empty_log(connection))
        return emptied[-1]

    monkeypatch.setattr(database, "truncate_wal", count)
    responses = [await store_response(store, MARK) for _ in range(200)]
    loop = asyncio.get_running_loop()
    began = loop.time()
    for response in responses:
        assert await store.delete_response("tenant", response.id)
    async with asyncio.timeout(SECONDS):
        while not emptied:
            await asyncio.sleep(0.02)
    await wait_until_erased(tmp_path)
    # Consecutive deletions share checkpoints: at most one in half a second.
    assert 1 <= len(emptied) <= 2 + 2 * (loop.time() - began)
