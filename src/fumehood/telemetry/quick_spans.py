"""Spans of OpenTelemetry's that cost little to make and to send; imports its API, SDK and exporter.

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


class Known(msgspec.Struct, frozen=True):
    """What is known when a span begins: facts that are small, and much the same from one to the next."""

    kind: ClassVar[SpanKind] = SpanKind.INTERNAL

    def title(self) -> str:
        return ""

    def attributes(self) -> Attributes:
        return {}


class _Place(NamedTuple):
    """All of a span that the SDK's processor looks at before it hands that on to the exporter."""

    trace_flags: TraceFlags


class QuickSpan(msgspec.Struct, eq=False, kw_only=True):
    """Something that a single task begins and ends, and that is told as a span.

    began_at: nanoseconds since 1970. took: nanoseconds, 0 until it has ended.
    error: what kind of error it ended with, empty if with none; a code or a type, never a sentence.
    trace_id, span_id, flags, state: its place in a trace, all zero until a tracer has given it one.
    parent_id: that of the span above, 0 if there is none. is_remote: whether that is somebody else's.
    besides: what others have to tell of it.
    """

    began_at: int = msgspec.field(default_factory=time_ns)
    took: int = 0
    error: str = ""
    trace_id: int = 0
    span_id: int = 0
    flags: int = 0
    state: TraceState | None = None
    parent_id: int = 0
    is_remote: bool = False
    besides: Attributes = {}
    context: ClassVar = _Place(TraceFlags(TraceFlags.SAMPLED))

    # ---- what there is to tell. It is asked for when it is sent, by another thread ----

    def known(self) -> Known:
        return Known()

    def told(self) -> dict[str, AttributeValue]:
        """Everything that has come to what was known."""
        return {}

    # ---- where it is ----

    @property
    def sampled(self) -> bool:
        return bool(self.flags & TraceFlags.SAMPLED)

    def place(self) -> SpanContext:
        """As the SDK has it."""
        return SpanContext(self.trace_id, self.span_id, False, TraceFlags(self.flags), self.state)

    def within(self) -> Context:
        """For whatever of the SDK's belongs to it."""
        return set_span_in_context(NonRecordingSpan(self.place()), Context())


class QuickTracer:
    """Begins spans as a tracer of the SDK does. `send` takes those that have ended and were sampled."""

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        self._sampler = provider.sampler
        self._follows = _follows(provider.sampler)
        self._takes_all = provider.sampler is DEFAULT_ON
        ids = provider.id_generator
        self._new_trace_id, self._new_span_id = ids.generate_trace_id, ids.generate_span_id
        if type(ids) is RandomIdGenerator:  # the same, without the way there
            self._new_trace_id, self._new_span_id = partial(getrandbits, 128), partial(getrandbits, 64)
        self._random = TraceFlags.RANDOM_TRACE_ID if ids.is_trace_id_random() else TraceFlags.DEFAULT
        self._taken = TraceFlags.SAMPLED | self._random
        # The SDK looks once more whether it was sampled, if one goes by what it promises.
        send = getattr(getattr(processor, "_batch_processor", None), "emit", processor.on_end)
        self.send = cast("Callable[[QuickSpan], None]", send)

    def begin(self, span: QuickSpan, parent: QuickSpan | Context) -> None:
        """Give it its place. parent: one of ours, or what a caller says, if anything."""
        if isinstance(parent, QuickSpan):
            if not self._follows:
                self._ask(span, parent.within())
                return
            span.trace_id, span.flags = parent.trace_id, parent.flags
            span.state, span.parent_id = parent.state, parent.span_id
        elif parent or not self._takes_all:
            self._ask(span, parent)
            return
        else:
            span.trace_id, span.flags = self._new_trace_id(), self._taken
        span.span_id = self._new_span_id()

    def _ask(self, span: QuickSpan, within: Context) -> None:
        """The sampler has its say, and may have something to tell."""
        above = get_current_span(within).get_span_context()
        known = span.known()
        attributes = known.attributes()
        span.trace_id = above.trace_id if above.is_valid else self._new_trace_id()
        said = self._sampler.should_sample(within, span.trace_id, known.title(), known.kind, attributes)
        flags = TraceFlags.SAMPLED if said.decision.is_sampled() else TraceFlags.DEFAULT
        span.flags = flags | (
            above.trace_flags & TraceFlags.RANDOM_TRACE_ID if above.is_valid else self._random
        )
        span.span_id, span.state = self._new_span_id(), said.trace_state
        span.parent_id, span.is_remote = above.span_id, above.is_remote
        told = cast("Attributes", said.attributes)  # pyright: ignore[reportUnknownMemberType]
        if told != attributes:
            span.besides = {key: value for key, value in told.items() if key not in attributes}


def _follows(sampler: Sampler) -> bool:
    """Whether it says of what is begun here what it has said of the span above, as those of the variables do that are
    called after parents. Then it need not be asked.
    """
    usual = DEFAULT_ON.get_description()
    return type(sampler).should_sample is ParentBased.should_sample and sampler.get_description().endswith(
        usual[usual.index(",localParentSampled") :]
    )


# --- sent -------------------------------------------------------------------------------------------------------


_LARGEST = 64 << 20


class QuickExporter(OTLPSpanExporter):
    """The SDK's exporter over OTLP/HTTP, which writes its requests itself."""

    def __init__(self, resource: Resource, scope: InstrumentationScope, **settings: Any) -> None:
        super().__init__(**settings)
        self._readable = partial(readable, resource, scope)
        self._request_of = Writer(resource, scope).request_of

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        ended = cast("Sequence[QuickSpan]", spans)
        request = self._request_of(ended)
        send = getattr(getattr(self, "_client", None), "export", None)  # no part of what the SDK promises
        if send is None or self._shutdown or len(request) > _LARGEST:
            return super().export([self._readable(span) for span in ended])  # which has words for it
        return SpanExportResult.SUCCESS if send(request).success else SpanExportResult.FAILURE


def readable(resource: Resource, scope: InstrumentationScope, span: QuickSpan) -> ReadableSpan:
    """As the SDK would have it."""
    known = span.known()
    return ReadableSpan(
        known.title(),
        span.place(),
        SpanContext(span.trace_id, span.parent_id, span.is_remote) if span.parent_id else None,
        resource,
        {**known.attributes(), **_come(span)},
        kind=known.kind,
        status=Status(StatusCode.ERROR if span.error else StatusCode.UNSET),
        start_time=span.began_at,
        end_time=span.began_at + span.took,
        instrumentation_scope=scope,
    )


def _come(span: QuickSpan) -> dict[str, AttributeValue]:
    """To what was known of it."""
    found = span.told()
    if span.besides:
        found |= span.besides
    if span.error:
        found["error.type"] = span.error
    return found


class Writer:
    """Writes requests, in which every span is of the same resource and scope."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        self._readable = partial(readable, resource, scope)
        told = self._by_the_sdk(QuickSpan())
        scoped = told.scope_spans[0]
        scoped.ClearField("spans")
        self._scope = scoped.SerializePartialToString()
        told.ClearField("scope_spans")
        self._resource = told.SerializePartialToString()

    def request_of(self, spans: Sequence[QuickSpan]) -> bytes:
        """An ExportTraceServiceRequest, equal to what `encode_spans` makes of them."""
        written = [self._scope]
        for span in spans:
            try:
                written.append(_field(b"\x12", self._span(span)))
            except Exception as error:  # without its words: what was said may be among them
                logger.error("telemetry: a span is left out: %s", type(error).__name__)
        return _field(b"\x0a", self._resource + _field(b"\x12", b"".join(written)))

    def _span(self, span: QuickSpan) -> bytes:
        try:
            return _span(span)
        except _Unusual:
            return self._by_the_sdk(span).scope_spans[0].spans[0].SerializePartialToString()

    def _by_the_sdk(self, span: QuickSpan) -> ResourceSpans:
        return encode_spans([self._readable(span)]).resource_spans[0]


class _Unusual(Exception):
    """A sampler has told something that is not written here."""


_IDS = struct.Struct(">H16sHQ").pack
_PARENT = struct.Struct(">HQ").pack
_TIMES = struct.Struct("<BQBQ").pack
_DOUBLE = struct.Struct("<Bd").pack
_LOCAL, _REMOTE = (struct.pack("<HI", 0x0185, flags) for flags in (0x100, 0x300))  # where the parent is
_FINE = b"\x7a\x00"
_FAILED = bytes((0x7A, 2, 0x18, StatusCode.ERROR.value))


def _span(span: QuickSpan) -> bytes:
    began_at = span.began_at
    written = [_IDS(0x0A10, span.trace_id.to_bytes(16), 0x1208, span.span_id)]
    if span.state:
        written.append(_text(b"\x1a", span.state.to_header()))
    if span.parent_id:
        written.append(_PARENT(0x2208, span.parent_id))
    written += _TIMES(0x39, began_at, 0x41, began_at + span.took), _known(span.known())
    written += [
        _number(key, value) if type(value) is int else _attribute(key, value)
        for key, value in _come(span).items()
    ]
    written += _FAILED if span.error else _FINE, _REMOTE if span.is_remote else _LOCAL
    return b"".join(written)


@lru_cache(maxsize=1024)
def _known(known: Known) -> bytes:
    title = _text(b"\x2a", known.title()) + bytes((0x30, known.kind.value + 1))
    return title + b"".join(_attribute(key, value) for key, value in known.attributes().items())


def _attribute(key: str, value: AttributeValue) -> bytes:
    """Nearly all of them are short, and are written in one step."""
    if type(value) is str:
        text = value.encode(errors="replace")
        name, size = _key(key), len(text)
        if len(name) + size < 120:
            return b"J%c%b\x12%c\n%c%b" % (len(name) + size + 4, name, size + 2, size, text)
    elif type(value) is float:
        name = _key(key)
        if len(name) < 110:
            return b"J%c%b\x12\t%b" % (len(name) + 11, name, _DOUBLE(0x21, value))
    elif isinstance(value, tuple) and len(value) == 1 and isinstance(word := value[0], str):
        return _word(key, word)
    return _written(key, value)


def _written(key: str, value: AttributeValue) -> bytes:
    return _field(b"J", _key(key) + _field(b"\x12", _value(value)))


@lru_cache(maxsize=4096)
def _number(key: str, number: int) -> bytes:
    """Numbers of tokens come again and again."""
    return _written(key, number)


@lru_cache(maxsize=256)
def _word(key: str, word: str) -> bytes:
    """So do the reasons why models stop, which are lists of one word."""
    return _written(key, (word,))


def _value(value: AttributeValue) -> bytes:
    match value:
        case str():
            return _text(b"\x0a", value)
        case bool():
            return b"\x10\x01" if value else b"\x10\x00"
        case int():
            return b"\x18" + (_SMALL[value] if 0 <= value < 128 else _varint(value & 0xFFFF_FFFF_FFFF_FFFF))
        case float():
            return _DOUBLE(0x21, value)
        case list() | tuple():
            return _field(b"\x2a", b"".join([_field(b"\x0a", _value(each)) for each in value]))
        case _:
            raise _Unusual


def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, text.encode(errors="replace"))


def _field(tag: bytes, body: bytes) -> bytes:
    size = len(body)
    return tag + (_SMALL[size] if size < 128 else _varint(size)) + body


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


_SMALL = [_varint(number) for number in range(128)]
_key = lru_cache(maxsize=256)(partial(_text, b"\x0a"))  # there are not many
