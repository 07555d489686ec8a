"""An engine of doubles, driven by requests as clients write them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fumehood.engine.agent_loop import LoopLimits
from fumehood.engine.run_event_log import ReaderLagLimits
from fumehood.engine.run_service import EngineRun, EngineRunService
from fumehood.gateway_stats import GatewayStats
from fumehood.interfaces import AttachmentLoader, Caller, HostedTool, Run, Sealer
from fumehood.protocol.openai.items import OutputMessage, OutputText, ProducedFile
from fumehood.protocol.openai.responses import (
    CompactedResponse,
    CreateResponse,
    InputTokenCount,
    Response,
    Usage,
)
from fumehood.protocol.openai.stream_events import StreamEvent
from fumehood.testing import FakeClock, MemoryStore, PlainSealer, ScriptedModel, SingleBackendProvider

ECHO: dict[str, Any] = {"type": "echo"}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {}},
}


@dataclass
class EngineHarness:
    model: ScriptedModel
    tools: Sequence[HostedTool] = ()
    limits: LoopLimits = field(default_factory=LoopLimits)
    lag_limits: ReaderLagLimits = field(default_factory=ReaderLagLimits)
    disabled_tools: frozenset[str] = frozenset()
    clock: FakeClock = field(default_factory=FakeClock)
    sealer: Sealer = field(default_factory=PlainSealer)
    attachments: AttachmentLoader | None = None
    existing_store: MemoryStore | None = None  # what another engine has kept

    def __post_init__(self) -> None:
        self.store = self.existing_store or MemoryStore(self.clock)
        self.stats = GatewayStats()
        self.runs = EngineRunService(
            SingleBackendProvider(self.model),
            self.tools,
            self.store,
            self.clock,
            limits=self.limits,
            lag_limits=self.lag_limits,
            disabled_tools=self.disabled_tools,
            sealer=self.sealer,
            attachments=self.attachments,
            stats=self.stats,
        )

    async def start(self, tenant: str = "", **body: Any) -> EngineRun:
        body = {"model": "scripted", "input": "Hi", "stream": True} | body
        return await self.runs.start(_decode_request(body), Caller(tenant))

    async def count_tokens(self, **body: Any) -> InputTokenCount:
        return await self.runs.count_tokens(_decode_request(body), Caller(""))

    async def compact(self, **body: Any) -> CompactedResponse:
        return await self.runs.compact(_decode_request(body), Caller(""))

    async def stream(self, **body: Any) -> list[StreamEvent]:
        return await collect_events(await self.start(**body))

    async def create(self, **body: Any) -> Response:
        return await (await self.start(**body, stream=False)).wait()


def _decode_request(body: dict[str, Any]) -> CreateResponse:
    return msgspec.json.decode(msgspec.json.encode(body), type=CreateResponse)


def make_usage(output: int) -> Usage:
    return Usage(input_tokens=10, output_tokens=output, total_tokens=10 + output)


def message_text(message: object) -> str:
    assert isinstance(message, OutputMessage)
    part = message.content[0]
    assert isinstance(part, OutputText)
    return part.text


async def read_batches(run: Run) -> AsyncGenerator[Sequence[StreamEvent]]:
    """Yield the events of a run, each time all that are available."""
    available = asyncio.Event()
    reader = run.open_reader(available.set)
    try:
        while not reader.is_exhausted:
            available.clear()
            if batch := reader.read_available():
                yield batch
            else:
                await available.wait()
    finally:
        reader.close()


async def collect_events(run: Run) -> list[StreamEvent]:
    return [event async for batch in read_batches(run) for event in batch]


async def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


def make_produced_file(name: str) -> ProducedFile:
    return ProducedFile(
        file_id=f"cfile_{name}", container_id="cntr_1", filename=name, path=f"/mnt/data/{name}", bytes=1
    )
