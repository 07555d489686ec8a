"""What HTTP/1.1 asks of a server and uvicorn leaves out: declined upgrades, Host, HTTP/1.0."""

from typing import override

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_SUPPORTED_VERSIONS = ("1.1", "1.0")


class Http1Protocol(HttpToolsProtocol):
    """Checks the head of each request, and serves requests whose upgrade it declines.

    The parser stops after a head that asks for an upgrade, because what follows may be another protocol. A server may
    ignore the wish (RFC 9110, 7.8), and every upgrade but that to a WebSocket is ignored here: the same head goes to a
    new parser without its Upgrade header, followed by the body.
    """

    # Of a request whose upgrade is declined, until its head is parsed again.
    _declined_upgrade_head: bytes | None = None
    head_error: str | None = None  # why the head is refused, for who raises in `on_headers_complete`

    @override
    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            data = self._parse_data(data)

    def _parse_data(self, data: bytes) -> bytes:
        """Parse this; what has to be parsed after it."""
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
            if isinstance(error.__context__, MemoryError):  # there was none left for what was parsed
                self.on_out_of_memory()
                return b""
            reason, self.head_error = self.head_error or "Invalid HTTP request received.", None
            self.logger.info("A request was refused: %s", reason)
            self.send_400_response(reason)
        return b""

    def on_out_of_memory(self) -> None:
        """Refuse what came for now; for who inherits."""
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
            self.cycle.waiting_for_100_continue = False  # such a client takes it for the answer
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
    """Sends to a client of HTTP/1.0, which knows no chunks: the end of the connection ends a body of unknown length."""

    __slots__ = ("_cycle", "_send", "_unknown_length")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._unknown_length = False

    async def send(self, message: ASGISendEvent) -> None:
        cycle = self._cycle
        while cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        # Nothing below waits: what is set here holds for this message.
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._unknown_length = b"content-length" not in names
            if self._unknown_length:
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and self._unknown_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)
        if cycle.response_complete:
            cycle.__dict__.pop("send", None)  # the two hold each other


def _make_parser(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """As uvicorn makes its own."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _find_head_error(version: str, method: bytes, headers: list[tuple[bytes, bytes]]) -> str | None:
    if version not in _SUPPORTED_VERSIONS:
        return f"HTTP/{version} is not served here; use HTTP/1.1."
    if method == b"CONNECT":
        return "CONNECT is not served here: this server is not a proxy."
    hosts = 0
    for name, _ in headers:
        if name == b"host":
            hosts += 1
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
    """The elements of all headers of that name, in lower case."""
    return [
        element.strip().lower() for each, value in headers if each == name for element in value.split(b",")
    ]
