"""Calls of the code interpreter as tests make them, and their events in a form to compare."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Self

import msgspec
from msgspec import Raw

from fumehood.containers.container_service import SandboxContainerService
from fumehood.containers.container_settings import ContainerSettings, IsolationScope
from fumehood.containers.file_sync import ContainerFileLimits
from fumehood.interfaces import (
    BlobStore,
    Caller,
    FileService,
    SandboxProvider,
    ToolCallContext,
    ToolCallResult,
)
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.items import (
    CodeInterpreterCall,
    CodeInterpreterLogs,
    ExecutionDetails,
    OutputItem,
    ProducedFile,
)
from fumehood.protocol.openai.stream_events import StreamEvent
from fumehood.protocol.openai.tool_specs import ToolSpec, parse_tool
from fumehood.sandbox_client.local_server_provider import LocalServerSettings
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.testing import (
    FakeClock,
    MemoryBlobStore,
    MemoryStore,
    ScriptedExecution,
    ScriptedSandboxProvider,
)
from fumehood.testing.conformance_kits.hosted_tool_kit import run_call
from fumehood.tools.code_interpreter_tool import CodeInterpreterTool, ConfiguredCodeInterpreter
from fumehood.tools.interpreter_call import CodeInterpreterToolSettings
from tests.support.sandbox_runs import has_cgroups

SOMEBODY = Caller("somebody")
_IDS = re.compile(r"(ci|sho|sh|cntr|cfile)_[0-9a-f]{48}")


@dataclass
class CallRecord:
    """One call and what came of it."""

    events: list[StreamEvent]
    result: ToolCallResult

    @property
    def item(self) -> CodeInterpreterCall:
        assert isinstance(self.result.item, CodeInterpreterCall)
        return self.result.item

    @property
    def execution(self) -> ExecutionDetails:
        assert isinstance(self.item.execution, ExecutionDetails)
        return self.item.execution

    @property
    def logs(self) -> str:
        return "".join(
            output.logs for output in self.item.outputs or [] if isinstance(output, CodeInterpreterLogs)
        )

    @property
    def model_text(self) -> str:
        return self.result.exchange.output

    @property
    def readable_events(self) -> list[dict[str, Any]]:
        return make_readable(self.events)


@dataclass
class InterpreterHarness:
    """A tool with everything behind it. `segments` is the conversation so far: each request adds to it."""

    provider: SandboxProvider
    settings: CodeInterpreterToolSettings = field(default_factory=CodeInterpreterToolSettings)
    containers_settings: ContainerSettings = field(default_factory=ContainerSettings)
    clock: FakeClock = field(default_factory=FakeClock)
    blobs: BlobStore = field(default_factory=MemoryBlobStore)
    segments: list[ConversationSegment] = field(default_factory=list[ConversationSegment])
    uploads: FileService | None = None

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock)
        self.containers = SandboxContainerService(
            self.provider,
            self.store,
            GarbageCollectedBlobs(self.blobs, self.store),
            self.clock,
            self.containers_settings,
            uploads=self.uploads,
        )
        self.tool = CodeInterpreterTool(self.containers, self.clock, self.settings, self.uploads)

    @classmethod
    def with_isolation(
        cls,
        provider: SandboxProvider,
        isolation: IsolationScope,
        *,
        execution_timeout: float = 60,
        sync_timeout: float = 60,
    ) -> Self:
        """A tool whose description tells what its containers keep."""
        return cls(
            provider,
            CodeInterpreterToolSettings(
                execution_timeout=execution_timeout, keeps_variables=isolation == "container"
            ),
            ContainerSettings(
                isolation=isolation, file_limits=ContainerFileLimits(sync_timeout=sync_timeout)
            ),
        )

    async def read_file(self, file: ProducedFile) -> bytes:
        chunks = self.containers.read_file(SOMEBODY, file.container_id, file.file_id)
        return b"".join([chunk async for chunk in chunks])

    def make_context(
        self,
        number: int = 0,
        seconds: float = 600,
        *,
        takes_images: bool = False,
        wants_contents: bool = False,
    ) -> ToolCallContext:
        return ToolCallContext(
            caller=SOMEBODY,
            response_id="resp_1",
            output_index=number,
            call_id=f"call_{number}",
            deadline=self.clock.monotonic() + seconds,
            allocate_output_index=count(number + 1).__next__,
            accepts_images=takes_images,
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
    ) -> CallRecord:
        """A request with one call."""
        return await self.run_arguments(
            encode_arguments(code, *requirements),
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
    ) -> CallRecord:
        configured = await self.configure(container)
        context = self.make_context(0, seconds, takes_images=takes_images, wants_contents=wants_contents)
        called = CallRecord(*await run_call(configured.start_call(context), text, fragment))
        configured.close()
        self.segments.append(ConversationSegment((make_entry(called.item),)))
        return called

    async def configure(
        self,
        container: object = None,
        segments: Sequence[ConversationSegment] | None = None,
        caller: Caller = SOMEBODY,
    ) -> ConfiguredCodeInterpreter:
        """A request with the tool; `segments` are the conversation before it."""
        past = self.segments if segments is None else segments
        return await self.tool.configure(make_tool_spec(container), caller, past)

    async def call(
        self, configured: ConfiguredCodeInterpreter, code: str, caller: Caller = SOMEBODY
    ) -> CallRecord:
        """A call in a request that is configured."""
        session = configured.start_call(replace(self.make_context(), caller=caller))
        return CallRecord(*await run_call(session, encode_arguments(code)))

    async def call_in_parallel(
        self, configured: ConfiguredCodeInterpreter, *codes: str
    ) -> Sequence[CallRecord]:
        sessions = [configured.start_call(self.make_context(number)) for number in range(len(codes))]
        calls = zip(sessions, codes, strict=True)
        done = await asyncio.gather(*(run_call(one, encode_arguments(code)) for one, code in calls))
        return [CallRecord(events, result) for events, result in done]


def local_server_settings(**changes: Any) -> LocalServerSettings:
    """A server that works on this host and starts fast."""
    defaults: dict[str, Any] = {"pool": 0, "environment": {"FUMEHOOD_SANDBOX_PRELOAD": ""}}
    limits = "enforced" if has_cgroups() else "best-effort"
    return LocalServerSettings(limits=limits, **{**defaults, **changes})


@asynccontextmanager
async def run_scripted(
    *steps: ScriptedExecution,
    settings: CodeInterpreterToolSettings | None = None,
    containers: ContainerSettings | None = None,
    capacity: int = 256,
) -> AsyncGenerator[InterpreterHarness]:
    """An interpreter whose sandboxes follow a script, to its end."""
    async with ScriptedSandboxProvider(*steps, capacity=capacity) as provider:
        yield InterpreterHarness(
            provider, settings or CodeInterpreterToolSettings(), containers or ContainerSettings()
        )


def encode_arguments(code: str, *requirements: str) -> str:
    """As a model writes them."""
    fields = {"code": code, **({"requirements": requirements} if requirements else {})}
    return msgspec.json.encode(fields).decode()


def make_tool_spec(container: object = None, **more: object) -> ToolSpec:
    fields = {"type": "code_interpreter", **({} if container is None else {"container": container}), **more}
    return parse_tool(Raw(msgspec.json.encode(fields)), "tools[0]")


def make_entry(item: OutputItem, turn: int = 1) -> ConversationEntry:
    raw = msgspec.json.encode(item)
    fields = msgspec.json.decode(raw)
    return ConversationEntry(type=fields["type"], id=fields.get("id"), turn=turn, raw=raw)


def outline(events: Sequence[StreamEvent]) -> list[str]:
    """One line for each: what it is, and the text or the status that it carries."""
    lines: list[str] = []
    for event in make_readable(events):
        kind = event["type"].removeprefix("response.").replace("code_interpreter_call", "ci")
        said = event.get("delta", event.get("code", event.get("item", {}).get("status", "")))
        lines.append(f"{kind} {said}".rstrip(" "))
    return lines


def make_readable(events: Sequence[StreamEvent]) -> list[dict[str, Any]]:
    """As they are sent, without numbers, and with short names for ids in the order of their coming."""
    names: dict[str, str] = {}

    def name(found: re.Match[str]) -> str:
        kind = found.group(1)
        known = sum(short.startswith(f"{kind}_") for short in names.values())
        return names.setdefault(found.group(), f"{kind}_{known + 1}")

    text = _IDS.sub(name, msgspec.json.encode(list(events)).decode())
    decoded = msgspec.json.decode(text, type=list[dict[str, Any]])
    return [{key: value for key, value in event.items() if key != "sequence_number"} for event in decoded]
