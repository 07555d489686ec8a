"""WebSockets under bounds of ours, whose answers are written as they come; imports uvicorn, websockets, a sibling."""

import asyncio
import logging
from collections.abc import Callable, Generator
from typing import Any, cast, override

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import State
from websockets.streams import StreamReader

from fumehood.serving.read_share import ReadShare, SlicedReading
from fumehood.serving.stalled import SLOWEST, LeavesStalled, Pace, nobody
from fumehood.serving.web import Refusal

SHUTDOWN = "fumehood.shutdown"
"""The type of what stands among the messages of a connection that should come to its end."""

UNHELD = "fumehood.unheld"
"""The type of what stands there instead of a message for which there was no room; its `error` says why."""

_PING_SECONDS = 15.0
# A client that runs a tool between two turns may answer no ping for as long as that takes.
_SILENT_SECONDS = 1200.0
_MESSAGE_SECONDS = 30.0  # for the next piece of a message
_CONTROL_BYTES = 125  # of the largest frame that is no piece of a message
_UNCOUNTED_BYTES = 4096  # of a message that is not whole: every connection may hold that much

logger = logging.getLogger(__name__)


class SocketProtocol(LeavesStalled, WebSocketsSansIOProtocol):
    """Speaks ASGI with words of its own. `websocket.accept` may say the largest message as `message_bytes`, how slowly
    one may come as `slowest`, and who is told how much has come of one as `hold`; if that raises, nothing of this
    message is kept, and the application is told UNHELD. Once a message is whole, what it holds is the application's
    affair. `websocket.send` may have `frames`: whole messages with their heads, as many as there are, written in one
    piece. And a server that stops says SHUTDOWN instead of hanging up.
    """

    refusal: Refusal
    _message_timer: asyncio.TimerHandle | None = None
    _slowest = SLOWEST
    _hold: Callable[[int], None] | None = None
    _pace: Pace | None = None  # of a message that has begun

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ping_interval = _PING_SECONDS
        self.ping_timeout = None  # or there would be no more pings until the last one is answered
        self._heard_at = self.loop.time()
        # A small message can hold a large one, and all of it would be unpacked.
        self.conn.available_extensions = []
        self._reader = _Reader(self.conn.reader)
        self.conn.reader.read_exact = self._reader.read_exact

    @override
    def data_received(self, data: bytes) -> None:
        heard_at, self._heard_at = self._heard_at, self.loop.time()
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse("The request cannot be understood as the beginning of a WebSocket.")
        elif self._begun and not self.transport.is_closing():
            if self._pace is None:
                self._pace = Pace(_MESSAGE_SECONDS, self._slowest)
            else:
                self._pace.came(len(data), self._heard_at - heard_at)
            self._message_timer = self.loop.call_later(self._pace.left, self._give_up)
            self._count()
        else:
            self._pace = None

    @property
    def _begun(self) -> bool:
        """Whether a message has begun and is not whole."""
        return bool(self.frames or self.conn.reader.buffer or self._reader.dropping)

    def _count(self) -> None:
        """Tell what has come of a message. While another waits before it, what was told is that one's, and the few
        bytes that may have come of this one are not told.
        """
        size = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        if self._hold is None or self._reader.dropping or size <= _UNCOUNTED_BYTES or not self.queue.empty():
            return
        try:
            self._hold(size)
        except Exception as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Forget what has come of a message, and what will come of it."""
        self._reader.dropping = True
        self.frames = []
        self.conn.receive_data(b"")  # so that the reader lets go at once
        word: Any = {"type": UNHELD, "error": error}
        self.queue.put_nowait(word)
        if not self.read_paused:  # as for a message: who does not hear that does not say more
            self.read_paused = True
            self.transport.pause_reading()

    @override
    def handle_cont(self, event: Frame) -> None:
        """Join the pieces of a message as they come: apart they would take far more than what is in them, which may be
        nothing.
        """
        if self.frames and not self._reader.dropping:
            whole = self.frames[0] if isinstance(self.frames[0], bytearray) else bytearray(self.frames[0])
            whole += event.data
            self.frames = [cast("bytes", whole)]
        if event.fin:
            self.send_receive_event_to_app()

    @override
    def send_receive_event_to_app(self) -> None:
        if self._reader.dropping:
            self._reader.dropping = False
            self.frames = []
        elif self.curr_msg_data_type == "text" and not all(map(_is_text, self.frames)):
            self.frames = []
            self.conn.fail(CloseCode.INVALID_DATA, "a text message is not UTF-8")
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()

    @override
    def send_keepalive_ping(self) -> None:
        if self.loop.time() - self._heard_at <= _SILENT_SECONDS:
            super().send_keepalive_ping()
        else:
            logger.info("A client that answered no ping was left.")
            self.transport.abort()

    def _refuse(self, reason: str) -> None:
        self.handshake_complete = True
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n%s" % self.refusal(400, reason)
        )
        self.transport.close()

    def _give_up(self) -> None:
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
        self.conn.max_size = message.get("message_bytes", self.conn.max_size)
        self._slowest = message.get("slowest", self._slowest)
        if (hold := message.get("hold")) is not None:
            self._hold = hold
            self._count()  # who is in a hurry may have begun before
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # as far as it will ever be

    @override
    def shutdown(self) -> None:
        if not self.handshake_complete or self.close_sent:
            super().shutdown()
        else:
            word: Any = {"type": SHUTDOWN}  # no message of ASGI's
            self.queue.put_nowait(word)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
        super().connection_lost(exc)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class _SlicedProtocol(SlicedReading, SocketProtocol):
    slice_bytes = 1 << 12  # which may be hundreds of frames

    @property
    @override
    def holds_back(self) -> bool:
        return self.read_paused

    @override
    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self.has_unparsed and not self.transport.is_closing():
            self.transport.pause_reading()  # that has been resumed
        return message


class _Reader:
    """Reads the frames of a connection, and can let go of the payloads of a message while they come.

    dropping: nothing is kept of the message that has begun.
    """

    def __init__(self, stream: StreamReader) -> None:
        self.dropping = False
        self._stream = stream

    def read_exact(self, n: int) -> Generator[None, None, bytes]:
        """As `StreamReader.read_exact`; a payload that is dropped is empty."""
        stream, droppable = self._stream, n > _CONTROL_BYTES  # nor is a head that long
        while len(stream.buffer) < n:
            if stream.eof:
                raise EOFError(f"stream ends {n - len(stream.buffer)} bytes early")
            if droppable and self.dropping:
                n -= len(stream.buffer)
                stream.discard()
            yield
        found = b"" if droppable and self.dropping else cast("bytes", stream.buffer[:n])
        del stream.buffer[:n]
        return found


def socket_protocol(refusal: Refusal, on_stalled: Callable[[], None] = nobody) -> type[SocketProtocol]:
    """The protocol with these settings, which uvicorn would not pass on.

    refusal: answers what is no beginning of a WebSocket. on_stalled: is told of readers that were left.
    """
    own = {
        "refusal": staticmethod(refusal),
        "on_stalled": staticmethod(on_stalled),
        "share": ReadShare(),
    }
    return type("_Bounded", (_SlicedProtocol,), own)
