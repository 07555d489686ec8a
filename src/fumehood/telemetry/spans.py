"""Spans of what was seen; imports OpenTelemetry's API, `protocol` and siblings.

Parents are given, never looked up: the context that OpenTelemetry keeps of its own would mix up traces. Besides what
was seen, only the caller's own trace is looked at.
"""

import json
from functools import partial
from typing import ClassVar, override

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from fumehood.parts.canonical import JsonObject
from fumehood.protocol.models import TurnEnded
from fumehood.protocol.responses import Response, TextConfig, Usage
from fumehood.telemetry.conventions import OWN, provider_of
from fumehood.telemetry.quick_spans import Known, QuickSpan, QuickTracer
from fumehood.telemetry.seen import CallSeen, Listener, PhaseSeen, RunSeen, Seen, TurnSeen
from fumehood.telemetry.trace_context import Propagation, callers_trace

type Attributes = dict[str, AttributeValue]


class Spans(Listener):
    """`invoke_agent` with `chat MODEL` and `execute_tool NAME` below it, and below that the phases of a sandbox."""

    def __init__(self, tracer: QuickTracer, propagation: Propagation, *, with_content: bool = False) -> None:
        self._tracer = tracer
        self._propagation = propagation
        self._with_content = with_content

    @override
    def began(self, seen: Seen) -> None:
        match seen:
            case TurnSeen():
                self._begin(seen, Asked.of(seen), _within(seen.run))
                seen.request = self._propagation.told(seen.request, seen.span)
            case RunSeen():
                self._begin(seen, _Run(seen.request.model), self._propagation.parent_of(seen.request))
            case CallSeen():
                self._begin(seen, _Call(seen.name), _within(seen.run))
                seen.span.tell(partial(_call_attributes, seen.call_id))
            case PhaseSeen(phase=phase):
                self._begin(seen, _Phase(phase.name, tuple(phase.facts.items())), _within(seen.call))
            case _:
                pass

    def _begin(self, seen: Seen, known: Known, parent: QuickSpan | Context) -> None:
        seen.span = self._tracer.begin(known, seen.began_at, parent)

    @override
    def ended(self, seen: Seen) -> None:
        span = seen.span
        if not span.sampled:
            return
        match seen:
            case RunSeen(response=Response() as response):
                span.tell(partial(_response_attributes, response.id, response.model, response.usage))
            case TurnSeen():
                span.tell(Answered.of(seen).attributes)
            case CallSeen(item_id=item_id) if item_id:
                span.tell(lambda: {"fumehood.item.id": item_id})
            case _:
                pass
        if self._with_content and seen.content:
            written = _content_attributes(seen.content)  # at once: as text it is smaller
            span.tell(lambda: written)
        self._tracer.end(span, seen.began_at + seen.took, seen.error)


def _within(parent: Seen | None) -> QuickSpan | Context:
    """In its run, or in what its caller does, if that asked for something else."""
    return callers_trace() if parent is None else parent.span


class _Run(Known, frozen=True):
    model: str | None

    @override
    def title(self) -> str:
        return "invoke_agent"

    @override
    def attributes(self) -> Attributes:
        told: Attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.provider.name": OWN}
        if self.model is not None:
            told["gen_ai.request.model"] = self.model
        return told


class _Call(Known, frozen=True):
    name: str

    @override
    def title(self) -> str:
        return f"execute_tool {self.name}"

    @override
    def attributes(self) -> Attributes:
        return {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": self.name,
            "gen_ai.tool.type": "extension",
        }


class _Phase(Known, frozen=True):
    name: str
    facts: tuple[tuple[str, str], ...]

    @override
    def title(self) -> str:
        return f"sandbox {self.name}"

    @override
    def attributes(self) -> Attributes:
        return {f"fumehood.sandbox.{fact}": value for fact, value in self.facts}


def _response_attributes(response_id: str, model: str, usage: Usage | None) -> Attributes:
    told: Attributes = {"gen_ai.response.id": response_id, "gen_ai.response.model": model}
    return told if usage is None else told | _usage(usage)


def _call_attributes(call_id: str) -> Attributes:
    return {"gen_ai.tool.call.id": call_id}


def _content_attributes(content: JsonObject) -> Attributes:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in content.items()}


# --- turns --------------------------------------------------------------------------------------------


class Asked(Known, frozen=True):
    """What is known of a turn before it begins; its request itself may be large."""

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
    def of(turn: TurnSeen) -> "Asked":
        sampling = turn.request.sampling
        return Asked(
            turn.request.model,
            turn.server,
            turn.request.streamed,
            sampling.temperature,
            sampling.top_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.max_output_tokens,
            _output_type(sampling.text),
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


class Answered(msgspec.Struct, frozen=True):
    """What is known of it once it has ended. first: nanoseconds, 0 where that is not told."""

    first: int
    finish_reason: str
    end: TurnEnded | None

    @staticmethod
    def of(turn: TurnSeen) -> "Answered":
        return Answered(turn.first if turn.request.streamed else 0, turn.finish_reason, turn.end)

    def attributes(self) -> Attributes:
        told: Attributes = {}
        if self.first:
            told["gen_ai.response.time_to_first_chunk"] = self.first / 1e9
        if self.end is not None:
            told["gen_ai.response.finish_reasons"] = [self.finish_reason]
            if self.end.usage is not None:
                told |= _usage(self.end.usage)
        return told


def _output_type(text: TextConfig | None) -> str | None:
    """What was asked for, if something was."""
    if text is None or text.format is None:
        return None
    return "text" if text.format.type == "text" else "json"


def _usage(usage: Usage) -> Attributes:
    told: Attributes = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
    }
    details = {
        "gen_ai.usage.cache_read.input_tokens": usage.input_tokens_details.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.input_tokens_details.cache_write_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.output_tokens_details.reasoning_tokens,
    }
    return told | {name: number for name, number in details.items() if number}
