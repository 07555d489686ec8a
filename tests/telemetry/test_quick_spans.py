"""Spans of ours against those of the SDK, which they are to equal; imports the SDK, its exporter and hypothesis."""

from collections.abc import Callable, Sequence
from typing import Any, override

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    DEFAULT_ON,
    Decision,
    Sampler,
    SamplingResult,
    StaticSampler,
)
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from fumehood.telemetry.quick_spans import QuickExporter, QuickTracer, Unusual, request_of
from fumehood.telemetry.spans import Tracer
from tests.support.otlp import Receiver

RESOURCE = Resource({"service.name": "test", "service.version": "é" * 100})
REMOTE = SpanContext(
    7, 8, is_remote=True, trace_flags=TraceFlags(1), trace_state=TraceState([("a", "1"), ("b", "2")])
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)
ATTRIBUTES = st.dictionaries(
    TEXTS.filter(bool),
    TEXTS
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.lists(TEXTS, max_size=3).map(tuple)
    | st.lists(st.booleans(), max_size=3).map(tuple)
    | st.lists(st.integers(-300, 300), max_size=3).map(tuple)
    | st.lists(st.floats(), max_size=3).map(tuple),
    max_size=5,
)


class Counting(IdGenerator):
    def __init__(self) -> None:
        self._last = 1 << 60

    def generate_span_id(self) -> int:
        self._last += 1
        return self._last

    def generate_trace_id(self) -> int:
        return self.generate_span_id() << 64


def made(
    quick: bool, attributes: dict[str, Any], status: Status, parent: Context, sampler: Sampler = DEFAULT_ON
) -> Sequence[ReadableSpan]:
    """Two spans, one below the other, by the SDK's tracer or by ours."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler, RESOURCE, shutdown_on_exit=False, id_generator=Counting())
    processor = SimpleSpanProcessor(exporter)
    provider.add_span_processor(processor)
    own = QuickTracer(provider, processor, "test", "1.0")
    tracer: Tracer = own if quick else provider.get_tracer("test", "1.0")
    outer = tracer.start_span("outer", parent, SpanKind.INTERNAL, {"x": 1}, start_time=5)
    inner = tracer.start_span("inner", set_span_in_context(outer, Context()), SpanKind.CLIENT, start_time=6)
    for name, value in attributes.items():
        inner.set_attribute(name, value)
    inner.set_status(status)
    inner.end(7)
    outer.set_attributes({"y": "z"})
    outer.end(2**63)
    outer.end(9)
    return exporter.get_finished_spans()


def parsed(request: bytes) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest.FromString(request)


def written(request: ExportTraceServiceRequest) -> bytes:
    """To compare by: as values, numbers that are none do not even equal themselves."""
    return request.SerializeToString(deterministic=True)


@given(
    ATTRIBUTES,
    st.sampled_from([Status(StatusCode.UNSET), Status(StatusCode.OK), Status(StatusCode.ERROR, "why")]),
    st.booleans(),
)
def test_they_are_what_the_sdk_makes(attributes: dict[str, Any], status: Status, remote: bool) -> None:
    parent = set_span_in_context(NonRecordingSpan(REMOTE), Context()) if remote else Context()
    ours, theirs = (made(quick, attributes, status, parent) for quick in (True, False))
    assert len(ours) == 2
    assert written(parsed(request_of(ours))) == written(encode_spans(ours))
    assert written(encode_spans(ours)) == written(encode_spans(theirs))


def test_spans_of_several_scopes_are_kept_apart() -> None:
    status = Status(StatusCode.UNSET)
    spans = [*made(True, {}, status, Context()), *made(True, {}, status, Context())]
    found = parsed(request_of(spans)).resource_spans
    assert [len(each.scope_spans[0].spans) for each in found] == [2, 2]
    assert {each.resource.attributes[0].value.string_value for each in found} == {"test"}


def happened(span: Span) -> None:
    span.add_event("happened", {"b": 1}, 5)


def described(span: Span) -> None:
    span.set_attributes({"a": {"b": [1, None]}, "c": b"d"})


@pytest.mark.parametrize("unusual", [happened, described])
def test_what_is_not_written_here_is_left_to_the_sdk(
    unusual: Callable[[Span], None], receiver: Receiver
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
    span = QuickTracer(provider, SimpleSpanProcessor(exporter), "test", "1.0").start_span(
        "a", Context(), SpanKind.INTERNAL
    )
    unusual(span)
    span.end()
    spans = exporter.get_finished_spans()
    with pytest.raises(Unusual):
        request_of(spans)
    assert sent(spans, receiver) == _spans_of(encode_spans(spans))


def test_what_is_usual_is_not(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a part of the SDK that is not promised, and would be slower without a word where that has changed."""
    spans = made(True, {"a": [1, 2]}, Status(StatusCode.OK), Context())
    expected = _spans_of(encode_spans(spans))
    monkeypatch.delattr(trace_exporter, "encode_spans")
    assert sent(spans, receiver) == expected


def test_one_that_has_ended_sends_nothing(receiver: Receiver) -> None:
    exporter = QuickExporter(f"{receiver.address}/v1/traces")
    exporter.shutdown()
    spans = made(True, {}, Status(StatusCode.OK), Context())
    assert exporter.export(spans) is SpanExportResult.FAILURE
    assert receiver.spans == []


@pytest.mark.parametrize("quick", [True, False])
def test_what_is_not_sampled_is_not_recorded(quick: bool) -> None:
    assert made(quick, {}, Status(StatusCode.UNSET), Context(), ALWAYS_OFF) == ()


def test_what_the_sampler_says_is_told() -> None:
    class Saying(StaticSampler):
        @override
        def should_sample(self, *given: Any, **more: Any) -> SamplingResult:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, {"said": "yes"}, TraceState([("s", "1")]))

    sampler = Saying(Decision.RECORD_AND_SAMPLE)
    ours, theirs = (made(quick, {}, Status(StatusCode.UNSET), Context(), sampler) for quick in (True, False))
    assert (ours[0].attributes or {})["said"] == "yes"
    assert parsed(request_of(ours)) == encode_spans(theirs)


def test_half_a_character_does_not_cost_the_batch() -> None:
    spans = made(True, {"a": "\ud800"}, Status(StatusCode.UNSET), Context())
    found = _spans_of(parsed(request_of(spans)))
    assert [each.value.string_value for each in found[0].attributes] == ["?"]


def test_nor_does_a_number_beyond_all_bounds() -> None:
    spans = made(True, {"a": 2**64 + 7}, Status(StatusCode.UNSET), Context())
    assert [span.name for span in _spans_of(parsed(request_of(spans)))] == ["inner", "outer"]


def sent(spans: Sequence[ReadableSpan], receiver: Receiver) -> list[Any]:
    """As they come."""
    exporter = QuickExporter(f"{receiver.address}/v1/traces")
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()
    return [span for _, span in receiver.spans]


def _spans_of(request: ExportTraceServiceRequest) -> list[Any]:
    return [*request.resource_spans[0].scope_spans[0].spans]
