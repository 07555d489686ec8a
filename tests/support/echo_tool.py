"""A hosted tool that does what a test tells it to."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from msgspec import Raw

from fumehood.interfaces import (
    Caller,
    CompactedToolState,
    ConfiguredTool,
    ToolCallContext,
    ToolCallResult,
    ToolCallStep,
)
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import CallStatus, CodeInterpreterCall, CodeInterpreterLogs, ProducedFile
from fumehood.protocol.openai.stream_events import (
    CodeInterpreterCallCodeDelta,
    CodeInterpreterCallCodeDone,
    CodeInterpreterCallCompleted,
    CodeInterpreterCallInProgress,
    CodeInterpreterCallInterpreting,
    OutputItemAdded,
    OutputItemDone,
    StreamEvent,
)
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec

PARAMETERS = Raw(b'{"type":"object","properties":{"text":{"type":"string"}}}')


@dataclass
class EchoTool:
    """Answers each call with its own arguments, in the clothes of a code interpreter.

    files: what every call produces. gate: what every run waits for. broken: what it raises instead.
    """

    types: frozenset[str] = frozenset({"echo"})
    item_types: frozenset[str] = frozenset({"code_interpreter_call"})
    finds_files: bool = False
    files: Sequence[ProducedFile] = ()
    known_files: Sequence[ProducedFile] = ()
    gate: Callable[[str], asyncio.Event] | None = None
    error: Exception | None = None
    log: list[str] = field(default_factory=list[str])
    contexts: list[ToolCallContext] = field(default_factory=list[ToolCallContext])
    closed: int = 0

    async def before_find_files(self) -> None:
        """What happens before files are told; nothing, unless a test says otherwise."""

    async def after_call(self) -> None:
        """What happens when a call is left, likewise."""

    async def configure(
        self,
        spec: ToolSpec,
        caller: Caller,
        past: Sequence[ConversationSegment],
        other_tools: Sequence[ConfiguredTool] = (),
    ) -> "ConfiguredEcho":
        self.log.append(f"offered after {len(past)}")
        return ConfiguredEcho(self)

    def echo_spec(self, spec: ToolSpec) -> bytes:
        return b'{"type":"echo","shown":true}'

    def rebuild_exchange(self, entry: ConversationEntry) -> ToolExchange | None:
        return ToolExchange(call_id="call_recalled", name="echo", arguments="{}", output="recalled")

    async def snapshot_state(
        self,
        caller: Caller,
        past: Sequence[ConversationSegment],
        kept_items: Sequence[ConversationEntry] = (),
    ) -> CompactedToolState | None:
        return None


@dataclass
class ConfiguredEcho:
    tool: EchoTool

    @property
    def function(self) -> ModelToolDefinition:
        return ModelToolDefinition(name="echo", description="Says it again.", parameters=PARAMETERS)

    def start_call(self, context: ToolCallContext) -> "EchoSession":
        self.tool.contexts.append(context)
        return EchoSession(self.tool, context)

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        await self.tool.before_find_files()
        return [file for file in self.tool.known_files if file.path in paths]

    def close(self) -> None:
        self.tool.closed += 1


class EchoSession:
    def __init__(self, tool: EchoTool, context: ToolCallContext) -> None:
        self._tool = tool
        self._context = context
        self._id = new_id("ci")
        self._pieces: list[str] = []

    def _item(
        self, status: CallStatus, outputs: list[CodeInterpreterLogs] | None = None
    ) -> CodeInterpreterCall:
        return CodeInterpreterCall(
            id=self._id,
            status=status,
            code="".join(self._pieces),
            container_id="cntr_1",
            outputs=None if outputs is None else [*outputs],
        )

    def open(self) -> Sequence[StreamEvent]:
        index = self._context.output_index
        return [
            OutputItemAdded(output_index=index, item=self._item("in_progress")),
            CodeInterpreterCallInProgress(item_id=self._id, output_index=index),
        ]

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        self._pieces += fragments
        index = self._context.output_index
        return [
            CodeInterpreterCallCodeDelta(item_id=self._id, output_index=index, delta=delta)
            for delta in fragments
        ]

    async def run(self) -> AsyncGenerator[ToolCallStep]:
        index, text = self._context.output_index, "".join(self._pieces)
        yield [
            CodeInterpreterCallCodeDone(item_id=self._id, output_index=index, code=text),
            CodeInterpreterCallInterpreting(item_id=self._id, output_index=index),
        ]
        self._tool.log.append(f"began {text}")
        try:
            if self._tool.gate is not None:
                await self._tool.gate(text).wait()
        finally:
            self._tool.log.append(f"ended {text}")
            await self._tool.after_call()
        if self._tool.error is not None:
            raise self._tool.error
        done = CodeInterpreterCallCompleted(item_id=self._id, output_index=index)
        yield self._result("completed", text, [done])

    def abort(self, reason: str) -> ToolCallResult:
        return self._result("incomplete", reason, [])

    def _result(self, status: CallStatus, output: str, events: list[StreamEvent]) -> ToolCallResult:
        item = self._item(status, [CodeInterpreterLogs(logs=output)])
        return ToolCallResult(
            events=[*events, OutputItemDone(output_index=self._context.output_index, item=item)],
            item=item,
            exchange=ToolExchange(
                call_id=self._context.call_id, name="echo", arguments="".join(self._pieces), output=output
            ),
            files=self._tool.files if status == "completed" else (),
        )
