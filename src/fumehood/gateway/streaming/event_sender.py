"""Sends the events of a run to one client, as server-sent events or WebSocket messages.

Every streamed token takes this path: it wakes no task per event and awaits nothing.
"""

import asyncio
import logging
import sys
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from fumehood.gateway.gateway_exchange import GatewayExchange, to_api_error
from fumehood.interfaces import ReadableRun
from fumehood.protocol.openai.api_errors import (
    ApiError,
    InternalServerError,
    to_error_detail,
)
from fumehood.protocol.openai.response_projection import ONLY_OPENAI_EVENTS, UNHANDLED_EVENTS
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

CLIENT_DISCONNECTED = "client disconnected"
TERMINAL_EVENTS = (ResponseCompleted, ResponseFailed, ResponseIncomplete)
_MAX_WRITE_BYTES = 1 << 20  # but for a single event that is larger

logger = logging.getLogger(__name__)


class _NeedsProjection(dict[type[StreamEvent], bool]):
    """Whether events of a class need projection, by class. Only these can contain fields that `include` did not ask
    for, item types that the client does not know, or raw JSON from elsewhere.
    """

    _EVENT_TYPES = (
        OutputItemEvent,
        ResponseEvent,
        OutputTextDone,
        ContentPartDone,
        CodeInterpreterCallFailed,
    )

    def __missing__(self, kind: type[StreamEvent]) -> bool:
        needs_projection = self[kind] = issubclass(kind, self._EVENT_TYPES)
        return needs_projection


NEEDS_PROJECTION = _NeedsProjection()


class EventEncoder(Protocol):
    """Encodes events for one kind of stream."""

    def encode_batch(
        self, events: Sequence[StreamEvent], include: Collection[str], max_bytes: int
    ) -> tuple[bytearray, int]:
        """Encode the first events, until they have `max_bytes`. Returns the bytes and the number of events."""
        ...

    def append_end(self, last: bytearray) -> bytearray:
        """The last events, followed by the end of the stream."""
        ...


class EventSender:
    """Sends the events of a run to one client.

    The run calls `_send_available` for every new event, so that no task is woken per event. The request's task, in
    `run`, is woken for what needs to wait: for a slow client, for other tasks after a large write, and for the end.

    sent_count: number of events sent. response: the terminal response; None if the client disconnected before.
    """

    def __init__(
        self, exchange: GatewayExchange, run: ReadableRun, include: Collection[str], encoder: EventEncoder
    ) -> None:
        self.sent_count = 0
        self.response: Response | None = None
        self._context = exchange
        self._run = run
        self._include = include
        self._encoder = encoder
        self._leaves_out_parts = ONLY_OPENAI_EVENTS in include
        self._unsent: Sequence[StreamEvent] = ()  # read, but too large for the last write
        self._last_number = -1  # sequence number of the last event sent
        self._first_response: Response | None = None  # the response of the first event
        self._disconnected = False
        self._pending_write: bytearray | None = None  # to be written by the request's task
        self._is_last_write = False
        self._error: ApiError | None = None  # ends the stream
        self._wakeup = asyncio.Event()  # set while the request's task has something to do
        self._reader = run.open_reader(self._send_available)

    def disconnect(self) -> None:
        """The client disconnected: cancel the run."""
        self._disconnected = True
        self._run.cancel(CLIENT_DISCONNECTED)
        self._wakeup.set()

    async def run(self) -> None:
        """Return when the response is sent or the client disconnected."""
        try:
            self._send_available()
            while not self._disconnected:
                await self._wakeup.wait()
                if self._error is not None:
                    self._finish(await self._encode_failure(self._error))
                if self._pending_write is not None:
                    await self._context.send(self._pending_write, more=not self._is_last_write)
                    self._pending_write = None
                    if self._is_last_write:
                        return
                else:
                    await asyncio.sleep(0)  # let other tasks run
                self._wakeup.clear()
                self._send_available()
        finally:
            self._reader.close()

    def _send_available(self) -> None:
        """Send the events that are available, unless the request's task is about to send."""
        if self._wakeup.is_set():
            return
        try:
            self._send_events(self._unsent or self._reader.read_available())
        except Exception as error:
            self._abort(to_api_error(error, self._context.request_id))

    def _send_events(self, events: Sequence[StreamEvent]) -> None:
        if not events:
            if self._reader.is_exhausted:
                self._abort(InternalServerError("The run ended without a response."))
            return
        if self._leaves_out_parts:
            events = [event for event in events if not isinstance(event, UNHANDLED_EVENTS)]
            if not events:
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
        if not self._context.send_nowait(body):
            self._pending_write = body
            self._wakeup.set()
        elif self._unsent:
            self._wakeup.set()

    def _abort(self, error: ApiError) -> None:
        self._error = error
        self._wakeup.set()

    async def _encode_failure(self, error: ApiError) -> bytearray:
        """Cancel the run; encode an error event and a failed response, since the status is already sent."""
        self._run.cancel("stream failed")
        events: list[StreamEvent] = [
            ErrorEvent(sequence_number=self._last_number + 1, error=to_error_detail(error))
        ]
        try:
            response = await self._run.wait()
        except Exception:  # the engine has logged it
            response = self._first_response
        if response is not None:
            details = ResponseError(code="server_error", message=error.message)
            self.response = msgspec.structs.replace(response, status="failed", error=details)
            events.append(ResponseFailed(sequence_number=self._last_number + 2, response=self.response))
        return self._encoder.encode_batch(events, self._include, sys.maxsize)[0]

    def _finish(self, body: bytearray) -> None:
        self._pending_write = self._encoder.append_end(body)
        self._is_last_write = True
        self._wakeup.set()
