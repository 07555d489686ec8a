"""What is told of a model's turn, by the conventions; imports the API, `protocol` and siblings.

Small structs, which may be kept for a while: a request itself may be large.
"""

from typing import ClassVar, override

from msgspec import Struct
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from fumehood.protocol.models import ModelRequest
from fumehood.protocol.responses import TextConfig, Usage
from fumehood.telemetry.conventions import provider_of
from fumehood.telemetry.quick_spans import Known

type Attributes = dict[str, AttributeValue]


class Asked(Known, frozen=True):
    """What is known of it before it begins. server: the host and the port, None where there is none."""

    model: str
    server: tuple[str, int] | None
    streamed: bool
    temperature: float | None
    top_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    max_tokens: int | None
    output_type: str | None
    kind: ClassVar[SpanKind] = SpanKind.CLIENT

    @staticmethod
    def of(request: ModelRequest, server: tuple[str, int] | None = None) -> "Asked":
        sampling = request.sampling
        return Asked(
            request.model,
            server,
            request.streamed,
            sampling.temperature,
            sampling.top_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.max_output_tokens,
            None if sampling.text is None else _output_type(sampling.text),
        )

    @override
    def title(self) -> str:
        return f"chat {self.model}"

    @override
    def attributes(self) -> Attributes:
        told = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": provider_of(self.server),
            "gen_ai.request.model": self.model,
            "gen_ai.request.stream": self.streamed or None,
            "gen_ai.request.temperature": self.temperature,
            "gen_ai.request.top_p": self.top_p,
            "gen_ai.request.presence_penalty": self.presence_penalty,
            "gen_ai.request.frequency_penalty": self.frequency_penalty,
            "gen_ai.request.max_tokens": self.max_tokens,
            "gen_ai.output.type": self.output_type,
        }
        if self.server is not None:
            told["server.address"], told["server.port"] = self.server
        return {name: value for name, value in told.items() if value is not None}


class Answered(Struct, frozen=True):
    """What is known of it once it has ended.

    first: nanoseconds until its first piece came, 0 where that is not told.
    finish_reason: why the model stopped, empty where it did not get that far.
    """

    first: int
    finish_reason: str
    usage: Usage | None

    def attributes(self) -> Attributes:
        told: Attributes = {}
        if self.first:
            told["gen_ai.response.time_to_first_chunk"] = self.first / 1e9
        if self.finish_reason:
            told["gen_ai.response.finish_reasons"] = [self.finish_reason]
        return told if self.usage is None else told | usage_attributes(self.usage)


def usage_attributes(usage: Usage) -> Attributes:
    told: Attributes = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
    }
    if cached := usage.input_tokens_details.cached_tokens:
        told["gen_ai.usage.cache_read.input_tokens"] = cached
    if written := usage.input_tokens_details.cache_write_tokens:
        told["gen_ai.usage.cache_creation.input_tokens"] = written
    if reasoned := usage.output_tokens_details.reasoning_tokens:
        told["gen_ai.usage.reasoning.output_tokens"] = reasoned
    return told


def _output_type(text: TextConfig) -> str | None:
    """What was asked for, if something was."""
    if text.format is None:
        return None
    return "text" if text.format.type == "text" else "json"
