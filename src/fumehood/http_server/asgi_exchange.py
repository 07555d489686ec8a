"""One HTTP request and its response on plain ASGI, with a bounded body."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl

type Scope = MutableMapping[str, Any]
type Message = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[Message]]
type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
type Application = Callable[[Scope, Receive, Send], Awaitable[None]]
type Headers = list[tuple[bytes, bytes]]

JSON_CONTENT_TYPE = (b"content-type", b"application/json")
# The scope key of the DirectWriter, if the server has one.
DIRECT_WRITER = "fumehood.direct_writer"
# The scope key of the RequestOutcome, once the application has handled the request.
REQUEST_OUTCOME = "fumehood.request_outcome"
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 << 20
_MAX_QUERY_PARAMETERS = 32


class RequestOutcome(NamedTuple):
    """How a request ended. route: the pattern of its path, empty if none matched. status: 0 without a response."""

    route: str
    status: int


class ClientDisconnected(Exception):
    """The client disconnected while its request was read."""


class DirectWriter(Protocol):
    """Writes a response without awaiting ASGI. All methods return False, and do nothing, if they cannot."""

    def write_response(self, status: int, headers: Headers, body: bytes) -> bool:
        """Write a complete response."""
        ...

    def start_chunks(self, status: int, headers: Headers, body: bytes) -> bool:
        """Start a response of unknown length, with its first chunk."""
        ...

    def write_chunk(self, body: bytes | bytearray) -> bool:
        """Write a chunk of a response of unknown length."""
        ...

    def break_off(self) -> bool:
        """Close the connection before the end of a response, so that the client knows that it is not complete."""
        ...


class AsgiExchange:
    """One request. Subclasses define the server's response format.

    headers: by lower-case name; the last one if repeated.
    """

    __slots__ = (
        "_has_unread_body",
        "_receive",
        "_send",
        "headers",
        "method",
        "path_parameters",
        "query_string",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.query_string: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.path_parameters: dict[str, str] = {}
        self._receive = receive
        self._send = send
        self._has_unread_body = self.has_body

    def _content_length(self) -> int:
        return int(self.headers.get(b"content-length", 0))  # the parser has rejected anything else

    # ---- request ------------------------------------------------------------------------------------------

    @property
    def has_body(self) -> bool:
        """Whether the headers announce a non-empty body."""
        return b"transfer-encoding" in self.headers or self._content_length() > 0

    def parse_query(self) -> list[tuple[str, str]]:
        """Raises ValueError if the query is too long, or is not percent-encoded UTF-8."""
        if not self.query_string:
            return []
        return parse_qsl(
            self.query_string.decode(),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_QUERY_PARAMETERS,
        )

    async def iter_chunks(self, limit: int) -> AsyncGenerator[bytes]:
        """Yield the body in chunks. Raises ClientDisconnected, and `_body_too_large` if it exceeds the limit."""
        if self._content_length() > limit:
            raise self._body_too_large(limit)
        size = 0
        while self._has_unread_body:
            message = await self._receive_message()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            self._has_unread_body = message.get("more_body", False)
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise self._body_too_large(limit)
            if chunk:
                yield chunk

    def _body_too_large(self, limit: int) -> Exception:
        """The error of the server's format."""
        raise NotImplementedError

    async def _receive_message(self) -> Message:
        """The next ASGI message; subclasses may limit the time."""
        return await self._receive()

    async def wait_for_disconnect(self) -> None:
        """Return when the client has disconnected. Call it only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ---- response -------------------------------------------------------------------------------------------

    async def start_response(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes | bytearray, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def send_and_discard_body(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a JSON response; discard an unread body and close the connection."""
        headers = [JSON_CONTENT_TYPE, (b"content-length", b"%d" % len(body)), *headers]
        if not self._has_unread_body:
            await self.start_response(status, headers)
            await self.send(body, more=False)
            return
        await self.start_response(status, [*headers, (b"connection", b"close")])
        await self.send(body)
        # Closing at once would reset the connection, and a client that still sends would not see the response.
        await self._discard_body()
        await self.send(b"", more=False)

    async def _discard_body(self) -> None:
        discarded = 0
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                while self._has_unread_body and discarded < _LINGER_BYTES:
                    message = await self._receive()
                    discarded += len(message.get("body", b""))
                    self._has_unread_body = message["type"] != "http.disconnect" and message.get(
                        "more_body", False
                    )
        except TimeoutError:
            pass
