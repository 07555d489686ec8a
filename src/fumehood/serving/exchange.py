"""One HTTP request and its answer on bare ASGI, with bounded bodies; imports only the standard library."""

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

JSON = (b"content-type", b"application/json")
# Where in its scope a request finds its Shortcut, if its server has one.
SHORTCUT = "fumehood.shortcut"
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 << 20
_MOST_PARAMETERS = 32


class CallerLeft(Exception):
    """The connection broke while its request was read."""


class BodyExceeds(Exception):
    """More came, or was announced, than was to be read."""


class Shortcut(Protocol):
    """What ASGI has no words for. Both say False if they cannot do it now, and then nothing was sent."""

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """A whole answer at once."""
        ...

    def send(self, body: bytes | bytearray) -> bool:
        """A piece of an answer of unknown length."""
        ...


class BareExchange:
    """Made for each request; answers once. What the answers of a server look like is said by those who inherit.

    headers: the last of each name.
    """

    __slots__ = ("_receive", "_send", "_unread", "headers", "method", "parameters", "query_string")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.query_string: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.parameters: dict[str, str] = {}
        self._receive = receive
        self._send = send
        self._unread = b"transfer-encoding" in self.headers or self._length() > 0

    def _length(self) -> int:
        return int(self.headers.get(b"content-length", 0))  # the parser has refused what is not a number

    # ---- the request ------------------------------------------------------------------------------------------

    @property
    def has_body(self) -> bool:
        """Whether one was announced that is not empty."""
        return b"transfer-encoding" in self.headers or self._length() > 0

    def parse_query(self) -> list[tuple[str, str]]:
        """Raises ValueError for what is not percent-encoded UTF-8, or too long."""
        if not self.query_string:
            return []
        return parse_qsl(
            self.query_string.decode(),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MOST_PARAMETERS,
        )

    async def pieces(self, limit: int) -> AsyncGenerator[bytes]:
        """The body as it comes; BodyExceeds as soon as it is known to, CallerLeft if it breaks off."""
        left = self.check_length(limit)
        while self._unread:
            piece = self.taken(await self._receive(), left)
            left -= len(piece)
            if piece:
                yield piece

    def check_length(self, limit: int) -> int:
        """The limit of a body that was not announced to be longer; raises BodyExceeds."""
        if self._length() > limit:
            raise BodyExceeds
        return limit

    def taken(self, message: Message, left: int) -> bytes:
        """The piece of a body that a message brought; raises BodyExceeds, CallerLeft."""
        if message["type"] == "http.disconnect":
            raise CallerLeft
        self._unread = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        if len(piece) > left:
            raise BodyExceeds
        return piece

    async def until_left(self) -> None:
        """Return when the caller has gone away; only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ---- the answer -------------------------------------------------------------------------------------------

    async def begin(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes | bytearray, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def end_early(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer; a body that nobody wants is not read to its end."""
        headers = [JSON, (b"content-length", b"%d" % len(body)), *headers]
        if not self._unread:
            await self.begin(status, headers)
            await self.send(body, more=False)
            return
        await self.begin(status, [*headers, (b"connection", b"close")])
        await self.send(body)
        # Closing at once would reset the connection, and a caller who still sends would never see the answer.
        await self._linger()
        await self.send(b"", more=False)

    async def _linger(self) -> None:
        taken = 0
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                while self._unread and taken < _LINGER_BYTES:
                    message = await self._receive()
                    taken += len(message.get("body", b""))
                    self._unread = message["type"] != "http.disconnect" and message.get("more_body", False)
        except TimeoutError:
            pass
