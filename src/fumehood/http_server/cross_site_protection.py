"""Requests that a web page has somebody's browser send.

A server without keys trusts whoever reaches it, and so every browser on the machine. Browsers say where a request
comes from, in headers that pages cannot change: Host, Origin and Sec-Fetch-Site. Both servers look at them here.
"""

import ipaddress
import re
from collections.abc import Mapping

_HOST_AND_PORT = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]*))(?::\d*)?")
_MAX_CACHED_HOSTS = 1000
# What a form can send: a browser sends these, and bodies without a type, without asking the server first.
_FORM_TYPES = frozenset((b"", b"text/plain", b"multipart/form-data", b"application/x-www-form-urlencoded"))
_METHODS_WITHOUT_PREFLIGHT = frozenset(("GET", "HEAD", "POST"))
_SAME_SITES = (b"same-origin", b"none")


class AllowedHosts:
    """The names of a server: addresses, localhost, and `names` besides.

    A page whose own name resolves to this machine (DNS rebinding) gives itself away by the Host header.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self._names = frozenset(("localhost", *(name.lower() for name in names)))
        self._cached: set[bytes] = set()

    def matches(self, header: bytes) -> bool:
        """Whether a Host header names this server."""
        if header in self._cached:
            return True
        host = _strip_port(decode_header(header).strip().lower())
        if host is None or not self._is_allowed(host):
            return False
        if len(self._cached) < _MAX_CACHED_HOSTS:
            self._cached.add(header)
        return True

    def _is_allowed(self, host: str) -> bool:
        return host in self._names or host.endswith(".localhost") or _is_ip_address(host)


def is_cross_site(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page of another site has sent the request. Programs that are no browsers say nothing about it."""
    origin = headers.get(b"origin")
    if origin is not None and not is_same_origin(origin, headers.get(b"host", b"")):
        return True
    site = headers.get(b"sec-fetch-site")
    return site is not None and site.strip().lower() not in _SAME_SITES


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Whether a page was loaded from the very server that it asks."""
    host = host.strip().lower()
    return bool(host) and origin.lower().partition(b"://")[2] == host


def content_media_type(headers: Mapping[bytes, bytes]) -> bytes:
    """The type of the body, in lower case and without parameters; empty if none is given."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def is_json_type(kind: bytes) -> bool:
    """Whether a media type is JSON, which no browser sends to another site without asking there first."""
    return kind == b"application/json" or kind.endswith(b"+json")


def is_form_type(kind: bytes) -> bool:
    """Whether a browser sends a body of this type to any site, without asking there first."""
    return kind in _FORM_TYPES


def is_simple_request(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser sends such a request to any site, without asking there first. It never adds a bearer token by
    itself, and asks before a page may add one.
    """
    if headers.get(b"authorization", b"")[:7].lower() == b"bearer ":
        return False
    return method in _METHODS_WITHOUT_PREFLIGHT and is_form_type(content_media_type(headers))


def decode_header(value: bytes) -> str:
    return value.decode("latin-1")


def _strip_port(authority: str) -> str | None:
    """The name or address; None for what is neither, with perhaps a port."""
    found = _HOST_AND_PORT.fullmatch(authority)
    return None if found is None else found[1] or found[2] or ""


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == ""  # HTTP/1.0 knows no Host, and no browser is so old
    return True
