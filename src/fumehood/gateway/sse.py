"""The events of a run as server-sent events; imports msgspec, `interfaces`, `protocol` and siblings.

Every event is whole in one write, and those that are there at once share one; what need not be projected is not.
"""

import sys
from collections.abc import Collection, Sequence

import msgspec

from fumehood.gateway.exchange import Exchange, Vigil
from fumehood.gateway.following import IS_DELICATE, Following
from fumehood.interfaces import Run
from fumehood.protocol.events import StreamEvent, TextDelta
from fumehood.protocol.folding import project
from fumehood.protocol.responses import Response

SILENCE = 15.0
DONE = b"data: [DONE]\n\n"
SIGN_OF_LIFE = b": still here\n\n"
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
_END = b"\n\n"
# A line break between two tokens of JSON is as good as a space; inside a string there is none.
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
# Some readers take these for the end of a line.
_BREAKS = (
    (b"\xc2", "\u0085".encode(), rb"\u0085"),
    (b"\xe2", "\u2028".encode(), rb"\u2028"),
    (b"\xe2", "\u2029".encode(), rb"\u2029"),
)

_encoder = msgspec.json.Encoder()
_encode = _encoder.encode
_encode_into = _encoder.encode_into


class _Forms(dict[type[StreamEvent], tuple[bytes, bool]]):
    """By the class of an event: what stands before its JSON, and whether it has to be looked at closely."""

    def __missing__(self, kind: type[StreamEvent]) -> tuple[bytes, bool]:
        name = str(kind.__struct_config__.tag)
        form = self[kind] = (f"event: {name}\ndata: ".encode(), IS_DELICATE[kind])
        return form


_FORMS = _Forms()


def encode_events(events: Sequence[StreamEvent], include: Collection[str]) -> bytearray:
    """The events as they go over the wire, projected, in one piece."""
    return encode_some(events, include, sys.maxsize)[0]


def encode_some(events: Sequence[StreamEvent], include: Collection[str], most: int) -> tuple[bytearray, int]:
    """As `encode_events`, for the first of them, up to the one that makes it `most` bytes; and how many they are."""
    buffer = bytearray()
    number = 0
    for event in events:
        number += 1
        head, delicate = _FORMS[type(event)]
        if delicate or (type(event) is TextDelta and event.logprobs):
            shown = project(event, include)
            buffer += _FORMS[type(shown)][0]
            body = _encode(shown)
            buffer += body if b"\n" not in body and b"\r" not in body else body.translate(_ONE_LINE)
        else:
            buffer += head
            _encode_into(event, buffer, -1)
        buffer += _END
        if len(buffer) >= most:
            break
    if not buffer.isascii():
        for lead, written, escaped in _BREAKS:
            if lead in buffer and written in buffer:  # to look for one byte takes a tenth of the time
                buffer = buffer.replace(written, escaped)
    return buffer, number


class EventStream:
    """The `Wire` of server-sent events."""

    some = staticmethod(encode_some)

    def end(self, last: bytearray) -> bytearray:
        return last + DONE


_SSE = EventStream()


async def stream(
    exchange: Exchange, run: Run, include: Collection[str], silence: float = SILENCE
) -> tuple[int, Response | None]:
    """Send the run to its end; how many events that were, and how it ended, None if the client did not stay for it.

    A client that goes away takes its run with it.
    """
    await exchange.begin(200, [*HEADERS])
    following = Following(exchange, run, include, _SSE)
    with Vigil(exchange, following.leave, sign_of_life=SIGN_OF_LIFE, every=silence):
        await following.to_the_end()
    return following.sent, following.response
