"""Spans of ours against those of the SDK, which they are to equal."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast, override

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
    ALWAYS_ON,
    DEFAULT_OFF,
    DEFAULT_ON,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    StaticSampler,
    TraceIdRatioBased,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from fumehood.telemetry.otlp_span_encoding import (
    EncodableSpan,
    EncodingSpanExporter,
    EncodingTracer,
    OtlpSpanEncoder,
    StartAttributes,
    to_readable_span,
)
from tests.support.otlp_receiver import OtlpReceiver

RESOURCE = Resource({"service.name": "test", "service.version": "é" * 100})
SCOPE = InstrumentationScope("test", "1.0")
REMOTE = SpanContext(
    7, 8, is_remote=True, trace_flags=TraceFlags(1), trace_state=TraceState([("a", "1"), ("b", "2")])
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)
ATTRIBUTES = st.dictionaries(
    TEXTS.filter(lambda key: key not in ("", "error.type")),
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


class CountingIdGenerator(IdGenerator):
    def __init__(self) -> None:
        self._last = 1 << 60

    def generate_span_id(self) -> int:
        self._last += 1
        return self._last

    def generate_trace_id(self) -> int:
        return self.generate_span_id() << 64


class OuterStart(StartAttributes, frozen=True):
    @override
    def span_name(self) -> str:
        return "outer"

    @override
    def build_attributes(self) -> Mapping[str, Any]:
        return {"x": 1}


class InnerStart(StartAttributes, frozen=True):
    name: str = "inner"
    kind: ClassVar[SpanKind] = SpanKind.CLIENT

    @override
    def span_name(self) -> str:
        return self.name


class Outer(EncodableSpan, eq=False, kw_only=True):
    @override
    def start_attributes(self) -> StartAttributes:
        return OuterStart()

    @override
    def end_attributes(self) -> dict[str, Any]:
        return {"y": "z"}


class Inner(EncodableSpan, eq=False, kw_only=True):
    name: str = "inner"
    tells: Callable[[], Mapping[str, Any]] = dict

    @override
    def start_attributes(self) -> StartAttributes:
        return InnerStart(self.name)

    @override
    def end_attributes(self) -> dict[str, Any]:
        return {**self.tells()}


def provider(sampler: Sampler) -> TracerProvider:
    return TracerProvider(sampler, RESOURCE, shutdown_on_exit=False, id_generator=CountingIdGenerator())


def encode_with_fumehood(
    attributes: dict[str, Any], error: str = "", parent: Context | None = None, sampler: Sampler = DEFAULT_ON
) -> Sequence[EncodableSpan]:
    """Two spans, one below the other."""
    exporter = InMemorySpanExporter()
    tracer = EncodingTracer(provider(sampler), SimpleSpanProcessor(exporter))
    outer, inner = Outer(started_at_ns=5), Inner(started_at_ns=6, tells=lambda: attributes)
    tracer.start_span(outer, parent or Context())
    tracer.start_span(inner, outer)
    inner.duration_ns, inner.error = 1, error
    outer.duration_ns = 2**63 - 5
    for span in (inner, outer):
        if span.is_sampled:
            tracer.export(span)
    return cast("Sequence[EncodableSpan]", exporter.get_finished_spans())


def encode_with_sdk(
    attributes: dict[str, Any], error: str = "", parent: Context | None = None, sampler: Sampler = DEFAULT_ON
) -> Sequence[ReadableSpan]:
    """The same by the SDK's tracer."""
    exporter = InMemorySpanExporter()
    making = provider(sampler)
    making.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = making.get_tracer("test", "1.0")
    outer = tracer.start_span("outer", parent or Context(), SpanKind.INTERNAL, {"x": 1}, start_time=5)
    inner = tracer.start_span("inner", set_span_in_context(outer, Context()), SpanKind.CLIENT, start_time=6)
    inner.set_attributes(attributes)
    if error:
        inner.set_attribute("error.type", error)
        inner.set_status(Status(StatusCode.ERROR))
    inner.end(7)
    outer.set_attribute("y", "z")
    outer.end(2**63)
    return exporter.get_finished_spans()


convert_to_readable = partial(to_readable_span, RESOURCE, SCOPE)
request_of = OtlpSpanEncoder(RESOURCE, SCOPE).encode_request


def parse_request(request: bytes) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest.FromString(request)


def serialize(request: ExportTraceServiceRequest) -> bytes:
    """To compare by: as values, numbers that are none do not even equal themselves."""
    return request.SerializeToString(deterministic=True)


@given(ATTRIBUTES, st.sampled_from(["", "timeout"]), st.booleans())
def test_they_are_what_the_sdk_makes(attributes: dict[str, Any], error: str, remote: bool) -> None:
    parent = set_span_in_context(NonRecordingSpan(REMOTE), Context()) if remote else Context()
    made = encode_with_fumehood(attributes, error, parent)
    assert len(made) == 2
    expected = serialize(encode_spans(encode_with_sdk(attributes, error, parent)))
    assert serialize(parse_request(request_of(made))) == expected
    assert serialize(encode_spans([*map(convert_to_readable, made)])) == expected


def test_what_is_known_of_one_is_not_told_of_another() -> None:
    made = [*encode_with_fumehood({}), *encode_with_fumehood({})]
    assert isinstance(made[2], Inner)
    made[2].name = "other"
    assert [span.name for span in _spans_of(parse_request(request_of(made)))] == [
        "inner",
        "outer",
        "other",
        "outer",
    ]


# --- samplers -----------------------------------------------------------------------------------------


def parent_of(*, sampled: bool) -> Context:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return set_span_in_context(
        NonRecordingSpan(SpanContext(7, 8, is_remote=True, trace_flags=flags)), Context()
    )


class NameSampler(Sampler):
    """Samples spans of one name; what is above does not matter to it, whatever it says of itself."""

    def __init__(self, name: str) -> None:
        self._name = name

    @override
    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Any = None,
        *more: Any,
        **others: Any,
    ) -> SamplingResult:
        decision = Decision.RECORD_AND_SAMPLE if name == self._name else Decision.DROP
        return SamplingResult(decision, attributes)

    @override
    def get_description(self) -> str:
        return DEFAULT_ON.get_description()


@pytest.mark.parametrize("parent", [Context(), parent_of(sampled=True), parent_of(sampled=False)])
@pytest.mark.parametrize(
    "sampler",
    [
        ALWAYS_ON,
        ALWAYS_OFF,
        DEFAULT_ON,
        DEFAULT_OFF,
        TraceIdRatioBased(0.5),
        ParentBased(TraceIdRatioBased(0.5)),
        ParentBased(ALWAYS_OFF, local_parent_not_sampled=ALWAYS_ON),
        ParentBased(ALWAYS_ON, local_parent_sampled=ALWAYS_OFF),
        NameSampler("inner"),
        NameSampler("outer"),
        StaticSampler(Decision.RECORD_ONLY),
    ],
)
def test_samplers_are_obeyed_as_by_the_sdk(sampler: Sampler, parent: Context) -> None:
    made, expected = (
        encode_with_fumehood({}, parent=parent, sampler=sampler),
        encode_with_sdk({}, parent=parent, sampler=sampler),
    )
    assert [convert_to_readable(span).name for span in made] == [span.name for span in expected]
    assert encode_spans([*map(convert_to_readable, made)]) == encode_spans(expected)


class AttributeSampler(StaticSampler):
    """Has something to tell itself."""

    said: Any = "yes"

    def __init__(self) -> None:
        super().__init__(Decision.RECORD_AND_SAMPLE)

    @override
    def should_sample(self, *given: Any, **more: Any) -> SamplingResult:
        return SamplingResult(Decision.RECORD_AND_SAMPLE, {"said": self.said}, TraceState([("s", "1")]))


def test_what_the_sampler_says_is_told() -> None:
    for span in _spans_of(parse_request(request_of(encode_with_fumehood({}, sampler=AttributeSampler())))):
        assert "said" in {each.key for each in span.attributes}
        assert span.trace_state == "s=1"


# --- what is sent -------------------------------------------------------------------------------------


@pytest.mark.parametrize("unusual", [{"b": [1, None]}, b"c"])
def test_what_is_not_written_here_is_left_to_the_sdk(unusual: Any, receiver: OtlpReceiver) -> None:
    made = encode_with_fumehood({"a": unusual})
    assert export_spans(made, receiver) == _spans_of(encode_spans([*map(convert_to_readable, made)]))


def test_what_is_usual_is_not(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a part of the SDK that is not promised, and would be slower without a word where that has changed."""
    made = encode_with_fumehood({"a": [1, 2]})
    expected = _spans_of(encode_spans([*map(convert_to_readable, made)]))
    monkeypatch.delattr(trace_exporter, "encode_spans")
    assert export_spans(made, receiver) == expected


def test_where_that_part_is_missing_the_sdk_sends(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ReadableSpan] = []

    def export(_: object, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        given.extend(spans)
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(trace_exporter.OTLPSpanExporter, "export", export)
    made = encode_with_fumehood({"a": 1})
    exporter = exporter_to(receiver)
    monkeypatch.delattr(exporter, "_client")
    assert exporter.export(cast("Sequence[ReadableSpan]", made)) is SpanExportResult.SUCCESS
    assert encode_spans(given) == parse_request(request_of(made))


def test_one_that_has_ended_sends_nothing(receiver: OtlpReceiver) -> None:
    exporter = exporter_to(receiver)
    exporter.shutdown()
    assert (
        exporter.export(cast("Sequence[ReadableSpan]", encode_with_fumehood({}))) is SpanExportResult.FAILURE
    )
    assert receiver.spans == []


def test_a_span_that_cannot_be_told_does_not_cost_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Mapping[str, Any]:
        raise ValueError("with a secret")

    made = encode_with_fumehood({})
    assert isinstance(made[0], Inner)
    made[0].tells = fails
    with caplog.at_level(logging.ERROR):
        assert [span.name for span in _spans_of(parse_request(request_of(made)))] == ["outer"]
    assert "a span is left out: ValueError" in caplog.text
    assert "secret" not in caplog.text


def test_half_a_character_does_not_cost_the_batch() -> None:
    found = _spans_of(parse_request(request_of(encode_with_fumehood({"a": "\ud800"}))))
    assert [each.value.string_value for each in found[0].attributes] == ["?"]


def test_nor_does_a_number_beyond_all_bounds() -> None:
    made = encode_with_fumehood({"a": 2**64 + 7})
    assert [span.name for span in _spans_of(parse_request(request_of(made)))] == ["inner", "outer"]


def exporter_to(receiver: OtlpReceiver) -> EncodingSpanExporter:
    return EncodingSpanExporter(RESOURCE, SCOPE, endpoint=f"{receiver.address}/v1/traces")


def export_spans(spans: Sequence[EncodableSpan], receiver: OtlpReceiver) -> list[Any]:
    """As they come."""
    exporter = exporter_to(receiver)
    assert exporter.export(cast("Sequence[ReadableSpan]", spans)) is SpanExportResult.SUCCESS
    exporter.shutdown()
    return [span for _, span in receiver.spans]


def _spans_of(request: ExportTraceServiceRequest) -> list[Any]:
    return [*request.resource_spans[0].scope_spans[0].spans]
