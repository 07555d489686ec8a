"""One HTTP request and its answer on bare ASGI: headers, bounded bodies, errors; imports msgspec and `protocol`."""

import asyncio
import contextlib
import itertools
import secrets
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol, Self, cast
from urllib.parse import parse_qsl

import msgspec

from fumehood import __version__
from fumehood.gateway.request_log import Field
from fumehood.protocol.errors import ApiError, BodyTooLarge, InvalidRequest, to_body

type Scope = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
type Headers = list[tuple[bytes, bytes]]

# Where in its scope a request finds its Shortcut, if its server has one.
SHORTCUT = "fumehood.shortcut"

VERSION = (b"fumehood-version", __version__.encode())
_JSON = (b"content-type", b"application/json")
_PATIENCE = 30.0  # seconds for the next piece of a body
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 << 20
_MOST_PARAMETERS = 32
# Seconds until it is worth a task to watch whether the caller is still there: most answers are complete by then.
_FIRST_LOOK = 0.25

_PROCESS = f"req_{secrets.token_hex(11)}"
_numbers = itertools.count(1)

encode = msgspec.json.Encoder().encode


class Shortcut(Protocol):
    """What ASGI has no words for. Both say False if they cannot do it now, and then nothing was sent."""

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """A whole answer at once."""
        ...

    def send(self, body: bytes | bytearray) -> bool:
        """A piece of an answer of unknown length."""
        ...


class CallerLeft(Exception):
    """The connection broke while its request was read."""


class BodyTooSlow(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Exchange:
    """Made for each request; answers once.

    noted: what the log's line of this request tells besides what every line tells.
    """

    __slots__ = (
        "_length",
        "_query",
        "_receive",
        "_send",
        "_shortcut",
        "_unread",
        "authorization",
        "began",
        "content_encoding",
        "content_type",
        "host",
        "last_sent",
        "method",
        "noted",
        "parameters",
        "path",
        "query_string",
        "request_id",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began = perf_counter()
        self.request_id = f"{_PROCESS}{next(_numbers):010x}"
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query_string: bytes = scope["query_string"]
        self.parameters: dict[str, str] = {}
        self.noted: dict[str, Field] = {}
        self.status = 0
        self.last_sent = self.began
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self.authorization = headers.get(b"authorization")
        self.content_type = headers.get(b"content-type", b"")
        self.content_encoding = headers.get(b"content-encoding", b"")
        self.host = headers.get(b"host", b"")
        self._receive = receive
        self._send = send
        self._shortcut: Shortcut | None = scope.get(SHORTCUT)
        self._query: list[tuple[str, str]] | None = None
        length = headers.get(b"content-length")
        self._length = None if length is None else int(length)  # the parser has refused what is not a number
        self._unread = bool(self._length) or b"transfer-encoding" in headers

    @property
    def started(self) -> bool:
        """Whether the answer has begun, so that an error comes too late to be its status."""
        return self.status != 0

    # ---- the request ------------------------------------------------------------------------------------------

    def query(self, name: str) -> str | None:
        """The last value of a parameter."""
        values = self.queries(name)
        return values[-1] if values else None

    def queries(self, name: str) -> list[str]:
        """All values of a parameter, which may be written `name` or `name[]`."""
        if not self.query_string:
            return []
        if self._query is None:
            self._query = self._parse_query()
        names = (name, f"{name}[]")
        return [value for key, value in self._query if key in names]

    def _parse_query(self) -> list[tuple[str, str]]:
        try:
            return parse_qsl(
                self.query_string.decode(),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=_MOST_PARAMETERS,
            )
        except (UnicodeDecodeError, ValueError):
            raise InvalidRequest("The query is not percent-encoded UTF-8, or too long.") from None

    async def body(self, limit: int, take: Callable[[int], None]) -> bytes:
        """All of it; BodyTooLarge as soon as it is known to be, CallerLeft if it breaks off, BodyTooSlow.

        take: told of the bytes of a body in several pieces, as they come; it may raise.
        """
        if self._length is not None and self._length > limit:
            raise _too_large(limit)
        pieces: list[bytes] = []
        taken = 0
        while self._unread:
            message = await self._next_message()
            if message["type"] == "http.disconnect":
                raise CallerLeft
            self._unread = message.get("more_body", False)
            piece: bytes = message.get("body", b"")
            taken += len(piece)
            if taken > limit:
                raise _too_large(limit)
            if self._unread or pieces:
                take(len(piece))
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _next_message(self) -> MutableMapping[str, Any]:
        """Mostly it came with the head, and then no timer is set; raises BodyTooSlow."""
        receiving = cast("Coroutine[Any, Any, MutableMapping[str, Any]]", self._receive())
        try:
            obstacle = receiving.send(None)
        except StopIteration as ready:
            return ready.value
        try:
            async with asyncio.timeout(_PATIENCE):
                return await _rest_of(receiving, obstacle)
        except TimeoutError:
            raise BodyTooSlow(f"Nothing of the body came for {_PATIENCE:g} seconds.") from None

    async def until_left(self) -> None:
        """Return when the caller has gone away; only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ---- the answer -------------------------------------------------------------------------------------------

    def elapsed(self) -> float:
        """Seconds since the request's head was there."""
        return perf_counter() - self.began

    async def begin(self, status: int, headers: Headers) -> None:
        self.status = status
        headers += self._usual_headers()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _usual_headers(self) -> Headers:
        return [
            VERSION,
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % (self.elapsed() * 1000)),
        ]

    async def send(self, body: bytes | bytearray, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self.last_sent = perf_counter()

    def send_now(self, body: bytes | bytearray) -> Awaitable[None] | None:
        """As `send`, for whoever cannot wait. What it gives has to be awaited before anything else is sent; mostly that
        is nothing.
        """
        if self._shortcut is not None and self._shortcut.send(body):
            self.last_sent = perf_counter()
            return None
        sending = cast(
            "Coroutine[Any, Any, None]",
            self._send({"type": "http.response.body", "body": body, "more_body": True}),
        )
        self.last_sent = perf_counter()
        try:
            obstacle = sending.send(None)
        except StopIteration:
            return None
        return _rest_of(sending, obstacle)

    async def answer(self, body: bytes, status: int = 200, content_type: tuple[bytes, bytes] = _JSON) -> None:
        headers = [content_type, (b"content-length", b"%d" % len(body))]
        shortcut = self._shortcut
        if shortcut is not None and shortcut.answer(status, headers + self._usual_headers(), body):
            self.status = status
            return
        await self.begin(status, headers)
        await self.send(body, more=False)

    async def answer_json(self, value: object, status: int = 200) -> None:
        await self.answer(encode(value), status)

    async def refuse(self, error: ApiError, extra: Headers | None = None) -> None:
        """Tell what is wrong; a body that nobody wants is not read to its end."""
        body = encode(to_body(error))
        headers: Headers = [_JSON, (b"content-length", b"%d" % len(body)), *(extra or [])]
        if error.retry_after is not None:
            headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
        if not self._unread:
            await self.begin(error.status, headers)
            await self.send(body, more=False)
            return
        headers.append((b"connection", b"close"))
        await self.begin(error.status, headers)
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


class Vigil:
    """Watches, while an answer is in the making, whether its caller is still there, and breaks long silences.

    sign_of_life: what is sent when nothing else was for `every` seconds; None sends nothing.
    """

    def __init__(
        self,
        exchange: Exchange,
        on_left: Callable[[], None],
        *,
        sign_of_life: bytes | None = None,
        every: float = 15.0,
    ) -> None:
        self.left = False
        self._exchange = exchange
        self._on_left = on_left
        self._sign = sign_of_life
        self._every = every
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._breaking: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        first = _FIRST_LOOK if self._sign is None else min(_FIRST_LOOK, self._every)
        self._timer = self._loop.call_later(first, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pending in (self._timer, self._watcher, self._breaking):
            if pending is not None:
                pending.cancel()

    def _look(self) -> None:
        if self._watcher is None:
            self._watcher = self._loop.create_task(self._watch())
        if self._sign is None:
            return
        silent = perf_counter() - self._exchange.last_sent
        if silent >= self._every:
            silent = 0.0
            if self._breaking is None or self._breaking.done():
                self._breaking = self._loop.create_task(self._break_silence(self._sign))
        self._timer = self._loop.call_later(self._every - silent, self._look)

    async def _watch(self) -> None:
        await self._exchange.until_left()
        self.left = True
        self._on_left()

    async def _break_silence(self, sign: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the answer ended at this very moment
            await self._exchange.send(sign)


@types.coroutine
def _rest_of[T](begun: Coroutine[Any, Any, T], obstacle: object) -> Generator[object, object, T]:
    """What is left of a coroutine that was begun by hand, and waits for something."""
    try:
        while True:
            try:
                found = yield obstacle
            except BaseException as error:
                obstacle = begun.throw(error)
            else:
                obstacle = begun.send(found)
    except StopIteration as end:
        return end.value


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit} bytes.")
