"""Runs the sandbox server: starts, serves, stops in good order; imports `serving` and siblings."""

import gc
import socket
from collections.abc import Callable
from typing import override

from fumehood.protocol.sandbox_errors import RequestRefused, TryLater, Unreachable, to_body
from fumehood.sandboxd import logs
from fumehood.sandboxd.app import App
from fumehood.sandboxd.http_exchange import PROTOCOL, encode
from fumehood.sandboxd.service import Service
from fumehood.sandboxd.settings import Settings
from fumehood.serving.browsers import HostNames
from fumehood.serving.sockets import Listener
from fumehood.serving.web import WebServer, render_refusal


class Server(WebServer):
    """One run of the server, which leaves nothing behind however it ends; `run` raises IsolationUnavailable."""

    def __init__(
        self,
        settings: Settings,
        listener: Listener,
        *,
        token: str | None = None,
        metrics_token: str | None = None,
        grace: float = 10.0,
        sign_of_life: float | None = None,
    ) -> None:
        self.service = Service(settings)
        self._listener = listener
        self._grace = grace
        app = App(
            self.service,
            token=token,
            metrics_token=metrics_token,
            hosts=None if listener.sock.family == socket.AF_UNIX else HostNames(),
            **({} if sign_of_life is None else {"sign_of_life": sign_of_life}),
        )
        super().__init__(app, listener.sock, _refusal, connections=settings.connections)

    @override
    async def start(self) -> None:
        await self.service.start()
        gc.collect()
        gc.freeze()  # what there is now stays, and need not be looked through again and again
        logs.event("started", where=self._listener.where, mode=self.service.settings.mode)

    @override
    async def drain(self) -> None:
        logs.event("stopping", grace=self._grace, running=self.service.health().running)
        await self.service.stop(self._grace)

    @override
    async def close(self) -> None:
        await self.service.close()

    @override
    async def serve(self, on_ready: Callable[[], None]) -> None:
        try:
            await super().serve(on_ready)
        finally:
            self._listener.close()
            logs.event("stopped")


def _refusal(status: int, reason: str) -> bytes:
    kinds = {429: TryLater, 503: Unreachable}
    error = kinds.get(status, RequestRefused)(reason)
    return render_refusal([PROTOCOL], encode(to_body(error)))
