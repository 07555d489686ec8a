"""Requests as the proxy accepts them, and its own answers; imports h11, the standard library and siblings.

Heads are looked at byte by byte first and then parsed by h11. What goes on is written anew from what was understood,
so that nobody behind this proxy can read a request in another way.
"""

import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus

import h11

from fumehood.sandboxd.egress.bounds import Bounds
from fumehood.sandboxd.egress.names import Authority, BadName, authority
from fumehood.sandboxd.egress.streams import Stream

type Headers = list[tuple[bytes, bytes]]

_END = b"\r\n\r\n"
_SUSPECT = re.compile(rb"\x00|\r(?!\n)|(?<!\r)\n|\n[ \t]")
_ABSOLUTE = re.compile(rb"http://([^/?#@]+)((?:[/?][^#]*)?)", re.IGNORECASE)
_HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
}
_FRAMING = {b"host", b"content-length", b"transfer-encoding"}


class Refused(Exception):
    """The proxy's own answer; the text names nothing that the sandbox could not know."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text

    def answer(self) -> bytes:
        """What whoever asked is sent; the connection ends with it."""
        body = f"The sandbox's proxy did not pass this on: {self.text}.\n".encode()
        head = (
            f"HTTP/1.1 {self.status} {self.status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


def bad(text: str) -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, text)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: for whom, and with what is to be passed on; `target` is empty for CONNECT."""

    method: bytes
    to: Authority
    target: bytes
    headers: Headers


async def read_head(stream: Stream, held: bytes, bounds: Bounds, *, first: bool) -> tuple[bytes, bytes]:
    """A request's head and what came after it; an empty head when the client has no more to ask."""
    if not held:
        try:
            async with asyncio.timeout(bounds.head_seconds if first else bounds.rest_seconds):
                held = await stream.read()
        except TimeoutError:
            return b"", b""
        if not held:
            return b"", b""
    try:
        async with asyncio.timeout(bounds.head_seconds):
            return await _rest_of_head(stream, bytearray(held), bounds)
    except TimeoutError:
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, "the request did not come in time") from None


async def _rest_of_head(stream: Stream, buffer: bytearray, bounds: Bounds) -> tuple[bytes, bytes]:
    searched = 0
    while (end := buffer.find(_END, searched)) < 0:
        if len(buffer) > bounds.head_bytes:
            raise _too_long()
        searched = max(0, len(buffer) - len(_END))
        more = await stream.read()
        if not more:
            raise bad("the request is cut short")
        buffer += more
    end += len(_END)
    if end > bounds.head_bytes:
        raise _too_long()
    return bytes(buffer[:end]), bytes(buffer[end:])


def _too_long() -> Refused:
    return Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too long")


def parse(head: bytes, bounds: Bounds) -> tuple[h11.Connection, h11.Request]:
    if _SUSPECT.search(head):
        raise bad("the head of the request has a folded line or a stray control character")
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=bounds.head_bytes)
    try:
        connection.receive_data(head)
        request = connection.next_event()
    except h11.RemoteProtocolError:
        request = None
    if not isinstance(request, h11.Request) or request.http_version not in (b"1.0", b"1.1"):
        raise bad("this is not an HTTP/1.1 request")
    return connection, request


def understood(request: h11.Request, within: Authority | None) -> Asked:
    """What is asked for; `within` is whom a terminated TLS connection is for, None on the proxy's own port."""
    fields = _checked_fields(request)
    if request.method.upper() in (b"TRACE", b"TRACK"):
        raise bad("TRACE would send a request's headers back")
    if request.method == b"CONNECT":
        if within is not None:
            raise bad("CONNECT within a connection")
        to, target = _authority(request.target, None), b""
        default = 443
    elif within is None:
        match = _ABSOLUTE.fullmatch(request.target)
        if match is None:
            raise bad("a proxy takes http://… addresses, and CONNECT for everything else")
        to, target = _authority(match[1], 80), match[2]
        default = 80
    else:
        if not request.target.startswith(b"/") and not (
            request.target == b"*" and request.method == b"OPTIONS"
        ):
            raise bad("within a connection a request names a path only")
        to, target, default = within, request.target, 443
    _check_host(fields.get(b"host"), to, default)
    if target[:1] in (b"", b"?"):
        target = b"/" + target
    return Asked(request.method, to, target, _passed_on(request, to, default))


def _checked_fields(request: h11.Request) -> dict[bytes, bytes]:
    fields = {
        name: value for name, value in request.headers if name in _FRAMING | {b"upgrade", b"connection"}
    }
    if b"content-length" in fields and b"transfer-encoding" in fields:
        raise bad("the request has both Content-Length and Transfer-Encoding")
    if b"transfer-encoding" in fields and request.http_version == b"1.0":
        raise bad("HTTP/1.0 knows no Transfer-Encoding")
    if b"upgrade" in fields:
        raise bad("protocols other than HTTP/1.1 are not passed on")
    if _FRAMING & _nominated(request):
        raise bad("the Connection header names a header that is needed")
    return fields


def _nominated(message: h11.Request | h11.Response) -> set[bytes]:
    """The headers that are meant for this hop only, by the message's own word."""
    values = [value for name, value in message.headers if name in (b"connection", b"proxy-connection")]
    return {token.strip().lower() for value in values for token in value.split(b",")}


def _authority(text: bytes, default_port: int | None) -> Authority:
    try:
        return authority(text.decode("ascii", errors="replace"), default_port=default_port)
    except BadName as error:
        raise Refused(HTTPStatus.FORBIDDEN, f"{text[:100].decode('latin-1')!a}: {error}") from None


def _check_host(host: bytes | None, to: Authority, default_port: int) -> None:
    if host is None:  # HTTP/1.0; h11 asks HTTP/1.1 for exactly one
        return
    try:
        named = authority(host.decode("ascii", errors="replace"), default_port=default_port)
    except BadName:
        named = None
    if named != to:
        raise bad("the Host header names another server than the request")


def _passed_on(request: h11.Request, to: Authority, default_port: int) -> Headers:
    dropped = _HOP_BY_HOP | _nominated(request) | {b"host"}
    host = to.name if to.port == default_port else f"{to.name}:{to.port}"
    headers = [(b"Host", host.encode())]
    headers += [(raw, value) for (raw, value) in request.headers.raw_items() if raw.lower() not in dropped]
    if any(name == b"transfer-encoding" for name, _ in request.headers):
        headers.append((b"Transfer-Encoding", b"chunked"))
    return headers


def passed_back(response: h11.Response) -> Headers:
    """A response's headers without those of this hop; how the body is framed is decided anew."""
    dropped = _HOP_BY_HOP | _nominated(response)
    if any(name == b"transfer-encoding" for name, _ in response.headers):
        dropped.add(b"content-length")
    return [(raw, value) for (raw, value) in response.headers.raw_items() if raw.lower() not in dropped]
