"""Requests to a model and the events of its turn.

A turn is text, refusal and reasoning deltas and calls in any order, then one `ModelTurnEnded`. Events about messages
and reasoning items come only from servers that know them.
"""

from collections.abc import Container, Sequence
from typing import Literal, final

import msgspec
from msgspec import Raw

from fumehood.protocol.conversation import ConversationSegment
from fumehood.protocol.openai.items import MessagePhase, UrlCitationAnnotation
from fumehood.protocol.openai.responses import ReasoningConfig, TextConfig, Usage
from fumehood.protocol.openai.stream_events import PassthroughItemEvent
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec

UPSTREAM_REASONING_PREFIX = "fh1:"
"""How encrypted reasoning of a model server begins here. What begins otherwise was sealed by the gateway."""


class GenerationParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters; None is the server's default.

    passthrough: request fields that only the model server understands.
    """

    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    passthrough: dict[str, Raw] = {}


class TraceContext(msgspec.Struct, frozen=True):
    """The W3C Trace Context headers of a request."""

    traceparent: str
    tracestate: str = ""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for one turn.

    model: the name that the client used; a backend may map it to another.
    instructions: text before the conversation.
    segments: the conversation, oldest first; the last ones are this response's own turns so far.
    server_tools: tools that the model server takes as they are; see `ModelProfile.passes_tool`.
    tool_choice: `auto`, `none`, `required`, or the one tool that must be called.
    used_call_ids: the ids that calls of this conversation have; a new call must have another one.
    streamed: whether a client reads the turn as it is written; if not, it may arrive at once.
    trace: the trace context to send to the server.
    """

    model: str
    instructions: str | None = None
    segments: Sequence[ConversationSegment] = ()
    function_tools: Sequence[ModelToolDefinition] = ()
    server_tools: Sequence[ToolSpec] = ()
    tool_choice: Literal["none", "auto", "required"] | ModelToolDefinition | ToolSpec = "auto"
    parallel_calls: bool = True
    used_call_ids: Container[str] = frozenset[str]()
    sampling: GenerationParameters = GenerationParameters()
    streamed: bool = True
    trace: TraceContext | None = None


class ModelEvent(msgspec.Struct, frozen=True, gc=False):
    """An event of one model turn."""


@final  # like those below: they come by the thousand, and are matched by exact class
class ModelTextDelta(ModelEvent, frozen=True):
    delta: str
    logprobs: list[Raw] = []


class ModelRefusalDelta(ModelEvent, frozen=True):
    delta: str


@final
class ModelReasoningDelta(ModelEvent, frozen=True):
    """Visible reasoning text."""

    delta: str


class ModelMessageStarted(ModelEvent, frozen=True):
    """The text that follows belongs to a new message."""

    phase: MessagePhase | None = None


class ModelCitation(ModelEvent, frozen=True, gc=True):
    """A citation in the current message."""

    citation: UrlCitationAnnotation


class ModelReasoningStarted(ModelEvent, frozen=True):
    """The reasoning that follows, up to `ModelReasoningEnded`, is one item."""


class ModelReasoningSummaryDelta(ModelEvent, frozen=True):
    """A summary of hidden reasoning; another `index` is another paragraph."""

    index: int
    delta: str


class ModelReasoningEnded(ModelEvent, frozen=True):
    """`encrypted_content` is returned to the server with the conversation; only the server can read it. It begins with
    `UPSTREAM_REASONING_PREFIX`.
    """

    encrypted_content: str | None = None


class ModelPassthroughStarted(ModelEvent, frozen=True, gc=True):
    """An item that only the server and the client understand begins; `key` identifies it within its turn."""

    key: int
    item: Raw


class ModelPassthroughDelta(ModelEvent, frozen=True, gc=True):
    """An event of an item that has begun, for the client; its output index is not set."""

    key: int
    event: PassthroughItemEvent


class ModelPassthroughItem(ModelEvent, frozen=True, gc=True):
    """A whole item that only the server and the client understand; `awaits_client` if the client must answer it.

    key: that of its `ModelPassthroughStarted`, with the same item id; None if there was none.
    """

    item: Raw
    awaits_client: bool = False
    key: int | None = None


class ModelCallStarted(ModelEvent, frozen=True):
    """`key` identifies the call within its turn, `call_id` within the conversation.

    `call_id` is the server's id, or another one if the server's is in `ModelRequest.used_call_ids` or repeated.
    """

    key: int
    call_id: str
    name: str


@final
class ModelCallArgumentsDelta(ModelEvent, frozen=True):
    """A fragment of the arguments; together they are JSON."""

    key: int
    delta: str


type TurnEndReason = Literal["stop", "calls", "length", "content_filter"]


class ModelTurnEnded(ModelEvent, frozen=True, gc=True):
    """The last event of a turn.

    usage, response_id, response_model: what the server reports of tokens, its id of the response, and the model that
        answered; None if it does not.
    """

    reason: TurnEndReason
    usage: Usage | None = None
    response_id: str | None = None
    response_model: str | None = None


type AnyModelEvent = (
    ModelTextDelta
    | ModelRefusalDelta
    | ModelReasoningDelta
    | ModelCallStarted
    | ModelCallArgumentsDelta
    | ModelMessageStarted
    | ModelCitation
    | ModelReasoningStarted
    | ModelReasoningSummaryDelta
    | ModelReasoningEnded
    | ModelPassthroughStarted
    | ModelPassthroughDelta
    | ModelPassthroughItem
    | ModelTurnEnded
)


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a model.

    context_window: in tokens. takes_files: whether it accepts files that are not text; None if unknown.
    counts_tokens: whether its server can count tokens. server: host and port, if it has one.
    provider: who runs the server, in the words of OpenTelemetry; None to tell it from the host.
    replays_reasoning: whether the model is sent the text of its earlier reasoning.
    passed_tools: tool types that its server takes as the client wrote them; `*` for all.
    """

    context_window: int | None = None
    takes_images: bool = False
    takes_files: bool | None = None
    counts_tokens: bool = False
    server: tuple[str, int] | None = None
    provider: str | None = None
    replays_reasoning: bool = False
    passed_tools: tuple[str, ...] = ()

    def passes_tool(self, tool_type: str) -> bool:
        """Whether tools of this type are sent to the server unchanged."""
        return tool_type in self.passed_tools or "*" in self.passed_tools


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models.

    tools: types of the tools that are hosted for this model, here or by its server; `*` if its server gets all.
    """

    id: str
    created: int
    owned_by: str
    object: Literal["model"] = "model"
    tools: Sequence[str] = msgspec.field(name="fumehood:tools", default_factory=list[str])


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The response of GET /v1/models."""

    object: Literal["list"] = "list"
    data: Sequence[ModelCard]
