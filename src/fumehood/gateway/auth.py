"""Who a request is from, and whether it may be from there; imports `interfaces`, `protocol` and siblings.

There are no keys yet: every caller is the same tenant, and the server listens where only this machine can reach it.
"""

import ipaddress
from typing import Protocol

from fumehood.gateway.exchange import Exchange
from fumehood.interfaces import Caller
from fumehood.protocol.errors import ApiError


class Forbidden(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class Callers(Protocol):
    def identify(self, exchange: Exchange) -> Caller:
        """Raises ApiError for somebody who may not ask."""
        ...


class Everybody:
    """Lets everybody in who reaches the server, and gives all of them one tenant.

    A web page that has its own name resolve to this machine would be such a caller too; it gives itself away by the
    Host header. `hosts` are names by which the server may be called besides localhost and addresses.
    """

    def __init__(self, hosts: tuple[str, ...] = ()) -> None:
        self._caller = Caller()
        self._names = frozenset(("localhost", *(name.lower() for name in hosts)))
        self._known: set[bytes] = set()

    def identify(self, exchange: Exchange) -> Caller:
        host = exchange.headers.get(b"host", b"")
        if host not in self._known:
            self._check(host)
        return self._caller

    def _check(self, header: bytes) -> None:
        host = _without_port(header.decode("latin-1").strip().lower())
        if host not in self._names and not host.endswith(".localhost") and not _is_address(host):
            raise Forbidden(
                f"This server is not known by the name {host[:100]!r}; if it should be, add the name to server.hosts."
            )
        if len(self._known) < 1000:
            self._known.add(header)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[")
    return host.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == ""  # HTTP/1.0 knows no Host, and no browser is so old
    return True
