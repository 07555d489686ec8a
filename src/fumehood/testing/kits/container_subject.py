"""An implementation of `Containers` under test, and what tests have it run."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from fumehood.interfaces import Caller, Container, ContainerService, ExecutionStarted
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, ExecutionEvent, Stdout

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
"""What is run, where sandboxes run Python."""

SOMEBODY = Caller("somebody")
STRANGER = Caller("stranger")
SECONDS = 60


@dataclass(frozen=True, slots=True)
class ContainerSubject:
    """The implementation under test.

    programs: the code that behaves as named.
    keeps_variables: whether one sandbox serves all calls; else each has its own, and only files are carried on.
    end_sandbox: ends the sandbox that a container has now; without it loss is not tested.
    let_pass: lets so many seconds pass for the containers; without it expiry is not tested.
    upload: keeps a file of that name for somebody, and tells its id; without it placing is not tested.
    """

    containers: ContainerService
    programs: Mapping[ContainerProgram, str] = field(default_factory=lambda: PYTHON_PROGRAMS)
    keeps_variables: bool = True
    destroy_sandbox: Callable[[str], Awaitable[None]] | None = None
    advance_clock: Callable[[float], Awaitable[None]] | None = None
    upload: Callable[[str, bytes], Awaitable[str]] | None = None

    async def create_container(self, **chosen: Any) -> str:
        """The id of a container that has not run anything yet."""
        return (await self.containers.create_container(SOMEBODY, ContainerSpec(**chosen))).id

    async def open_container(
        self, container_id: str | None = None, spec: ContainerSpec | None = None
    ) -> Container:
        name = self.containers.reserve_id() if container_id is None else container_id
        return await self.containers.open_container(SOMEBODY, name, spec or ContainerSpec())

    async def stream_events(
        self, container: Container, program: ContainerProgram
    ) -> AsyncGenerator[ExecutionEvent]:
        """What the call says, without the word that it has started."""
        async with aclosing(container.execute(ExecuteRequest(code=self.programs[program]))) as events:
            async for event in events:
                if not isinstance(event, ExecutionStarted):
                    yield event

    async def run(self, container: Container, program: ContainerProgram) -> list[ExecutionEvent]:
        """All events, after which it is left; fails unless one `End` comes, and comes last."""
        async with asyncio.timeout(SECONDS):
            seen = [event async for event in self.stream_events(container, program)]
        container.release()
        assert [isinstance(event, ExecutionEnd) for event in seen] == [False] * (len(seen) - 1) + [True], seen
        return seen

    async def run_and_collect(
        self, container: Container, *programs: ContainerProgram
    ) -> dict[str, ContainerFileRecord]:
        """What the last of the programs left."""
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
        pieces = self.containers.read_file(caller, container_id, file_id, start, end)
        async with asyncio.timeout(SECONDS):
            return b"".join([piece async for piece in pieces])

    async def list_paths(self, container_id: str) -> list[str]:
        return sorted(record.path for record in await self.containers.list_files(SOMEBODY, container_id))


def get_end(events: list[ExecutionEvent]) -> ExecutionEnd:
    last = events[-1]
    assert isinstance(last, ExecutionEnd)
    return last


def collect_stdout(events: list[ExecutionEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Stdout))
