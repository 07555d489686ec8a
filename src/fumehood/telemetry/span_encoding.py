"""Spans as OTLP, written in place into the message that is sent.

The SDK makes a message of each attribute, span and scope, and protobuf copies each into the one around it: 39 µs for a
span with 13 attributes. Written in place it takes 15 (decision 0085).
"""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.util import types

_KINDS = {kind: Span.SpanKind.Value(f"SPAN_KIND_{kind.name}") for kind in SpanKind}
_STATUS_CODES = {code: Status.StatusCode.Value(f"STATUS_CODE_{code.name}") for code in StatusCode}
_PARENT_IS_LOCAL = int(SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK)
_PARENT_IS_REMOTE = _PARENT_IS_LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


def use_in_place_encoding() -> None:
    """Let the SDK's exporter encode with this module. If it no longer asks this name, it encodes by itself."""
    trace_exporter.encode_spans = encode_spans  # pyright: ignore[reportPrivateImportUsage]


def encode_spans(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """Return what the SDK's function of this name returns. What our spans do not have is left to that."""
    request = trace_encoder.encode_spans(spans[:1])  # with the resource and the scope
    if not spans or any(not _has_same_scope(span, spans[0]) for span in spans):
        return trace_encoder.encode_spans(spans)
    encoded = request.resource_spans[0].scope_spans[0].spans
    for span in spans[1:]:
        try:
            _write_span(encoded.add(), span)
        except (TypeError, ValueError):
            del encoded[-1]
            encoded.extend(trace_encoder.encode_spans([span]).resource_spans[0].scope_spans[0].spans)
    return request


def _has_same_scope(span: ReadableSpan, other: ReadableSpan) -> bool:
    return span.resource is other.resource and span.instrumentation_scope is other.instrumentation_scope


def _write_span(target: Span, span: ReadableSpan) -> None:
    """Raise TypeError or ValueError for what has to be encoded by the SDK."""
    context, parent = span.context, span.parent
    if context is None or span.events or span.links or span.dropped_attributes:
        raise TypeError("only the SDK encodes events, links and what was dropped")
    target.trace_id = context.trace_id.to_bytes(16, "big")
    target.span_id = context.span_id.to_bytes(8, "big")
    if context.trace_state:
        target.trace_state = context.trace_state.to_header()
    target.flags = _PARENT_IS_LOCAL
    if parent is not None:
        target.parent_span_id = parent.span_id.to_bytes(8, "big")
        if parent.is_remote:
            target.flags = _PARENT_IS_REMOTE
    target.name = span.name
    target.kind = _KINDS[span.kind]
    target.start_time_unix_nano = span.start_time or 0
    target.end_time_unix_nano = span.end_time or 0
    target.status.code = _STATUS_CODES[span.status.status_code]
    if span.status.description:
        target.status.message = span.status.description
    attributes = target.attributes
    for name, value in (span.attributes or {}).items():
        attribute = attributes.add()
        attribute.key = name
        _write_value(attribute.value, value)


def _write_value(target: AnyValue, value: types.AnyValue) -> None:
    match value:
        case str():
            target.string_value = value
        case bool():  # before int, of which it is a kind
            target.bool_value = value
        case int():
            target.int_value = value
        case float():
            target.double_value = value
        case [_, *_]:
            values = target.array_value.values
            for each in value:
                _write_value(values.add(), each)
        case _:
            raise TypeError("only the SDK encodes such values")
