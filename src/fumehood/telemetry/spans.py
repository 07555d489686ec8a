"""Spans of what was seen; imports OpenTelemetry's API, `protocol` and siblings.

Parents are given, never looked up: the context that OpenTelemetry keeps of its own would mix up traces. Besides what
was seen, only the caller's own trace is looked at.
"""

import json
from functools import partial
from typing import override

from opentelemetry.context import Context

from fumehood.parts.canonical import JsonObject
from fumehood.telemetry.conventions import OWN
from fumehood.telemetry.quick_spans import Known, QuickSpan, QuickTracer
from fumehood.telemetry.seen import Answer, CallSeen, Listener, PhaseSeen, RunSeen, Seen, TurnSeen
from fumehood.telemetry.trace_context import Propagation, callers_trace
from fumehood.telemetry.turns import Attributes, usage_attributes


class Spans(Listener):
    """`invoke_agent` with `chat MODEL` and `execute_tool NAME` below it, and below that the phases of a sandbox."""

    def __init__(self, tracer: QuickTracer, propagation: Propagation, *, with_content: bool = False) -> None:
        self._tracer = tracer
        self._begin = tracer.begin
        self._propagation = propagation
        self._with_content = with_content

    @override
    def began(self, seen: Seen) -> None:
        if isinstance(seen, TurnSeen):
            seen.span = self._begin(seen.asked, seen.began_at, _within(seen.run))
            if seen.request is not None:
                seen.request = self._propagation.told(seen.request, seen.span)
        elif isinstance(seen, RunSeen):
            seen.span = self._begin(
                _Run(seen.model), seen.began_at, self._propagation.parent_of(seen.request)
            )
        elif isinstance(seen, CallSeen):
            seen.span = self._begin(_Call(seen.name), seen.began_at, _within(seen.run))
            seen.span.tell(partial(_call_attributes, seen.call_id))

    @override
    def ended(self, seen: Seen) -> None:
        if isinstance(seen, PhaseSeen):
            known = _Phase(seen.phase.name, tuple(seen.phase.facts.items()))
            seen.span = self._begin(known, seen.began_at, seen.call.span)
        span = seen.span
        if not span.sampled:
            return
        match seen:
            case TurnSeen():
                span.tell(seen.answered().attributes)
            case RunSeen(answer=Answer() as answer):
                span.tell(partial(_answer_attributes, answer))
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


def _answer_attributes(answer: Answer) -> Attributes:
    told: Attributes = {"gen_ai.response.id": answer.id, "gen_ai.response.model": answer.model}
    return told if answer.usage is None else told | usage_attributes(answer.usage)


def _call_attributes(call_id: str) -> Attributes:
    return {"gen_ai.tool.call.id": call_id}


def _content_attributes(content: JsonObject) -> Attributes:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in content.items()}
