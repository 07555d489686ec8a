"""Encoded spans, compared with what the SDK's own encoder makes of them."""

from collections.abc import Callable

import pytest
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as encode_by_sdk
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)
from opentelemetry.util.types import AnyValue

from fumehood.telemetry.span_encoding import encode_spans, use_in_place_encoding

CALLER = SpanContext(
    0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True, TraceFlags(1), TraceState([("vendor", "a")])
)


class SpanCollection:
    def __init__(self, limits: SpanLimits | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(
            resource=Resource({"service.name": "fumehood"}), shutdown_on_exit=False, span_limits=limits
        )
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.start = self.tracer("fumehood").start_span

    def tracer(self, scope: str) -> Tracer:
        return self._provider.get_tracer(scope, "1.0", schema_url="https://example.org/1.0")

    def finished(self) -> list[ReadableSpan]:
        return [*self._exporter.get_finished_spans()]


@pytest.fixture
def collection() -> SpanCollection:
    return SpanCollection()


def assert_encoded_as_by_sdk(spans: list[ReadableSpan]) -> None:
    assert encode_spans(spans) == encode_by_sdk(spans)


@pytest.mark.parametrize("kind", SpanKind)
def test_spans_of_each_kind(collection: SpanCollection, kind: SpanKind) -> None:
    for number in range(3):
        collection.start(f"chat {number}", Context(), kind, start_time=1_000 + number).end(2_000)

    assert_encoded_as_by_sdk(collection.finished())


SIMPLE_VALUES: list[AnyValue] = ["text", "", "ä€", True, False, 0, 7, -1, 2**63 - 1, 0.25]
SEQUENCES: list[AnyValue] = [("stop", "length"), [1, 2], [True], [0.5], ["a", 1], [["a"]]]
LEFT_TO_THE_SDK: list[AnyValue] = [[], b"bytes", {"a": 1}, {"a": {"b": [b"c"]}}, [None, "a"], 2**63, "\ud800"]


@pytest.mark.parametrize("value", [*SIMPLE_VALUES, *SEQUENCES, *LEFT_TO_THE_SDK], ids=repr)
def test_values_of_attributes(collection: SpanCollection, value: AnyValue) -> None:
    for _ in range(3):
        collection.start("chat", Context(), attributes={"before": 1, "value": value, "after": "2"}).end()

    assert_encoded_as_by_sdk(collection.finished())


def fail(span: Span) -> None:
    span.set_status(Status(StatusCode.ERROR, "upstream"))


def add_event(span: Span) -> None:
    span.add_event("exception", {"exception.type": "ValueError"}, 1_500)


def add_link(span: Span) -> None:
    span.add_link(CALLER, {"reason": "previous response"})


@pytest.mark.parametrize("change", [fail, add_event, add_link])
def test_what_only_some_spans_have(collection: SpanCollection, change: Callable[[Span], None]) -> None:
    spans = [collection.start("chat", Context(), attributes={"number": number}) for number in range(4)]
    change(spans[2])
    for span in spans:
        span.end()

    assert_encoded_as_by_sdk(collection.finished())


def test_parents_here_and_elsewhere(collection: SpanCollection) -> None:
    request = collection.start("POST /v1/responses", set_span_in_context(NonRecordingSpan(CALLER), Context()))
    run = collection.start("invoke_agent", set_span_in_context(request, Context()), links=[Link(CALLER)])
    turn = collection.start("chat", set_span_in_context(run, Context()))
    for span in (turn, run, request):
        span.end()
    spans = collection.finished()

    assert_encoded_as_by_sdk(spans)
    assert_encoded_as_by_sdk(spans[::-1])


def test_dropped_attributes_are_counted() -> None:
    collection = SpanCollection(SpanLimits(max_span_attributes=2))
    for _ in range(2):
        collection.start("chat", Context(), attributes={"a": 1, "b": 2, "c": 3}).end()

    assert_encoded_as_by_sdk(collection.finished())


def test_spans_of_two_scopes(collection: SpanCollection) -> None:
    for scope in ("fumehood", "other", "fumehood"):
        collection.tracer(scope).start_span("chat", Context()).end()

    assert_encoded_as_by_sdk(collection.finished())


def test_no_spans() -> None:
    assert_encoded_as_by_sdk([])


def test_the_exporter_of_the_sdk_uses_the_encoding(
    collection: SpanCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release of the SDK whose exporter takes its encoder from elsewhere fails here."""
    monkeypatch.setattr(trace_exporter, "encode_spans", encode_by_sdk)
    encoded: list[int] = []

    def count(spans: list[ReadableSpan]) -> object:
        encoded.append(len(spans))
        return encode_spans(spans)

    use_in_place_encoding()
    assert trace_exporter.encode_spans is encode_spans  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setattr(trace_exporter, "encode_spans", count)
    collection.start("chat", Context()).end()
    trace_exporter.OTLPSpanExporter("http://127.0.0.1:1/v1/traces", timeout=0.01).export(
        collection.finished()
    )

    assert encoded == [1]
