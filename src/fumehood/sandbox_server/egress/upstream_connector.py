"""Resolves a name, checks its addresses and connects."""

import asyncio
import contextlib
import ipaddress
import socket
from http import HTTPStatus

from fumehood.http_server.address_policy import AddressPolicy
from fumehood.http_server.dns_resolver import DnsResolutionFailed, DnsResolver
from fumehood.sandbox_server.egress.control_messages import ProxyLimits
from fumehood.sandbox_server.egress.domain_parsing import RequestTarget
from fumehood.sandbox_server.egress.request_parsing import ProxyRefusal


class UpstreamConnector:
    """Resolves once and connects to a checked address, so that no second lookup can answer differently."""

    def __init__(self, resolver: DnsResolver, address_policy: AddressPolicy, limits: ProxyLimits) -> None:
        self.resolver = resolver
        self._address_policy = address_policy
        self._limits = limits

    async def connect(self, to: RequestTarget) -> socket.socket:
        """Return a connected socket. Raises ProxyRefusal, which names no address: it may be the operator's."""
        try:
            found = await self.resolver.resolve(to.name)
        except DnsResolutionFailed:
            raise ProxyRefusal(HTTPStatus.BAD_GATEWAY, f"{to.name} has no address") from None
        usable = [address for address in found if self._address_policy.is_allowed(address)]
        if not usable:
            raise ProxyRefusal(
                HTTPStatus.FORBIDDEN, f"{to.name} has no address that sandboxes may be connected to"
            )
        for address in usable[: self._limits.addresses]:
            with contextlib.suppress(OSError, TimeoutError):
                return await self._connect(address, to.port)
        raise ProxyRefusal(HTTPStatus.BAD_GATEWAY, f"{to.name} does not accept connections on port {to.port}")

    async def _connect(self, address: str, port: int) -> socket.socket:
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(self._limits.connect_seconds):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
        except BaseException:
            sock.close()
            raise
        return sock
