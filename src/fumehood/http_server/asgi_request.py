"""One HTTP request and its answer on bare ASGI, with bounded bodies."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any, Protocol
from urllib.parse import parse_qsl

type Scope = MutableMapping[str, Any]
type Message = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[Message]]
type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
type Application = Callable[[Scope, Receive, Send], Awaitable[None]]
type Headers = list[tuple[bytes, bytes]]

JSON_CONTENT_TYPE = (b"content-type", b"application/json")
# Where in its scope a request finds its Shortcut, if its server has one.
DIRECT_WRITER = "fumehood.direct_writer"
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 << 20
_MAX_QUERY_PARAMETERS = 32


class ClientDisconnected(Exception):
    """The connection broke while its request was read."""


class BodyLimitExceeded(Exception):
    """More came, or was announced, than was to be read."""


class DirectWriter(Protocol):
    """What ASGI has no words for. Both say False if they cannot do it now, and then nothing was sent."""

    def write_response(self, status: int, headers: Headers, body: bytes) -> bool:
        """A whole answer at once."""
        ...

    def write_chunk(self, body: bytes | bytearray) -> bool:
        """A piece of an answer of unknown length."""
        ...


class AsgiRequest:
    """Made for each request; answers once. What the answers of a server look like is said by those who inherit.

    headers: the last of each name.
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
        self._has_unread_body = b"transfer-encoding" in self.headers or self._content_length() > 0

    def _content_length(self) -> int:
        return int(self.headers.get(b"content-length", 0))  # the parser has refused what is not a number

    # ---- the request ------------------------------------------------------------------------------------------

    @property
    def has_body(self) -> bool:
        """Whether one was announced that is not empty."""
        return b"transfer-encoding" in self.headers or self._content_length() > 0

    def parse_query(self) -> list[tuple[str, str]]:
        """Raises ValueError for what is not percent-encoded UTF-8, or too long."""
        if not self.query_string:
            return []
        return parse_qsl(
            self.query_string.decode(),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_QUERY_PARAMETERS,
        )

    async def iter_chunks(self, limit: int) -> AsyncGenerator[bytes]:
        """The body as it comes; BodyExceeds as soon as it is known to, CallerLeft if it breaks off."""
        left = self.check_content_length(limit)
        while self._has_unread_body:
            piece = self.accept_chunk(await self._receive(), left)
            left -= len(piece)
            if piece:
                yield piece

    def check_content_length(self, limit: int) -> int:
        """The limit of a body that was not announced to be longer; raises BodyExceeds."""
        if self._content_length() > limit:
            raise BodyLimitExceeded
        return limit

    def accept_chunk(self, message: Message, limit: int) -> bytes:
        """The piece of a body that a message brought; raises BodyExceeds, CallerLeft."""
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        self._has_unread_body = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        if len(piece) > limit:
            raise BodyLimitExceeded
        return piece

    async def wait_for_disconnect(self) -> None:
        """Return when the caller has gone away; only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ---- the answer -------------------------------------------------------------------------------------------

    async def start_response(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes | bytearray, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def send_and_discard_body(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer; a body that nobody wants is not read to its end."""
        headers = [JSON_CONTENT_TYPE, (b"content-length", b"%d" % len(body)), *headers]
        if not self._has_unread_body:
            await self.start_response(status, headers)
            await self.send(body, more=False)
            return
        await self.start_response(status, [*headers, (b"connection", b"close")])
        await self.send(body)
        # Closing at once would reset the connection, and a caller who still sends would never see the answer.
        await self._discard_body()
        await self.send(b"", more=False)

    async def _discard_body(self) -> None:
        taken = 0
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                while self._has_unread_body and taken < _LINGER_BYTES:
                    message = await self._receive()
                    taken += len(message.get("body", b""))
                    self._has_unread_body = message["type"] != "http.disconnect" and message.get(
                        "more_body", False
                    )
        except TimeoutError:
            pass
