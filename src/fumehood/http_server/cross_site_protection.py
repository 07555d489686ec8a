"""Detects requests that a web page makes a browser send.

A server without keys trusts every browser on the machine. Browsers send the headers Host, Origin and Sec-Fetch-Site,
which pages cannot change.
"""

import ipaddress
import re
from collections.abc import Mapping

_HOST_AND_PORT = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]*))(?::\d*)?")
_MAX_CACHED_HOSTS = 1000
# Content types that a form can send, and none: browsers send these without a preflight.
_FORM_TYPES = frozenset((b"", b"text/plain", b"multipart/form-data", b"application/x-www-form-urlencoded"))
_METHODS_WITHOUT_PREFLIGHT = frozenset(("GET", "HEAD", "POST"))
_SAME_SITES = (b"same-origin", b"none")


class AllowedHosts:
    """Accepted Host headers: IP addresses, localhost and `names`. Protects against DNS rebinding."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self._names = frozenset(("localhost", *(name.lower() for name in names)))
        self._cached: set[bytes] = set()

    def matches(self, header: bytes) -> bool:
        """Whether a Host header is accepted."""
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
    """Whether a page of another site sent the request. Clients that are not browsers send none of these headers."""
    origin = headers.get(b"origin")
    if origin is not None and not is_same_origin(origin, headers.get(b"host", b"")):
        return True
    site = headers.get(b"sec-fetch-site")
    return site is not None and site.strip().lower() not in _SAME_SITES


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Whether the page was loaded from this server."""
    host = host.strip().lower()
    return bool(host) and origin.lower().partition(b"://")[2] == host


def content_media_type(headers: Mapping[bytes, bytes]) -> bytes:
    """The media type of the body, in lower case and without parameters; empty if missing."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def is_json_type(kind: bytes) -> bool:
    """Whether a media type is JSON, which browsers send to another site only after a preflight."""
    return kind == b"application/json" or kind.endswith(b"+json")


def is_form_type(kind: bytes) -> bool:
    """Whether browsers send this media type to another site without a preflight."""
    return kind in _FORM_TYPES


def is_simple_request(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether browsers send such a request to another site without a preflight; never with a bearer token."""
    if headers.get(b"authorization", b"")[:7].lower() == b"bearer ":
        return False
    return method in _METHODS_WITHOUT_PREFLIGHT and is_form_type(content_media_type(headers))


def decode_header(value: bytes) -> str:
    return value.decode("latin-1")


def _strip_port(authority: str) -> str | None:
    """The host of an authority without its port; None if it is malformed."""
    found = _HOST_AND_PORT.fullmatch(authority)
    return None if found is None else found[1] or found[2] or ""


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == ""  # HTTP/1.0 has no Host; no browser uses it
    return True
