"""Spans of OpenTelemetry's that cost little to make and to send.

The SDK's own are made for everybody: with locks, limits and checks of every value, and each is built once more from
protobuf's classes before it is sent. Here one task ends what it began and the values are ours. So a span is a few
fields while the event loop has it. What is told of it is asked for by the thread that sends it, and is written as
bytes. Sampler, ids, resource, batches and sending are the SDK's.
"""

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from random import getrandbits
from time import time_ns
from typing import Any, ClassVar, NamedTuple, cast, override

import msgspec
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, ParentBased, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

type Attributes = Mapping[str, AttributeValue]

logger = logging.getLogger(__name__)

# --- made -------------------------------------------------------------------------------------------------------


class StartAttributes(msgspec.Struct, frozen=True):
    """What is known when a span begins: facts that are small, and much the same from one to the next."""

    kind: ClassVar[SpanKind] = SpanKind.INTERNAL

    def span_name(self) -> str:
        return ""

    def build_attributes(self) -> Attributes:
        return {}


class _SampledContext(NamedTuple):
    """All of a span that the SDK's processor looks at before it hands that on to the exporter."""

    trace_flags: TraceFlags


class EncodableSpan(msgspec.Struct, eq=False, kw_only=True):
    """Something that a single task begins and ends, and that is told as a span.

    began_at: nanoseconds since 1970. took: nanoseconds, 0 until it has ended.
    error: what kind of error it ended with, empty if with none; a code or a type, never a sentence.
    trace_id, span_id, flags, state: its place in a trace, all zero until a tracer has given it one.
    parent_id: that of the span above, 0 if there is none. is_remote: whether that is somebody else's.
    besides: what others have to tell of it.
    """

    started_at_ns: int = msgspec.field(default_factory=time_ns)
    duration_ns: int = 0
    error: str = ""
    trace_id: int = 0
    span_id: int = 0
    trace_flags: int = 0
    trace_state: TraceState | None = None
    parent_span_id: int = 0
    has_remote_parent: bool = False
    extra_attributes: Attributes = {}
    context: ClassVar = _SampledContext(TraceFlags(TraceFlags.SAMPLED))

    # ---- what there is to tell. It is asked for when it is sent, by another thread ----

    def start_attributes(self) -> StartAttributes:
        return StartAttributes()

    def end_attributes(self) -> dict[str, AttributeValue]:
        """Everything that has come to what was known."""
        return {}

    # ---- where it is ----

    @property
    def is_sampled(self) -> bool:
        return bool(self.trace_flags & TraceFlags.SAMPLED)

    def span_context(self) -> SpanContext:
        """As the SDK has it."""
        return SpanContext(self.trace_id, self.span_id, False, TraceFlags(self.trace_flags), self.trace_state)

    def as_context(self) -> Context:
        """For whatever of the SDK's belongs to it."""
        return set_span_in_context(NonRecordingSpan(self.span_context()), Context())


class EncodingTracer:
    """Begins spans as a tracer of the SDK does. `send` takes those that have ended and were sampled."""

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        self._sampler = provider.sampler
        self._inherits_decision = _inherits_parent_decision(provider.sampler)
        self._samples_all = provider.sampler is DEFAULT_ON
        ids = provider.id_generator
        self._new_trace_id, self._new_span_id = ids.generate_trace_id, ids.generate_span_id
        if type(ids) is RandomIdGenerator:  # the same, without the way there
            self._new_trace_id, self._new_span_id = partial(getrandbits, 128), partial(getrandbits, 64)
        self._random_flag = TraceFlags.RANDOM_TRACE_ID if ids.is_trace_id_random() else TraceFlags.DEFAULT
        self._sampled_flags = TraceFlags.SAMPLED | self._random_flag
        # The SDK looks once more whether it was sampled, if one goes by what it promises.
        send = getattr(getattr(processor, "_batch_processor", None), "emit", processor.on_end)
        self.export = cast("Callable[[EncodableSpan], None]", send)

    def start_span(self, span: EncodableSpan, parent: EncodableSpan | Context) -> None:
        """Give it its place. parent: one of ours, or what a caller says, if anything."""
        if isinstance(parent, EncodableSpan):
            if not self._inherits_decision:
                self._ask_sampler(span, parent.as_context())
                return
            span.trace_id, span.trace_flags = parent.trace_id, parent.trace_flags
            span.trace_state, span.parent_span_id = parent.trace_state, parent.span_id
        elif parent or not self._samples_all:
            self._ask_sampler(span, parent)
            return
        else:
            span.trace_id, span.trace_flags = self._new_trace_id(), self._sampled_flags
        span.span_id = self._new_span_id()

    def _ask_sampler(self, span: EncodableSpan, within: Context) -> None:
        """The sampler has its say, and may have something to tell."""
        above = get_current_span(within).get_span_context()
        known = span.start_attributes()
        attributes = known.build_attributes()
        span.trace_id = above.trace_id if above.is_valid else self._new_trace_id()
        said = self._sampler.should_sample(within, span.trace_id, known.span_name(), known.kind, attributes)
        flags = TraceFlags.SAMPLED if said.decision.is_sampled() else TraceFlags.DEFAULT
        span.trace_flags = flags | (
            above.trace_flags & TraceFlags.RANDOM_TRACE_ID if above.is_valid else self._random_flag
        )
        span.span_id, span.trace_state = self._new_span_id(), said.trace_state
        span.parent_span_id, span.has_remote_parent = above.span_id, above.is_remote
        told = cast("Attributes", said.attributes)  # pyright: ignore[reportUnknownMemberType]
        if told != attributes:
            span.extra_attributes = {key: value for key, value in told.items() if key not in attributes}


def _inherits_parent_decision(sampler: Sampler) -> bool:
    """Whether it says of what is begun here what it has said of the span above, as those of the variables do that are
    called after parents. Then it need not be asked.
    """
    usual = DEFAULT_ON.get_description()
    return type(sampler).should_sample is ParentBased.should_sample and sampler.get_description().endswith(
        usual[usual.index(",localParentSampled") :]
    )


# --- sent -------------------------------------------------------------------------------------------------------


_MAX_REQUEST_BYTES = 64 << 20


class EncodingSpanExporter(OTLPSpanExporter):
    """The SDK's exporter over OTLP/HTTP, which writes its requests itself."""

    def __init__(self, resource: Resource, scope: InstrumentationScope, **settings: Any) -> None:
        super().__init__(**settings)
        self._to_readable_span = partial(to_readable_span, resource, scope)
        self._encode_request = OtlpSpanEncoder(resource, scope).encode_request

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        ended = cast("Sequence[EncodableSpan]", spans)
        request = self._encode_request(ended)
        send = getattr(getattr(self, "_client", None), "export", None)  # no part of what the SDK promises
        if send is None or self._shutdown or len(request) > _MAX_REQUEST_BYTES:
            return super().export([self._to_readable_span(span) for span in ended])  # which has words for it
        return SpanExportResult.SUCCESS if send(request).success else SpanExportResult.FAILURE


def to_readable_span(resource: Resource, scope: InstrumentationScope, span: EncodableSpan) -> ReadableSpan:
    """As the SDK would have it."""
    known = span.start_attributes()
    return ReadableSpan(
        known.span_name(),
        span.span_context(),
        SpanContext(span.trace_id, span.parent_span_id, span.has_remote_parent)
        if span.parent_span_id
        else None,
        resource,
        {**known.build_attributes(), **_end_attributes_of(span)},
        kind=known.kind,
        status=Status(StatusCode.ERROR if span.error else StatusCode.UNSET),
        start_time=span.started_at_ns,
        end_time=span.started_at_ns + span.duration_ns,
        instrumentation_scope=scope,
    )


def _end_attributes_of(span: EncodableSpan) -> dict[str, AttributeValue]:
    """To what was known of it."""
    found = span.end_attributes()
    if span.extra_attributes:
        found |= span.extra_attributes
    if span.error:
        found["error.type"] = span.error
    return found


class OtlpSpanEncoder:
    """Writes requests, in which every span is of the same resource and scope."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        self._to_readable_span = partial(to_readable_span, resource, scope)
        told = self._encode_with_sdk(EncodableSpan())
        scoped = told.scope_spans[0]
        scoped.ClearField("spans")
        self._encoded_scope = scoped.SerializePartialToString()
        told.ClearField("scope_spans")
        self._encoded_resource = told.SerializePartialToString()

    def encode_request(self, spans: Sequence[EncodableSpan]) -> bytes:
        """An ExportTraceServiceRequest, equal to what `encode_spans` makes of them."""
        written = [self._encoded_scope]
        for span in spans:
            try:
                written.append(_encode_field(b"\x12", self._encode_span(span)))
            except Exception as error:  # without its words: what was said may be among them
                logger.error("telemetry: a span is left out: %s", type(error).__name__)
        return _encode_field(b"\x0a", self._encoded_resource + _encode_field(b"\x12", b"".join(written)))

    def _encode_span(self, span: EncodableSpan) -> bytes:
        try:
            return _encode_span(span)
        except _UnsupportedValue:
            return self._encode_with_sdk(span).scope_spans[0].spans[0].SerializePartialToString()

    def _encode_with_sdk(self, span: EncodableSpan) -> ResourceSpans:
        return encode_spans([self._to_readable_span(span)]).resource_spans[0]


class _UnsupportedValue(Exception):
    """A sampler has told something that is not written here."""


_PACK_IDS = struct.Struct(">H16sHQ").pack
_PACK_PARENT = struct.Struct(">HQ").pack
_PACK_TIMES = struct.Struct("<BQBQ").pack
_PACK_DOUBLE = struct.Struct("<Bd").pack
_LOCAL_PARENT_FLAGS, _REMOTE_PARENT_FLAGS = (
    struct.pack("<HI", 0x0185, flags) for flags in (0x100, 0x300)
)  # where the parent is
_STATUS_UNSET = b"\x7a\x00"
_STATUS_ERROR = bytes((0x7A, 2, 0x18, StatusCode.ERROR.value))


def _encode_span(span: EncodableSpan) -> bytes:
    began_at = span.started_at_ns
    written = [_PACK_IDS(0x0A10, span.trace_id.to_bytes(16), 0x1208, span.span_id)]
    if span.trace_state:
        written.append(_encode_text(b"\x1a", span.trace_state.to_header()))
    if span.parent_span_id:
        written.append(_PACK_PARENT(0x2208, span.parent_span_id))
    written += (
        _PACK_TIMES(0x39, began_at, 0x41, began_at + span.duration_ns),
        _encode_start_attributes(span.start_attributes()),
    )
    written += [
        _encode_int_attribute(key, value) if type(value) is int else _encode_attribute(key, value)
        for key, value in _end_attributes_of(span).items()
    ]
    written += (
        _STATUS_ERROR if span.error else _STATUS_UNSET,
        _REMOTE_PARENT_FLAGS if span.has_remote_parent else _LOCAL_PARENT_FLAGS,
    )
    return b"".join(written)


@lru_cache(maxsize=1024)
def _encode_start_attributes(known: StartAttributes) -> bytes:
    title = _encode_text(b"\x2a", known.span_name()) + bytes((0x30, known.kind.value + 1))
    return title + b"".join(_encode_attribute(key, value) for key, value in known.build_attributes().items())


def _encode_attribute(key: str, value: AttributeValue) -> bytes:
    """Nearly all of them are short, and are written in one step."""
    if type(value) is str:
        text = value.encode(errors="replace")
        name, size = _encode_key(key), len(text)
        if len(name) + size < 120:
            return b"J%c%b\x12%c\n%c%b" % (len(name) + size + 4, name, size + 2, size, text)
    elif type(value) is float:
        name = _encode_key(key)
        if len(name) < 110:
            return b"J%c%b\x12\t%b" % (len(name) + 11, name, _PACK_DOUBLE(0x21, value))
    elif isinstance(value, tuple) and len(value) == 1 and isinstance(word := value[0], str):
        return _encode_single_word(key, word)
    return _encode_key_value(key, value)


def _encode_key_value(key: str, value: AttributeValue) -> bytes:
    return _encode_field(b"J", _encode_key(key) + _encode_field(b"\x12", _encode_value(value)))


@lru_cache(maxsize=4096)
def _encode_int_attribute(key: str, number: int) -> bytes:
    """Numbers of tokens come again and again."""
    return _encode_key_value(key, number)


@lru_cache(maxsize=256)
def _encode_single_word(key: str, word: str) -> bytes:
    """So do the reasons why models stop, which are lists of one word."""
    return _encode_key_value(key, (word,))


def _encode_value(value: AttributeValue) -> bytes:
    match value:
        case str():
            return _encode_text(b"\x0a", value)
        case bool():
            return b"\x10\x01" if value else b"\x10\x00"
        case int():
            return b"\x18" + (
                _SMALL_VARINTS[value] if 0 <= value < 128 else _encode_varint(value & 0xFFFF_FFFF_FFFF_FFFF)
            )
        case float():
            return _PACK_DOUBLE(0x21, value)
        case list() | tuple():
            return _encode_field(
                b"\x2a", b"".join([_encode_field(b"\x0a", _encode_value(each)) for each in value])
            )
        case _:
            raise _UnsupportedValue


def _encode_text(tag: bytes, text: str) -> bytes:
    return _encode_field(tag, text.encode(errors="replace"))


def _encode_field(tag: bytes, body: bytes) -> bytes:
    size = len(body)
    return tag + (_SMALL_VARINTS[size] if size < 128 else _encode_varint(size)) + body


def _encode_varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


_SMALL_VARINTS = [_encode_varint(number) for number in range(128)]
_encode_key = lru_cache(maxsize=256)(partial(_encode_text, b"\x0a"))  # there are not many
