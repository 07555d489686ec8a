"""Spans of OpenTelemetry's that cost little to make and to send; imports its API, SDK and exporter.

The SDK's own are made for everybody: with locks, limits and checks of every value, and each is built once more from
protobuf's classes before it is sent. Here one task ends what it began and the values are ours, so a span is a few
fields, and is written as bytes. Sampler, ids, resource, batches and sending are the SDK's.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from time import time_ns
from typing import Never, cast, override

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
)
from opentelemetry.util.types import Attributes, AttributeValue

# --- made -------------------------------------------------------------------------------------------------------


class QuickTracer:
    """Begins spans as a tracer of the SDK does; those that have ended go to the processor."""

    def __init__(self, provider: TracerProvider, processor: SpanProcessor, name: str, version: str) -> None:
        self._sampler = provider.sampler
        self._ids = provider.id_generator
        self._resource = provider.resource
        self._scope = InstrumentationScope(name, version)
        self._on_end = processor.on_end

    def start_span(
        self,
        name: str,
        context: Context,
        kind: SpanKind,
        attributes: Attributes = None,
        *,
        start_time: int | None = None,
    ) -> Span:
        above = get_current_span(context).get_span_context()
        parent = above if above.is_valid else None
        ids = self._ids
        trace_id = ids.generate_trace_id() if parent is None else parent.trace_id
        random = ids.is_trace_id_random() if parent is None else parent.trace_flags.random_trace_id
        sampled = self._sampler.should_sample(context, trace_id, name, kind, attributes)
        flags = TraceFlags.SAMPLED if sampled.decision.is_sampled() else 0
        own = SpanContext(
            trace_id,
            ids.generate_span_id(),
            is_remote=False,
            trace_flags=TraceFlags(flags | (TraceFlags.RANDOM_TRACE_ID if random else 0)),
            trace_state=sampled.trace_state,
        )
        if not sampled.decision.is_recording():
            return NonRecordingSpan(own)
        told = cast("Mapping[str, AttributeValue]", sampled.attributes)  # pyright: ignore[reportUnknownMemberType]
        return _QuickSpan(
            self._on_end,
            dict(told),
            name=name,
            context=own,
            parent=parent,
            resource=self._resource,
            kind=kind,
            start_time=start_time or time_ns(),
            instrumentation_scope=self._scope,
        )


class _QuickSpan(Span, ReadableSpan):
    """One that a single task begins and ends; values are taken as they are."""

    def __init__(
        self, on_end: Callable[[ReadableSpan], None], told: dict[str, AttributeValue], **fields: object
    ) -> None:
        ReadableSpan.__init__(self, attributes=told, **fields)  # pyright: ignore[reportArgumentType]
        self._told = told
        self._on_end = on_end
        self._ended = False

    @override
    def get_span_context(self) -> SpanContext:
        return self._context or INVALID_SPAN_CONTEXT

    @override
    def is_recording(self) -> bool:
        return not self._ended

    @override
    def set_attribute(self, key: str, value: AttributeValue) -> None:
        self._told[key] = value

    @override
    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        self._told.update(attributes)

    @override
    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        self._status = status if isinstance(status, Status) else Status(status, description)

    @override
    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        self._events = (*self._events, Event(name, attributes, timestamp))

    @override
    def update_name(self, name: str) -> None:
        self._name = name

    @override
    def record_exception(self, *_: object, **__: object) -> Never:
        raise NotImplementedError("errors are told by their kinds, never in their words")

    @override
    def end(self, end_time: int | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._end_time = end_time or time_ns()
            self._on_end(self)


# --- sent -------------------------------------------------------------------------------------------------------


_LARGEST = 64 << 20


class QuickExporter(OTLPSpanExporter):
    """The SDK's exporter over OTLP/HTTP, which writes its requests itself; what it cannot write goes the SDK's way."""

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            request = request_of(spans)
            send = self._client.export  # no part of what the SDK promises
        except Exception:
            return super().export(spans)
        if self._shutdown or len(request) > _LARGEST:
            return super().export(spans)  # which has words for it
        return SpanExportResult.SUCCESS if send(request).success else SpanExportResult.FAILURE


class Unusual(Exception):
    """A span holds something that is not written here."""


def request_of(spans: Sequence[ReadableSpan]) -> bytes:
    """An ExportTraceServiceRequest, equal to what `encode_spans` makes of them; raises Unusual."""
    written: list[bytes] = []
    for _, alike in groupby(spans, lambda span: (id(span.resource), id(span.instrumentation_scope))):
        group = list(alike)
        told, scoped = _around(group[0])
        body = scoped + b"".join(_field(b"\x12", _span(span)) for span in group)
        written.append(_field(b"\x0a", told + _field(b"\x12", body)))
    return b"".join(written)


def _around(span: ReadableSpan) -> tuple[bytes, bytes]:
    """What is said of its resource and of its scope, once for all of a batch: the SDK writes it."""
    bare = ReadableSpan(
        "",
        INVALID_SPAN_CONTEXT,
        resource=span.resource,
        instrumentation_scope=span.instrumentation_scope,
    )
    told = encode_spans([bare]).resource_spans[0]
    scoped = told.scope_spans[0]
    scoped.ClearField("spans")
    written = scoped.SerializePartialToString()
    told.ClearField("scope_spans")
    return told.SerializePartialToString(), written


_TIMES = struct.Struct("<BQBQ").pack
_DOUBLE = struct.Struct("<Bd").pack
_FLAGS = struct.Struct("<HI").pack
_IS_KNOWN, _IS_REMOTE = 0x100, 0x200


def _span(span: ReadableSpan) -> bytes:
    if span.events or span.links or span.dropped_attributes:
        raise Unusual
    context, parent = span.get_span_context() or INVALID_SPAN_CONTEXT, span.parent
    written = [
        b"\x0a\x10",
        context.trace_id.to_bytes(16),
        b"\x12\x08",
        context.span_id.to_bytes(8),
    ]
    if context.trace_state:
        written.append(_text(b"\x1a", context.trace_state.to_header()))
    flags = _IS_KNOWN
    if parent is not None:
        written += (b"\x22\x08", parent.span_id.to_bytes(8))
        flags |= _IS_REMOTE if parent.is_remote else 0
    written += (
        _text(b"\x2a", span.name),
        bytes((0x30, span.kind.value + 1)),
        _TIMES(0x39, span.start_time or 0, 0x41, span.end_time or 0),
    )
    for key, value in (span.attributes or {}).items():
        written.append(_field(b"\x4a", _text(b"\x0a", key) + _field(b"\x12", _value(value))))
    status = _text(b"\x12", span.status.description) if span.status.description else b""
    if span.status.status_code is not StatusCode.UNSET:
        status += bytes((0x18, span.status.status_code.value))
    written += (_field(b"\x7a", status), _FLAGS(0x0185, flags))
    return b"".join(written)


def _value(value: AttributeValue) -> bytes:
    match value:
        case str():
            return _text(b"\x0a", value)
        case bool():
            return b"\x10\x01" if value else b"\x10\x00"
        case int():
            return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
        case float():
            return _DOUBLE(0x21, value)
        case list() | tuple():
            return _field(b"\x2a", b"".join(_field(b"\x0a", _value(each)) for each in value))
        case _:
            raise Unusual


def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, text.encode(errors="replace"))


def _field(tag: bytes, body: bytes) -> bytes:
    size = len(body)
    return tag + (bytes((size,)) if size < 128 else _varint(size)) + body


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)
