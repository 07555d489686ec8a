"""Hosted tools and their calls."""

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
from fumehood.protocol.openai.tool_specs import FunctionSpec, ToolSpec

# --- hosted tools -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallContext:
    """One call of a hosted tool: whose, where in the response, by which name the model knows it, and until when
    (by the monotonic clock) it may take.

    place: the output index of a further item, which begins now.
    takes_images: whether the model does. wants_contents: whether the client asked for what produced files hold.
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
    """One that a call makes beside its first: where, and what the model is told of it."""

    output_index: int
    item: OutputItem
    exchange: ToolExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallResult:
    """How a call ended: its last events, its finished item, what the model is told, and the files it left.

    further: where a call is more than one item, the others that have begun.
    """

    events: Sequence[StreamEvent]
    item: OutputItem
    exchange: ToolExchange
    additional_items: Sequence[AdditionalItem] = ()
    files: Sequence[ProducedFile] = ()


type ToolCallStep = Sequence[StreamEvent] | ToolCallResult


@dataclass(frozen=True, slots=True)
class ToolStateSnapshot:
    """What a hosted tool keeps of calls that are compacted: items that `offer` finds in their place, and what the model
    is told of them.
    """

    items: Sequence[bytes]
    note: str


class ToolCallSession(Protocol):
    """One call, from the moment when the model begins to write it. The session owns its items and their lifecycle
    events, from `output_item.added` to `output_item.done`.
    """

    def open(self) -> Sequence[StreamEvent]: ...

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        """The next pieces of the arguments, as the model writes them."""
        ...

    def run(self) -> AsyncGenerator[ToolCallStep]:
        """Do it; called once, when the arguments are complete. Its last step is the ToolResult. What goes wrong is
        told to the model in there; what is raised is a fault of ours. Closing the generator interrupts the call.
        """
        ...

    def abort(self, reason: str) -> ToolCallResult:
        """End a call that will not run, or that was cut off."""
        ...


class ConfiguredTool(Protocol):
    """A hosted tool as one request configured it."""

    @property
    def function(self) -> FunctionSpec:
        """What the model is told."""
        ...

    def start_call(self, context: ToolCallContext) -> ToolCallSession: ...

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        """Those of these absolute paths that are files of this tool's, for citations."""
        ...

    def close(self) -> None:
        """The request is over: what was held for its further calls is let go."""
        ...


class HostedTool(Protocol):
    """A tool that the gateway runs itself. The engine knows no tool by name."""

    @property
    def types(self) -> frozenset[str]:
        """The types of `tools` that it serves."""
        ...

    @property
    def item_types(self) -> frozenset[str]:
        """The types of the items that it makes."""
        ...

    @property
    def finds_files(self) -> bool:
        """Whether its calls find the files of the conversation."""
        ...

    async def configure(
        self,
        spec: ToolSpec,
        caller: Caller,
        past: Sequence[ConversationSegment],
        other_tools: Sequence[ConfiguredTool] = (),
    ) -> ConfiguredTool | None:
        """Check the configuration and everything that it names; raises ApiError. Nothing is created yet. None for one
        that leaves the tool to the client, or to the model's own server.

        past: the conversation with what the request adds to it.
        beside: what the same request was offered before this.
        """
        ...

    def echo_spec(self, spec: ToolSpec) -> bytes:
        """The configuration as the response shows it: complete, and without secrets."""
        ...

    def rebuild_exchange(self, entry: ConversationEntry) -> ToolExchange | None:
        """What the model is shown of an item of this tool's that a client gave back."""
        ...

    async def snapshot_state(
        self,
        caller: Caller,
        past: Sequence[ConversationSegment],
        kept_items: Sequence[ConversationEntry] = (),
    ) -> ToolStateSnapshot | None:
        """What must outlive the items of this conversation, which are about to be compacted; None if nothing must.

        kept: those among them that stay as they are.
        """
        ...
