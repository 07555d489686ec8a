"""Spans of what was seen; imports OpenTelemetry's API, `protocol` and siblings.

Parents are given, never looked up: the context that OpenTelemetry keeps of its own would mix up traces. Besides what
was seen, only the caller's own trace is looked at.
"""

import json
from typing import override

from opentelemetry.trace import TraceFlags

from fumehood.parts.canonical import JsonObject
from fumehood.telemetry.known import Attributes
from fumehood.telemetry.quick_spans import QuickTracer
from fumehood.telemetry.seen import CallSeen, Listener, PhaseSeen, RunSeen, Seen, TurnSeen
from fumehood.telemetry.trace_context import Propagation, callers_trace


class Spans(Listener):
    """`invoke_agent` with `chat MODEL` and `execute_tool NAME` below it, and below that the phases of a sandbox.

    To be told last: a record that has ended is sent as it is.
    """

    def __init__(self, tracer: QuickTracer, propagation: Propagation, *, with_content: bool = False) -> None:
        self._begin = tracer.begin
        self._send = tracer.send
        self._propagation = propagation
        self._with_content = with_content

    def began(self, seen: Seen) -> None:
        if isinstance(seen, TurnSeen):
            run, request = seen.run, seen.request
            self._begin(seen, callers_trace() if run is None else run)
            if request is not None:
                seen.request = self._propagation.told(request, seen)
        elif isinstance(seen, RunSeen):
            self._begin(seen, self._propagation.parent_of(seen.request))
        elif isinstance(seen, CallSeen):
            run = seen.run
            self._begin(seen, callers_trace() if run is None else run)

    @override
    def ended(self, seen: Seen) -> None:
        if isinstance(seen, PhaseSeen):
            self._begin(seen, seen.call)
        if seen.content:
            if self._with_content and seen.sampled:
                seen.besides = {**seen.besides, **_attributes(seen.content)}
            seen.content = {}  # as text it is smaller
        if seen.flags & TraceFlags.SAMPLED:
            self._send(seen)


def _attributes(content: JsonObject) -> Attributes:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in content.items()}
