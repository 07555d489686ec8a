"""Runs the gateway on a socket: serves, drains, stops in good order; imports uvicorn and siblings."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from typing import Any, override

import uvicorn
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from fumehood.gateway.app import Gateway
from fumehood.gateway.exchange import VERSION, encode
from fumehood.gateway.websocket import SHUTDOWN
from fumehood.protocol.errors import InvalidRequest, to_body

_KEEP_ALIVE = 120
_HEADER_SECONDS = 30.0
_HEADER_BYTES = 64 << 10
_HEADER_COUNT = 256
# A reader for whom answers wait takes at least this much in this time, or is gone.
_STALL_SECONDS = 60.0
_STALL_BYTES = 64 << 10
_PING_SECONDS = 15.0
_MESSAGE_SECONDS = 30.0  # for the next piece of a message
_LAST_ANSWERS = 5.0  # seconds for connections to end after all runs have
_LAST_WORDS = 1.0  # and for their requests after that

logger = logging.getLogger(__name__)


class Server:
    """One run of the server. SIGTERM and SIGINT stop it in good order, a second one at once.

    drain: what has to be waited for when it is stopped; nothing new is accepted meanwhile.
    """

    def __init__(self, app: Gateway, sock: socket.socket, drain: Callable[[], Awaitable[None]]) -> None:
        self._sock = sock
        self._drain = drain
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._web = _Web(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws=_SocketProtocol,
                ws_max_size=app.body_bytes,
                # A client that runs a tool between two turns may answer no ping for as long as that takes.
                ws_ping_interval=_PING_SECONDS,
                ws_ping_timeout=None,
                # A small message can hold a large one, and all of it would be unpacked.
                ws_per_message_deflate=False,
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE,
            )
        )

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Stop in good order; the second time, at once."""
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Until it is stopped, by a signal or by `stop`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self.serve(on_ready)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """As `run`, without taking the signals: those are the process's affair."""
        web = asyncio.ensure_future(self._web.serve(sockets=[self._sock]))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            on_ready()
            await asyncio.wait({web, stop}, return_when=asyncio.FIRST_COMPLETED)
            self._web.should_exit = True  # nothing more is accepted from here on
            await self._finish()
        finally:
            stop.cancel()
            self._web.should_exit = True
            await self._hang_up(web)

    async def _finish(self) -> None:
        """Let what runs end, unless somebody is in a hurry."""
        draining = asyncio.ensure_future(self._drain())
        hurry = asyncio.ensure_future(self._at_once.wait())
        try:
            await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                draining.result()
        finally:
            hurry.cancel()
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)

    async def _hang_up(self, web: asyncio.Future[None]) -> None:
        """Let connections end; then end them, and then those who still write to one."""
        await asyncio.wait({web}, timeout=0 if self._at_once.is_set() else _LAST_ANSWERS)
        self._web.force_exit = True
        for connection in tuple(self._web.server_state.connections):
            connection.transport.abort()
        await asyncio.wait({web}, timeout=_LAST_WORDS)
        for task in tuple(self._web.server_state.tasks):
            task.cancel()
        await web


class _Web(uvicorn.Server):
    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Generator[None]:
        """They are ours."""
        yield


class _Stalled:
    """Watches a connection whose reader is behind, and leaves one that takes next to nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._await_reader()

    def _await_reader(self) -> None:
        self._waiting_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(_STALL_SECONDS, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if self._transport.get_write_buffer_size() > self._waiting_bytes - _STALL_BYTES:
            logger.info("A client that read nothing was left.")
            self._transport.abort()  # closing would wait for it
        else:
            self._await_reader()

    def forget(self) -> None:
        self._timer.cancel()


class _Protocol(HttpToolsProtocol):
    """Bounds what uvicorn does not: the size of a request's head, the time it takes to arrive, and how long an answer
    may wait for a reader that takes nothing.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _stalled: _Stalled | None = None
    _head_bytes = 0
    _in_head = True

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_head()

    def _expect_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEADER_SECONDS, self.transport.close)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > _HEADER_BYTES:
                self.send_400_response("The head of the request is too large.")

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    @override
    def on_headers_complete(self) -> None:
        self._in_head = False
        self._forget_timer()
        if len(self.headers) > _HEADER_COUNT:
            raise ValueError("too many headers")
        super().on_headers_complete()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        self._forget_stall()
        super().connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = _Stalled(self.loop, self.transport)

    @override
    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.forget()
            self._stalled = None

    @override
    def handle_websocket_upgrade(self) -> None:
        self._forget_stall()
        super().handle_websocket_upgrade()

    @override
    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    @override
    def send_400_response(self, msg: str) -> None:
        _refuse(self.transport, msg)


def _refuse(transport: asyncio.Transport, message: str) -> None:
    logger.debug("What came was not HTTP.")
    body = encode(to_body(InvalidRequest(message)))
    transport.write(
        b"HTTP/1.1 400 Bad Request\r\n%s: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%s" % (*VERSION, len(body), body)
    )
    transport.close()


class _SocketProtocol(WebSocketsSansIOProtocol):
    """As `_Protocol`, after the upgrade. Answers come as whole messages, many of them in one piece, and are written as
    they are; and a server that stops lets them end.
    """

    _message_timer: asyncio.TimerHandle | None = None
    _stalled: _Stalled | None = None

    @override
    def data_received(self, data: bytes) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.handshake_complete = True
            _refuse(self.transport, "The request cannot be understood as the beginning of a WebSocket.")
        elif (self.frames or self.conn.reader.buffer) and not self.transport.is_closing():
            self._message_timer = self.loop.call_later(_MESSAGE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        logger.info("A client that did not end its message was left.")
        self.transport.abort()

    @override
    async def send(self, message: ASGISendEvent) -> None:
        messages: bytes | None = message.get("frames")
        if messages is None:
            await super().send(message)
            if message["type"] == "websocket.http.response.body":
                self.handshake_complete = True  # as far as it will ever be
            return
        await self.writable.wait()
        if self.conn.state is State.OPEN and not self.disconnected:
            self.transport.write(messages)

    @override
    def shutdown(self) -> None:
        if not self.handshake_complete or self.close_sent:
            super().shutdown()
        else:
            word: Any = {"type": SHUTDOWN}  # no message of ASGI's
            self.queue.put_nowait(word)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = _Stalled(self.loop, self.transport)

    @override
    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_stall()
        if self._message_timer is not None:
            self._message_timer.cancel()
        super().connection_lost(exc)

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.forget()
            self._stalled = None
