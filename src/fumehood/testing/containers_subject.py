"""An implementation of `Containers` under test, and what tests have it run; imports `interfaces` and `protocol`."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from fumehood.interfaces import Caller, Container, Containers, Started
from fumehood.protocol.containers import ContainerFileRecord, ContainerSpec
from fumehood.protocol.sandbox import AnyOutput, End, ExecuteRequest, Stdout

type Program = Literal[
    "prints hello",
    "raises ValueError",
    "waits to be interrupted",
    "writes out.txt",
    "changes out.txt",
    "deletes out.txt",
    "prints out.txt",
    "writes hidden and temporary files",
]

PYTHON_PROGRAMS: Mapping[Program, str] = {
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
class Subject:
    """The implementation under test.

    programs: the code that behaves as named.
    keeps_variables: whether one sandbox serves all calls; else each has its own, and only files are carried on.
    end_sandbox: ends the sandbox that a container has now; without it loss is not tested.
    let_pass: lets so many seconds pass for the containers; without it expiry is not tested.
    upload: keeps a file of that name for somebody, and tells its id; without it placing is not tested.
    """

    containers: Containers
    programs: Mapping[Program, str] = field(default_factory=lambda: PYTHON_PROGRAMS)
    keeps_variables: bool = True
    end_sandbox: Callable[[str], Awaitable[None]] | None = None
    let_pass: Callable[[float], Awaitable[None]] | None = None
    upload: Callable[[str, bytes], Awaitable[str]] | None = None

    async def created(self, **chosen: Any) -> str:
        """The id of a container that has not run anything yet."""
        return (await self.containers.create(SOMEBODY, ContainerSpec(**chosen))).id

    async def open(self, container_id: str | None = None, spec: ContainerSpec | None = None) -> Container:
        name = self.containers.reserve() if container_id is None else container_id
        return await self.containers.open(SOMEBODY, name, spec or ContainerSpec())

    async def start(self, container: Container, program: Program) -> AsyncGenerator[AnyOutput]:
        """What the call says, without the word that it has started."""
        async with aclosing(container.execute(ExecuteRequest(code=self.programs[program]))) as events:
            async for event in events:
                if not isinstance(event, Started):
                    yield event

    async def run(self, container: Container, program: Program) -> list[AnyOutput]:
        """All events, after which it is left; fails unless one `End` comes, and comes last."""
        async with asyncio.timeout(SECONDS):
            seen = [event async for event in self.start(container, program)]
        container.leave()
        assert [isinstance(event, End) for event in seen] == [False] * (len(seen) - 1) + [True], seen
        return seen

    async def run_for_files(self, container: Container, *programs: Program) -> dict[str, ContainerFileRecord]:
        """What the last of the programs left."""
        records: Sequence[ContainerFileRecord] = ()
        for program in programs:
            await self.run(container, program)
            records = (await container.collect()).files
        return {record.path: record for record in records}

    async def content(
        self,
        container_id: str,
        file_id: str,
        caller: Caller = SOMEBODY,
        start: int = 0,
        end: int | None = None,
    ) -> bytes:
        pieces = self.containers.read(caller, container_id, file_id, start, end)
        async with asyncio.timeout(SECONDS):
            return b"".join([piece async for piece in pieces])

    async def paths(self, container_id: str) -> list[str]:
        return sorted(record.path for record in await self.containers.files(SOMEBODY, container_id))


def end_of(events: list[AnyOutput]) -> End:
    last = events[-1]
    assert isinstance(last, End)
    return last


def printed(events: list[AnyOutput]) -> str:
    return "".join(event.text for event in events if isinstance(event, Stdout))
