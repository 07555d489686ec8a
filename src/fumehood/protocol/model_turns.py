"""What the engine asks of a model and what comes back.

A model turn is: text, refusal and reasoning deltas and calls in any order, then one `TurnEnded`. Servers that know
more of messages and reasoning than their text say it by further events; those that do not leave them out.
"""

from collections.abc import Sequence
from typing import Literal, final

import msgspec
from msgspec import Raw

from fumehood.protocol.conversation import ConversationSegment
from fumehood.protocol.openai.items import MessagePhase, UrlCitationAnnotation
from fumehood.protocol.openai.responses import ReasoningConfig, TextConfig, Usage
from fumehood.protocol.openai.tool_specs import FunctionSpec, ToolSpec


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is to write; None leaves it to the server.

    passed: fields of the request that nobody here understands; a server is given those that its model takes.
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
    passed: dict[str, Raw] = {}


class TraceContext(msgspec.Struct, frozen=True):
    """Where a request stands in a trace, as the headers of W3C Trace Context write it."""

    traceparent: str
    tracestate: str = ""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn.

    model: the name that the client used; a backend may know it by another.
    instructions: text that comes before everything.
    segments: the conversation, oldest first; the last ones are this response's own turns so far.
    others: tools of the request that are neither hosted here nor the client's functions; a server may know them.
    choice: `auto`, `none`, `required`, or the one function that must be called.
    streamed: whether somebody watches; if nobody does, the turn may as well come in one piece.
    trace: what the server is told of the trace that the turn is part of, if there is one.
    """

    model: str
    instructions: str | None = None
    segments: Sequence[ConversationSegment] = ()
    function_tools: Sequence[FunctionSpec] = ()
    other_tools: Sequence[ToolSpec] = ()
    tool_choice: Literal["none", "auto", "required"] | FunctionSpec = "auto"
    parallel_calls: bool = True
    sampling: SamplingParameters = SamplingParameters()
    streamed: bool = True
    trace: TraceContext | None = None


class ModelEvent(msgspec.Struct, frozen=True, gc=False):
    """A piece of what a model says in one turn."""


@final  # as those below: these come by the thousand, and are told apart by their very class
class ModelTextDelta(ModelEvent, frozen=True):
    delta: str
    logprobs: list[Raw] = []


class ModelRefusalDelta(ModelEvent, frozen=True):
    delta: str


@final
class ModelReasoningDelta(ModelEvent, frozen=True):
    """Reasoning that the model shows."""

    delta: str


class ModelMessageStarted(ModelEvent, frozen=True):
    """What text follows is a message of its own."""

    phase: MessagePhase | None = None


class ModelCitation(ModelEvent, frozen=True, gc=True):
    """A source of the message that is being written."""

    citation: UrlCitationAnnotation


class ModelReasoningStarted(ModelEvent, frozen=True):
    """What reasoning follows is an item of its own, until `ReasoningEnded`."""


class ModelReasoningSummaryDelta(ModelEvent, frozen=True):
    """What the server tells of reasoning that it does not show; another `index` is another paragraph."""

    index: int
    delta: str


class ModelReasoningEnded(ModelEvent, frozen=True):
    """`sealed` is what the server wants to be given back with the conversation, and nobody else can read."""

    encrypted_content: str | None = None


class ModelPassthroughItem(ModelEvent, frozen=True, gc=True):
    """An item that only the server and the client understand, whole; `open` if the client has to answer it."""

    item: Raw
    awaits_client: bool = False


class ModelCallStarted(ModelEvent, frozen=True):
    """`key` tells the calls of one turn apart while their arguments come in; `call_id` is the server's own name."""

    key: int
    call_id: str
    name: str


@final
class ModelCallArgumentsDelta(ModelEvent, frozen=True):
    """A piece of the arguments, JSON once all are there."""

    key: int
    delta: str


type TurnEndReason = Literal["stop", "calls", "length", "content_filter"]


class ModelTurnEnded(ModelEvent, frozen=True, gc=True):
    """The last event of a turn; `usage` is None where the server tells none."""

    reason: TurnEndReason
    usage: Usage | None = None


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
    | ModelPassthroughItem
    | ModelTurnEnded
)


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model; `context_window` in tokens, `takes_files` whether it is shown files that are no text,
    None where nobody has said, `counts` whether its server can count tokens, `server` its host and port, if it has one.
    """

    context_window: int | None = None
    takes_images: bool = False
    takes_files: bool | None = None
    counts_tokens: bool = False
    server: tuple[str, int] | None = None


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models."""

    id: str
    created: int
    owned_by: str
    object: Literal["model"] = "model"
