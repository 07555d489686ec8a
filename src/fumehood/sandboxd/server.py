"""Runs the sandbox server: listens, starts, serves, stops in good order; imports uvicorn and siblings."""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable, Coroutine, Generator
from typing import Any, override

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fumehood.protocol.sandbox_errors import RequestRefused, SandboxError, TryLater, to_body
from fumehood.sandboxd import logs
from fumehood.sandboxd.app import App
from fumehood.sandboxd.http_exchange import PROTOCOL_HEADER, encode
from fumehood.sandboxd.service import Service
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.sockets import Listener

_KEEP_ALIVE = 120
_HEADER_SECONDS = 30.0
_HEADER_BYTES = 64 << 10
_HEADER_COUNT = 256
_LAST_ANSWERS = 5  # seconds for connections to end after everything else has


class Server:
    """One run of the server. SIGTERM and SIGINT stop it in good order, a second one at once."""

    def __init__(
        self,
        settings: Settings,
        listener: Listener,
        *,
        token: str | None = None,
        grace: float = 10.0,
        sign_of_life: float | None = None,
    ) -> None:
        self.service = Service(settings)
        self._listener = listener
        self._grace = grace
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        app = App(
            self.service, token=token, **({} if sign_of_life is None else {"sign_of_life": sign_of_life})
        )
        self._web = _Web(
            uvicorn.Config(
                app,
                http=_bounded(settings.connections),
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_LAST_ANSWERS,
            )
        )

    @property
    def open_requests(self) -> int:
        """How many are being answered."""
        return len(self._web.server_state.tasks)

    def stop(self) -> None:
        """Stop in good order; the second time, at once."""
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Until it is stopped; raises IsolationUnavailable, and leaves nothing behind whatever happens."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self.serve(on_ready)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def serve(self, on_ready: Callable[[str], None]) -> None:
        """As `run`, without taking the signals: those are the process's affair."""
        web = asyncio.ensure_future(self._web.serve(sockets=[self._listener.sock]))
        try:
            if await self._unless(self._stop, self.service.start()):
                gc.collect()
                gc.freeze()  # what there is now stays, and need not be looked through again and again
                logs.event("started", where=self._listener.where, mode=self.service.settings.mode)
                on_ready(self._listener.where)
                await self._unless(self._stop, asyncio.shield(web))
            logs.event("stopping", grace=self._grace, running=self.service.health().running)
            await self._unless(self._at_once, self.service.stop(self._grace))
        finally:
            await self.service.close()
            self._web.should_exit = True
            self._web.force_exit = self._at_once.is_set()
            await web
            self._listener.close()
            logs.event("stopped")

    async def _unless(
        self, event: asyncio.Event, work: Coroutine[Any, Any, None] | asyncio.Future[None]
    ) -> bool:
        """Do it, unless the event comes first; says whether it was done."""
        task = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                return False
            task.result()
            return True
        finally:
            waiting.cancel()
            task.cancel()


class _Web(uvicorn.Server):
    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Generator[None]:
        """They are ours."""
        yield


class _Protocol(HttpToolsProtocol):
    """Bounds what uvicorn does not: connections, the size of a request's head and the time it takes to arrive."""

    most: int
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            error = TryLater(f"{self.most} callers are connected, as many as may be; try again later.")
            self._end_with(b"429 Too Many Requests\r\nretry-after: 1", error)
            return
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
        super().connection_lost(exc)

    @override
    def send_400_response(self, msg: str) -> None:
        self._end_with(b"400 Bad Request", RequestRefused(msg))

    def _end_with(self, status: bytes, error: SandboxError) -> None:
        logs.event("bad_http", level=logging.DEBUG, code=error.code)
        body = encode(to_body(error))
        self.transport.write(
            b"HTTP/1.1 %s\r\n%s: 1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, PROTOCOL_HEADER.encode(), len(body), body)
        )
        self.transport.close()


def _bounded(most: int) -> type[_Protocol]:
    """uvicorn makes the protocols itself, and passes no settings of ours on."""
    return type("_BoundedProtocol", (_Protocol,), {"most": most})
