"""Runs the gateway on a socket, and lets its runs end when it is stopped."""

import socket
from collections.abc import Awaitable, Callable
from typing import override

from fumehood.gateway.request_context import VERSION_HEADER, encode_json
from fumehood.http_server.asgi_request import Application
from fumehood.http_server.slow_clients import do_nothing
from fumehood.http_server.web_server import WebServer, render_error_response
from fumehood.http_server.websocket_protocol import make_websocket_protocol
from fumehood.protocol.openai.api_errors import InvalidRequest, ServiceUnavailable, to_error_body


class GatewayServer(WebServer):
    """One run of the gateway.

    app: a `Gateway`, or one with something around it.
    runs_end: what has to be waited for when it is stopped; nothing new is accepted meanwhile.
    on_stalled: is told of every reader that was left because it took nothing.
    """

    def __init__(
        self,
        app: Application,
        sock: socket.socket,
        drain_runs: Callable[[], Awaitable[None]],
        *,
        on_stalled: Callable[[], None] = do_nothing,
    ) -> None:
        sockets = make_websocket_protocol(_render_error, on_stalled)
        super().__init__(app, sock, _render_error, websocket_protocol=sockets, on_stalled=on_stalled)
        self._drain_runs = drain_runs

    @override
    async def drain(self) -> None:
        self.stop_accepting()
        await self._drain_runs()


def _render_error(status: int, reason: str) -> bytes:
    error = ServiceUnavailable(reason) if status == 503 else InvalidRequest(reason)
    return render_error_response([VERSION_HEADER], encode_json(to_error_body(error)))
