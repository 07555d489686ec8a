"""The request and response objects of the Responses API."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from fumehood.protocol.openai.items import CompactionItem, OutputItem

type ResponseStatus = Literal["queued", "in_progress", "completed", "failed", "incomplete", "cancelled"]
type Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]

# What every model server and database can store.
MAX_INT32 = 2**31 - 1

WARNINGS_FIELD = "fumehood:warnings"
# An object whose values are not decoded. msgspec has no `Raw | None`.
type JsonObject = dict[str, Raw]


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`text.format`: plain text, any JSON object, or JSON of a schema."""

    # A factory, since plain defaults are omitted, and this one has to be sent.
    type: Literal["text", "json_object", "json_schema"] = msgspec.field(default_factory=lambda: "text")
    name: str | None = None
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


_SUMMARY_VALUES = frozenset({"auto", "concise", "detailed"})


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`effort` is not checked here: the model server knows its values."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None

    @property
    def asks_for_summary(self) -> bool:
        return not _SUMMARY_VALUES.isdisjoint((self.summary, self.generate_summary))


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_obfuscation: bool | None = None


class ContextCompactionConfig(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="compaction"):
    """An entry of `context_management`: the token count that triggers compaction; None is the server's default."""

    compact_threshold: Annotated[int, Meta(ge=1000, le=MAX_INT32)] | None = None


type UnitFraction = Annotated[float, Meta(ge=0, le=1)]


class CreateResponse(msgspec.Struct, kw_only=True):
    """The body of POST /v1/responses. Unknown fields are ignored; null is allowed for every field.

    generate: false creates a response to continue from without calling the model.
    client_metadata: what a client says about itself; over a WebSocket it replaces headers.

    `input`, `instructions`, `tools`, `tool_choice`, `conversation`, `prompt` and `client_metadata` stay bytes until
    their own parsers read them.
    """

    model: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    input: str | list[Raw] | None = None
    instructions: str | list[Raw] | None = None
    previous_response_id: str | None = None
    conversation: str | JsonObject | None = None
    tools: list[Raw] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: UnitFraction | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    generate: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[Raw] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_retention: str | None = None
    prompt: JsonObject | None = None
    # A factory, since a plain default would appear in the schema.
    client_metadata: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))

    @property
    def passthrough(self) -> dict[str, Raw]:
        """Fields for the model server alone; see `passthrough_fields.extend_request_type`."""
        return {}


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one model turn, or of all turns of a response."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=self.input_tokens_details.cached_tokens
                + other.input_tokens_details.cached_tokens,
                cache_write_tokens=self.input_tokens_details.cache_write_tokens
                + other.input_tokens_details.cache_write_tokens,
            ),
            output_tokens=self.output_tokens + other.output_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=self.output_tokens_details.reasoning_tokens
                + other.output_tokens_details.reasoning_tokens
            ),
            total_tokens=self.total_tokens + other.total_tokens,
        )


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


RUN_LOST_ERROR = ResponseError(
    code="server_error", message="The server stopped while this response was in progress. Ask again."
)
"""The error of a response whose run was lost."""


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens", "content_filter"]


class Response(msgspec.Struct, kw_only=True):
    """A response. Every field is always sent, as null if it is empty; only `conversation` and `user` are omitted.

    warnings: our extension, omitted if there are none: what of the request is not served.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | list[Raw] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: ReasoningConfig = ReasoningConfig()
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: TextConfig = TextConfig(format=TextFormat())
    # A factory, since a schema cannot express such a default.
    tool_choice: Raw = msgspec.field(default_factory=lambda: Raw(b'"auto"'))
    tools: list[Raw] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: Usage | None = None
    metadata: Metadata = {}
    user: str | UnsetType | None = UNSET
    conversation: JsonObject | UnsetType | None = UNSET
    warnings: list[str] | UnsetType = msgspec.field(name=WARNINGS_FIELD, default=UNSET)


class CompactedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response to POST /v1/responses/compact: the input for the next request."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[CompactionItem]
    usage: Usage
    warnings: list[str] | UnsetType = msgspec.field(name=WARNINGS_FIELD, default=UNSET)


class InputTokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """The response to POST /v1/responses/input_tokens; `exact` is our extension."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
    exact: bool = msgspec.field(name="fumehood:exact")
    warnings: list[str] | UnsetType = msgspec.field(name=WARNINGS_FIELD, default=UNSET)


class DeletedObject(msgspec.Struct, frozen=True, kw_only=True):
    """The response to DELETE; `object` names the type."""

    id: str
    object: str
    deleted: bool = True


class ListPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list; the data is encoded already."""

    object: Literal["list"] = "list"
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
