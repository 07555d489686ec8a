"""Containers that were used and deleted leave nothing in the gateway's memory."""

import gc
import sqlite3
from pathlib import Path

from fumehood.containers.container_service import SandboxContainerService
from fumehood.interfaces import Caller
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest
from fumehood.store.database import Database
from fumehood.store.disk_blob_store import DiskBlobStore
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock, ScriptedExecution, ScriptedSandboxProvider

SOMEBODY = Caller("somebody")
CACHED_BYTES = 16 << 20  # of the file, by all connections together


async def _use(containers: SandboxContainerService, scripted: ScriptedSandboxProvider, number: int) -> int:
    """How many objects of our own there are after so many containers."""
    for _ in range(number):
        container = await containers.open_container(SOMEBODY, containers.reserve_id(), ContainerSpec())
        async for _ in container.execute(ExecuteRequest(code="1")):
            pass
        await container.collect_files()
        container.release()
        await containers.delete_container(SOMEBODY, container.id)
    scripted.requests.clear()
    gc.collect()
    return sum(str(type(one).__module__).startswith("fumehood.") for one in gc.get_objects())


async def test_no_object_stays_of_a_deleted_container(tmp_path: Path) -> None:
    scripted = ScriptedSandboxProvider(repeatable=[ScriptedExecution("1")])
    store = await SqliteStore.open(tmp_path / "store.db")
    blobs = GarbageCollectedBlobs(DiskBlobStore(tmp_path / "blobs"), store)
    containers = SandboxContainerService(scripted, store, blobs, FakeClock())
    await _use(containers, scripted, 20)  # what is loaded and cached at first
    before = await _use(containers, scripted, 20)
    after = await _use(containers, scripted, 100)
    assert after - before < 50, "something is kept of each"
    await containers.close()
    await store.close()


async def test_the_connections_of_a_store_cache_little_of_its_file(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "store.db")

    def cached(db: sqlite3.Connection) -> int:
        (size,) = db.execute("PRAGMA cache_size").fetchone()
        return -size * 1024  # negative: in KiB

    writer, reader = await database.write(cached), await database.read(cached)
    assert 0 < writer + 2 * reader <= CACHED_BYTES
    await database.close()
