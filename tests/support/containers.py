"""Containers over sandboxes that follow a script; imports fumehood."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fumehood.figures import ContainerFigures
from fumehood.interfaces import Caller, Collected, SandboxRef, Started
from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.sandbox import (
    AnyOutput,
    End,
    ExecuteRequest,
    Note,
)
from fumehood.sandbox.container import ContainerSettings, SandboxContainer
from fumehood.sandbox.containers import SandboxContainers
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.testing import FakeClock, MemoryBlobs, MemoryStore, ScriptedSandbox, ScriptedSandboxes, Step
from fumehood.testing.sealing import PlainSealer

SOMEBODY = Caller("somebody")


@dataclass
class Ran:
    events: list[AnyOutput]
    files: Sequence[ContainerFileRecord]
    collected: Collected

    @property
    def end(self) -> End:
        last = self.events[-1]
        assert isinstance(last, End)
        return last

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]

    @property
    def paths(self) -> list[str]:
        return [record.path for record in self.files]


@dataclass
class Host:
    """One process with containers; `beside` makes another one with the same store, blobs and sandboxes."""

    scripted: ScriptedSandboxes
    settings: ContainerSettings = field(default_factory=ContainerSettings)
    clock: FakeClock = field(default_factory=FakeClock)
    store: MemoryStore | None = None
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)

    def __post_init__(self) -> None:
        self.kept = self.store or MemoryStore(self.clock)
        self.figures = ContainerFigures()
        self.containers = SandboxContainers(
            self.scripted,
            self.kept,
            ReferredBlobs(self.blobs, self.kept),
            self.clock,
            self.settings,
            sealer=PlainSealer(),
            figures=self.figures,
        )

    def beside(self) -> "Host":
        return Host(self.scripted, self.settings, self.clock, self.kept, self.blobs)

    async def open(
        self, container_id: str | None = None, spec: ContainerSpec | None = None
    ) -> SandboxContainer:
        name = self.containers.reserve() if container_id is None else container_id
        return await self.containers.open(SOMEBODY, name, spec or ContainerSpec())

    async def run(self, container: SandboxContainer, code: str) -> Ran:
        """The only call for which it was opened."""
        try:
            events = [
                event
                async for event in container.execute(ExecuteRequest(code=code))
                if not isinstance(event, Started)
            ]
            collected = await container.collect()
            return Ran(events, collected.files, collected)
        finally:
            container.leave()

    async def record(self, container: SandboxContainer) -> ContainerRecord:
        record = await self.kept.container(container.id)
        assert record is not None
        return record

    async def paths(self, container: SandboxContainer) -> list[str]:
        return sorted(record.path for record in await self.kept.files(container.id))

    async def content(self, container: SandboxContainer, path: str) -> bytes:
        (record,) = [one for one in await self.kept.files(container.id) if one.path == path]
        pieces = self.containers.read(SOMEBODY, container.id, record.id)
        return b"".join([piece async for piece in pieces])

    async def sandbox(self, container: SandboxContainer) -> ScriptedSandbox:
        return await self.scripted.attach(SandboxRef((await self.record(container)).sandbox))


@asynccontextmanager
async def host(
    *steps: Step, settings: ContainerSettings | None = None, capacity: int = 256
) -> AsyncGenerator[Host]:
    async with ScriptedSandboxes(*steps, capacity=capacity) as provider:
        yield Host(provider, settings or ContainerSettings())
