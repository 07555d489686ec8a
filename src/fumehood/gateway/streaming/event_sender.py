"""Sends the events of a run to one reader, in whatever form.

This is the path that every streamed token takes: no task is woken for an event, and nothing is awaited.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Collection, Sequence
from typing import Protocol

import msgspec

from fumehood.gateway.request_context import RequestContext
from fumehood.interfaces import Run
from fumehood.protocol.openai.api_errors import (
    ApiError,
    InternalServerError,
    detect_resource_exhaustion,
    to_error_detail,
)
from fumehood.protocol.openai.responses import Response, ResponseError
from fumehood.protocol.openai.stream_events import (
    CodeInterpreterCallFailed,
    ContentPartDone,
    ErrorEvent,
    OutputItemEvent,
    OutputTextDone,
    ResponseCompleted,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    StreamEvent,
)

CLIENT_DISCONNECTED = "the client has gone"
TERMINAL_EVENTS = (ResponseCompleted, ResponseFailed, ResponseIncomplete)
_MAX_WRITE_BYTES = 1 << 20  # but for a single event that is larger

logger = logging.getLogger(__name__)


class _NeedsProjection(dict[type[StreamEvent], bool]):
    """By the class of an event: whether it has to be looked at closely. Only these can hold what the client did not ask
    for or does not know, or bytes that somebody else has written.
    """

    _EVENT_TYPES = (
        OutputItemEvent,
        ResponseEvent,
        OutputTextDone,
        ContentPartDone,
        CodeInterpreterCallFailed,
    )

    def __missing__(self, kind: type[StreamEvent]) -> bool:
        delicate = self[kind] = issubclass(kind, self._EVENT_TYPES)
        return delicate


NEEDS_PROJECTION = _NeedsProjection()


class EventEncoder(Protocol):
    """How events become bytes."""

    def encode_batch(
        self, events: Sequence[StreamEvent], include: Collection[str], max_bytes: int
    ) -> tuple[bytearray, int]:
        """The first of these events, up to the one that makes it `most` bytes; how many they are."""
        ...

    def append_end(self, last: bytearray) -> bytearray:
        """The last events, with whatever says that nothing more will come."""
        ...


class EventSender:
    """Shows a run to one reader. The run itself calls `_pass_on` when it has something new: events go out before it
    goes on, and nobody has to be woken for each.

    The request's own task, in `to_the_end`, has its turn only where somebody has to wait: for a slow reader, for others
    when there is much to send, or for the end.

    sent: how many events were. response: how the run ended, None if the reader did not stay for that.
    """

    def __init__(
        self, context: RequestContext, run: Run, include: Collection[str], encoder: EventEncoder
    ) -> None:
        self.sent_count = 0
        self.response: Response | None = None
        self._context = context
        self._run = run
        self._include = include
        self._encoder = encoder
        self._unsent: Sequence[StreamEvent] = ()  # taken from the run, and too much for one write
        self._last_number = -1  # the number of the event that was sent last
        self._first_response: Response | None = None  # as the first event had it
        self._disconnected = False
        self._pending_write: Awaitable[None] | None = None  # a write that has to be awaited before the next
        self._error: ApiError | None = None  # for which the stream breaks off
        self._final_write: bytearray | None = None  # the last write
        self._wakeup = asyncio.Event()  # set when the request's task has something to do
        self._reader = run.watch(self._send_available)

    def disconnect(self) -> None:
        """The client has gone."""
        self._disconnected = True
        self._run.cancel(CLIENT_DISCONNECTED)
        self._wakeup.set()

    async def run(self) -> None:
        try:
            self._send_available()
            while not self._disconnected:
                await self._wakeup.wait()
                self._wakeup.clear()
                if self._pending_write is not None:
                    await self._pending_write
                    self._pending_write = None
                    self._send_available()
                elif self._unsent:
                    await asyncio.sleep(0)  # others have their turns
                    self._send_available()
                if self._error is not None:
                    self._finish(await self._encode_failure(self._error))
                if self._final_write is not None:
                    await self._context.send(self._final_write, more=False)
                    return
        finally:
            self._reader.close()

    def _send_available(self) -> None:
        """Send what is there, unless what was sent before is still on its way."""
        if self._pending_write is not None or self._final_write is not None or self._error is not None:
            return
        try:
            self._send_events(self._unsent or self._reader.read_available())
        except ApiError as error:
            self._abort(error)
        except Exception as error:
            lack = detect_resource_exhaustion(error)
            if lack is None:
                logger.exception("The stream of %s broke off (%s).", self._run.id, self._context.request_id)
            self._abort(lack or InternalServerError("The server failed; its log says why."))

    def _send_events(self, events: Sequence[StreamEvent]) -> None:
        if not events:
            if self._reader.is_exhausted:
                self._abort(InternalServerError("The response broke off."))
            return
        body, number = self._encoder.encode_batch(events, self._include, _MAX_WRITE_BYTES)
        if self._first_response is None and isinstance(events[0], ResponseEvent):
            self._first_response = events[0].response
        self._unsent = events[number:] if number < len(events) else ()
        last = events[number - 1]
        self.sent_count += number
        self._last_number = last.sequence_number
        if isinstance(last, TERMINAL_EVENTS):
            self.response = last.response
            self._finish(body)
            return
        self._pending_write = self._context.send_nowait(body)
        if self._pending_write is not None or self._unsent:
            self._wakeup.set()

    def _abort(self, error: ApiError) -> None:
        self._error = error
        self._wakeup.set()

    async def _encode_failure(self, error: ApiError) -> bytearray:
        """Tell in the stream what can no longer be told by a status; the run ends with it, and is told as it ended."""
        self._run.cancel("its stream broke off")
        events: list[StreamEvent] = [
            ErrorEvent(sequence_number=self._last_number + 1, error=to_error_detail(error))
        ]
        try:
            response = await self._run.wait()
        except Exception:  # it has told why, in its own log
            response = self._first_response
        if response is not None:
            told = ResponseError(code="server_error", message=error.message)
            self.response = msgspec.structs.replace(response, status="failed", error=told)
            events.append(ResponseFailed(sequence_number=self._last_number + 2, response=self.response))
        return self._encoder.encode_batch(events, self._include, sys.maxsize)[0]

    def _finish(self, body: bytearray) -> None:
        self._final_write = self._encoder.append_end(body)
        self._wakeup.set()
