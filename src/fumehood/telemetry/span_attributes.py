"""What is told of runs, turns, calls and phases, by the conventions."""

from typing import ClassVar, override

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from fumehood.protocol.openai.responses import TextConfig, Usage
from fumehood.telemetry.otlp_span_encoding import StartAttributes
from fumehood.telemetry.semantic_conventions import OWN_PROVIDER, map_provider

type Attributes = dict[str, AttributeValue]


class RunStartAttributes(StartAttributes, frozen=True):
    """A response that is asked for."""

    model: str | None

    @override
    def span_name(self) -> str:
        return "invoke_agent"

    @override
    def build_attributes(self) -> Attributes:
        told: Attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.provider.name": OWN_PROVIDER}
        if self.model is not None:
            told["gen_ai.request.model"] = self.model
        return told


class TurnStartAttributes(StartAttributes, frozen=True):
    """What a model is asked for. server: the host and the port, None where there is none."""

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

    @override
    def span_name(self) -> str:
        return f"chat {self.model}"

    @override
    def build_attributes(self) -> Attributes:
        told = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": map_provider(self.server),
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


class CallStartAttributes(StartAttributes, frozen=True):
    """A tool that is called."""

    name: str

    @override
    def span_name(self) -> str:
        return f"execute_tool {self.name}"

    @override
    def build_attributes(self) -> Attributes:
        return {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": self.name,
            "gen_ai.tool.type": "extension",
        }


class SandboxTimingStartAttributes(StartAttributes, frozen=True):
    """What is done in a sandbox, and what is known of that."""

    name: str
    facts: tuple[tuple[str, str], ...]

    @override
    def span_name(self) -> str:
        return f"sandbox {self.name}"

    @override
    def build_attributes(self) -> Attributes:
        return {f"fumehood.sandbox.{fact}": value for fact, value in self.facts}


def build_usage_attributes(usage: Usage) -> Attributes:
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


def read_output_type(text: TextConfig) -> str | None:
    """What was asked for, if something was."""
    if text.format is None:
        return None
    return "text" if text.format.type == "text" else "json"
