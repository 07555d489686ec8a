"""Spans of requests, runs, turns, tool calls and sandbox timings.

Parents are passed explicitly: OpenTelemetry's ambient context would mix up traces (decision 0030).
"""

import json
from typing import override

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, Tracer

from fumehood.telemetry.operation_records import (
    HttpRequestRecord,
    RecordListener,
    RunRecord,
    SandboxPhaseRecord,
    SpanRecord,
    ToolCallRecord,
    TurnRecord,
)
from fumehood.telemetry.trace_context import TraceContextPropagator, get_caller_context

_ERROR = Status(StatusCode.ERROR)


class SpanEmitter(RecordListener):
    """Emits `METHOD ROUTE`, below it `invoke_agent`, `chat MODEL` and `execute_tool NAME`, and `sandbox PHASE`."""

    def __init__(
        self, tracer: Tracer, propagator: TraceContextPropagator, *, with_content: bool = False
    ) -> None:
        self._tracer = tracer
        self._propagator = propagator
        self._with_content = with_content

    def on_start(self, record: SpanRecord) -> None:
        if isinstance(record, RunRecord):
            self._start_span(record, self._propagator.extract_parent(record.request), record.previous_span)
        elif isinstance(record, HttpRequestRecord):
            self._start_span(record, get_caller_context())
        elif isinstance(record, TurnRecord | ToolCallRecord):
            run = record.run
            self._start_span(record, get_caller_context() if run is None else run.as_context())
            if isinstance(record, TurnRecord) and record.request is not None:
                record.request = self._propagator.inject(record.request, record.span)

    @override
    def on_end(self, record: SpanRecord) -> None:
        if isinstance(record, SandboxPhaseRecord):
            self._start_span(record, record.call.as_context())
        span = record.span
        if not span.is_recording():
            return
        if isinstance(record, HttpRequestRecord):
            span.update_name(_clean(record.span_name()))  # the route is known only now
        attributes = record.end_attributes()
        if self._with_content:
            for name, value in record.content.items():
                attributes[name] = value if isinstance(value, str) else json.dumps(value)
        if record.error:
            attributes["error.type"] = record.error
            span.set_status(_ERROR)
        span.set_attributes(attributes)
        span.end(record.started_at_ns + record.duration_ns)

    def _start_span(self, record: SpanRecord, parent: Context, linked: SpanContext | None = None) -> None:
        record.span = self._tracer.start_span(
            _clean(record.span_name()),
            parent,
            record.kind,
            record.start_attributes(),
            None if linked is None else [Link(linked)],
            start_time=record.started_at_ns,
        )


def _clean(name: str) -> str:
    """Replace lone surrogates, for which the SDK drops the whole batch."""
    return name.encode(errors="replace").decode()
