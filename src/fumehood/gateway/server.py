"""Runs the gateway on a socket, and lets its runs end when it is stopped; imports `serving` and siblings."""

import socket
from collections.abc import Awaitable, Callable
from typing import override

from fumehood.gateway.exchange import VERSION, encode
from fumehood.protocol.errors import InvalidRequest, Unavailable, to_body
from fumehood.serving.exchange import Application
from fumehood.serving.stalled import nobody
from fumehood.serving.web import WebServer, render_refusal
from fumehood.serving.websocket import socket_protocol


class Server(WebServer):
    """One run of the gateway.

    app: a `Gateway`, or one with something around it.
    runs_end: what has to be waited for when it is stopped; nothing new is accepted meanwhile.
    on_stalled: is told of every reader that was left because it took nothing.
    """

    def __init__(
        self,
        app: Application,
        sock: socket.socket,
        runs_end: Callable[[], Awaitable[None]],
        *,
        on_stalled: Callable[[], None] = nobody,
    ) -> None:
        sockets = socket_protocol(_refusal, on_stalled)
        super().__init__(app, sock, _refusal, sockets=sockets, on_stalled=on_stalled)
        self._runs_end = runs_end

    @override
    async def drain(self) -> None:
        self.accept_no_more()
        await self._runs_end()


def _refusal(status: int, reason: str) -> bytes:
    error = Unavailable(reason) if status == 503 else InvalidRequest(reason)
    return render_refusal([VERSION], encode(to_body(error)))
