"""The store after its process was killed."""

import asyncio
import os
import random
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fumehood.protocol.openai.responses import Response
from fumehood.store.sqlite_store import SqliteStore
from tests.support.store_writer import digest_items

ROOT = Path(__file__).resolve().parents[2]


class AcknowledgedWrites:
    """What the processes printed before they were killed."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}
        self.deleted: set[str] = set()
        self.unsure: set[str] = set()

    def parse_line(self, line: str) -> None:
        word, response_id, *rest = line.split()
        match word:
            case "stored":
                self.stored[response_id] = rest[0]
            case "deleting":
                self.stored.pop(response_id)
                self.unsure.add(response_id)
            case "deleted":
                self.deleted.add(response_id)
            case _:
                assert word == "started"


async def _run_and_kill(path: Path, chance: random.Random, writes: AcknowledgedWrites) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.store_writer",
        str(path),
        str(chance.randrange(1 << 30)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    writes.parse_line((await process.stdout.readline()).decode())
    asyncio.get_running_loop().call_later(chance.uniform(0, 0.25), os.kill, process.pid, signal.SIGKILL)
    output = await process.stdout.read()
    assert await process.wait() == -signal.SIGKILL
    for line in output.decode().splitlines():
        writes.parse_line(line)


async def _check_response(store: SqliteStore, response: Response) -> None:
    conversation = await store.get_conversation("tenant", response.id)
    assert conversation is not None
    if response.status == "completed":
        own = conversation[-1].entries
        assert len(own) == int(response.metadata["entries"])
        assert digest_items(own) == response.metadata["digest"]
        assert len(response.output) == 1
    else:
        assert response.status == "failed"
        assert response.error is not None
        assert response.output == []


async def _check_store(path: Path, writes: AcknowledgedWrites) -> int:
    """Check that all acknowledged responses exist and all responses are complete; return the number of failed ones."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        ids = [response_id for (response_id,) in connection.execute("SELECT id FROM responses")]
    store = await SqliteStore.open(path)
    try:
        lost = await store.fail_orphaned_responses()
        assert writes.stored.keys() <= set(ids)
        assert not writes.deleted & set(ids)
        for response_id in ids:
            response = await store.get_response("tenant", response_id)
            assert response is not None
            assert response.status not in ("queued", "in_progress")
            await _check_response(store, response)
        for response_id, previous in writes.stored.items():
            response = await store.get_response("tenant", response_id)
            assert response is not None
            assert (response.status, response.previous_response_id or "-") == ("completed", previous)
        return lost
    finally:
        await store.close()


async def _kill_often(path: Path, times: int, seed: int) -> None:
    chance = random.Random(seed)
    writes = AcknowledgedWrites()
    lost = 0
    for _ in range(times):
        await _run_and_kill(path, chance, writes)
        lost += await _check_store(path, writes)
    assert len(writes.stored) > 10 * times
    assert lost >= times, "each process has a response that never ends"
    await _delete_all(path)


async def _delete_all(path: Path) -> None:
    """Delete all responses, and check that no row is left."""
    with closing(sqlite3.connect(path)) as connection:
        ids = [response_id for (response_id,) in connection.execute("SELECT id FROM responses")]
    store = await SqliteStore.open(path)
    assert all(await asyncio.gather(*(store.delete_response("tenant", response_id) for response_id in ids)))
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        for table in ("responses", "items", "threads", "running_responses"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table


async def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    await _kill_often(tmp_path / "store.db", 4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_what_was_acknowledged_survives_many_kills(tmp_path: Path) -> None:
    await _kill_often(tmp_path / "store.db", 60, seed=2)
