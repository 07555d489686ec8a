"""HTTP/1.1 rules that uvicorn does not implement: declined upgrades, Host checks, HTTP/1.0."""

from typing import override

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_SUPPORTED_VERSIONS = ("1.1", "1.0")


class Http1Protocol(HttpToolsProtocol):
    """Checks request heads, and serves requests whose upgrade it declines.

    The parser stops after a head with Upgrade, because another protocol may follow. A server may ignore Upgrade (RFC
    9110, 7.8), and this one ignores all but WebSocket: it passes the head without Upgrade, then the body, to a new
    parser.
    """

    # The head of a request whose upgrade is declined, until it is parsed again.
    _declined_upgrade_head: bytes | None = None
    head_error: str | None = None  # set before `on_headers_complete` raises

    @override
    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            data = self._parse_data(data)

    def _parse_data(self, data: bytes) -> bytes:
        """Parse data; return what remains to be parsed."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self._declined_upgrade_head is None:
                self.handle_websocket_upgrade()
                return b""
            head, self._declined_upgrade_head = self._declined_upgrade_head, None
            self.parser = _make_parser(self)
            return head + data[stop.args[0] :]
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, MemoryError):
                self.on_out_of_memory()
                return b""
            reason, self.head_error = self.head_error or "Invalid HTTP request received.", None
            self.logger.info("Rejected a malformed request: %s", reason)
            self.send_400_response(reason)
        return b""

    def on_out_of_memory(self) -> None:
        """Reject the request; for subclasses."""
        self.transport.abort()

    @override
    def on_headers_complete(self) -> None:
        version, method = self.parser.get_http_version(), self.parser.get_method()
        self.head_error = _find_head_error(version, method, self.headers)
        if self.head_error is not None:
            raise ValueError(self.head_error)
        if self.parser.should_upgrade() and not self._should_upgrade():
            self._declined_upgrade_head = _render_head(method, self.url, version, self.headers)
            return
        super().on_headers_complete()
        if version == "1.0":
            self.cycle.waiting_for_100_continue = False  # the client would take it for the response
            self.cycle.send = _CloseDelimitedSender(self.cycle).send

    @override
    def on_message_complete(self) -> None:
        if self._declined_upgrade_head is None:
            super().on_message_complete()

    @override
    def _should_upgrade(self) -> bool:
        if self.ws_protocol_class is None or self.parser.get_method() != b"GET":
            return False
        if self.parser.get_http_version() != "1.1":
            return False
        return b"upgrade" in _header_elements(self.headers, b"connection") and _header_elements(
            self.headers, b"upgrade"
        ) == [b"websocket"]


class _CloseDelimitedSender:
    """Sends to an HTTP/1.0 client: without chunked encoding, closing the connection ends a body of unknown length."""

    __slots__ = ("_cycle", "_send", "_unknown_length")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._unknown_length = False

    async def send(self, message: ASGISendEvent) -> None:
        cycle = self._cycle
        while cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        # Nothing below awaits, so these settings apply to this message.
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._unknown_length = b"content-length" not in names
            if self._unknown_length:
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and self._unknown_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)
        if cycle.response_complete:
            cycle.__dict__.pop("send", None)  # breaks the reference cycle


def _make_parser(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """A parser with uvicorn's settings."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _find_head_error(version: str, method: bytes, headers: list[tuple[bytes, bytes]]) -> str | None:
    if version not in _SUPPORTED_VERSIONS:
        return f"HTTP/{version} is not supported; use HTTP/1.1."
    if method == b"CONNECT":
        return "CONNECT is not supported: this server is not a proxy."
    hosts = [name for name, _ in headers].count(b"host")
    if hosts > 1:
        return f"The request has {hosts} Host headers; send one."
    if not hosts and version == "1.1":
        return "The request has no Host header; send one."
    return None


def _render_head(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])


def _header_elements(headers: list[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """The comma-separated elements of all headers of that name, in lower case."""
    return [
        element.strip().lower() for each, value in headers if each == name for element in value.split(b",")
    ]
