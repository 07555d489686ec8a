"""Serves the gateway on a socket and drains its runs on shutdown."""

import socket
from collections.abc import Awaitable, Callable
from typing import override

from fumehood.gateway.gateway_exchange import VERSION_HEADER, encode_json
from fumehood.http_server.asgi_exchange import Application
from fumehood.http_server.slow_clients import do_nothing
from fumehood.http_server.uvicorn_websocket import make_websocket_protocol
from fumehood.http_server.web_server import WebServer, render_error_response
from fumehood.protocol.openai.api_errors import InvalidRequest, ServiceUnavailable, to_error_body


class GatewayWebServer(WebServer):
    """A web server for a `Gateway`.

    app: the `Gateway`, possibly wrapped in middleware.
    drain_runs: awaited on shutdown, after the server has stopped accepting connections.
    on_stalled: called whenever a client is disconnected because it reads nothing.
    """

    def __init__(
        self,
        app: Application,
        sock: socket.socket,
        drain_runs: Callable[[], Awaitable[None]],
        *,
        on_stalled: Callable[[], None] = do_nothing,
    ) -> None:
        websocket_protocol = make_websocket_protocol(_render_error, on_stalled)
        super().__init__(
            app, sock, _render_error, websocket_protocol=websocket_protocol, on_stalled=on_stalled
        )
        self._drain_runs = drain_runs

    @override
    async def drain(self) -> None:
        self.stop_accepting()
        await self._drain_runs()


def _render_error(status: int, reason: str) -> bytes:
    error = ServiceUnavailable(reason) if status == 503 else InvalidRequest(reason)
    return render_error_response([VERSION_HEADER], encode_json(to_error_body(error)))
