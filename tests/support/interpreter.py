"""Calls of the code interpreter as tests make them, and their events in a form to compare; imports fumehood."""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from msgspec import Raw

from fumehood.interfaces import BlobStore, CallContext, Caller, Files, SandboxProvider, ToolResult
from fumehood.protocol.conversation import Entry, Segment
from fumehood.protocol.events import StreamEvent
from fumehood.protocol.items import CodeInterpreterCall, Execution, Logs, OutputItem
from fumehood.protocol.tools import ToolSpec, read_tool
from fumehood.sandbox.container import ContainerSettings
from fumehood.sandbox.containers import SandboxContainers
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.testing import FakeClock, MemoryBlobs, MemoryStore, ScriptedSandboxes, Step
from fumehood.testing.tool_kit import call
from fumehood.tools.code_interpreter import CodeInterpreter
from fumehood.tools.code_session import InterpreterSettings

SOMEBODY = Caller("somebody")
_IDS = re.compile(r"(ci|sho|sh|cntr|cfile)_[0-9a-f]{48}")


@dataclass
class Called:
    """One call and what came of it."""

    events: list[StreamEvent]
    result: ToolResult

    @property
    def item(self) -> CodeInterpreterCall:
        assert isinstance(self.result.item, CodeInterpreterCall)
        return self.result.item

    @property
    def execution(self) -> Execution:
        assert isinstance(self.item.execution, Execution)
        return self.item.execution

    @property
    def logs(self) -> str:
        return "".join(output.logs for output in self.item.outputs or [] if isinstance(output, Logs))

    @property
    def told(self) -> str:
        return self.result.exchange.output

    @property
    def shown(self) -> list[dict[str, Any]]:
        return shown(self.events)


@dataclass
class Interpreter:
    """A tool with everything behind it. `segments` is the conversation so far: each request adds to it."""

    provider: SandboxProvider
    settings: InterpreterSettings = field(default_factory=InterpreterSettings)
    containers_settings: ContainerSettings = field(default_factory=ContainerSettings)
    clock: FakeClock = field(default_factory=FakeClock)
    blobs: BlobStore = field(default_factory=MemoryBlobs)
    segments: list[Segment] = field(default_factory=list[Segment])
    uploads: Files | None = None

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock)
        self.containers = SandboxContainers(
            self.provider,
            self.store,
            ReferredBlobs(self.blobs, self.store),
            self.clock,
            self.containers_settings,
            uploads=self.uploads,
        )
        self.tool = CodeInterpreter(self.containers, self.clock, self.settings, self.uploads)

    def context(
        self,
        number: int = 0,
        seconds: float = 600,
        *,
        takes_images: bool = False,
        wants_contents: bool = False,
    ) -> CallContext:
        return CallContext(
            caller=SOMEBODY,
            response_id="resp_1",
            output_index=number,
            call_id=f"call_{number}",
            deadline=self.clock.monotonic() + seconds,
            place=count(number + 1).__next__,
            takes_images=takes_images,
            wants_contents=wants_contents,
        )

    async def run(
        self,
        code: str,
        *requirements: str,
        container: object = None,
        seconds: float = 600,
        takes_images: bool = False,
        wants_contents: bool = False,
        fragment: int = 7,
    ) -> Called:
        """A request with one call."""
        return await self.run_arguments(
            arguments(code, *requirements),
            container=container,
            seconds=seconds,
            takes_images=takes_images,
            wants_contents=wants_contents,
            fragment=fragment,
        )

    async def run_arguments(
        self,
        text: str,
        *,
        container: object = None,
        seconds: float = 600,
        takes_images: bool = False,
        wants_contents: bool = False,
        fragment: int = 7,
    ) -> Called:
        offered = await self.tool.offer(spec(container), SOMEBODY, self.segments)
        context = self.context(0, seconds, takes_images=takes_images, wants_contents=wants_contents)
        session = offered.begin(context)
        events, result = await call(session, text, fragment)
        offered.close()
        self.segments.append(Segment((entry(result.item),)))
        return Called(events, result)


@asynccontextmanager
async def scripted(
    *steps: Step,
    settings: InterpreterSettings | None = None,
    containers: ContainerSettings | None = None,
    capacity: int = 256,
) -> AsyncGenerator[Interpreter]:
    """An interpreter whose sandboxes follow a script, to its end."""
    async with ScriptedSandboxes(*steps, capacity=capacity) as provider:
        yield Interpreter(provider, settings or InterpreterSettings(), containers or ContainerSettings())


def arguments(code: str, *requirements: str) -> str:
    """As a model writes them."""
    fields = {"code": code, **({"requirements": requirements} if requirements else {})}
    return msgspec.json.encode(fields).decode()


def spec(container: object = None, **more: object) -> ToolSpec:
    fields = {"type": "code_interpreter", **({} if container is None else {"container": container}), **more}
    return read_tool(Raw(msgspec.json.encode(fields)), "tools[0]")


def entry(item: OutputItem, turn: int = 1) -> Entry:
    raw = msgspec.json.encode(item)
    fields = msgspec.json.decode(raw)
    return Entry(type=fields["type"], id=fields.get("id"), turn=turn, raw=raw)


def outline(events: Sequence[StreamEvent]) -> list[str]:
    """One line for each: what it is, and the text or the status that it carries."""
    lines: list[str] = []
    for event in shown(events):
        kind = event["type"].removeprefix("response.").replace("code_interpreter_call", "ci")
        said = event.get("delta", event.get("code", event.get("item", {}).get("status", "")))
        lines.append(f"{kind} {said}".rstrip(" "))
    return lines


def shown(events: Sequence[StreamEvent]) -> list[dict[str, Any]]:
    """As they are sent, without numbers, and with short names for ids in the order of their coming."""
    names: dict[str, str] = {}

    def name(found: re.Match[str]) -> str:
        kind = found.group(1)
        known = sum(short.startswith(f"{kind}_") for short in names.values())
        return names.setdefault(found.group(), f"{kind}_{known + 1}")

    text = _IDS.sub(name, msgspec.json.encode(list(events)).decode())
    decoded = msgspec.json.decode(text, type=list[dict[str, Any]])
    return [{key: value for key, value in event.items() if key != "sequence_number"} for event in decoded]
