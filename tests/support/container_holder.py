"""A process with containers on a store that others use too, which does what it is told; imports fumehood.

Each line that it reads is a word and perhaps a value; each is answered by one line.
"""

import asyncio
import sys
from pathlib import Path

from fumehood.interfaces import Container
from fumehood.protocol.containers import ContainerSpec
from fumehood.protocol.errors import ApiError
from fumehood.sandbox.containers import SandboxContainers
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.store.sqlite import SqliteStore
from fumehood.testing import FakeClock, MemoryBlobs, ScriptedSandboxes
from tests.support.containers import SOMEBODY


async def _main(path: Path) -> None:
    clock, store = FakeClock(), await SqliteStore.open(path, shared=True)
    containers = SandboxContainers(ScriptedSandboxes(), store, ReferredBlobs(MemoryBlobs(), store), clock)
    held: list[Container] = []

    async def do(word: str, value: str) -> str:
        match word:
            case "open":
                held.append(await containers.open(SOMEBODY, value, ContainerSpec()))
            case "leave":
                held.pop().leave()
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
