"""Who a request is from, and whether it may be from there; imports `interfaces`, `protocol` and siblings.

There are no keys yet: every caller is the same tenant, and the server listens where only this machine can reach it.
"""

import ipaddress
import re
from typing import Protocol

from fumehood.gateway.exchange import Exchange
from fumehood.interfaces import Caller
from fumehood.protocol.errors import ApiError

_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]*))(?::\d*)?")


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
        if exchange.host not in self._known:
            self._check(exchange.host)
        return self._caller

    def _check(self, header: bytes) -> None:
        written = header.decode("latin-1").strip().lower()
        host = _without_port(written)
        if host is None or not self._is_ours(host):
            raise Forbidden(
                f"This server is not called {written[:100]!r}; if it should be, add the name to server.hosts."
            )
        if len(self._known) < 1000:
            self._known.add(header)

    def _is_ours(self, host: str) -> bool:
        return host in self._names or host.endswith(".localhost") or _is_address(host)


def check_origin(exchange: Exchange) -> None:
    """Raises Forbidden for a web page of another site. A browser asks nobody before it opens a WebSocket, from
    whatever page; but it says from which, and programs that are no browsers say nothing.
    """
    if exchange.origin is None:
        return
    site = exchange.origin.lower().partition(b"://")[2]
    if not site or site != exchange.host.strip().lower():
        shown = exchange.origin.decode("latin-1")[:100]
        raise Forbidden(f"Web pages of {shown!r} may not connect to this server.")


def _without_port(authority: str) -> str | None:
    """The name or address; None for what is neither, with perhaps a port."""
    found = _AUTHORITY.fullmatch(authority)
    return None if found is None else found[1] or found[2] or ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == ""  # HTTP/1.0 knows no Host, and no browser is so old
    return True
