"""Runs an ASGI application on uvicorn, with connection limits and a graceful shutdown."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, cast, override

import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from fumehood.http_server.asgi_exchange import DIRECT_WRITER, Application, Headers
from fumehood.http_server.fair_parse_scheduler import FairParseScheduler, SlicedReadProtocol
from fumehood.http_server.slow_clients import StalledClientMixin, do_nothing
from fumehood.http_server.uvicorn_http1 import Http1Protocol

type ErrorRenderer = Callable[[int, str], bytes]

_KEEP_ALIVE_SECONDS = 120
_HEADER_SECONDS = 30.0
_HEADER_BYTES = 64 << 10
_HEADER_COUNT = 256
_MAX_PIPELINED = 128
_MAX_DIRECT_BYTES = 64 << 10  # larger responses are not copied into one write
_SHUTDOWN_SECONDS = 5.0  # for connections to close on shutdown
_LINGER_SECONDS = 2.0  # for a client to read an error before the connection closes
_REJECTION_LOG_INTERVAL = 60.0
_ABORT_SECONDS = 1.0  # for requests to end after their connections were aborted

logger = logging.getLogger(__name__)


class WebServer:
    """A server. The first SIGTERM or SIGINT stops it gracefully, the second one at once.

    render_error: headers and body of the response to a malformed request, by status and reason.
    max_connections: limit of open connections; None for no limit.
    websocket_protocol: the protocol class of WebSockets; None disables them.
    on_stalled: called when a client is disconnected because it reads nothing.
    """

    def __init__(
        self,
        app: Application,
        sock: socket.socket,
        render_error: ErrorRenderer,
        *,
        max_connections: int | None = None,
        websocket_protocol: type[asyncio.Protocol] | None = None,
        on_stalled: Callable[[], None] = do_nothing,
    ) -> None:
        self._sock = sock
        self._stop = asyncio.Event()
        self._force_stop = asyncio.Event()
        self._uvicorn = _UvicornServer(
            uvicorn.Config(
                app,
                # uvicorn creates the protocols itself, so settings are class attributes
                http=type(
                    "_ConfiguredHttpProtocol",
                    (_SlicedHttpProtocol,),
                    {
                        "scheduler": FairParseScheduler(),
                        "render_error": staticmethod(render_error),
                        "max_connections": max_connections,
                        "descriptor_limit": FileDescriptorGuard(),
                        "on_stalled": staticmethod(on_stalled),
                    },
                ),
                ws=websocket_protocol or "none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
        )

    # ---- hooks for subclasses ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Called before the server is ready; requests are already served."""

    async def drain(self) -> None:
        """Called on shutdown; cancelled by a second signal."""

    async def close(self) -> None:
        """Called at the end in any case."""

    # ---- lifecycle ---------------------------------------------------------------------------------------------

    @property
    def open_request_count(self) -> int:
        """The number of requests in progress."""
        return len(self._uvicorn.server_state.tasks)

    def stop(self) -> None:
        """Stop gracefully; the second call stops at once."""
        if self._stop.is_set():
            self._force_stop.set()
        self._stop.set()

    def stop_accepting(self) -> None:
        self._uvicorn.should_exit = True

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until a signal or `stop`. Raises what `start` raises."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self.serve(on_ready)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """As `run`, without signal handlers."""
        loop = asyncio.get_running_loop()
        handler = loop.get_exception_handler()
        loop.set_exception_handler(_report_loop_error)
        web = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._sock]))
        try:
            if await _run_unless(self._stop, self.start()):
                on_ready()
                await _run_unless(self._stop, asyncio.shield(web))
            await _run_unless(self._force_stop, self.drain())
        finally:
            await self.close()
            self.stop_accepting()
            await self._close_connections(web)
            loop.set_exception_handler(handler)

    async def _close_connections(self, web: asyncio.Future[None]) -> None:
        """Wait for connections to close, then abort them, then cancel their requests."""
        await asyncio.wait({web}, timeout=0 if self._force_stop.is_set() else _SHUTDOWN_SECONDS)
        self._uvicorn.force_exit = True
        for connection in tuple(self._uvicorn.server_state.connections):
            connection.transport.abort()
        await asyncio.wait({web}, timeout=_ABORT_SECONDS)
        for task in tuple(self._uvicorn.server_state.tasks):
            task.cancel()
        await web


def _report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of the event loop; running out of memory needs no traceback."""
    if isinstance(context.get("exception"), MemoryError):
        logger.warning("Closed a connection: out of memory.")
    else:
        loop.default_exception_handler(context)


async def _run_unless(event: asyncio.Event, work: Coroutine[Any, Any, None] | asyncio.Future[None]) -> bool:
    """Run `work` until the event is set; return whether it finished."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        waiting.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _UvicornServer(uvicorn.Server):
    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Generator[None]:
        """Signals are handled by `WebServer`."""
        yield


class FileDescriptorGuard:
    """Rejects connections when few file descriptors are left; logs it once a minute.

    Responses need descriptors too (model servers, files), and uvloop closes connections silently when there are none.

    limit: returns the descriptor limit of the process; -1 if unlimited.
    """

    def __init__(
        self,
        limit: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._monotonic = monotonic
        self._rejected_count = 0
        self._logged_at: float | None = None

    def rejects(self, descriptor: int) -> bool:
        """Whether a connection with this descriptor is too many: the kernel assigns the lowest free number."""
        limit = self._limit()
        if limit < 0 or descriptor < limit - max(8, min(64, limit // 16)):
            return False
        self._rejected_count += 1
        now = self._monotonic()
        if self._logged_at is None or now - self._logged_at >= _REJECTION_LOG_INTERVAL:
            self._logged_at = now
            number, self._rejected_count = self._rejected_count, 0
            logger.warning(
                "Rejecting connections: nearly all of the %d file descriptors are in use (%d rejected since the last "
                "message). Raise the limit with ulimit -n or LimitNOFILE=.",
                limit,
                number,
            )
        return True


class _LimitedProtocol(StalledClientMixin, Http1Protocol):
    """Adds limits to uvicorn: number of connections, size and duration of a request head, stalled clients."""

    render_error: ErrorRenderer
    max_connections: int | None
    descriptor_limit: FileDescriptorGuard
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0  # of the head, or of trailers since the last body chunk
    _in_head = True
    _in_body = False
    _received_body = False
    _is_discarding = False  # the error is sent; further input is ignored
    # The request in progress; uvicorn's `cycle` is the last one received, which may be queued behind it.
    _active_cycle: RequestResponseCycle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            reason = f"Connection limit reached ({self.max_connections}); try again later."
            self._send_error_and_close(b"429 Too Many Requests\r\nretry-after: 1", 429, reason)
            return
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and self.descriptor_limit.rejects(sock.fileno()):
            self._send_unavailable("The server is out of file descriptors; try again later.")
            self.transport.close()
            return
        self._start_head_timer()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEADER_SECONDS, self.transport.close)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            return
        self._received_body = False
        super().data_received(data)
        if self.transport.is_closing() or self._is_discarding:
            return
        if self._in_head:
            self._start_head_timer()  # for the rest of the head
            self._head_bytes += len(data)
            if self._head_bytes > _HEADER_BYTES:
                self.send_400_response("The request head is too large.")
        elif self._in_body and not self._received_body:
            self._head_bytes += len(data)
            if self._head_bytes > _HEADER_BYTES:
                self.send_400_response("The trailers of the request are too large.")

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignore trailers: they would pass for headers that a proxy has not seen."""
        if self._in_head:
            super().on_header(name, value)

    @override
    def on_body(self, body: bytes) -> None:
        self._received_body = True
        self._head_bytes = 0
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    @override
    def on_headers_complete(self) -> None:
        self._in_head = False
        self._in_body = True
        self._head_bytes = 0
        self._cancel_head_timer()
        if len(self.headers) > _HEADER_COUNT:
            self.head_error = f"The request has more than {_HEADER_COUNT} headers."
            raise ValueError(self.head_error)
        if len(self.pipeline) >= _MAX_PIPELINED:
            self.head_error = f"More than {_MAX_PIPELINED} pipelined requests on this connection."
            raise ValueError(self.head_error)
        super().on_headers_complete()
        cast("dict[str, object]", self.scope)[DIRECT_WRITER] = _CycleWriter(self.cycle)

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active_cycle = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_responding(self) -> bool:
        return self._active_cycle is not None and not self._active_cycle.response_complete

    @property
    def _has_pending_response(self) -> bool:
        """Whether received data belongs to a request after the one in progress."""
        active = self._active_cycle
        if active is None or active.response_complete:
            return False
        return active.response_started or not active.more_body

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._disconnect_active()
        super().connection_lost(exc)

    def _disconnect_active(self) -> None:
        """Tell the request in progress that the client disconnected."""
        if self._active_cycle is not None and self._is_responding:
            self._active_cycle.disconnected = True
            self._active_cycle.message_event.set()

    @override
    def handle_websocket_upgrade(self) -> None:
        if self._is_responding:  # its response would mix with the frames
            self.send_400_response("Another request on this connection is in progress.")
            return
        self.cancel_stall_timer()
        super().handle_websocket_upgrade()

    @override
    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _send_unavailable(self, reason: str) -> None:
        self._write_error(b"503 Service Unavailable\r\nretry-after: 5", 503, reason)

    @override
    def on_out_of_memory(self) -> None:
        """Closing at once would reset the connection, and a client that still sends would not see the response."""
        self._send_unavailable("The server is out of memory; try again later.")
        self._disconnect_active()  # it would wait for the rest of its body
        self.transport.write_eof()
        self._is_discarding = True
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    @override
    def send_400_response(self, msg: str) -> None:
        self._send_error_and_close(b"400 Bad Request", 400, msg)

    def _send_error_and_close(self, head: bytes, status: int, reason: str) -> None:
        self._write_error(head, status, reason)
        self.transport.close()

    def _write_error(self, head: bytes, status: int, reason: str) -> None:
        logger.debug("Rejected a connection or malformed request: %s", reason)
        if not self._has_pending_response:  # else the client would take this for that response
            response = self.render_error(status, reason)
            self.transport.write(b"HTTP/1.1 %s\r\nconnection: close\r\n%s" % (head, response))


class _SlicedHttpProtocol(SlicedReadProtocol, _LimitedProtocol):
    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.flow = _SlicedFlowControl(self)

    @property
    @override
    def is_read_paused(self) -> bool:
        return self.flow.read_paused


class _SlicedFlowControl(FlowControl):
    """Keeps reading paused while received data is unparsed."""

    def __init__(self, protocol: _SlicedHttpProtocol) -> None:
        super().__init__(protocol.transport)
        self._protocol = protocol

    @override
    def resume_reading(self) -> None:
        if self._protocol.has_unparsed:
            self.read_paused = False
        else:
            super().resume_reading()


class _CycleWriter:
    """The `DirectWriter` of a request: uvicorn's `send` without its checks of headers that are known to be valid."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write_response(self, status: int, headers: Headers, body: bytes) -> bool:
        """One write, which takes half the CPU time of two."""
        cycle = self._cycle
        if not self._can_start(body):
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.transport.write(b"%b\r\n%b" % (self._encode_head(status, headers), body))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True

    def start_chunks(self, status: int, headers: Headers, body: bytes) -> bool:
        """One write, too."""
        cycle = self._cycle
        if not body or cycle.scope["http_version"] != "1.1" or not self._can_start(body):
            return False
        cycle.response_started = cycle.chunked_encoding = True
        head = self._encode_head(status, headers)
        cycle.transport.write(b"%btransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (head, len(body), body))
        return True

    def _can_start(self, body: bytes) -> bool:
        cycle = self._cycle
        if cycle.response_started or cycle.flow.write_paused or _is_disconnected(cycle):
            return False
        return len(body) <= _MAX_DIRECT_BYTES and cycle.scope["method"] != "HEAD"

    def _encode_head(self, status: int, headers: Headers) -> bytes:
        cycle = self._cycle
        lines = b"".join([b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)])
        return b"%b%b%b" % (STATUS_LINE[status], lines, b"" if cycle.keep_alive else b"connection: close\r\n")

    def write_chunk(self, body: bytes | bytearray) -> bool:
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.response_complete or not body:
            return False
        if cycle.flow.write_paused or _is_disconnected(cycle):
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def break_off(self) -> bool:
        self._cycle.disconnected = True  # else uvicorn reports an incomplete response
        self._cycle.transport.close()
        return True


def _is_disconnected(cycle: RequestResponseCycle) -> bool:
    return cycle.disconnected or cycle.transport.is_closing()


def render_error_response(headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Headers and body in the form that an `ErrorRenderer` returns."""
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"%scontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (lines, len(body), body)
