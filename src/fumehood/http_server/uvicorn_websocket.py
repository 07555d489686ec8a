"""WebSocket protocol on uvicorn, with limits on messages and batched frames."""

import asyncio
import logging
from collections.abc import Callable, Generator
from typing import Any, cast, override

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import State
from websockets.streams import StreamReader

from fumehood.http_server.asgi_exchange import DIRECT_WRITER, Headers
from fumehood.http_server.fair_parse_scheduler import FairParseScheduler, SlicedReadProtocol
from fumehood.http_server.slow_clients import (
    MIN_BYTES_PER_SECOND,
    StalledClientMixin,
    TransferDeadline,
    do_nothing,
)
from fumehood.http_server.web_server import ErrorRenderer

SHUTDOWN_MESSAGE = "fumehood.shutdown"
"""Type of the ASGI message that tells the application to close the connection."""

MESSAGE_REJECTED = "fumehood.message_rejected"
"""Type of the ASGI message that replaces a rejected message; `error` is the reason."""

_PING_SECONDS = 15.0
# A client may run a tool for that long without answering pings.
_PONG_TIMEOUT = 1200.0
_MESSAGE_TIMEOUT = 30.0  # for the next data of a message
_MAX_CONTROL_BYTES = 125  # the largest control frame
_UNCOUNTED_BYTES = 4096  # of an incomplete message; every connection may buffer that much

logger = logging.getLogger(__name__)


class WebSocketProtocol(StalledClientMixin, WebSocketsSansIOProtocol):
    """uvicorn's protocol with extensions of ASGI.

    `websocket.accept` may contain `max_message_bytes`, `min_bytes_per_second`, and `on_message_size`, which is called
    with the received size of an incomplete message. If that raises, the message is discarded and the application
    receives MESSAGE_REJECTED. `websocket.send` may contain `frames`: encoded frames, written as they are; so does the
    `DirectWriter` of the scope. On shutdown, the application receives SHUTDOWN_MESSAGE.
    """

    render_error: ErrorRenderer
    _message_timer: asyncio.TimerHandle | None = None
    _min_bytes_per_second = MIN_BYTES_PER_SECOND
    _on_message_size: Callable[[int], None] | None = None
    _message_deadline: TransferDeadline | None = None  # of an incomplete message

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ping_interval = _PING_SECONDS
        self.ping_timeout = None  # else uvicorn sends no ping before the last one is answered
        self._last_received_at = self.loop.time()
        # No compression: a small message could expand to a huge one.
        self.conn.available_extensions = []
        self._reader = _FrameReader(self.conn.reader)
        self.conn.reader.read_exact = self._reader.read_exact

    @override
    def data_received(self, data: bytes) -> None:
        received_at, self._last_received_at = self._last_received_at, self.loop.time()
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._send_bad_request("Invalid WebSocket handshake.")
        elif self._has_partial_message and not self.transport.is_closing():
            if self._message_deadline is None:
                self._message_deadline = TransferDeadline(_MESSAGE_TIMEOUT, self._min_bytes_per_second)
            else:
                self._message_deadline.extend(len(data), self._last_received_at - received_at)
            self._message_timer = self.loop.call_later(
                self._message_deadline.remaining_seconds, self._abort_slow_message
            )
            self._report_size()
        else:
            self._message_deadline = None

    @property
    def _has_partial_message(self) -> bool:
        """Whether a message is incomplete."""
        return bool(self.frames or self.conn.reader.buffer or self._reader.is_dropping)

    def _report_size(self) -> None:
        """Report the received size of an incomplete message, unless another message is queued before it."""
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
        """Discard the rest of a message, too."""
        self._reader.is_dropping = True
        self.frames = []
        self.conn.receive_data(b"")  # so that the reader discards at once
        message: Any = {"type": MESSAGE_REJECTED, "error": error}
        self.queue.put_nowait(message)
        if not self.read_paused:  # as for a message, until the application receives it
            self.read_paused = True
            self.transport.pause_reading()

    @override
    def handle_cont(self, event: Frame) -> None:
        """Join the frames of a message as they arrive: many small ones would take far more memory than their data."""
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
            logger.info("Disconnected a client that does not answer pings.")
            self.transport.abort()

    def _send_bad_request(self, reason: str) -> None:
        self.handshake_complete = True
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n%s" % self.render_error(400, reason)
        )
        self.transport.close()

    def _abort_slow_message(self) -> None:
        logger.info("Disconnected a client that sent a message too slowly.")
        self.transport.abort()

    @override
    async def run_asgi(self) -> None:
        scope: Any = self.scope
        scope[DIRECT_WRITER] = _FrameWriter(self)
        await super().run_asgi()

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
        if (on_message_size := message.get("on_message_size")) is not None:
            self._on_message_size = on_message_size
            self._report_size()  # a message may already be arriving
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # there will be no upgrade

    @override
    def shutdown(self) -> None:
        if not self.handshake_complete or self.close_sent:
            super().shutdown()
        else:
            message: Any = {"type": SHUTDOWN_MESSAGE}
            self.queue.put_nowait(message)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
        super().connection_lost(exc)


class _FrameWriter:
    """The `DirectWriter` of a connection, for chunks that are encoded frames."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: WebSocketProtocol) -> None:
        self._protocol = protocol

    def write_response(self, status: int, headers: Headers, body: bytes) -> bool:
        del status, headers, body
        return False

    def start_chunks(self, status: int, headers: Headers, body: bytes) -> bool:
        del status, headers, body
        return False

    def write_chunk(self, body: bytes | bytearray) -> bool:
        protocol = self._protocol
        if not protocol.writable.is_set() or protocol.disconnected or protocol.conn.state is not State.OPEN:
            return False
        protocol.transport.write(body)
        return True

    def break_off(self) -> bool:
        return False


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class _SlicedWebSocketProtocol(SlicedReadProtocol, WebSocketProtocol):
    slice_bytes = 1 << 12  # may be hundreds of frames

    @property
    @override
    def is_read_paused(self) -> bool:
        return self.read_paused

    @override
    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self.has_unparsed and not self.transport.is_closing():
            self.transport.pause_reading()  # super() resumed it
        return message


class _FrameReader:
    """Reads frames, and can discard the payload of a message while it arrives.

    is_dropping: the current message is discarded.
    """

    def __init__(self, stream: StreamReader) -> None:
        self.is_dropping = False
        self._stream = stream

    def read_exact(self, n: int) -> Generator[None, None, bytes]:
        """As `StreamReader.read_exact`; a discarded payload is empty."""
        stream, droppable = self._stream, n > _MAX_CONTROL_BYTES  # control frames and headers are shorter
        while len(stream.buffer) < n:
            if stream.eof:
                raise EOFError(f"stream ends {n - len(stream.buffer)} bytes early")
            if droppable and self.is_dropping:
                n -= len(stream.buffer)
                stream.discard()
            yield
        payload = b"" if droppable and self.is_dropping else cast("bytes", stream.buffer[:n])
        del stream.buffer[:n]
        return payload


def make_websocket_protocol(
    render_error: ErrorRenderer, on_stalled: Callable[[], None] = do_nothing
) -> type[WebSocketProtocol]:
    """A protocol class with these settings as class attributes, since uvicorn creates the protocols itself.

    render_error: renders the response to an invalid handshake. on_stalled: called when a client stops reading.
    """
    settings = {
        "render_error": staticmethod(render_error),
        "on_stalled": staticmethod(on_stalled),
        "scheduler": FairParseScheduler(),
    }
    return type("_ConfiguredWebSocketProtocol", (_SlicedWebSocketProtocol,), settings)
