"""A container service over scripted sandboxes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fumehood.containers.container_handle import ContainerHandle
from fumehood.containers.container_service import SandboxContainerService
from fumehood.containers.container_settings import ContainerSettings
from fumehood.gateway_stats import ContainerStats
from fumehood.interfaces import Caller, CollectedFiles, ExecutionStarted, SandboxRef
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    ExecutionNote,
)
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.testing import (
    FakeClock,
    MemoryBlobStore,
    MemoryStore,
    ScriptedExecution,
    ScriptedSandbox,
    ScriptedSandboxProvider,
)
from fumehood.testing.fakes.plain_sealer import PlainSealer

SOMEBODY = Caller("somebody")


@dataclass
class CallOutcome:
    events: list[ExecutionEvent]
    files: Sequence[ContainerFileRecord]
    collected: CollectedFiles

    @property
    def end(self) -> ExecutionEnd:
        last = self.events[-1]
        assert isinstance(last, ExecutionEnd)
        return last

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, ExecutionNote)]

    @property
    def paths(self) -> list[str]:
        return [record.path for record in self.files]


@dataclass
class ContainerHarness:
    """One gateway process with containers; `second_process` shares its store, blobs and sandboxes."""

    scripted: ScriptedSandboxProvider
    settings: ContainerSettings = field(default_factory=ContainerSettings)
    clock: FakeClock = field(default_factory=FakeClock)
    shared_store: MemoryStore | None = None
    blobs: MemoryBlobStore = field(default_factory=MemoryBlobStore)

    def __post_init__(self) -> None:
        self.store = self.shared_store or MemoryStore(self.clock)
        self.stats = ContainerStats()
        self.containers = SandboxContainerService(
            self.scripted,
            self.store,
            GarbageCollectedBlobs(self.blobs, self.store),
            self.clock,
            self.settings,
            sealer=PlainSealer(),
            stats=self.stats,
        )

    def second_process(self) -> "ContainerHarness":
        self.store.is_shared = True
        return ContainerHarness(self.scripted, self.settings, self.clock, self.store, self.blobs)

    async def open(
        self, container_id: str | None = None, spec: ContainerSpec | None = None
    ) -> ContainerHandle:
        name = self.containers.reserve_id() if container_id is None else container_id
        return await self.containers.open_container(SOMEBODY, name, spec or ContainerSpec())

    async def run(self, container: ContainerHandle, code: str) -> CallOutcome:
        """Run one call and release the handle."""
        try:
            events = [
                event
                async for event in container.execute(ExecuteRequest(code=code))
                if not isinstance(event, ExecutionStarted)
            ]
            collected = await container.collect_files()
            return CallOutcome(events, collected.files, collected)
        finally:
            container.release()

    async def sweep_after(self, seconds: float) -> None:
        """Let time pass, then expire what is due."""
        self.clock.advance(seconds)
        await self.containers.sweep()

    async def record(self, container: ContainerHandle) -> ContainerRecord:
        record = await self.store.get_container(container.id)
        assert record is not None
        return record

    async def paths(self, container: ContainerHandle) -> list[str]:
        return sorted(record.path for record in await self.store.list_container_files(container.id))

    async def content(self, container: ContainerHandle, path: str) -> bytes:
        (record,) = [
            each for each in await self.store.list_container_files(container.id) if each.path == path
        ]
        chunks = self.containers.read_file(SOMEBODY, container.id, record.id)
        return b"".join([chunk async for chunk in chunks])

    async def sandbox(self, container: ContainerHandle) -> ScriptedSandbox:
        return await self.scripted.attach(SandboxRef((await self.record(container)).sandbox))


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(50):
        await asyncio.sleep(0)


@asynccontextmanager
async def container_harness(
    *steps: ScriptedExecution, settings: ContainerSettings | None = None, capacity: int = 256
) -> AsyncGenerator[ContainerHarness]:
    async with ScriptedSandboxProvider(*steps, capacity=capacity) as provider:
        yield ContainerHarness(provider, settings or ContainerSettings())
