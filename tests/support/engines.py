"""An engine of doubles, driven by requests as clients write them; imports `engine`, `testing` and siblings."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fumehood.engine.log import LagLimits
from fumehood.engine.loop import LoopLimits
from fumehood.engine.runs import EngineRun, EngineRuns
from fumehood.figures import Figures
from fumehood.interfaces import Attachments, Caller, HostedTool, Sealer
from fumehood.protocol.events import StreamEvent
from fumehood.protocol.items import Message, OutputText, ProducedFile
from fumehood.protocol.responses import CreateResponse, Response, Usage
from fumehood.testing import FakeClock, MemoryStore, PlainSealer, ScriptedModel, ScriptedModels

ECHO: dict[str, Any] = {"type": "echo"}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {}},
}


@dataclass
class Engine:
    model: ScriptedModel
    tools: Sequence[HostedTool] = ()
    limits: LoopLimits = field(default_factory=LoopLimits)
    lag: LagLimits = field(default_factory=LagLimits)
    disabled: frozenset[str] = frozenset()
    clock: FakeClock = field(default_factory=FakeClock)
    sealer: Sealer = field(default_factory=PlainSealer)
    attachments: Attachments | None = None
    before: MemoryStore | None = None  # what another engine has kept

    def __post_init__(self) -> None:
        self.store = self.before or MemoryStore(self.clock)
        self.figures = Figures()
        self.runs = EngineRuns(
            ScriptedModels(self.model),
            self.tools,
            self.store,
            self.clock,
            limits=self.limits,
            lag=self.lag,
            disabled_tools=self.disabled,
            sealer=self.sealer,
            attachments=self.attachments,
            figures=self.figures,
        )

    async def start(self, tenant: str = "", **body: Any) -> EngineRun:
        body = {"model": "scripted", "input": "Hi", "stream": True} | body
        request = msgspec.json.decode(msgspec.json.encode(body), type=CreateResponse)
        return await self.runs.start(request, Caller(tenant))

    async def stream(self, **body: Any) -> list[StreamEvent]:
        run = await self.start(**body)
        return [event async for batch in run.subscribe() for event in batch]

    async def block(self, **body: Any) -> Response:
        return await (await self.start(**body, stream=False)).wait()


def tokens(output: int) -> Usage:
    return Usage(input_tokens=10, output_tokens=output, total_tokens=10 + output)


def text_of(message: object) -> str:
    assert isinstance(message, Message)
    part = message.content[0]
    assert isinstance(part, OutputText)
    return part.text


async def collected(run: EngineRun) -> list[StreamEvent]:
    return [event async for batch in run.subscribe() for event in batch]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


def produced(name: str) -> ProducedFile:
    return ProducedFile(
        file_id=f"cfile_{name}", container_id="cntr_1", filename=name, path=f"/mnt/data/{name}", bytes=1
    )
