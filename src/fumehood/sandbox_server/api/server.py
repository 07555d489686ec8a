"""The sandbox server process: starts the service, serves HTTP, drains and stops."""

import asyncio
import gc
import socket
from collections.abc import Callable
from typing import override

from fumehood.http_server.cross_site_protection import AllowedHosts
from fumehood.http_server.listening_sockets import ListeningSocket
from fumehood.http_server.web_server import WebServer, render_error_response
from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidSandboxRequest,
    RetryLater,
    SandboxServerUnreachable,
    to_sandbox_error_body,
)
from fumehood.sandbox_server import structured_logging
from fumehood.sandbox_server.api.app import KEEPALIVE_SECONDS, SandboxServerApp
from fumehood.sandbox_server.api.sandbox_http_exchange import PROTOCOL_VERSION_HEADER, encode_json
from fumehood.sandbox_server.api.sandbox_service import SandboxService
from fumehood.sandbox_server.pod.container_sockets import wait_for_sockets
from fumehood.sandbox_server.settings import SandboxServerSettings


class SandboxServer(WebServer):
    """One run of the server; `serve` raises IsolationUnavailable. It leaves nothing behind on the host."""

    def __init__(
        self,
        settings: SandboxServerSettings,
        listener: ListeningSocket,
        *,
        token: str | None = None,
        metrics_token: str | None = None,
        grace_seconds: float = 10.0,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
    ) -> None:
        self.service = SandboxService(settings)
        self._listener = listener
        self._grace_seconds = grace_seconds
        self._exit_timer: asyncio.TimerHandle | None = None  # mode `pod`
        app = SandboxServerApp(
            self.service,
            token=token,
            metrics_token=metrics_token,
            host_names=None if listener.sock.family == socket.AF_UNIX else AllowedHosts(),
            keepalive_seconds=keepalive_seconds,
        )
        super().__init__(app, listener.sock, _render_connection_refusal, max_connections=settings.connections)

    @override
    async def start(self) -> None:
        settings = self.service.settings
        if settings.mode == "pod":
            self.service.supervisor.on_pod_end = self._on_pod_end
            sockets = [path for path in (settings.guest_socket, settings.egress_socket) if path is not None]
            await wait_for_sockets(sockets, settings.start_timeout)
        await self.service.start()
        gc.collect()
        gc.freeze()  # objects that exist now stay: spare the collector from scanning them
        structured_logging.log_event("started", where=self._listener.url, mode=self.service.settings.mode)

    def _on_pod_end(self) -> None:
        """Exit after a while: a pod is used once, and callers may still read how the last execution ended."""
        if self._exit_timer is None:
            seconds = self.service.settings.pod_linger_seconds
            structured_logging.log_event("pod_ended", exits_in_seconds=seconds)
            self._exit_timer = asyncio.get_running_loop().call_later(seconds, self.stop)

    @override
    async def drain(self) -> None:
        structured_logging.log_event(
            "stopping", grace=self._grace_seconds, running=self.service.health().running
        )
        await self.service.stop(self._grace_seconds)

    @override
    async def close(self) -> None:
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        await self.service.close()

    @override
    async def serve(self, on_ready: Callable[[], None]) -> None:
        has_started = False

        def ready() -> None:
            nonlocal has_started
            has_started = True
            on_ready()

        try:
            await super().serve(ready)
        finally:
            self._listener.close()
            if has_started:
                structured_logging.log_event("stopped")


def _render_connection_refusal(status: int, reason: str) -> bytes:
    kinds = {429: RetryLater, 503: SandboxServerUnreachable}
    error = kinds.get(status, InvalidSandboxRequest)(reason)
    return render_error_response([PROTOCOL_VERSION_HEADER], encode_json(to_sandbox_error_body(error)))
