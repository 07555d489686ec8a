"""Sends the events of a run to one reader, in whatever form; imports msgspec, `interfaces`, `protocol` and siblings.

This is the path that every streamed token takes: no task is woken for an event, and nothing is awaited.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Collection, Sequence
from typing import Protocol

import msgspec

from fumehood.gateway.exchange import Exchange
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
    TextDone,
)
from fumehood.protocol.responses import Response, ResponseError
from fumehood.protocol.shortage import find_shortage

GONE = "the client has gone"
TERMINAL = (Completed, Failed, Incomplete)
_LARGEST_WRITE = 1 << 20  # but for a single event that is larger

logger = logging.getLogger(__name__)


class _Delicate(dict[type[StreamEvent], bool]):
    """By the class of an event: whether it has to be looked at closely. Only these can hold what the client did not ask
    for or does not know, or bytes that somebody else has written.
    """

    _KINDS = (ItemEvent, ResponseEvent, TextDone, PartDone, InterpreterFailed)

    def __missing__(self, kind: type[StreamEvent]) -> bool:
        delicate = self[kind] = issubclass(kind, self._KINDS)
        return delicate


IS_DELICATE = _Delicate()


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


class Following:
    """Shows a run to one reader. The run itself calls `_pass_on` when it has something new: events go out before it
    goes on, and nobody has to be woken for each.

    The request's own task, in `to_the_end`, has its turn only where somebody has to wait: for a slow reader, for others
    when there is much to send, or for the end.

    sent: how many events were. response: how the run ended, None if the reader did not stay for that.
    """

    def __init__(self, exchange: Exchange, run: Run, include: Collection[str], wire: Wire) -> None:
        self.sent = 0
        self.response: Response | None = None
        self._exchange = exchange
        self._run = run
        self._include = include
        self._wire = wire
        self._untold: Sequence[StreamEvent] = ()  # taken from the run, and too much for one write
        self._last = -1  # the number of the event that was sent last
        self._opening: Response | None = None  # as the first event had it
        self._left = False
        self._obstacle: Awaitable[None] | None = None  # a write that has to be awaited before the next
        self._fault: ApiError | None = None  # for which the stream breaks off
        self._ending: bytearray | None = None  # the last write
        self._turn = asyncio.Event()  # set when the request's task has something to do
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
        except Exception as error:
            lack = find_shortage(error)
            if lack is None:
                logger.exception("The stream of %s broke off (%s).", self._run.id, self._exchange.request_id)
            self._break_off(lack or ServerFault("The server failed; its log says why."))

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
