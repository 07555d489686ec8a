"""Runs the gateway on a socket: serves, drains, stops in good order; imports uvicorn and siblings."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from typing import cast, override

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from fumehood.gateway.app import Gateway
from fumehood.gateway.exchange import SHORTCUT, VERSION, Headers, encode
from fumehood.protocol.errors import InvalidRequest, to_body

_KEEP_ALIVE = 120
_HEADER_SECONDS = 30.0
_HEADER_BYTES = 64 << 10
_HEADER_COUNT = 256
# A reader for whom answers wait takes at least this much in this time, or is gone.
_STALL_SECONDS = 60.0
_STALL_BYTES = 64 << 10
_ONE_PACKET = 64 << 10  # of an answer that is copied to be sent at once
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
                ws="none",
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


class _Protocol(HttpToolsProtocol):
    """Bounds what uvicorn does not: the size of a request's head, the time it takes to arrive, and how long an answer
    may wait for a reader that takes nothing.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _waiting_bytes = 0
    _head_bytes = 0
    _in_head = True

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_head()

    def _expect_head(self) -> None:
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
            self._expect_head()  # the rest of it: mostly all of it came at once
            self._head_bytes += len(data)
            if self._head_bytes > _HEADER_BYTES:
                self.send_400_response("The head of the request is too large.")

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    @override
    def on_headers_complete(self) -> None:
        self._in_head = False
        self._forget_timer()
        if len(self.headers) > _HEADER_COUNT:
            raise ValueError("too many headers")
        super().on_headers_complete()
        cast("dict[str, object]", self.scope)[SHORTCUT] = _Shortcut(self.cycle)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        self._forget_stall()
        super().connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    @override
    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    def _await_reader(self) -> None:
        self._waiting_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(_STALL_SECONDS, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if self.transport.get_write_buffer_size() > self._waiting_bytes - _STALL_BYTES:
            logger.info("A client that read nothing was left.")
            self.transport.abort()  # closing would wait for it
        else:
            self._await_reader()

    def _forget_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    @override
    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    @override
    def send_400_response(self, msg: str) -> None:
        logger.debug("What came was not HTTP.")
        body = encode(to_body(InvalidRequest(msg)))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\n%s: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (*VERSION, len(body), body)
        )
        self.transport.close()


class _Shortcut:
    """See `exchange.Shortcut`: as uvicorn's `send` would, but for the looks at what is known to be well-formed."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """In one packet, which takes half of what two take."""
        cycle = self._cycle
        if cycle.response_started or cycle.disconnected or cycle.flow.write_paused:
            return False
        if len(body) > _ONE_PACKET or cycle.scope["method"] == "HEAD":
            return False
        lines = b"".join([b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)])
        closing = b"" if cycle.keep_alive else b"connection: close\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.transport.write(b"%b%b%b\r\n%b" % (STATUS_LINE[status], lines, closing, body))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True

    def send(self, body: bytes | bytearray) -> bool:
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.response_complete or not body:
            return False
        if cycle.flow.write_paused or cycle.disconnected:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True
