"""A `HostedTool` that follows a script."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec
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
from fumehood.protocol.openai.items import ProducedFile
from fumehood.protocol.openai.stream_events import OutputItemAdded, OutputItemDone, StreamEvent
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec
from fumehood.testing.fakes.scripted_fake import ScriptedFake

_PARAMETERS = Raw(b'{"type":"object","properties":{},"additionalProperties":true}')


@dataclass(frozen=True, slots=True)
class ScriptedToolAnswer:
    """One expected call and its answer.

    output: what the model reads.
    arguments: expected, as the model writes them; None for any.
    wait_for: the call waits until it is set.
    error: raised instead of the output.
    files: that the call produces.
    """

    output: str = ""
    arguments: str | None = None
    wait_for: asyncio.Event | None = None
    error: Exception | None = None
    files: Sequence[ProducedFile] = ()

    def matches(self, arguments: str) -> bool:
        return self.arguments in (None, arguments)

    def __str__(self) -> str:
        arguments = "any arguments" if self.arguments is None else repr(self.arguments)
        return f"the answer {self.output!r} to {arguments}"


class ScriptedTool(ScriptedFake[ScriptedToolAnswer]):
    """A `HostedTool` whose calls get the answers in order. Its items have a type of their own.

    files: found by `find_files`.
    calls: arguments of all calls; interrupted_calls: of those that were closed before they answered.
    """

    def __init__(
        self,
        *answers: ScriptedToolAnswer,
        name: str = "scripted",
        repeatable: Sequence[ScriptedToolAnswer] = (),
        files: Sequence[ProducedFile] = (),
    ) -> None:
        super().__init__(answers, repeatable)
        self.name = name
        self.files = files
        self.calls: list[str] = []
        self.interrupted_calls: list[str] = []

    @property
    def types(self) -> frozenset[str]:
        return frozenset({self.name})

    @property
    def finds_files(self) -> bool:
        return False

    @property
    def item_types(self) -> frozenset[str]:
        return frozenset({f"{self.name}_call"})

    async def configure(
        self,
        spec: ToolSpec,  # noqa: ARG002
        caller: Caller,  # noqa: ARG002
        past: Sequence[ConversationSegment],  # noqa: ARG002
        other_tools: Sequence[ConfiguredTool] = (),  # noqa: ARG002
    ) -> "ConfiguredScriptedTool":
        return ConfiguredScriptedTool(self)

    def echo_spec(self, spec: ToolSpec) -> bytes:
        return spec.raw

    def rebuild_exchange(self, entry: ConversationEntry) -> ToolExchange | None:
        return ToolExchange(
            call_id=entry.id or "call_recalled", name=self.name, arguments="{}", output="(recalled)"
        )

    async def snapshot_state(
        self,
        caller: Caller,
        past: Sequence[ConversationSegment],
        kept_items: Sequence[ConversationEntry] = (),
    ) -> CompactedToolState | None:
        """Keep the latest item of each of its types."""
        del caller, kept_items
        latest = {entry.type: entry.raw for segment in past for entry in segment.entries}
        items = [raw for kind, raw in latest.items() if kind in self.item_types]
        return CompactedToolState(items, f"{self.name} was used.") if items else None

    def next_answer(self, arguments: str) -> ScriptedToolAnswer:
        self.calls.append(arguments)
        call = f"{self.name} was called with {arguments!r}"
        return self.take_step(call, lambda answer: answer.matches(arguments))


class ConfiguredScriptedTool:
    def __init__(self, tool: ScriptedTool) -> None:
        self._tool = tool

    @property
    def function(self) -> ModelToolDefinition:
        return ModelToolDefinition(
            name=self._tool.name, description="Does what a test says.", parameters=_PARAMETERS
        )

    def start_call(self, context: ToolCallContext) -> "ScriptedToolCallSession":
        return ScriptedToolCallSession(self._tool, context)

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        return [file for file in self._tool.files if file.path in paths]

    def close(self) -> None:
        pass


class ScriptedToolCallSession:
    def __init__(self, tool: ScriptedTool, context: ToolCallContext) -> None:
        self._tool = tool
        self._context = context
        self._id = new_id("st")
        self._fragments: list[str] = []

    def open(self) -> Sequence[StreamEvent]:
        return (
            OutputItemAdded(output_index=self._context.output_index, item=self._make_item("in_progress")),
        )

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        self._fragments += fragments
        return ()

    async def run(self) -> AsyncGenerator[ToolCallStep]:
        arguments = "".join(self._fragments)
        answer = self._tool.next_answer(arguments)
        finished = False
        try:
            if answer.wait_for is not None:
                await answer.wait_for.wait()
            finished = True
        finally:
            if not finished:
                self._tool.interrupted_calls.append(arguments)
        if answer.error is not None:
            raise answer.error
        yield self._make_result("completed", answer.output, answer.files)

    def abort(self, reason: str) -> ToolCallResult:
        return self._make_result("incomplete", reason, ())

    def _make_result(self, status: str, output: str, files: Sequence[ProducedFile]) -> ToolCallResult:
        item = self._make_item(status, output)
        exchange = ToolExchange(
            call_id=self._context.call_id,
            name=self._tool.name,
            arguments=self._valid_arguments(),
            output=output,
        )
        done = OutputItemDone(output_index=self._context.output_index, item=item)
        return ToolCallResult(events=(done,), item=item, exchange=exchange, files=files)

    def _make_item(self, status: str, output: str | None = None) -> Raw:
        (kind,) = self._tool.item_types
        fields = {"type": kind, "id": self._id, "status": status, "output": output}
        return Raw(msgspec.json.encode(fields))

    def _valid_arguments(self) -> str:
        text = "".join(self._fragments)
        try:
            msgspec.json.decode(text, type=dict[str, Raw])
        except msgspec.DecodeError:
            return "{}"
        return text
