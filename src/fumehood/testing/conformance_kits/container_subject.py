"""The `ContainerService` under test, and the programs that the tests run."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from fumehood.interfaces import Caller, Container, ContainerService, ExecutionStarted
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEvent
from fumehood.testing.conformance_kits.sandbox_kit import collect_stdout, get_end, read_events

__all__ = [
    "PYTHON_PROGRAMS",
    "SECONDS",
    "SOMEBODY",
    "STRANGER",
    "ContainerProgram",
    "ContainerSubject",
    "collect_stdout",
    "get_end",
]

type ContainerProgram = Literal[
    "prints hello",
    "raises ValueError",
    "waits to be interrupted",
    "writes out.txt",
    "changes out.txt",
    "deletes out.txt",
    "prints out.txt",
    "writes hidden and temporary files",
]

PYTHON_PROGRAMS: Mapping[ContainerProgram, str] = {
    "prints hello": "print('hello')",
    "raises ValueError": "raise ValueError('no')",
    "waits to be interrupted": "import time\nprint('waiting', flush=True)\nwhile True: time.sleep(0.01)",
    "writes out.txt": "open('out.txt', 'w').write('made')\nNone",
    "changes out.txt": "open('out.txt', 'w').write('changed')\nNone",
    "deletes out.txt": "import os\nos.remove('out.txt')",
    "prints out.txt": "print(open('out.txt').read())",
    "writes hidden and temporary files": (
        "import os\nos.makedirs('__pycache__', exist_ok=True)\n"
        "for name in ('.hidden', '__pycache__/x.pyc', 'backup~', 'half.tmp'): open(name, 'w').write('x')"
    ),
}
"""For sandboxes that run Python."""

SOMEBODY = Caller("somebody")
STRANGER = Caller("stranger")
SECONDS = 60


@dataclass(frozen=True, slots=True)
class ContainerSubject:
    """The implementation under test.

    programs: code by its behaviour.
    keeps_variables: whether one sandbox serves all calls; else each call has its own, and only files are kept.
    destroy_sandbox: ends the current sandbox of a container; without it, the tests of loss are skipped.
    advance_clock: moves the time of the containers; without it, the tests of expiry are skipped.
    upload: stores a file of `SOMEBODY` and returns its id; without it, the tests of uploads are skipped.
    """

    containers: ContainerService
    programs: Mapping[ContainerProgram, str] = field(default_factory=lambda: PYTHON_PROGRAMS)
    keeps_variables: bool = True
    destroy_sandbox: Callable[[str], Awaitable[None]] | None = None
    advance_clock: Callable[[float], Awaitable[None]] | None = None
    upload: Callable[[str, bytes], Awaitable[str]] | None = None

    async def pass_time(self, seconds: float) -> None:
        """Move the time of the containers, or skip the test."""
        if self.advance_clock is None:
            pytest.skip("the adapter cannot let time pass")
        await self.advance_clock(seconds)

    async def create_container(self, **fields: Any) -> str:
        """Create a container with these fields of its spec, and return its id."""
        return (await self.containers.create_container(SOMEBODY, ContainerSpec(**fields))).id

    async def open_container(
        self, container_id: str | None = None, spec: ContainerSpec | None = None
    ) -> Container:
        name = self.containers.reserve_id() if container_id is None else container_id
        return await self.containers.open_container(SOMEBODY, name, spec or ContainerSpec())

    async def stream_events(
        self, container: Container, program: ContainerProgram
    ) -> AsyncGenerator[ExecutionEvent]:
        """Yield the events of an execution, except `ExecutionStarted`."""
        async with aclosing(container.execute(ExecuteRequest(code=self.programs[program]))) as events:
            async for event in events:
                if not isinstance(event, ExecutionStarted):
                    yield event

    async def run(self, container: Container, program: ContainerProgram) -> list[ExecutionEvent]:
        """Run a program, release the container, and return all events. Fails unless `ExecutionEnd` comes last, once."""
        async with asyncio.timeout(SECONDS):
            events = await read_events(self.stream_events(container, program))
        container.release()
        return events

    async def run_and_collect(
        self, container: Container, *programs: ContainerProgram
    ) -> dict[str, ContainerFileRecord]:
        """Run programs, and return the files that the last one changed, by path."""
        records: Sequence[ContainerFileRecord] = ()
        for program in programs:
            await self.run(container, program)
            records = (await container.collect_files()).files
        return {record.path: record for record in records}

    async def read_content(
        self,
        container_id: str,
        file_id: str,
        caller: Caller = SOMEBODY,
        start: int = 0,
        end: int | None = None,
    ) -> bytes:
        chunks = self.containers.read_file(caller, container_id, file_id, start, end)
        async with asyncio.timeout(SECONDS):
            return b"".join([chunk async for chunk in chunks])

    async def list_paths(self, container_id: str) -> list[str]:
        return sorted(record.path for record in await self.containers.list_files(SOMEBODY, container_id))
