"""Hosted tools: configured by a request, called by the model, run by the gateway."""

from collections.abc import (
    AsyncGenerator,
    Callable,
    Sequence,
)
from dataclasses import dataclass
from typing import Protocol

from fumehood.interfaces.callers import Caller
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.openai.items import OutputItem, ProducedFile
from fumehood.protocol.openai.stream_events import StreamEvent
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallContext:
    """The circumstances of one call.

    caller, response_id: whose call it is, and of which response.
    output_index: of its item.
    call_id: by which the model knows the call.
    deadline: monotonic time at which it must end.
    allocate_output_index: starts an additional item and returns its index.
    accepts_images: whether the model takes images.
    wants_contents: whether the client asked for the contents of produced files.
    """

    caller: Caller
    response_id: str
    output_index: int
    call_id: str
    deadline: float
    allocate_output_index: Callable[[], int]
    accepts_images: bool = False
    wants_contents: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditionalItem:
    """An item that a call makes besides its first, and what the model reads of it."""

    output_index: int
    item: OutputItem
    exchange: ToolExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallResult:
    """The end of a call.

    events: the last ones.
    item: its finished item.
    exchange: what the model reads.
    additional_items: all further items that the call has started.
    files: that it produced.
    error_type: for operators, one word for why the call failed, such as `timeout`; empty if it did not.
    """

    events: Sequence[StreamEvent]
    item: OutputItem
    exchange: ToolExchange
    additional_items: Sequence[AdditionalItem] = ()
    files: Sequence[ProducedFile] = ()
    error_type: str = ""


type ToolCallStep = Sequence[StreamEvent] | ToolCallResult


@dataclass(frozen=True, slots=True)
class CompactedToolState:
    """What a hosted tool keeps of calls that are compacted.

    items: items that `HostedTool.configure` will find in place of the calls.
    note: what the model reads of them.
    """

    items: Sequence[bytes]
    note: str


class ToolCallSession(Protocol):
    """One call, from its first argument byte to its result.

    It owns its items and their events, from `output_item.added` to `output_item.done`.
    """

    def open(self) -> Sequence[StreamEvent]:
        """Start the item and return its first events. Called once, first."""
        ...

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        """Accept arguments as the model writes them, and return the events that they cause.

        fragments: the next ones, in order. They may be invalid JSON.
        """
        ...

    def run(self) -> AsyncGenerator[ToolCallStep]:
        """Run the call and yield its events, the `ToolCallResult` last. Called once, after the last argument.

        Closing the generator interrupts the call. A failure of the call is part of its result; an exception is a bug
        of the tool.
        """
        ...

    def abort(self, reason: str) -> ToolCallResult:
        """End a call that will not run, or that was interrupted.

        reason: what the model reads as its output.
        """
        ...


class ConfiguredTool(Protocol):
    """A hosted tool as one request has configured it."""

    @property
    def function(self) -> ModelToolDefinition:
        """The function that the model sees."""
        ...

    def start_call(self, context: ToolCallContext) -> ToolCallSession:
        """Return the session of a new call.

        context: its circumstances.
        """
        ...

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        """Return the files of this tool at these paths, for citations. Unknown paths are left out.

        paths: absolute.
        """
        ...

    def close(self) -> None:
        """Release what is held for further calls. Called once, at the end of the request."""
        ...


class HostedTool(Protocol):
    """A tool that the gateway runs itself. The engine knows no tool by name."""

    @property
    def types(self) -> frozenset[str]:
        """The types of `tools` entries that it serves."""
        ...

    @property
    def item_types(self) -> frozenset[str]:
        """The types of the items that it makes."""
        ...

    @property
    def finds_files(self) -> bool:
        """Whether its calls can read the files of the conversation."""
        ...

    async def configure(
        self,
        spec: ToolSpec,
        caller: Caller,
        past: Sequence[ConversationSegment],
        other_tools: Sequence[ConfiguredTool] = (),
    ) -> ConfiguredTool | None:
        """Validate a `tools` entry and everything that it names. Creates nothing.

        None leaves the tool to the client or to the model's server.

        spec: the entry.
        caller: who sent the request.
        past: the conversation, with the input of the request.
        other_tools: those that the same request has configured before.

        Raises ApiError if the entry is invalid.
        """
        ...

    def echo_spec(self, spec: ToolSpec) -> bytes:
        """Return the `tools` entry as JSON for the response: with defaults, without secrets.

        spec: an entry that `configure` has accepted.
        """
        ...

    def rebuild_exchange(self, entry: ConversationEntry) -> ToolExchange | None:
        """Return what the model reads of an item of this tool's that a client has sent back; None for nothing.

        Arguments are those that the model wrote, as far as the item carries them, and no others.

        entry: the item.
        """
        ...

    async def snapshot_state(
        self,
        caller: Caller,
        past: Sequence[ConversationSegment],
        kept_items: Sequence[ConversationEntry] = (),
    ) -> CompactedToolState | None:
        """Return what must survive the compaction of a conversation; None for nothing.

        caller: who sent the request.
        past: the conversation to compact.
        kept_items: those of its items that stay as they are.

        Raises ApiError if the state cannot be read.
        """
        ...
