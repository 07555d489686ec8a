"""Serves one connection of a sandbox to the proxy."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING

import h11

from fumehood.sandbox_server.egress import tls_client_hello
from fumehood.sandbox_server.egress.byte_streams import ByteStream, SocketStream, TlsServerStream, relay
from fumehood.sandbox_server.egress.control_messages import EgressEvent, ProxyLimits, Verdict
from fumehood.sandbox_server.egress.domain_parsing import InvalidDomainName, RequestTarget, parse_domain_name
from fumehood.sandbox_server.egress.egress_policy import EgressPolicy
from fumehood.sandbox_server.egress.request_forwarding import ForwardingAborted, RequestForwarder
from fumehood.sandbox_server.egress.request_parsing import (
    ForwardedRequest,
    ProxyRefusal,
    bad_request,
    parse_head,
    read_head,
    validate_request,
)
from fumehood.sandbox_server.egress.secret_placeholders import SecretPlaceholders
from fumehood.sandbox_server.egress.upstream_connector import UpstreamConnector

if TYPE_CHECKING:  # slow to import, and most servers never need it
    from fumehood.sandbox_server.egress.certificate_authority import SandboxCertificateAuthority

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"  # a TLS alert, so that programs report more than "closed"
_LINGER = 1.0


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What the connections of one sandbox share.

    consume_budget: counts transferred bytes; returns False once the sandbox has exceeded its budget.
    """

    policy: EgressPolicy
    limits: ProxyLimits
    connector: UpstreamConnector
    send_event: Callable[[EgressEvent], None]
    consume_budget: Callable[[int], bool]
    authority: "SandboxCertificateAuthority | None" = None
    upstream_tls: ssl.SSLContext | None = None
    placeholders: dict[str, SecretPlaceholders] = field(
        default_factory=dict[str, SecretPlaceholders], repr=False
    )


class _BudgetExhausted(Exception):
    """The sandbox has used up its bytes."""


class ProxyConnection:
    """One connection of a sandbox to the proxy: plain HTTP requests, or CONNECT and TLS."""

    def __init__(self, client: SocketStream, context: SessionContext) -> None:
        self._client = client
        self._context = context
        # A connection to a checked address, and the only server that requests on it may name.
        self._upstream: tuple[SocketStream, RequestTarget] | None = None
        self._idle_timeout: asyncio.Timeout | None = None
        self._next_check: asyncio.TimerHandle | None = None
        self._is_quiet = True
        self._sent = self._received = 0

    async def run(self) -> None:
        """Serve until the client, the server or a limit ends it; closes everything."""
        try:
            async with asyncio.timeout(self._context.limits.total_seconds):
                await self._serve(self._client, None)
        except (TimeoutError, OSError, EOFError, ForwardingAborted, _BudgetExhausted, h11.ProtocolError):
            self._client.reset()
        finally:
            self._close_upstream()
            self._client.close()

    async def _serve(self, stream: ByteStream, tls_authority: RequestTarget | None) -> None:
        """Serve request after request, each checked; `tls_authority` as in `validate_request`."""
        buffered = b""
        is_first = True
        is_open = True
        to: RequestTarget | None = tls_authority
        while is_open:
            try:
                head, buffered = await read_head(stream, buffered, self._context.limits, is_first=is_first)
                if not head:
                    return
                to = tls_authority
                incoming, parsed = parse_head(head, self._context.limits)
                request = validate_request(parsed, tls_authority)
                to = request.authority
                self._check_policy(to)
                if request.method == b"CONNECT":
                    await self._handle_connect(parsed, to, buffered)
                    return
                is_open, buffered = await self._forward(stream, incoming, request, buffered, tls_authority)
            except ProxyRefusal as refusal:
                verdict = "failed" if refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "refused"
                self._send_event(to, verdict, refusal.text)
                await stream.send(refusal.encode_response())
                break
            is_first = False
        await self._linger(stream)

    async def _linger(self, stream: ByteStream) -> None:
        async with asyncio.timeout(self._context.limits.idle_seconds):
            await stream.linger(_LINGER)

    def _check_policy(self, to: RequestTarget) -> None:
        reason = self._context.policy.refusal_reason(to)
        if reason is not None:
            raise ProxyRefusal(HTTPStatus.FORBIDDEN, reason)
        if not self._context.consume_budget(0):
            raise ProxyRefusal(HTTPStatus.FORBIDDEN, "this sandbox has used up its network bytes")

    # ---- plain requests, and requests within terminated TLS -------------------------------------------------------

    async def _forward(
        self,
        stream: ByteStream,
        incoming: h11.Connection,
        request: ForwardedRequest,
        buffered: bytes,
        tls_authority: RequestTarget | None,
    ) -> tuple[bool, bytes]:
        """Forward a request; returns whether the connection stays open, and bytes of the next request."""
        upstream = await self._upstream_for(request.authority, secure=tls_authority is not None)
        placeholders = self._context.placeholders.get(request.authority.name)
        if tls_authority is not None and placeholders is not None:  # never over plain HTTP
            request = replace(request, headers=placeholders.fill(request.headers))
        if buffered:
            incoming.receive_data(buffered)
        forwarder = RequestForwarder(stream, incoming, upstream, self._count_bytes)
        try:
            async with self._idle_guard():
                await forwarder.run(request)
        except (TimeoutError, ForwardingAborted, _BudgetExhausted) as error:
            if isinstance(error, TimeoutError) and not forwarder.has_response_started:
                text = f"{request.authority.name} did not respond in time"
                raise ProxyRefusal(HTTPStatus.GATEWAY_TIMEOUT, text) from None
            self._send_event(request.authority, "failed", "aborted")
            raise
        finally:
            if not forwarder.can_reuse_upstream:
                self._close_upstream()
        self._send_event(request.authority, "allowed")
        return forwarder.can_reuse_client, incoming.trailing_data[0]

    async def _upstream_for(self, to: RequestTarget, *, secure: bool) -> SocketStream:
        """Return the connection of the last request if it is to the same server, else a new, checked one."""
        if self._upstream is not None and self._upstream[1] == to and not self._upstream[0].is_at_eof:
            return self._upstream[0]
        self._close_upstream()
        sock = await self._context.connector.connect(to)
        context = self._context.upstream_tls if secure else None
        seconds = self._context.limits.connect_seconds if secure else None
        try:
            stream = await SocketStream.open(
                sock, context=context, name=to.name if secure else None, timeout=seconds
            )
        except ssl.SSLCertVerificationError as error:
            raise ProxyRefusal(
                HTTPStatus.BAD_GATEWAY, f"the certificate of {to.name} is not valid: {error.verify_message}"
            ) from None
        except OSError:
            raise ProxyRefusal(HTTPStatus.BAD_GATEWAY, f"the TLS handshake with {to.name} failed") from None
        self._upstream = (stream, to)
        return stream

    def _close_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream[0].close()
            self._upstream = None

    # ---- CONNECT ----------------------------------------------------------------------------------------------

    async def _handle_connect(self, request: h11.Request, to: RequestTarget, buffered: bytes) -> None:
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in request.headers):
            raise bad_request("CONNECT has no body")
        if to.name in self._context.placeholders:
            await self._accept_connect(buffered)
            await self._terminate_tls(to)
            return
        server = await SocketStream.open(await self._context.connector.connect(to))
        try:
            await self._accept_connect(buffered)
            if await self._check_client_hello(to):
                await self._run_tunnel(server, to)
        finally:
            server.close()

    async def _accept_connect(self, buffered: bytes) -> None:
        self._client.push_back(buffered)
        await self._client.send(_ESTABLISHED)

    async def _run_tunnel(self, server: SocketStream, to: RequestTarget) -> None:
        try:
            async with self._idle_guard():
                await relay(self._client, server, self._count_bytes)
        finally:
            self._send_event(to, "allowed")

    async def _terminate_tls(self, to: RequestTarget) -> None:
        """Act as the server of a domain with secrets, to fill in placeholders in its requests."""
        if not await self._check_client_hello(to) or self._context.authority is None:
            return
        stream = TlsServerStream(self._client, await self._context.authority.server_context(to.name))
        async with asyncio.timeout(self._context.limits.head_seconds):
            await stream.handshake()
        await self._serve(stream, to)

    async def _check_client_hello(self, to: RequestTarget) -> bool:
        """Whether the client starts TLS with the requested server; the ClientHello is pushed back."""
        data = b""
        name: str | None = None
        try:
            async with asyncio.timeout(self._context.limits.head_seconds):
                while name is None:
                    header = await self._client.read_exactly(tls_client_hello.RECORD_HEADER)
                    data += header
                    data += await self._client.read_exactly(tls_client_hello.parse_record_length(header))
                    name = tls_client_hello.parse_server_name(data)
            if parse_domain_name(name) != to.name or name.endswith("."):
                raise tls_client_hello.InvalidClientHello("it names another server")
        except (tls_client_hello.InvalidClientHello, InvalidDomainName) as error:
            self._send_event(to, "refused", f"within the tunnel: {error}")
            if data[:1] == b"\x16":
                await self._client.send(_ACCESS_DENIED)
                await self._linger(self._client)
            return False
        self._client.push_back(data)
        return True

    # ---- idle timeout and byte counts -------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _idle_guard(self) -> AsyncGenerator[None]:
        """Raise TimeoutError when idle; sooner once the client has closed its side."""
        try:
            async with asyncio.timeout(self._context.limits.idle_seconds) as self._idle_timeout:
                self._schedule_check()
                yield
        finally:
            self._idle_timeout = None
            if self._next_check is not None:
                self._next_check.cancel()

    def _schedule_check(self) -> None:
        self._is_quiet = True
        self._next_check = asyncio.get_running_loop().call_later(
            self._context.limits.half_closed_seconds, self._check_half_closed
        )

    def _check_half_closed(self) -> None:
        if self._idle_timeout is None:
            return
        if self._is_quiet and self._client.is_peer_closed:
            self._idle_timeout.reschedule(asyncio.get_running_loop().time())
        else:
            self._schedule_check()

    def _count_bytes(self, sent: int, received: int) -> None:
        self._sent += sent
        self._received += received
        self._is_quiet = False
        if not self._context.consume_budget(sent + received):
            raise _BudgetExhausted
        if self._idle_timeout is not None:
            self._idle_timeout.reschedule(
                asyncio.get_running_loop().time() + self._context.limits.idle_seconds
            )

    def _send_event(self, to: RequestTarget | None, verdict: Verdict, reason: str = "") -> None:
        name, port = ("", 0) if to is None else (to.name, to.port)
        self._context.send_event(
            EgressEvent(
                domain=name,
                port=port,
                verdict=verdict,
                reason=reason,
                sent=self._sent,
                received=self._received,
            )
        )
        self._sent = self._received = 0
