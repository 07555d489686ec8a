"""The events of a run as server-sent events.

Every event is whole in one write, and those that are there at once share one; what need not be projected is not.
"""

import sys
from collections.abc import Collection, Sequence

import msgspec

from fumehood.gateway.request_context import DisconnectMonitor, RequestContext
from fumehood.gateway.streaming.event_sender import NEEDS_PROJECTION, EventSender
from fumehood.interfaces import Run
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
# A line break between two tokens of JSON is as good as a space; inside a string there is none.
_NEWLINES_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")
# Some readers take these for the end of a line.
_UNICODE_LINE_BREAKS = (
    (b"\xc2", "\u0085".encode(), rb"\u0085"),
    (b"\xe2", "\u2028".encode(), rb"\u2028"),
    (b"\xe2", "\u2029".encode(), rb"\u2029"),
)

_encoder = msgspec.json.Encoder()
_encode = _encoder.encode
_encode_into = _encoder.encode_into


class _EventPrefixes(dict[type[StreamEvent], tuple[bytes, bool]]):
    """By the class of an event: what stands before its JSON, and whether it has to be looked at closely."""

    def __missing__(self, kind: type[StreamEvent]) -> tuple[bytes, bool]:
        name = str(kind.__struct_config__.tag)
        form = self[kind] = (f"event: {name}\ndata: ".encode(), NEEDS_PROJECTION[kind])
        return form


_EVENT_PREFIXES = _EventPrefixes()


def encode_events(events: Sequence[StreamEvent], include: Collection[str]) -> bytearray:
    """The events as they go over the wire, projected, in one piece."""
    return encode_batch(events, include, sys.maxsize)[0]


def encode_batch(
    events: Sequence[StreamEvent], include: Collection[str], max_bytes: int
) -> tuple[bytearray, int]:
    """As `encode_events`, for the first of them, up to the one that makes it `most` bytes; and how many they are."""
    buffer = bytearray()
    number = 0
    for event in events:
        number += 1
        head, delicate = _EVENT_PREFIXES[type(event)]
        if delicate or (type(event) is OutputTextDelta and event.logprobs):
            shown = project_event(event, include)
            buffer += _EVENT_PREFIXES[type(shown)][0]
            body = _encode(shown)
            buffer += body if b"\n" not in body and b"\r" not in body else body.translate(_NEWLINES_TO_SPACES)
        else:
            buffer += head
            _encode_into(event, buffer, -1)
        buffer += _EVENT_END
        if len(buffer) >= max_bytes:
            break
    if not buffer.isascii():
        for lead, written, escaped in _UNICODE_LINE_BREAKS:
            if lead in buffer and written in buffer:  # to look for one byte takes a tenth of the time
                buffer = buffer.replace(written, escaped)
    return buffer, number


class SseEncoder:
    """The `Wire` of server-sent events."""

    encode_batch = staticmethod(encode_batch)

    def append_end(self, last: bytearray) -> bytearray:
        return last + DONE_EVENT


_SSE_ENCODER = SseEncoder()


async def send_run(
    context: RequestContext, run: Run, include: Collection[str], keepalive_seconds: float = KEEPALIVE_SECONDS
) -> tuple[int, Response | None]:
    """Send the run to its end; how many events that were, and how it ended, None if the client did not stay for it.

    A client that goes away takes its run with it.
    """
    await context.start_response(200, [*SSE_HEADERS])
    following = EventSender(context, run, include, _SSE_ENCODER)
    with DisconnectMonitor(
        context, following.disconnect, keepalive=KEEPALIVE_COMMENT, interval=keepalive_seconds
    ):
        await following.run()
    return following.sent_count, following.response
