"""Sends the events of a run as server-sent events; imports msgspec, `interfaces`, `protocol` and siblings.

Every event is whole in one write, and those that are there at once share one. This is the path that every streamed
token takes: no await, no projection and no copy for an event that does not need it.
"""

import contextlib
import logging
from collections.abc import Collection, Sequence

import msgspec

from fumehood.gateway.exchange import Exchange, Vigil
from fumehood.interfaces import Run
from fumehood.protocol.errors import ApiError, ServerFault, to_detail
from fumehood.protocol.events import (
    Completed,
    ErrorOccurred,
    Failed,
    Incomplete,
    ItemEvent,
    PartDone,
    ResponseEvent,
    StreamEvent,
    TextDelta,
    TextDone,
)
from fumehood.protocol.folding import project
from fumehood.protocol.responses import Response

SILENCE = 15.0
DONE = b"data: [DONE]\n\n"
GONE = "the client has gone"
_SIGN_OF_LIFE = b": still here\n\n"
_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
_END = b"\n\n"
_TERMINAL = (Completed, Failed, Incomplete)
# Only these can hold what the client did not ask for, or bytes that somebody else has written.
_DELICATE = (ItemEvent, ResponseEvent, TextDone, PartDone)
# A line break between two tokens of JSON is as good as a space; inside a string there is none.
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
# Some readers take these for the end of a line.
_BREAKS = (("\u0085".encode(), rb"\u0085"), ("\u2028".encode(), rb"\u2028"), ("\u2029".encode(), rb"\u2029"))

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
_encode = _encoder.encode
_encode_into = _encoder.encode_into


class _Forms(dict[type[StreamEvent], tuple[bytes, bool]]):
    """By the class of an event: what stands before its JSON, and whether it has to be looked at closely."""

    def __missing__(self, kind: type[StreamEvent]) -> tuple[bytes, bool]:
        name = str(kind.__struct_config__.tag)
        form = self[kind] = (f"event: {name}\ndata: ".encode(), issubclass(kind, _DELICATE))
        return form


_forms = _Forms()


def encode_events(events: Sequence[StreamEvent], include: Collection[str]) -> bytearray:
    """The events as they go over the wire, projected, in one piece."""
    buffer = bytearray()
    for event in events:
        head, delicate = _forms[type(event)]
        buffer += head
        if delicate or (isinstance(event, TextDelta) and event.logprobs):
            buffer += _encode(project(event, include)).translate(_ONE_LINE)
        else:
            _encode_into(event, buffer, -1)
        buffer += _END
    if not buffer.isascii():
        for written, escaped in _BREAKS:
            if written in buffer:
                buffer = buffer.replace(written, escaped)
    return buffer


async def stream(
    exchange: Exchange, run: Run, include: Collection[str], silence: float = SILENCE
) -> tuple[int, Response | None]:
    """Send the run to its end; how many events that were, and how it ended, None if the client did not stay for it.

    A client that goes away takes its run with it.
    """
    sent = 0
    last: StreamEvent | None = None
    await exchange.begin(200, [*_HEADERS])
    with Vigil(exchange, lambda: run.cancel(GONE), sign_of_life=_SIGN_OF_LIFE, every=silence) as vigil:
        try:
            async with contextlib.aclosing(run.subscribe()) as batches:
                async for batch in batches:
                    if vigil.left:
                        return sent, None
                    last = batch[-1]
                    sent += len(batch)
                    body = encode_events(batch, include)
                    if isinstance(last, _TERMINAL):
                        body += DONE
                        await exchange.send(body, more=False)
                        return sent, last.response
                    await exchange.send(body)
            fault: ApiError = ServerFault("The response broke off.")
        except ApiError as error:
            fault = error
        except Exception:
            logger.exception("The stream of %s broke off (%s).", run.id, exchange.request_id)
            fault = ServerFault("The server failed; its log says why.")
        await _break_off(exchange, last, fault)
    return sent, None


async def _break_off(exchange: Exchange, last: StreamEvent | None, error: ApiError) -> None:
    """Tell in the stream what can no longer be told by a status."""
    number = 0 if last is None else last.sequence_number + 1
    event = ErrorOccurred(sequence_number=number, error=to_detail(error))
    await exchange.send(encode_events([event], ()) + DONE, more=False)
