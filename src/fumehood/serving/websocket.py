"""WebSockets under bounds of ours, whose answers are written as they come; imports uvicorn, websockets, a sibling."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, override

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from fumehood.serving.stalled import SLOWEST, LeavesStalled, Pace, nobody
from fumehood.serving.web import Refusal

SHUTDOWN = "fumehood.shutdown"
"""The type of what stands among the messages of a connection that should come to its end."""

_PING_SECONDS = 15.0
# A client that runs a tool between two turns may answer no ping for as long as that takes.
_SILENT_SECONDS = 1200.0
_MESSAGE_SECONDS = 30.0  # for the next piece of a message

logger = logging.getLogger(__name__)


class SocketProtocol(LeavesStalled, WebSocketsSansIOProtocol):
    """Speaks ASGI with words of its own. `websocket.accept` may say the largest message as `message_bytes`, and how
    slowly one may come as `slowest`. `websocket.send` may have `frames`: whole messages with their heads, as many as
    there are, written in one piece. And a server that stops says SHUTDOWN instead of hanging up.
    """

    refusal: Refusal
    _message_timer: asyncio.TimerHandle | None = None
    _slowest = SLOWEST
    _pace: Pace | None = None  # of a message that has begun

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ping_interval = _PING_SECONDS
        self.ping_timeout = None  # or there would be no more pings until the last one is answered
        self._heard_at = self.loop.time()
        # A small message can hold a large one, and all of it would be unpacked.
        self.conn.available_extensions = []

    @override
    def data_received(self, data: bytes) -> None:
        heard_at, self._heard_at = self._heard_at, self.loop.time()
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse("The request cannot be understood as the beginning of a WebSocket.")
        elif (self.frames or self.conn.reader.buffer) and not self.transport.is_closing():
            if self._pace is None:
                self._pace = Pace(_MESSAGE_SECONDS, self._slowest)
            else:
                self._pace.came(len(data), self._heard_at - heard_at)
            self._message_timer = self.loop.call_later(self._pace.left, self._give_up)
        else:
            self._pace = None

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


def socket_protocol(refusal: Refusal, on_stalled: Callable[[], None] = nobody) -> type[SocketProtocol]:
    """One that answers with this what is no beginning of a WebSocket, and tells of readers that it left; uvicorn
    passes no settings of ours on.
    """
    own = {"refusal": staticmethod(refusal), "on_stalled": staticmethod(on_stalled)}
    return type("_Bounded", (SocketProtocol,), own)
