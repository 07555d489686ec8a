"""Sends the events of a run as server-sent events; imports msgspec, `interfaces`, `protocol` and siblings.

Every event is whole in one write, and those that are there at once share one. This is the path that every streamed
token takes: no await, no projection and no copy for an event that does not need it.
"""

import asyncio
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


class _Outlet:
    """The way of a run's events to the wire.

    While the connection takes what is written, the run itself sends an event the moment it comes. What it cannot send
    so, because the reader is slow or because it is the end, stays here or in the log, for `rest`.
    """

    def __init__(self, exchange: Exchange, run: Run, include: Collection[str]) -> None:
        self.sent = 0
        self.last: StreamEvent | None = None
        self._exchange = exchange
        self._include = include
        self._news = asyncio.Event()
        self._unattended = False  # whether nobody is in `rest` but for waiting
        self._ready = bytearray()
        self._fault: Exception | None = None
        self._reading = run.watch(self._wake)

    def close(self) -> None:
        self._reading.close()

    @property
    def ended(self) -> Response | None:
        return self.last.response if isinstance(self.last, _TERMINAL) else None

    async def rest(self) -> bytearray:
        """What is to be sent next, not before there is something; nothing once the run has stopped. Raises what
        reading the log does.
        """
        while True:
            ready = self._ready or self._take()
            if self._fault is not None:
                raise self._fault
            if ready or self._reading.over:
                self._ready = bytearray()
                return ready
            self._news.clear()
            self._unattended = True
            await self._news.wait()

    def _wake(self) -> None:
        """Called by the run."""
        if self._unattended and self._exchange.writable:
            try:
                ready = self._take()
                if ready and self.ended is None:
                    self._exchange.send_now(ready)
                    return
                self._ready = ready
            except Exception as error:
                self._fault = error
        self._unattended = False
        self._news.set()

    def _take(self) -> bytearray:
        events = self._reading.take()
        if events:
            self.last = events[-1]
            self.sent += len(events)
        return encode_events(events, self._include)


async def stream(
    exchange: Exchange, run: Run, include: Collection[str], silence: float = SILENCE
) -> tuple[int, Response | None]:
    """Send the run to its end; how many events that were, and how it ended, None if the client did not stay for it.

    A client that goes away takes its run with it.
    """
    await exchange.begin(200, [*_HEADERS])
    outlet = _Outlet(exchange, run, include)
    with (
        contextlib.closing(outlet),
        Vigil(exchange, lambda: run.cancel(GONE), sign_of_life=_SIGN_OF_LIFE, every=silence) as vigil,
    ):
        try:
            while body := await outlet.rest():
                if vigil.left:
                    return outlet.sent, None
                if outlet.ended is not None:
                    await exchange.send(body + DONE, more=False)
                    return outlet.sent, outlet.ended
                await exchange.send(body)
            fault: ApiError = ServerFault("The response broke off.")
        except ApiError as error:
            fault = error
        except Exception:
            logger.exception("The stream of %s broke off (%s).", run.id, exchange.request_id)
            fault = ServerFault("The server failed; its log says why.")
        await _break_off(exchange, outlet.last, fault)
    return outlet.sent, None


async def _break_off(exchange: Exchange, last: StreamEvent | None, error: ApiError) -> None:
    """Tell in the stream what can no longer be told by a status."""
    number = 0 if last is None else last.sequence_number + 1
    event = ErrorOccurred(sequence_number=number, error=to_detail(error))
    await exchange.send(encode_events([event], ()) + DONE, more=False)
