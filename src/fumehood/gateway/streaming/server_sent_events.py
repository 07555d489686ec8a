"""Encodes and sends the events of a run as server-sent events.

Events that are available together share one write. Only events that can need projection are projected.
"""

from collections.abc import Collection, Sequence

import msgspec

from fumehood.gateway.gateway_exchange import ClientConnectionMonitor, GatewayExchange
from fumehood.gateway.streaming.event_sender import NEEDS_PROJECTION, EventSender
from fumehood.interfaces import ReadableRun
from fumehood.protocol.openai.response_projection import project_event
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import OutputTextDelta, StreamEvent

KEEPALIVE_SECONDS = 15.0
DONE_EVENT = b"data: [DONE]\n\n"
KEEPALIVE_COMMENT = b": still here\n\n"
SSE_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
_EVENT_END = b"\n\n"
# A raw line break can only stand between JSON tokens, where a space is as good.
_NEWLINES_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")
# Some clients treat these as line ends.
_UNICODE_LINE_BREAKS = (
    (b"\xc2", "\u0085".encode(), rb"\u0085"),
    (b"\xe2", "\u2028".encode(), rb"\u2028"),
    (b"\xe2", "\u2029".encode(), rb"\u2029"),
)

_encoder = msgspec.json.Encoder()
_encode = _encoder.encode
_encode_into = _encoder.encode_into


class _EventPrefixes(dict[type[StreamEvent], tuple[bytes, bool]]):
    """The bytes before the JSON of an event and whether it needs projection, by class."""

    def __missing__(self, kind: type[StreamEvent]) -> tuple[bytes, bool]:
        name = str(kind.__struct_config__.tag)
        entry = self[kind] = (f"event: {name}\ndata: ".encode(), NEEDS_PROJECTION[kind])
        return entry


_EVENT_PREFIXES = _EventPrefixes()


def encode_batch(
    events: Sequence[StreamEvent], include: Collection[str], max_bytes: int
) -> tuple[bytearray, int]:
    """See `EventEncoder.encode_batch`."""
    buffer = bytearray()
    number = 0
    for event in events:
        number += 1
        prefix, needs_projection = _EVENT_PREFIXES[type(event)]
        if needs_projection or (type(event) is OutputTextDelta and event.logprobs):
            projected = project_event(event, include)
            buffer += _EVENT_PREFIXES[type(projected)][0]
            body = _encode(projected)
            buffer += body if b"\n" not in body and b"\r" not in body else body.translate(_NEWLINES_TO_SPACES)
        else:
            buffer += prefix
            _encode_into(event, buffer, -1)
        buffer += _EVENT_END
        if len(buffer) >= max_bytes:
            break
    if not buffer.isascii():
        for lead, raw, escaped in _UNICODE_LINE_BREAKS:
            if lead in buffer and raw in buffer:  # searching for one byte takes a tenth of the time
                buffer = buffer.replace(raw, escaped)
    return buffer, number


class SseEncoder:
    """The `EventEncoder` for server-sent events."""

    encode_batch = staticmethod(encode_batch)

    def append_end(self, last: bytearray) -> bytearray:
        return last + DONE_EVENT


_SSE_ENCODER = SseEncoder()


async def send_run(
    exchange: GatewayExchange,
    run: ReadableRun,
    include: Collection[str],
    keepalive_seconds: float = KEEPALIVE_SECONDS,
) -> tuple[int, Response | None]:
    """Stream a run; cancel it if the client disconnects.

    Returns the number of events sent and the terminal response, None if the client disconnected before it.
    """
    await exchange.start_response(200, [*SSE_HEADERS])
    sender = EventSender(exchange, run, include, _SSE_ENCODER)
    with ClientConnectionMonitor(
        exchange, sender.disconnect, keepalive=KEEPALIVE_COMMENT, interval=keepalive_seconds
    ):
        await sender.run()
    return sender.sent_count, sender.response
