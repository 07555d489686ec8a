"""From a name to a connected socket, over addresses that were checked; imports `serving` and siblings."""

import asyncio
import contextlib
import ipaddress
import socket
from http import HTTPStatus

from fumehood.sandboxd.egress.bounds import Bounds
from fumehood.sandboxd.egress.messages import Refused
from fumehood.sandboxd.egress.names import Authority
from fumehood.serving.addresses import Addresses
from fumehood.serving.resolver import ResolveFailed, Resolver


class Connector:
    """Looks up once, checks what came, and connects to just that: no second look-up could answer differently."""

    def __init__(self, resolver: Resolver, addresses: Addresses, bounds: Bounds) -> None:
        self.resolver = resolver
        self._addresses = addresses
        self._bounds = bounds

    async def connect(self, to: Authority) -> socket.socket:
        """Refused says why not; no address is named, since it may be one of the operator's own network."""
        try:
            found = await self.resolver.addresses(to.name)
        except ResolveFailed:
            raise Refused(HTTPStatus.BAD_GATEWAY, f"{to.name} has no address") from None
        usable = [address for address in found if self._addresses.allowed(address)]
        if not usable:
            raise Refused(
                HTTPStatus.FORBIDDEN, f"{to.name} has no address that sandboxes may be connected to"
            )
        for address in usable[: self._bounds.addresses]:
            with contextlib.suppress(OSError, TimeoutError):
                return await self._connect(address, to.port)
        raise Refused(HTTPStatus.BAD_GATEWAY, f"{to.name} does not accept connections on port {to.port}")

    async def _connect(self, address: str, port: int) -> socket.socket:
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(self._bounds.connect_seconds):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
        except BaseException:
            sock.close()
            raise
        return sock
