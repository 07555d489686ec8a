"""Sends the events of a run, as server-sent events or otherwise; imports msgspec, `interfaces`, `protocol`, siblings.

Every event is whole in one write, and those that are there at once share one. This is the path that every streamed
token takes: no task is woken, nothing is awaited and nothing projected for an event that does not need it.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Collection, Sequence
from typing import Protocol

import msgspec

from fumehood.gateway.exchange import Exchange, Vigil
from fumehood.interfaces import Run
from fumehood.protocol.errors import ApiError, ServerFault, to_detail
from fumehood.protocol.events import (
    Completed,
    ErrorOccurred,
    Failed,
    Incomplete,
    InterpreterFailed,
    ItemEvent,
    PartDone,
    ResponseEvent,
    StreamEvent,
    TextDelta,
    TextDone,
)
from fumehood.protocol.folding import project
from fumehood.protocol.responses import Response, ResponseError

SILENCE = 15.0
DONE = b"data: [DONE]\n\n"
GONE = "the client has gone"
SIGN_OF_LIFE = b": still here\n\n"
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
_END = b"\n\n"
_LARGEST_WRITE = 1 << 20  # but for a single event that is larger
TERMINAL = (Completed, Failed, Incomplete)
# Only these can hold what the client did not ask for or does not know, or bytes that somebody else has written.
_DELICATE = (ItemEvent, ResponseEvent, TextDone, PartDone, InterpreterFailed)
# A line break between two tokens of JSON is as good as a space; inside a string there is none.
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
# Some readers take these for the end of a line.
_BREAKS = (
    (b"\xc2", "\u0085".encode(), rb"\u0085"),
    (b"\xe2", "\u2028".encode(), rb"\u2028"),
    (b"\xe2", "\u2029".encode(), rb"\u2029"),
)

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


FORMS = _Forms()


def encode_events(events: Sequence[StreamEvent], include: Collection[str]) -> bytearray:
    """The events as they go over the wire, projected, in one piece."""
    return encode_some(events, include, sys.maxsize)[0]


def encode_some(events: Sequence[StreamEvent], include: Collection[str], most: int) -> tuple[bytearray, int]:
    """The same for the first of them, up to the one that makes it `most` bytes; how many they are."""
    buffer = bytearray()
    number = 0
    for event in events:
        number += 1
        head, delicate = FORMS[type(event)]
        if delicate or (type(event) is TextDelta and event.logprobs):
            shown = project(event, include)
            buffer += FORMS[type(shown)][0]
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


class Wire(Protocol):
    """How events become bytes."""

    def some(
        self, events: Sequence[StreamEvent], include: Collection[str], most: int
    ) -> tuple[bytearray, int]:
        """The first of these events, up to the one that makes it `most` bytes; how many they are."""
        ...

    def end(self, last: bytearray) -> bytearray:
        """The last events, with whatever says that nothing more will come."""
        ...


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


class Following:
    """One reader of a run, at whose hands events go out before the run goes on: nobody has to be woken for each.

    Only where somebody has to wait, for a slow reader or for the end, does the request's own task take over.
    """

    def __init__(self, exchange: Exchange, run: Run, include: Collection[str], wire: Wire) -> None:
        self.sent = 0
        self.response: Response | None = None
        self._exchange = exchange
        self._run = run
        self._include = include
        self._wire = wire
        self._untold: Sequence[StreamEvent] = ()  # were taken, and are more than one write
        self._last = -1
        self._opening: Response | None = None
        self._fault: ApiError | None = None
        self._left = False
        self._obstacle: Awaitable[None] | None = None
        self._ending: bytearray | None = None
        self._turn = asyncio.Event()
        self._reading = run.watch(self._pass_on)

    def leave(self) -> None:
        """The client has gone."""
        self._left = True
        self._run.cancel(GONE)
        self._turn.set()

    async def to_the_end(self) -> None:
        try:
            self._pass_on()
            while not self._left:
                await self._turn.wait()
                self._turn.clear()
                if self._obstacle is not None:
                    await self._obstacle
                    self._obstacle = None
                    self._pass_on()
                elif self._untold:
                    await asyncio.sleep(0)  # others have their turns
                    self._pass_on()
                if self._fault is not None:
                    self._end(await self._broken_off(self._fault))
                if self._ending is not None:
                    await self._exchange.send(self._ending, more=False)
                    return
        finally:
            self._reading.close()

    def _pass_on(self) -> None:
        """Send what is there, unless what was sent before is still on its way."""
        if self._obstacle is not None or self._ending is not None or self._fault is not None:
            return
        try:
            self._send(self._untold or self._reading.take())
        except ApiError as error:
            self._break_off(error)
        except Exception:
            logger.exception("The stream of %s broke off (%s).", self._run.id, self._exchange.request_id)
            self._break_off(ServerFault("The server failed; its log says why."))

    def _send(self, events: Sequence[StreamEvent]) -> None:
        if not events:
            if self._reading.over:
                self._break_off(ServerFault("The response broke off."))
            return
        body, number = self._wire.some(events, self._include, _LARGEST_WRITE)
        if self._opening is None and isinstance(events[0], ResponseEvent):
            self._opening = events[0].response
        self._untold = events[number:] if number < len(events) else ()
        last = events[number - 1]
        self.sent += number
        self._last = last.sequence_number
        if isinstance(last, TERMINAL):
            self.response = last.response
            self._end(body)
            return
        self._obstacle = self._exchange.send_now(body)
        if self._obstacle is not None or self._untold:
            self._turn.set()

    def _break_off(self, error: ApiError) -> None:
        self._fault = error
        self._turn.set()

    async def _broken_off(self, error: ApiError) -> bytearray:
        """Tell in the stream what can no longer be told by a status; the run ends with it, and is told as it ended."""
        self._run.cancel("its stream broke off")
        events: list[StreamEvent] = [ErrorOccurred(sequence_number=self._last + 1, error=to_detail(error))]
        try:
            response = await self._run.wait()
        except Exception:  # it has told why, in its own log
            response = self._opening
        if response is not None:
            told = ResponseError(code="server_error", message=error.message)
            self.response = msgspec.structs.replace(response, status="failed", error=told)
            events.append(Failed(sequence_number=self._last + 2, response=self.response))
        return self._wire.some(events, self._include, sys.maxsize)[0]

    def _end(self, body: bytearray) -> None:
        self._ending = self._wire.end(body)
        self._turn.set()
