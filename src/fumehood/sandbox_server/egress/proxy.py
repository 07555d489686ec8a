"""The egress proxy: one for all sandboxes, with a listener for each.

It parses untrusted input and runs in its own process: see proxy_worker.py and proxy_control.py.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import traceback
from collections.abc import Callable

import msgspec

from fumehood.http_server.address_policy import AddressPolicy, parse_networks
from fumehood.http_server.dns_resolver import DnsResolver
from fumehood.sandbox_server.egress import control_messages
from fumehood.sandbox_server.egress.byte_streams import SocketStream
from fumehood.sandbox_server.egress.certificate_authority import SandboxCertificateAuthority
from fumehood.sandbox_server.egress.egress_policy import EgressPolicy
from fumehood.sandbox_server.egress.proxy_connection import ProxyConnection, SessionContext
from fumehood.sandbox_server.egress.secret_placeholders import SecretPlaceholders
from fumehood.sandbox_server.egress.upstream_connector import UpstreamConnector

logger = logging.getLogger(__name__)

_ACCEPT_RETRY_SECONDS = 0.2  # after accept() failed, mostly for lack of descriptors
_BUSY_RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class EgressProxy:
    """The HTTP proxy of all sandboxes: accepts their connections and forwards what their access allows.

    upstream_tls: see `client_tls_context`.
    on_event: called with what was done for a sandbox.
    on_change: called when `connections` or a listener's `bytes_used` has changed.
    """

    def __init__(
        self,
        configuration: control_messages.ProxyConfiguration,
        upstream_tls: ssl.SSLContext,
        *,
        on_event: Callable[[control_messages.EgressEvent], None],
        on_change: Callable[[], None],
    ) -> None:
        limits = configuration.limits
        self.connector = UpstreamConnector(
            DnsResolver(configuration.hosts, timeout=limits.resolve_seconds),
            AddressPolicy(parse_networks(configuration.private)),
            limits,
        )
        self.on_event = on_event
        self.on_change = on_change
        self.upstream_tls = upstream_tls
        self.connections = 0
        self._max_connections = configuration.connections_total
        self._tasks: set[asyncio.Task[None]] = set()

    def track_session(self, session: asyncio.Task[None]) -> None:
        """Keep a session's task until it is done."""
        self._tasks.add(session)
        session.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all sessions and wait for them; close the listeners before."""
        for task in [*self._tasks]:
            task.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # let the callbacks of finished tasks run
        self.connector.resolver.close()

    @property
    def is_full(self) -> bool:
        return self.connections >= self._max_connections


class SandboxListener:
    """Accepts the connections of one sandbox; owns the listener. Raises ValueError for an invalid key pair."""

    def __init__(
        self,
        proxy: EgressProxy,
        number: int,
        access: control_messages.SandboxEgressConfig,
        listener: socket.socket,
    ) -> None:
        self._proxy = proxy
        self._number = number
        self._max_connections = access.connections
        self._budget = access.budget
        self.bytes_used = access.bytes_used
        self._sessions: set[asyncio.Task[None]] = set()
        self._unstarted_sockets: set[socket.socket] = set()  # accepted, but their tasks have not started
        keys = access.authority
        self._context = SessionContext(
            policy=EgressPolicy(frozenset(access.domains), frozenset(access.ports), access.secrets),
            limits=access.limits,
            connector=proxy.connector,
            send_event=self._send_event,
            consume_budget=self._consume_budget,
            authority=None
            if keys is None
            else SandboxCertificateAuthority.load(keys.private, keys.certificate),
            upstream_tls=proxy.upstream_tls,
            placeholders={domain: SecretPlaceholders(values) for domain, values in access.secrets.items()},
        )
        self._listener: socket.socket | None = listener
        listener.setblocking(False)
        self._resume_accepting()

    def close(self) -> None:
        """Close the listener and all connections."""
        if self._listener is not None:
            self._pause_accepting()
            self._listener.close()
            self._listener = None
        for task in [*self._sessions]:
            task.cancel()
        for sock in self._unstarted_sockets:  # cancelled before they started
            sock.close()
        self._unstarted_sockets.clear()

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept, self._listener)

    def _pause_accepting(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        """Accept up to the connection limit; the others wait in the queue of the sandbox's own kernel socket."""
        while len(self._sessions) < self._max_connections:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("The proxy could not accept a connection: %s.", error.strerror)
                self._pause_accepting()
                asyncio.get_running_loop().call_later(_ACCEPT_RETRY_SECONDS, self._resume_accepting)
                return
            self._unstarted_sockets.add(sock)
            task = asyncio.ensure_future(self._serve(sock))
            self._sessions.add(task)
            task.add_done_callback(self._on_session_done)
            self._proxy.track_session(task)
        self._pause_accepting()

    def _on_session_done(self, task: asyncio.Task[None]) -> None:
        self._sessions.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Only type and location: the text may contain what passed through.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            logger.error(
                "A proxy session failed: %s in %s:%s.", type(error).__name__, frame.name, frame.lineno
            )
        self._resume_accepting()

    async def _serve(self, sock: socket.socket) -> None:
        self._unstarted_sockets.discard(sock)
        sock.setblocking(False)
        if self._proxy.is_full:
            with sock, contextlib.suppress(OSError):
                sock.send(_BUSY_RESPONSE)
            return
        self._proxy.connections += 1
        self._proxy.on_change()
        try:
            await ProxyConnection(await SocketStream.open(sock), self._context).run()
        finally:
            self._proxy.connections -= 1
            self._proxy.on_change()

    def _consume_budget(self, count: int) -> bool:
        if count:
            self.bytes_used += count
            self._proxy.on_change()
        return self._budget is None or self.bytes_used <= self._budget

    def _send_event(self, event: control_messages.EgressEvent) -> None:
        self._proxy.on_event(msgspec.structs.replace(event, number=self._number))


def client_tls_context(extra_certificates: str) -> ssl.SSLContext:
    """Return the TLS context for connections to servers; certificates and names are verified."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if extra_certificates:
        context.load_verify_locations(cadata=extra_certificates)
    return context
