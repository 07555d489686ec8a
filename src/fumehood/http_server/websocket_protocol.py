"""WebSockets under bounds of ours, whose answers are written as they come."""

import asyncio
import logging
from collections.abc import Callable, Generator
from typing import Any, cast, override

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import State
from websockets.streams import StreamReader

from fumehood.http_server.read_scheduler import ReadScheduler, SlicedReadProtocol
from fumehood.http_server.slow_clients import (
    MIN_BYTES_PER_SECOND,
    StalledClientMixin,
    TransferDeadline,
    do_nothing,
)
from fumehood.http_server.web_server import ErrorRenderer

SHUTDOWN_MESSAGE = "fumehood.shutdown"
"""The type of what stands among the messages of a connection that should come to its end."""

MESSAGE_REJECTED = "fumehood.message_rejected"
"""The type of what stands there instead of a message for which there was no room; its `error` says why."""

_PING_SECONDS = 15.0
# A client that runs a tool between two turns may answer no ping for as long as that takes.
_PONG_TIMEOUT = 1200.0
_MESSAGE_TIMEOUT = 30.0  # for the next piece of a message
_MAX_CONTROL_BYTES = 125  # of the largest frame that is no piece of a message
_UNCOUNTED_BYTES = 4096  # of a message that is not whole: every connection may hold that much

logger = logging.getLogger(__name__)


class WebSocketProtocol(StalledClientMixin, WebSocketsSansIOProtocol):
    """Speaks ASGI with words of its own. `websocket.accept` may say the largest message as `message_bytes`, how slowly
    one may come as `slowest`, and who is told how much has come of one as `hold`; if that raises, nothing of this
    message is kept, and the application is told UNHELD. Once a message is whole, what it holds is the application's
    affair. `websocket.send` may have `frames`: whole messages with their heads, as many as there are, written in one
    piece. And a server that stops says SHUTDOWN instead of hanging up.
    """

    render_error: ErrorRenderer
    _message_timer: asyncio.TimerHandle | None = None
    _min_bytes_per_second = MIN_BYTES_PER_SECOND
    _on_message_size: Callable[[int], None] | None = None
    _message_deadline: TransferDeadline | None = None  # of a message that has begun

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ping_interval = _PING_SECONDS
        self.ping_timeout = None  # or there would be no more pings until the last one is answered
        self._last_received_at = self.loop.time()
        # A small message can hold a large one, and all of it would be unpacked.
        self.conn.available_extensions = []
        self._reader = _FrameReader(self.conn.reader)
        self.conn.reader.read_exact = self._reader.read_exact

    @override
    def data_received(self, data: bytes) -> None:
        heard_at, self._last_received_at = self._last_received_at, self.loop.time()
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._send_bad_request("The request cannot be understood as the beginning of a WebSocket.")
        elif self._has_partial_message and not self.transport.is_closing():
            if self._message_deadline is None:
                self._message_deadline = TransferDeadline(_MESSAGE_TIMEOUT, self._min_bytes_per_second)
            else:
                self._message_deadline.extend(len(data), self._last_received_at - heard_at)
            self._message_timer = self.loop.call_later(
                self._message_deadline.remaining_seconds, self._abort_slow_message
            )
            self._report_size()
        else:
            self._message_deadline = None

    @property
    def _has_partial_message(self) -> bool:
        """Whether a message has begun and is not whole."""
        return bool(self.frames or self.conn.reader.buffer or self._reader.is_dropping)

    def _report_size(self) -> None:
        """Tell what has come of a message. While another waits before it, what was told is that one's, and the few
        bytes that may have come of this one are not told.
        """
        size = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        if (
            self._on_message_size is None
            or self._reader.is_dropping
            or size <= _UNCOUNTED_BYTES
            or not self.queue.empty()
        ):
            return
        try:
            self._on_message_size(size)
        except Exception as error:
            self._reject_message(error)

    def _reject_message(self, error: Exception) -> None:
        """Forget what has come of a message, and what will come of it."""
        self._reader.is_dropping = True
        self.frames = []
        self.conn.receive_data(b"")  # so that the reader lets go at once
        word: Any = {"type": MESSAGE_REJECTED, "error": error}
        self.queue.put_nowait(word)
        if not self.read_paused:  # as for a message: who does not hear that does not say more
            self.read_paused = True
            self.transport.pause_reading()

    @override
    def handle_cont(self, event: Frame) -> None:
        """Join the pieces of a message as they come: apart they would take far more than what is in them, which may be
        nothing.
        """
        if self.frames and not self._reader.is_dropping:
            whole = self.frames[0] if isinstance(self.frames[0], bytearray) else bytearray(self.frames[0])
            whole += event.data
            self.frames = [cast("bytes", whole)]
        if event.fin:
            self.send_receive_event_to_app()

    @override
    def send_receive_event_to_app(self) -> None:
        if self._reader.is_dropping:
            self._reader.is_dropping = False
            self.frames = []
        elif self.curr_msg_data_type == "text" and not all(map(_is_utf8, self.frames)):
            self.frames = []
            self.conn.fail(CloseCode.INVALID_DATA, "a text message is not UTF-8")
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()

    @override
    def send_keepalive_ping(self) -> None:
        if self.loop.time() - self._last_received_at <= _PONG_TIMEOUT:
            super().send_keepalive_ping()
        else:
            logger.info("A client that answered no ping was left.")
            self.transport.abort()

    def _send_bad_request(self, reason: str) -> None:
        self.handshake_complete = True
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n%s" % self.render_error(400, reason)
        )
        self.transport.close()

    def _abort_slow_message(self) -> None:
        logger.info("A client that did not end its message was left.")
        self.transport.abort()

    @override
    async def send(self, message: ASGISendEvent) -> None:
        frames: bytes | None = message.get("frames")
        if frames is not None:
            await self.writable.wait()
            if self.conn.state is State.OPEN and not self.disconnected:
                self.transport.write(frames)
            return
        self.conn.max_size = message.get("max_message_bytes", self.conn.max_size)
        self._min_bytes_per_second = message.get("min_bytes_per_second", self._min_bytes_per_second)
        if (hold := message.get("on_message_size")) is not None:
            self._on_message_size = hold
            self._report_size()  # who is in a hurry may have begun before
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # as far as it will ever be

    @override
    def shutdown(self) -> None:
        if not self.handshake_complete or self.close_sent:
            super().shutdown()
        else:
            word: Any = {"type": SHUTDOWN_MESSAGE}  # no message of ASGI's
            self.queue.put_nowait(word)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
        super().connection_lost(exc)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class _SlicedWebSocketProtocol(SlicedReadProtocol, WebSocketProtocol):
    slice_bytes = 1 << 12  # which may be hundreds of frames

    @property
    @override
    def is_read_paused(self) -> bool:
        return self.read_paused

    @override
    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self.has_unparsed and not self.transport.is_closing():
            self.transport.pause_reading()  # that has been resumed
        return message


class _FrameReader:
    """Reads the frames of a connection, and can let go of the payloads of a message while they come.

    dropping: nothing is kept of the message that has begun.
    """

    def __init__(self, stream: StreamReader) -> None:
        self.is_dropping = False
        self._stream = stream

    def read_exact(self, n: int) -> Generator[None, None, bytes]:
        """As `StreamReader.read_exact`; a payload that is dropped is empty."""
        stream, droppable = self._stream, n > _MAX_CONTROL_BYTES  # nor is a head that long
        while len(stream.buffer) < n:
            if stream.eof:
                raise EOFError(f"stream ends {n - len(stream.buffer)} bytes early")
            if droppable and self.is_dropping:
                n -= len(stream.buffer)
                stream.discard()
            yield
        found = b"" if droppable and self.is_dropping else cast("bytes", stream.buffer[:n])
        del stream.buffer[:n]
        return found


def make_websocket_protocol(
    render_error: ErrorRenderer, on_stalled: Callable[[], None] = do_nothing
) -> type[WebSocketProtocol]:
    """The protocol with these settings, which uvicorn would not pass on.

    refusal: answers what is no beginning of a WebSocket. on_stalled: is told of readers that were left.
    """
    own = {
        "render_error": staticmethod(render_error),
        "on_stalled": staticmethod(on_stalled),
        "scheduler": ReadScheduler(),
    }
    return type("_Bounded", (_SlicedWebSocketProtocol,), own)
