"""Spans of what was seen; imports OpenTelemetry's API, `protocol` and siblings.

Parents are given, never looked up: the context that OpenTelemetry keeps of its own would mix up traces. Besides what
was seen, only the caller's own trace is looked at.
"""

import json
from typing import Protocol, override

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from fumehood.protocol.responses import Response, TextConfig, Usage
from fumehood.telemetry.conventions import OWN, provider_of
from fumehood.telemetry.seen import CallSeen, Listener, PhaseSeen, RunSeen, Seen, TurnSeen
from fumehood.telemetry.trace_context import Propagation, callers_trace

type Attributes = dict[str, AttributeValue]


class Tracer(Protocol):
    """One of the SDK's, or one that costs less."""

    def start_span(
        self,
        name: str,
        context: Context,
        kind: SpanKind,
        attributes: Attributes,
        *,
        start_time: int | None = None,
    ) -> Span: ...


class Spans(Listener):
    """`invoke_agent` with `chat MODEL` and `execute_tool NAME` below it, and below that the phases of a sandbox."""

    def __init__(self, tracer: Tracer, propagation: Propagation, *, with_content: bool = False) -> None:
        self._tracer = tracer
        self._propagation = propagation
        self._with_content = with_content

    @override
    def began(self, seen: Seen) -> None:
        match seen:
            case RunSeen():
                self._run_began(seen)
            case TurnSeen():
                self._turn_began(seen)
            case CallSeen():
                self._call_began(seen)
            case PhaseSeen():
                self._phase_began(seen)
            case _:
                pass

    @override
    def ended(self, seen: Seen) -> None:
        span = seen.span
        if span.is_recording():
            match seen:
                case RunSeen(response=Response() as response):
                    _tell_response(span, response)
                case TurnSeen():
                    _tell_turn(span, seen)
                case CallSeen(item_id=item_id) if item_id:
                    span.set_attribute("fumehood.item.id", item_id)
                case _:
                    pass
            if self._with_content:
                for name, value in seen.content.items():
                    span.set_attribute(name, value if isinstance(value, str) else json.dumps(value))
            if seen.error:
                span.set_attribute("error.type", seen.error)
                span.set_status(Status(StatusCode.ERROR))
        span.end(seen.began_at + seen.took)

    def _run_began(self, run: RunSeen) -> None:
        attributes: Attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.provider.name": OWN}
        if run.request.model is not None:
            attributes["gen_ai.request.model"] = run.request.model
        parent = self._propagation.parent_of(run.request)
        self._begin(run, "invoke_agent", parent, SpanKind.INTERNAL, attributes)

    def _turn_began(self, turn: TurnSeen) -> None:
        self._begin(
            turn, f"chat {turn.request.model}", _within(turn.run), SpanKind.CLIENT, asked_attributes(turn)
        )
        turn.request = self._propagation.told(turn.request, turn.span)

    def _call_began(self, call: CallSeen) -> None:
        attributes: Attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "gen_ai.tool.call.id": call.call_id,
            "gen_ai.tool.type": "extension",
        }
        self._begin(call, f"execute_tool {call.name}", _within(call.run), SpanKind.INTERNAL, attributes)

    def _phase_began(self, seen: PhaseSeen) -> None:
        phase = seen.phase
        attributes: Attributes = {f"fumehood.sandbox.{fact}": value for fact, value in phase.facts.items()}
        self._begin(seen, f"sandbox {phase.name}", _within(seen.call), SpanKind.INTERNAL, attributes)

    def _begin(self, seen: Seen, name: str, parent: Context, kind: SpanKind, attributes: Attributes) -> None:
        seen.span = self._tracer.start_span(name, parent, kind, attributes, start_time=seen.began_at)


def _tell_response(span: Span, response: Response) -> None:
    span.set_attribute("gen_ai.response.id", response.id)
    span.set_attribute("gen_ai.response.model", response.model)
    if response.usage is not None:
        _tell_usage(span, response.usage)


def _within(parent: Seen | None) -> Context:
    """In its run, or in what its caller does, if that asked for something else."""
    return callers_trace() if parent is None else set_span_in_context(parent.span, Context())


def _tell_turn(span: Span, turn: TurnSeen) -> None:
    for name, value in answered_attributes(turn).items():
        span.set_attribute(name, value)


def asked_attributes(turn: TurnSeen) -> Attributes:
    """What is known of a turn before it begins."""
    request, sampling = turn.request, turn.request.sampling
    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider_of(turn.server),
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": request.streamed or None,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.max_tokens": sampling.max_output_tokens,
        "gen_ai.output.type": _output_type(sampling.text),
    }
    if turn.server is not None:
        told["server.address"], told["server.port"] = turn.server
    return {name: value for name, value in told.items() if value is not None}


def _output_type(text: TextConfig | None) -> str | None:
    """What was asked for, if something was."""
    if text is None or text.format is None:
        return None
    return "text" if text.format.type == "text" else "json"


def answered_attributes(turn: TurnSeen) -> Attributes:
    """What is known of it once it has ended."""
    told: Attributes = {}
    if turn.first and turn.request.streamed:
        told["gen_ai.response.time_to_first_chunk"] = turn.first / 1e9
    if turn.end is not None:
        told["gen_ai.response.finish_reasons"] = [turn.finish_reason]
        if turn.end.usage is not None:
            told |= _usage(turn.end.usage)
    return told


def _tell_usage(span: Span, usage: Usage) -> None:
    for name, value in _usage(usage).items():
        span.set_attribute(name, value)


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
