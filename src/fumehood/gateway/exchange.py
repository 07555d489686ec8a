"""One request to the gateway, its answer, and whether its caller is still there; imports `serving` and `protocol`."""

import asyncio
import contextlib
import itertools
import math
import secrets
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from time import perf_counter
from types import TracebackType
from typing import Any, Self, cast, override

import msgspec

from fumehood import __version__
from fumehood.gateway.request_log import Field
from fumehood.protocol.errors import ApiError, BodyTooLarge, InvalidRequest, to_body
from fumehood.serving.exchange import (
    JSON,
    SHORTCUT,
    BareExchange,
    BodyExceeds,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    Shortcut,
)
from fumehood.serving.stalled import SLOWEST, Pace

VERSION = (b"fumehood-version", __version__.encode())
_PATIENCE = 30.0  # seconds for the next piece of a body
_PIECE = 256 << 10  # bytes of an answer that are sent at once
# Seconds until it is worth a task to watch whether the caller is still there: most answers are complete by then.
_FIRST_LOOK = 0.25

_PROCESS = f"req_{secrets.token_hex(11)}"
_numbers = itertools.count(1)

encode = msgspec.json.Encoder().encode


class BodyTooSlow(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Exchange(BareExchange):
    """One request to the gateway, and its answer.

    noted: what the log's line of this request tells besides what every line tells.
    extra: headers of the answer, whatever it will be, besides what every answer has.
    slowest: bytes of a body that have to come in a second, on the whole.
    transfer_fault: whether the body comes, or the answer is wanted, in a way that nobody here will undo.
    """

    __slots__ = (
        "_pace",
        "_query",
        "_shortcut",
        "began",
        "extra",
        "last_sent",
        "noted",
        "path",
        "request_id",
        "slowest",
        "status",
        "transfer_fault",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, slowest: int = SLOWEST) -> None:
        super().__init__(scope, receive, send)
        self.began = perf_counter()
        self.slowest = slowest
        self._pace: Pace | None = None  # once it had to be waited for
        self.request_id = f"{_PROCESS}{next(_numbers):010x}"
        self.path: str = scope["path"]
        self.noted: dict[str, Field] = {}
        self.extra: Headers = []
        self.status = 0
        self.last_sent = self.began
        self.transfer_fault = (b"transfer-encoding" in self.headers or b"te" in self.headers) and _is_coded(
            scope["headers"]
        )
        self._query: list[tuple[str, str]] | None = None
        # It leads to the scope: left in there, neither would go before somebody looks for such cycles.
        self._shortcut: Shortcut | None = scope.pop(SHORTCUT, None)

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
        if self._query is None:
            try:
                self._query = self.parse_query()
            except ValueError:
                raise InvalidRequest("The query is not percent-encoded UTF-8, or too long.") from None
        names = (name, f"{name}[]")
        return [value for key, value in self._query if key in names]

    async def body(self, limit: int, take: Callable[[int], None]) -> bytes:
        """All of it; BodyTooLarge as soon as it is known to be, CallerLeft if it breaks off, BodyTooSlow.

        take: told of the bytes of a body in several pieces, as they come; it may raise.
        """
        pieces: list[bytes] = []
        try:
            left = self.check_length(limit)
            while self._unread:
                piece = self.taken(await self._next_message(), left)
                left -= len(piece)
                if self._unread or pieces:
                    take(len(piece))
                pieces.append(piece)
        except BodyExceeds:
            raise BodyTooLarge(f"The body is larger than {limit} bytes.") from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @override
    async def pieces(self, limit: int) -> AsyncGenerator[bytes]:
        """The body as it comes; raises as `body` does."""
        try:
            left = self.check_length(limit)
            while self._unread:
                piece = self.taken(await self._next_message(), left)
                left -= len(piece)
                if piece:
                    yield piece
        except BodyExceeds:
            raise BodyTooLarge(f"The body is larger than {limit} bytes.") from None

    async def _next_message(self) -> Message:
        """Mostly it came with the head, and then no timer is set; raises BodyTooSlow."""
        receiving = cast("Coroutine[Any, Any, Message]", self._receive())
        try:
            obstacle = receiving.send(None)
        except StopIteration as ready:
            if self._pace is not None:
                self._pace.came(len(ready.value.get("body", b"")))
            return ready.value
        pace = self._pace = self._pace or Pace(_PATIENCE, self.slowest)
        asked = perf_counter()
        try:
            async with asyncio.timeout(pace.left):
                message = await _rest_of(receiving, obstacle)
        except TimeoutError:
            raise BodyTooSlow(
                f"The body came too slowly: nothing for {_PATIENCE:g} seconds, or on the whole fewer than "
                f"{self.slowest} bytes a second."
            ) from None
        pace.came(len(message.get("body", b"")), perf_counter() - asked)
        return message

    # ---- the answer -------------------------------------------------------------------------------------------

    def elapsed(self) -> float:
        """Seconds since the request's head was there."""
        return perf_counter() - self.began

    @override
    async def begin(self, status: int, headers: Headers) -> None:
        self.status = status
        await super().begin(status, headers + self._usual_headers())

    def _usual_headers(self) -> Headers:
        return [
            VERSION,
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % (self.elapsed() * 1000)),
            *self.extra,
        ]

    @override
    async def send(self, body: bytes | bytearray, *, more: bool = True) -> None:
        await super().send(body, more=more)
        self.last_sent = perf_counter()

    def send_now(self, body: bytes | bytearray) -> Awaitable[None] | None:
        """As `send`, for whoever cannot wait: what it gives has to be awaited before anything else is sent. It
        mostly gives nothing.
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

    async def answer(self, body: bytes, status: int = 200, content_type: tuple[bytes, bytes] = JSON) -> None:
        headers = [content_type, (b"content-length", b"%d" % len(body))]
        shortcut = self._shortcut
        if shortcut is not None and shortcut.answer(status, headers + self._usual_headers(), body):
            self.status = status
            return
        await self.begin(status, headers)
        # Each waits for the reader of those before it: who has answered can let go of the rest.
        for start in range(0, len(body) - _PIECE, _PIECE):
            await self.send(body[start : start + _PIECE])
        await self.send(body[(len(body) - 1) // _PIECE * _PIECE :] if body else body, more=False)

    async def answer_json(self, value: object, status: int = 200) -> None:
        await self.answer(encode(value), status)

    def note_refusal(self, error: ApiError) -> None:
        """Have the log tell of it."""
        self.noted["error"] = error.wire_code or error.type
        self.noted["param"] = error.param

    async def refuse(self, error: ApiError) -> None:
        """Tell what is wrong."""
        await self.end_early(error.status, refusal_headers(error), encode(to_body(error)))


def refusal_headers(error: ApiError) -> Headers:
    """What the answer that tells of it says in its head."""
    if error.retry_after is None:
        return []
    return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after)))]


def _is_coded(headers: Headers) -> bool:
    """Whether anything but chunks is said of how bodies are sent, in whichever of several headers."""
    return any(
        value.strip().lower() != b"chunked" if name == b"transfer-encoding" else b"chunked" in value.lower()
        for name, value in headers
        if name in (b"transfer-encoding", b"te")
    )


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
