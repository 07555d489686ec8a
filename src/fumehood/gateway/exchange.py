"""One HTTP request and its answer on bare ASGI: headers, bounded bodies, errors; imports msgspec and `protocol`."""

import asyncio
import contextlib
import itertools
import secrets
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from time import perf_counter
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import parse_qsl

import msgspec

from fumehood import __version__
from fumehood.gateway.request_log import Field
from fumehood.protocol.errors import ApiError, BodyTooLarge, InvalidRequest, to_body

type Scope = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
type Headers = list[tuple[bytes, bytes]]

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


class CallerLeft(Exception):
    """The connection broke while its request was read."""


class BodyTooSlow(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Exchange:
    """Made for each request; answers once.

    noted: what the log's line of this request tells besides what every line tells.
    transfer_fault: whether the body comes, or the answer is wanted, in a way that nobody here will undo.
    """

    __slots__ = (
        "_length",
        "_query",
        "_receive",
        "_send",
        "_unread",
        "authorization",
        "began",
        "content_encoding",
        "content_type",
        "host",
        "last_sent",
        "method",
        "noted",
        "origin",
        "parameters",
        "path",
        "query_string",
        "request_id",
        "status",
        "transfer_fault",
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
        self.authorization: bytes | None = None
        self.content_type = b""
        self.content_encoding = b""
        self.host = b""
        self.origin: bytes | None = None
        self.transfer_fault = False
        self._receive = receive
        self._send = send
        self._query: list[tuple[str, str]] | None = None
        self._length: int | None = None
        self._unread = False
        for name, value in scope["headers"]:
            if name == b"content-length":
                self._length = int(value)  # the parser has refused what is not a number
                self._unread = self._length > 0
            elif name == b"transfer-encoding":
                self._unread = True
                self.transfer_fault |= value.strip().lower() != b"chunked"
            elif name == b"te":
                self.transfer_fault |= b"chunked" in value.lower()
            elif name == b"origin":
                self.origin = value
            elif name == b"content-type":
                self.content_type = value
            elif name == b"authorization":
                self.authorization = value
            elif name == b"host":
                self.host = value
            elif name == b"content-encoding":
                self.content_encoding = value

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

    async def body(self, limit: int) -> bytes:
        """All of it; BodyTooLarge as soon as it is known to be, CallerLeft if it breaks off, BodyTooSlow."""
        if self._length is not None and self._length > limit:
            raise _too_large(limit)
        pieces: list[bytes] = []
        taken = 0
        try:
            async with asyncio.timeout(_PATIENCE) as patience:
                while self._unread:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise CallerLeft
                    self._unread = message.get("more_body", False)
                    piece: bytes = message.get("body", b"")
                    taken += len(piece)
                    if taken > limit:
                        raise _too_large(limit)
                    pieces.append(piece)
                    if self._unread:
                        patience.reschedule(asyncio.get_running_loop().time() + _PATIENCE)
        except TimeoutError:
            raise BodyTooSlow(f"Nothing of the body came for {_PATIENCE:g} seconds.") from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

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
        headers += (
            VERSION,
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % (self.elapsed() * 1000)),
        )
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes | bytearray, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self.last_sent = perf_counter()

    def send_now(self, body: bytes | bytearray) -> Awaitable[None] | None:
        """As `send`, for whoever cannot wait. What it gives has to be awaited before anything else is sent; mostly that
        is nothing.
        """
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
        await self.begin(status, [content_type, (b"content-length", b"%d" % len(body))])
        await self.send(body, more=False)

    async def answer_json(self, value: object, status: int = 200) -> None:
        await self.answer(encode(value), status)

    def note_refusal(self, error: ApiError) -> None:
        """For the log."""
        self.noted["error"] = error.wire_code or error.type
        self.noted["param"] = error.param

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
def _rest_of(begun: Coroutine[Any, Any, None], obstacle: object) -> Generator[object, object, None]:
    """What is left of a coroutine that was begun by hand, and waits for something."""
    try:
        while True:
            try:
                found = yield obstacle
            except BaseException as error:
                obstacle = begun.throw(error)
            else:
                obstacle = begun.send(found)
    except StopIteration:
        return


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit} bytes.")
