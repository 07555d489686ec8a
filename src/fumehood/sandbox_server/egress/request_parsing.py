"""Parses and checks requests to the proxy, and encodes its refusals.

A head is first checked for suspicious bytes and then parsed by h11. The forwarded request is written anew from what was
parsed, so that no server can read it differently.
"""

import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus

import h11

from fumehood.sandbox_server.egress.byte_streams import ByteStream
from fumehood.sandbox_server.egress.control_messages import ProxyLimits
from fumehood.sandbox_server.egress.domain_parsing import InvalidDomainName, RequestTarget, parse_authority

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
    """A refusal by the proxy; the text contains nothing that the sandbox may not know."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text

    def encode_response(self) -> bytes:
        """Return the HTTP response to the client, which closes the connection."""
        body = f"The sandbox's proxy refused the request: {self.text}.\n".encode()
        head = (
            f"HTTP/1.1 {self.status} {self.status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


def bad_request(text: str) -> ProxyRefusal:
    """Return a refusal with status 400."""
    return ProxyRefusal(HTTPStatus.BAD_REQUEST, text)


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A checked request with the headers to forward; `target` is empty for CONNECT."""

    method: bytes
    authority: RequestTarget
    target: bytes
    headers: Headers


async def read_head(
    stream: ByteStream, buffered: bytes, limits: ProxyLimits, *, is_first: bool
) -> tuple[bytes, bytes]:
    """Read the head of a request; returns it and what followed, or an empty head at the end.

    buffered: bytes that were read already. is_first: the first request of a connection.
    Raises ProxyRefusal, OSError.
    """
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
        raise ProxyRefusal(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time") from None


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
            raise bad_request("the request is truncated")
        buffer += more
    end += len(_END_OF_HEAD)
    if end > limits.head_bytes:
        raise _head_too_long()
    return bytes(buffer[:end]), bytes(buffer[end:])


def _head_too_long() -> ProxyRefusal:
    return ProxyRefusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too long")


def parse_head(head: bytes, limits: ProxyLimits) -> tuple[h11.Connection, h11.Request]:
    """Parse a head. Raises ProxyRefusal."""
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


def validate_request(request: h11.Request, tls_authority: RequestTarget | None) -> ForwardedRequest:
    """Check a request and return what to forward. Raises ProxyRefusal.

    tls_authority: the server of a terminated TLS connection, None on the proxy's own port.
    """
    fields = _check_fields(request)
    if request.method.upper() in (b"TRACE", b"TRACK"):
        raise bad_request("TRACE is not allowed: it returns the request's headers")
    if request.method == b"CONNECT":
        if tls_authority is not None:
            raise bad_request("CONNECT is not allowed within a tunnel")
        to, target, default_port = _parse_request_authority(request.target, None), b"", 443
    elif tls_authority is None:
        match = _ABSOLUTE_URL.fullmatch(request.target)
        if match is None:
            raise bad_request("the proxy accepts http:// URLs, and CONNECT for everything else")
        to, target, default_port = _parse_request_authority(match[1], 80), match[2], 80
    else:
        if not request.target.startswith(b"/") and not (
            request.target == b"*" and request.method == b"OPTIONS"
        ):
            raise bad_request("within a tunnel the target of a request is a path")
        to, target, default_port = tls_authority, request.target, 443
    _check_host(fields.get(b"host"), to, default_port)
    if target[:1] in (b"", b"?"):
        target = b"/" + target
    return ForwardedRequest(request.method, to, target, _forwarded_headers(request, to, default_port))


def _check_fields(request: h11.Request) -> dict[bytes, bytes]:
    fields = {
        name: value for name, value in request.headers if name in _FRAMING | {b"upgrade", b"connection"}
    }
    if b"content-length" in fields and b"transfer-encoding" in fields:
        raise bad_request("the request has both Content-Length and Transfer-Encoding")
    if b"transfer-encoding" in fields and request.http_version == b"1.0":
        raise bad_request("HTTP/1.0 has no Transfer-Encoding")
    if b"upgrade" in fields:
        raise bad_request("protocols other than HTTP/1.1 are not forwarded")
    if _FRAMING & _connection_options(request):
        raise bad_request("the Connection header names a required header")
    return fields


def _connection_options(message: h11.Request | h11.Response) -> set[bytes]:
    """Return the headers that the message's Connection headers declare hop-by-hop."""
    values = [value for name, value in message.headers if name in (b"connection", b"proxy-connection")]
    return {token.strip().lower() for value in values for token in value.split(b",")}


def _parse_request_authority(text: bytes, default_port: int | None) -> RequestTarget:
    try:
        return parse_authority(text.decode("ascii", errors="replace"), default_port=default_port)
    except InvalidDomainName as error:
        raise ProxyRefusal(HTTPStatus.FORBIDDEN, f"{text[:100].decode('latin-1')!a}: {error}") from None


def _check_host(host: bytes | None, to: RequestTarget, default_port: int) -> None:
    if host is None:  # HTTP/1.0; h11 requires exactly one in HTTP/1.1
        return
    try:
        host_authority = parse_authority(host.decode("ascii", errors="replace"), default_port=default_port)
    except InvalidDomainName:
        host_authority = None
    if host_authority != to:
        raise bad_request("the Host header and the request name different servers")


def _forwarded_headers(request: h11.Request, to: RequestTarget, default_port: int) -> Headers:
    dropped = _HOP_BY_HOP | _connection_options(request) | {b"host"}
    host = to.name if to.port == default_port else f"{to.name}:{to.port}"
    headers = [(b"Host", host.encode())]
    headers += [(raw, value) for (raw, value) in request.headers.raw_items() if raw.lower() not in dropped]
    if any(name == b"transfer-encoding" for name, _ in request.headers):
        headers.append((b"Transfer-Encoding", b"chunked"))
    return headers


def response_headers(response: h11.Response) -> Headers:
    """Return the headers of a response without hop-by-hop headers; the body is framed anew."""
    dropped = _HOP_BY_HOP | _connection_options(response)
    if any(name == b"transfer-encoding" for name, _ in response.headers):
        dropped.add(b"content-length")
    return [(raw, value) for (raw, value) in response.headers.raw_items() if raw.lower() not in dropped]
