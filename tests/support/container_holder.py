"""A process with containers on a store that others use too, which does what it is told.

Each line that it reads is a word and perhaps a value; each is answered by one line.
"""

import asyncio
import sys
from pathlib import Path

from fumehood.containers.container_service import SandboxContainerService
from fumehood.interfaces import Container
from fumehood.protocol.openai.api_errors import ApiError
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import FakeClock, MemoryBlobStore, ScriptedSandboxProvider
from tests.support.containers import SOMEBODY


async def _main(path: Path) -> None:
    clock, store = FakeClock(), await SqliteStore.open(path, shared=True)
    containers = SandboxContainerService(
        ScriptedSandboxProvider(), store, GarbageCollectedBlobs(MemoryBlobStore(), store), clock
    )
    held: list[Container] = []

    async def do(word: str, value: str) -> str:
        match word:
            case "open":
                held.append(await containers.open_container(SOMEBODY, value, ContainerSpec()))
            case "leave":
                held.pop().release()
            case "advance":
                clock.advance(float(value))
            case "sweep":
                await containers.sweep()
            case _:
                raise ValueError(word)
        return "done"

    for line in iter(sys.stdin.readline, ""):
        word, _, value = line.strip().partition(" ")
        try:
            print(await do(word, value), flush=True)
        except ApiError as error:
            print(type(error).__name__, flush=True)
    await store.close()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
