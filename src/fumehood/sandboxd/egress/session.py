"""One connection of a sandbox to its proxy, from the first byte to the last; imports h11 and siblings."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING

import h11

from fumehood.sandboxd.egress import hello, tunnel
from fumehood.sandboxd.egress.bounds import Bounds
from fumehood.sandboxd.egress.connecting import Connector
from fumehood.sandboxd.egress.exchange import Broken, Exchange, Upstream
from fumehood.sandboxd.egress.messages import Asked, Refused, bad, parse, read_head, understood
from fumehood.sandboxd.egress.names import Authority, BadName, normalised
from fumehood.sandboxd.egress.orders import Event, Verdict
from fumehood.sandboxd.egress.placeholders import Placeholders
from fumehood.sandboxd.egress.policy import Policy
from fumehood.sandboxd.egress.streams import SocketStream, Stream, TlsStream

if TYPE_CHECKING:  # it takes a while to import, and most servers never need it
    from fumehood.sandboxd.egress.certificates import SandboxAuthority

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"  # a TLS alert, so that programs can say more than "closed"
_LINGER = 1.0


@dataclass(frozen=True, slots=True)
class Gate:
    """What the connections of one sandbox share.

    spend: takes a number of bytes off what the sandbox may move; False when that was too many.
    """

    policy: Policy
    bounds: Bounds
    connector: Connector
    report: Callable[[Event], None]
    spend: Callable[[int], bool]
    authority: "SandboxAuthority | None" = None
    upstream_tls: ssl.SSLContext | None = None
    placeholders: dict[str, Placeholders] = field(default_factory=dict[str, Placeholders], repr=False)


class _Spent(Exception):
    """The sandbox has moved as many bytes as it may."""


class Session:
    """One connection of a sandbox to the proxy, from its first byte to its last."""

    def __init__(self, client: SocketStream, gate: Gate) -> None:
        self._client = client
        self._gate = gate
        self._upstream: Upstream | None = None
        self._clock: asyncio.Timeout | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._quiet = True
        self._sent = self._received = 0

    async def run(self) -> None:
        """Until the client, the server or a bound ends it; closes everything."""
        try:
            async with asyncio.timeout(self._gate.bounds.total_seconds):
                await self._serve(self._client, None)
        except (TimeoutError, OSError, EOFError, Broken, _Spent, h11.ProtocolError):
            self._client.break_off()
        finally:
            self._drop_upstream()
            self._client.close()

    async def _serve(self, stream: SocketStream | TlsStream, within: Authority | None) -> None:
        """Request after request, each checked for itself; `within` as in `understood`."""
        held = b""
        first = True
        goes_on = True
        to: Authority | None = within
        while goes_on:
            try:
                head, held = await read_head(stream, held, self._gate.bounds, first=first)
                if not head:
                    return
                to = within
                incoming, request = parse(head, self._gate.bounds)
                asked = understood(request, within)
                to = asked.to
                self._check(to)
                if asked.method == b"CONNECT":
                    await self._connect(request, to, held)
                    return
                goes_on, held = await self._forward(stream, incoming, asked, held, within)
            except Refused as refusal:
                verdict = "failed" if refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "refused"
                self._report(to, verdict, refusal.text)
                await stream.send(refusal.answer())
                break
            first = False
        await self._linger(stream)

    async def _linger(self, stream: SocketStream | TlsStream) -> None:
        async with asyncio.timeout(self._gate.bounds.idle_seconds):
            await stream.linger(_LINGER)

    def _check(self, to: Authority) -> None:
        why = self._gate.policy.refusal(to)
        if why is not None:
            raise Refused(HTTPStatus.FORBIDDEN, why)
        if not self._gate.spend(0):
            raise Refused(HTTPStatus.FORBIDDEN, "this sandbox has moved as many bytes as it may")

    # ---- plain requests, and those within a terminated TLS connection ---------------------------------------------

    async def _forward(
        self, stream: Stream, incoming: h11.Connection, asked: Asked, held: bytes, within: Authority | None
    ) -> tuple[bool, bytes]:
        """Whether the connection goes on, and what the client has sent of its next request."""
        upstream = await self._upstream_for(asked.to, secure=within is not None)
        placeholders = self._gate.placeholders.get(asked.to.name)
        if within is not None and placeholders is not None:  # never over plain HTTP
            asked = replace(asked, headers=placeholders.filled(asked.headers))
        if held:
            incoming.receive_data(held)
        exchange = Exchange(stream, incoming, upstream, self._moved)
        try:
            async with self._while_it_moves():
                await exchange.run(asked)
        except (TimeoutError, Broken, _Spent) as error:
            if isinstance(error, TimeoutError) and not exchange.answered:
                text = f"{asked.to.name} did not answer in time"
                raise Refused(HTTPStatus.GATEWAY_TIMEOUT, text) from None
            self._report(asked.to, "failed", "broken off")
            raise
        finally:
            if not exchange.upstream_goes_on:
                self._drop_upstream()
        self._report(asked.to, "allowed")
        return exchange.client_goes_on, incoming.trailing_data[0]

    async def _upstream_for(self, to: Authority, *, secure: bool) -> Upstream:
        """The connection of the last request if it leads to the same server, else a new one, checked anew."""
        if self._upstream is not None and self._upstream.to == to and not self._upstream.stream.ended:
            return self._upstream
        self._drop_upstream()
        sock = await self._gate.connector.connect(to)
        context = self._gate.upstream_tls if secure else None
        seconds = self._gate.bounds.connect_seconds if secure else None
        try:
            stream = await SocketStream.of(
                sock, context=context, name=to.name if secure else None, timeout=seconds
            )
        except ssl.SSLCertVerificationError as error:
            sock.close()
            raise Refused(
                HTTPStatus.BAD_GATEWAY, f"the certificate of {to.name} is not valid: {error.verify_message}"
            ) from None
        except OSError:
            sock.close()
            raise Refused(HTTPStatus.BAD_GATEWAY, f"there is no TLS connection to {to.name}") from None
        except BaseException:
            sock.close()
            raise
        self._upstream = Upstream(stream, to)
        return self._upstream

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.stream.close()
            self._upstream = None

    # ---- CONNECT ----------------------------------------------------------------------------------------------

    async def _connect(self, request: h11.Request, to: Authority, held: bytes) -> None:
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in request.headers):
            raise bad("CONNECT has no body")
        if to.name in self._gate.placeholders:
            await self._start(held)
            await self._terminate(to)
            return
        sock = await self._gate.connector.connect(to)
        try:
            server = await SocketStream.of(sock)
        except BaseException:
            sock.close()
            raise
        try:
            await self._start(held)
            if await self._hello_is_for(to):
                await self._tunnel(server, to)
        finally:
            server.close()

    async def _start(self, held: bytes) -> None:
        self._client.unread(held)
        await self._client.send(_ESTABLISHED)

    async def _tunnel(self, server: SocketStream, to: Authority) -> None:
        try:
            async with self._while_it_moves():
                await tunnel.join(self._client, server, self._moved)
        finally:
            self._report(to, "allowed")

    async def _terminate(self, to: Authority) -> None:
        """Be the server of a domain with secrets, so that its requests can be read and filled in."""
        if not await self._hello_is_for(to) or self._gate.authority is None:
            return
        stream = TlsStream(self._client, await self._gate.authority.context(to.name))
        async with asyncio.timeout(self._gate.bounds.head_seconds):
            await stream.handshake()
        await self._serve(stream, to)

    async def _hello_is_for(self, to: Authority) -> bool:
        """Whether TLS begins, for the very server that was asked for; the hello stays to be read."""
        data = b""
        name: str | None = None
        try:
            async with asyncio.timeout(self._gate.bounds.head_seconds):
                while name is None:
                    header = await self._client.exactly(hello.RECORD_HEADER)
                    data += header
                    data += await self._client.exactly(hello.record_length(header))
                    name = hello.server_name(data)
            if normalised(name) != to.name or name.endswith("."):
                raise hello.BadHello("it is for another server")
        except (hello.BadHello, BadName) as error:
            self._report(to, "refused", f"within the tunnel: {error}")
            if data[:1] == b"\x16":
                await self._client.send(_ACCESS_DENIED)
                await self._linger(self._client)
            return False
        self._client.unread(data)
        return True

    # ---- counting ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _while_it_moves(self) -> AsyncGenerator[None]:
        """TimeoutError after a silence, which is shorter once the client has ended its side."""
        try:
            async with asyncio.timeout(self._gate.bounds.idle_seconds) as self._clock:
                self._look_in_a_while()
                yield
        finally:
            self._clock = None
            if self._next_look is not None:
                self._next_look.cancel()

    def _look_in_a_while(self) -> None:
        self._quiet = True
        self._next_look = asyncio.get_running_loop().call_later(self._gate.bounds.left_seconds, self._look)

    def _look(self) -> None:
        if self._clock is None:
            return
        if self._quiet and self._client.left:
            self._clock.reschedule(asyncio.get_running_loop().time())
        else:
            self._look_in_a_while()

    def _moved(self, sent: int, received: int) -> None:
        self._sent += sent
        self._received += received
        self._quiet = False
        if not self._gate.spend(sent + received):
            raise _Spent
        if self._clock is not None:
            self._clock.reschedule(asyncio.get_running_loop().time() + self._gate.bounds.idle_seconds)

    def _report(self, to: Authority | None, verdict: Verdict, reason: str = "") -> None:
        name, port = ("", 0) if to is None else (to.name, to.port)
        self._gate.report(
            Event(
                domain=name,
                port=port,
                verdict=verdict,
                reason=reason,
                sent=self._sent,
                received=self._received,
            )
        )
        self._sent = self._received = 0
