"""Requests as the proxy accepts them, and its own answers.

Heads are looked at byte by byte first and then parsed by h11. What goes on is written anew from what was understood,
so that nobody behind this proxy can read a request in another way.
"""

import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus

import h11

from fumehood.sandbox_server.egress.byte_streams import ByteStream
from fumehood.sandbox_server.egress.control_messages import ProxyLimits
from fumehood.sandbox_server.egress.domain_names import Authority, InvalidDomainName, parse_authority

type Headers = list[tuple[bytes, bytes]]

_END_OF_HEAD = b"\r\n\r\n"
_SUSPICIOUS_BYTES = re.compile(rb"\x00|\r(?!\n)|(?<!\r)\n|\n[ \t]")
_ABSOLUTE_URL = re.compile(rb"http://([^/?#@]+)((?:[/?][^#]*)?)", re.IGNORECASE)
_HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
}
_FRAMING = {b"host", b"content-length", b"transfer-encoding"}


class ProxyRefusal(Exception):
    """The proxy's own answer; the text names nothing that the sandbox could not know."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text

    def encode_response(self) -> bytes:
        """What whoever asked is sent; the connection ends with it."""
        body = f"The sandbox's proxy did not pass this on: {self.text}.\n".encode()
        head = (
            f"HTTP/1.1 {self.status} {self.status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


def bad_request(text: str) -> ProxyRefusal:
    return ProxyRefusal(HTTPStatus.BAD_REQUEST, text)


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """One request: for whom, and with what is to be passed on; `target` is empty for CONNECT."""

    method: bytes
    authority: Authority
    target: bytes
    headers: Headers


async def read_head(
    stream: ByteStream, buffered: bytes, limits: ProxyLimits, *, is_first: bool
) -> tuple[bytes, bytes]:
    """A request's head and what came after it; an empty head when the client has no more to ask."""
    if not buffered:
        try:
            async with asyncio.timeout(limits.head_seconds if is_first else limits.keepalive_seconds):
                buffered = await stream.read()
        except TimeoutError:
            return b"", b""
        if not buffered:
            return b"", b""
    try:
        async with asyncio.timeout(limits.head_seconds):
            return await _read_rest_of_head(stream, bytearray(buffered), limits)
    except TimeoutError:
        raise ProxyRefusal(HTTPStatus.REQUEST_TIMEOUT, "the request did not come in time") from None


async def _read_rest_of_head(
    stream: ByteStream, buffer: bytearray, limits: ProxyLimits
) -> tuple[bytes, bytes]:
    searched = 0
    while (end := buffer.find(_END_OF_HEAD, searched)) < 0:
        if len(buffer) > limits.head_bytes:
            raise _head_too_long()
        searched = max(0, len(buffer) - len(_END_OF_HEAD))
        more = await stream.read()
        if not more:
            raise bad_request("the request is cut short")
        buffer += more
    end += len(_END_OF_HEAD)
    if end > limits.head_bytes:
        raise _head_too_long()
    return bytes(buffer[:end]), bytes(buffer[end:])


def _head_too_long() -> ProxyRefusal:
    return ProxyRefusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too long")


def parse_head(head: bytes, limits: ProxyLimits) -> tuple[h11.Connection, h11.Request]:
    if _SUSPICIOUS_BYTES.search(head):
        raise bad_request("the head of the request has a folded line or a stray control character")
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
    try:
        connection.receive_data(head)
        request = connection.next_event()
    except h11.RemoteProtocolError:
        request = None
    if not isinstance(request, h11.Request) or request.http_version not in (b"1.0", b"1.1"):
        raise bad_request("this is not an HTTP/1.1 request")
    return connection, request


def validate_request(request: h11.Request, tls_authority: Authority | None) -> ForwardRequest:
    """What is asked for; `within` is whom a terminated TLS connection is for, None on the proxy's own port."""
    fields = _check_fields(request)
    if request.method.upper() in (b"TRACE", b"TRACK"):
        raise bad_request("TRACE would send a request's headers back")
    if request.method == b"CONNECT":
        if tls_authority is not None:
            raise bad_request("CONNECT within a connection")
        to, target = _parse_request_authority(request.target, None), b""
        default = 443
    elif tls_authority is None:
        match = _ABSOLUTE_URL.fullmatch(request.target)
        if match is None:
            raise bad_request("a proxy takes http://… addresses, and CONNECT for everything else")
        to, target = _parse_request_authority(match[1], 80), match[2]
        default = 80
    else:
        if not request.target.startswith(b"/") and not (
            request.target == b"*" and request.method == b"OPTIONS"
        ):
            raise bad_request("within a connection a request names a path only")
        to, target, default = tls_authority, request.target, 443
    _check_host(fields.get(b"host"), to, default)
    if target[:1] in (b"", b"?"):
        target = b"/" + target
    return ForwardRequest(request.method, to, target, _forwarded_headers(request, to, default))


def _check_fields(request: h11.Request) -> dict[bytes, bytes]:
    fields = {
        name: value for name, value in request.headers if name in _FRAMING | {b"upgrade", b"connection"}
    }
    if b"content-length" in fields and b"transfer-encoding" in fields:
        raise bad_request("the request has both Content-Length and Transfer-Encoding")
    if b"transfer-encoding" in fields and request.http_version == b"1.0":
        raise bad_request("HTTP/1.0 knows no Transfer-Encoding")
    if b"upgrade" in fields:
        raise bad_request("protocols other than HTTP/1.1 are not passed on")
    if _FRAMING & _connection_options(request):
        raise bad_request("the Connection header names a header that is needed")
    return fields


def _connection_options(message: h11.Request | h11.Response) -> set[bytes]:
    """The headers that are meant for this hop only, by the message's own word."""
    values = [value for name, value in message.headers if name in (b"connection", b"proxy-connection")]
    return {token.strip().lower() for value in values for token in value.split(b",")}


def _parse_request_authority(text: bytes, default_port: int | None) -> Authority:
    try:
        return parse_authority(text.decode("ascii", errors="replace"), default_port=default_port)
    except InvalidDomainName as error:
        raise ProxyRefusal(HTTPStatus.FORBIDDEN, f"{text[:100].decode('latin-1')!a}: {error}") from None


def _check_host(host: bytes | None, to: Authority, default_port: int) -> None:
    if host is None:  # HTTP/1.0; h11 asks HTTP/1.1 for exactly one
        return
    try:
        named = parse_authority(host.decode("ascii", errors="replace"), default_port=default_port)
    except InvalidDomainName:
        named = None
    if named != to:
        raise bad_request("the Host header names another server than the request")


def _forwarded_headers(request: h11.Request, to: Authority, default_port: int) -> Headers:
    dropped = _HOP_BY_HOP | _connection_options(request) | {b"host"}
    host = to.name if to.port == default_port else f"{to.name}:{to.port}"
    headers = [(b"Host", host.encode())]
    headers += [(raw, value) for (raw, value) in request.headers.raw_items() if raw.lower() not in dropped]
    if any(name == b"transfer-encoding" for name, _ in request.headers):
        headers.append((b"Transfer-Encoding", b"chunked"))
    return headers


def response_headers(response: h11.Response) -> Headers:
    """A response's headers without those of this hop; how the body is framed is decided anew."""
    dropped = _HOP_BY_HOP | _connection_options(response)
    if any(name == b"transfer-encoding" for name, _ in response.headers):
        dropped.add(b"content-length")
    return [(raw, value) for (raw, value) in response.headers.raw_items() if raw.lower() not in dropped]
