"""Spans of runs, turns, tool calls and sandbox timings.

Parents are passed explicitly: OpenTelemetry's ambient context would mix up traces (decision 0030).
"""

import json
from typing import override

from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode, Tracer

from fumehood.telemetry.operation_records import (
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
    """Emits `invoke_agent`, below it `chat MODEL` and `execute_tool NAME`, and below that `sandbox PHASE`."""

    def __init__(
        self, tracer: Tracer, propagator: TraceContextPropagator, *, with_content: bool = False
    ) -> None:
        self._tracer = tracer
        self._propagator = propagator
        self._with_content = with_content

    def on_start(self, record: SpanRecord) -> None:
        if isinstance(record, RunRecord):
            self._start_span(record, self._propagator.extract_parent(record.request))
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
        attributes = record.end_attributes()
        if self._with_content:
            for name, value in record.content.items():
                attributes[name] = value if isinstance(value, str) else json.dumps(value)
        if record.error:
            attributes["error.type"] = record.error
            span.set_status(_ERROR)
        span.set_attributes(attributes)
        span.end(record.started_at_ns + record.duration_ns)

    def _start_span(self, record: SpanRecord, parent: Context) -> None:
        # The SDK drops the whole batch for a lone surrogate in a name.
        name = record.span_name().encode(errors="replace").decode()
        record.span = self._tracer.start_span(
            name, parent, record.kind, record.start_attributes(), start_time=record.started_at_ns
        )
