"""A hosted tool that does what a test tells it to; imports `interfaces` and `protocol`."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from msgspec import Raw

from fumehood.interfaces import CallContext, Caller, Memory, OfferedTool, ToolResult, ToolStep
from fumehood.protocol.conversation import Entry, Segment, ToolExchange
from fumehood.protocol.events import (
    CodeDelta,
    CodeDone,
    InterpreterCompleted,
    InterpreterInProgress,
    InterpreterInterpreting,
    ItemAdded,
    ItemDone,
    StreamEvent,
)
from fumehood.protocol.ids import new_id
from fumehood.protocol.items import CallStatus, CodeInterpreterCall, Logs, ProducedFile
from fumehood.protocol.tools import FunctionSpec, ToolSpec

PARAMETERS = Raw(b'{"type":"object","properties":{"text":{"type":"string"}}}')


@dataclass
class Echo:
    """Answers each call with its own arguments, in the clothes of a code interpreter.

    files: what every call produces. gate: what every run waits for. broken: what it raises instead.
    """

    types: frozenset[str] = frozenset({"echo"})
    item_types: frozenset[str] = frozenset({"code_interpreter_call"})
    finds_files: bool = False
    files: Sequence[ProducedFile] = ()
    known: Sequence[ProducedFile] = ()
    gate: Callable[[str], asyncio.Event] | None = None
    broken: Exception | None = None
    log: list[str] = field(default_factory=list[str])
    contexts: list[CallContext] = field(default_factory=list[CallContext])
    closed: int = 0

    async def find(self) -> None:
        """What happens before files are told; nothing, unless a test says otherwise."""

    async def leave(self) -> None:
        """What happens when a call is left, likewise."""

    async def offer(
        self, spec: ToolSpec, caller: Caller, past: Sequence[Segment], beside: Sequence[OfferedTool] = ()
    ) -> "OfferedEcho":
        self.log.append(f"offered after {len(past)}")
        return OfferedEcho(self)

    def echo(self, spec: ToolSpec) -> bytes:
        return b'{"type":"echo","shown":true}'

    def recall(self, entry: Entry) -> ToolExchange | None:
        return ToolExchange(call_id="call_recalled", name="echo", arguments="{}", output="recalled")

    async def remember(
        self, caller: Caller, past: Sequence[Segment], kept: Sequence[Entry] = ()
    ) -> Memory | None:
        return None


@dataclass
class OfferedEcho:
    tool: Echo

    @property
    def function(self) -> FunctionSpec:
        return FunctionSpec(name="echo", description="Says it again.", parameters=PARAMETERS)

    def begin(self, context: CallContext) -> "EchoSession":
        self.tool.contexts.append(context)
        return EchoSession(self.tool, context)

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        await self.tool.find()
        return [file for file in self.tool.known if file.path in paths]

    def close(self) -> None:
        self.tool.closed += 1


class EchoSession:
    def __init__(self, tool: Echo, context: CallContext) -> None:
        self._tool = tool
        self._context = context
        self._id = new_id("ci")
        self._pieces: list[str] = []

    def _item(self, status: CallStatus, outputs: list[Logs] | None = None) -> CodeInterpreterCall:
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
            ItemAdded(output_index=index, item=self._item("in_progress")),
            InterpreterInProgress(item_id=self._id, output_index=index),
        ]

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        self._pieces += fragments
        index = self._context.output_index
        return [CodeDelta(item_id=self._id, output_index=index, delta=delta) for delta in fragments]

    async def run(self) -> AsyncGenerator[ToolStep]:
        index, text = self._context.output_index, "".join(self._pieces)
        yield [
            CodeDone(item_id=self._id, output_index=index, code=text),
            InterpreterInterpreting(item_id=self._id, output_index=index),
        ]
        self._tool.log.append(f"began {text}")
        try:
            if self._tool.gate is not None:
                await self._tool.gate(text).wait()
        finally:
            self._tool.log.append(f"ended {text}")
            await self._tool.leave()
        if self._tool.broken is not None:
            raise self._tool.broken
        done = InterpreterCompleted(item_id=self._id, output_index=index)
        yield self._result("completed", text, [done])

    def abort(self, reason: str) -> ToolResult:
        return self._result("incomplete", reason, [])

    def _result(self, status: CallStatus, output: str, events: list[StreamEvent]) -> ToolResult:
        item = self._item(status, [Logs(logs=output)])
        return ToolResult(
            events=[*events, ItemDone(output_index=self._context.output_index, item=item)],
            item=item,
            exchange=ToolExchange(
                call_id=self._context.call_id, name="echo", arguments="".join(self._pieces), output=output
            ),
            files=self._tool.files if status == "completed" else (),
        )
