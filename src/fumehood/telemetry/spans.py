"""Spans of what was seen.

Parents are given, never looked up: the context that OpenTelemetry keeps of its own would mix up traces. Besides what
was seen, only the caller's own trace is looked at.
"""

import json
from typing import override

from opentelemetry.trace import TraceFlags

from fumehood.message_parts import JsonObject
from fumehood.telemetry.otlp_span_encoding import EncodingTracer
from fumehood.telemetry.span_attributes import Attributes
from fumehood.telemetry.span_records import (
    RecordListener,
    RunRecord,
    SandboxTimingRecord,
    SpanRecord,
    ToolCallRecord,
    TurnRecord,
)
from fumehood.telemetry.trace_context import TraceContextPropagator, get_caller_context


class SpanEmitter(RecordListener):
    """`invoke_agent` with `chat MODEL` and `execute_tool NAME` below it, and below that the phases of a sandbox.

    To be told last: a record that has ended is sent as it is.
    """

    def __init__(
        self, tracer: EncodingTracer, propagator: TraceContextPropagator, *, with_content: bool = False
    ) -> None:
        self._start_span = tracer.start_span
        self._export = tracer.export
        self._propagator = propagator
        self._with_content = with_content

    def on_start(self, record: SpanRecord) -> None:
        if isinstance(record, TurnRecord):
            run, request = record.run, record.request
            self._start_span(record, get_caller_context() if run is None else run)
            if request is not None:
                record.request = self._propagator.inject(request, record)
        elif isinstance(record, RunRecord):
            self._start_span(record, self._propagator.extract_parent(record.request))
        elif isinstance(record, ToolCallRecord):
            run = record.run
            self._start_span(record, get_caller_context() if run is None else run)

    @override
    def on_end(self, record: SpanRecord) -> None:
        if isinstance(record, SandboxTimingRecord):
            self._start_span(record, record.call)
        if record.content:
            if self._with_content and record.is_sampled:
                record.extra_attributes = {**record.extra_attributes, **_content_attributes(record.content)}
            record.content = {}  # as text it is smaller
        if record.trace_flags & TraceFlags.SAMPLED:
            self._export(record)


def _content_attributes(content: JsonObject) -> Attributes:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in content.items()}
