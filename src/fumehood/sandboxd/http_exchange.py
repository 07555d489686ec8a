"""One HTTP request and its answer on bare ASGI: headers, bounded bodies, errors; imports msgspec and siblings."""

import asyncio
import difflib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any, Literal, get_args, get_origin
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from fumehood.protocol.sandbox import PROTOCOL_VERSION
from fumehood.protocol.sandbox_errors import (
    RequestRefused,
    SandboxError,
    TooLarge,
    TryLater,
    to_body,
)

type Scope = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
type Headers = list[tuple[bytes, bytes]]

PROTOCOL_HEADER = "fumehood-sandbox-protocol"
EXECUTION_HEADER = "fumehood-execution-id"
_PROTOCOL = (PROTOCOL_HEADER.encode(), str(PROTOCOL_VERSION).encode())
_JSON = (b"content-type", b"application/json")
_NDJSON_HEADERS: Headers = [
    _PROTOCOL,
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-store"),
]
_RETRY_SECONDS = b"1"
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 << 20
_ERROR_PLACE = re.compile(r" - at `(?:key in )?\$(?:\.([^.\[`]+))?")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([\w-]{1,64})`", re.ASCII)

encode = msgspec.json.Encoder().encode


class CallerLeft(Exception):
    """The connection broke while its request was read."""


class MethodNotAllowed(RequestRefused):
    code = "method_not_allowed"
    status = 405


class TookTooLong(RequestRefused):
    code = "request_timeout"
    status = 408


class Exchange:
    """Made for each request; answers once."""

    __slots__ = (
        "_length",
        "_query",
        "_receive",
        "_send",
        "_unread",
        "authorization",
        "method",
        "parameters",
        "scope",
        "started",
        "version",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.parameters: dict[str, str] = {}
        self.started = False
        self.authorization: list[bytes] = []
        self.version: bytes | None = None
        self._receive = receive
        self._send = send
        self._query: dict[str, str] | None = None
        self._length: int | None = None
        self._unread = False
        for name, value in scope["headers"]:
            if name == b"content-length":
                self._length = int(value)  # the parser has refused what is not a number
                self._unread = self._length > 0
            elif name == b"transfer-encoding":
                self._unread = True
            elif name == b"authorization":
                self.authorization.append(value)
            elif name == _PROTOCOL[0]:
                self.version = value

    # ---- the request ------------------------------------------------------------------------------------------

    def check_version(self) -> None:
        if self.version is not None and self.version.partition(b".")[0].strip() != _PROTOCOL[1]:
            raise RequestRefused(
                f"This server speaks version {PROTOCOL_VERSION} of the sandbox protocol, not the one asked for.",
                param=PROTOCOL_HEADER,
            )

    def path(self) -> str:
        """The path, decoded strictly: what is not UTF-8 names nothing."""
        raw: bytes = scope_path(self.scope)
        try:
            return (unquote_to_bytes(raw) if b"%" in raw else raw).decode()
        except UnicodeDecodeError:
            raise RequestRefused("The path is not percent-encoded UTF-8.", param="path") from None

    def query(self, name: str) -> str | None:
        if self._query is None:
            self._query = self._parse_query()
        return self._query.get(name)

    def _parse_query(self) -> dict[str, str]:
        raw: bytes = self.scope["query_string"]
        if not raw:
            return {}
        try:
            pairs = parse_qsl(raw.decode(), keep_blank_values=True, errors="strict", max_num_fields=32)
        except (UnicodeDecodeError, ValueError):
            raise RequestRefused(
                "The query is not percent-encoded UTF-8, or too long.", param="query"
            ) from None
        found: dict[str, str] = {}
        for name, value in pairs:
            if name in found:
                raise RequestRefused("A parameter is given twice.", param=name[:100])
            found[name] = value
        return found

    async def chunks(self, limit: int) -> AsyncGenerator[bytes]:
        """The body as it comes; TooLarge as soon as it is known to be, CallerLeft if it breaks off."""
        if self._length is not None and self._length > limit:
            raise _too_large(limit)
        taken = 0
        while self._unread:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise CallerLeft
            self._unread = message.get("more_body", False)
            chunk: bytes = message.get("body", b"")
            taken += len(chunk)
            if taken > limit:
                raise _too_large(limit)
            if chunk:
                yield chunk

    async def body(self, limit: int, seconds: float) -> bytes:
        """All of it; TookTooLong, however steadily it trickles."""
        if not self._unread:
            return b""
        try:
            async with asyncio.timeout(seconds):
                pieces = [chunk async for chunk in self.chunks(limit)]
        except TimeoutError:
            raise TookTooLong(
                f"The body did not arrive within {seconds:g} s; send it again, faster.", param="body"
            ) from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read_json[T](self, decoder: msgspec.json.Decoder[T], limit: int, seconds: float) -> T:
        return decode(decoder, await self.body(limit, seconds))

    async def until_left(self) -> None:
        """Return when the caller has gone away; only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ---- the answer -------------------------------------------------------------------------------------------

    async def begin(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(self, status: int, body: bytes, content_type: bytes | None = None) -> None:
        kind = _JSON if content_type is None else (b"content-type", content_type)
        await self.begin(status, [_PROTOCOL, kind, (b"content-length", b"%d" % len(body))])
        await self.send(body, more=False)

    async def answer_json(self, value: object, status: int = 200) -> None:
        await self.answer(status, encode(value))

    async def answer_nothing(self) -> None:
        await self.begin(204, [_PROTOCOL])
        await self.send(b"", more=False)

    async def begin_bytes(self, size: int) -> None:
        await self.begin(
            200,
            [_PROTOCOL, (b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % size)],
        )

    async def begin_events(self, execution_id: str) -> None:
        await self.begin(200, [*_NDJSON_HEADERS, (EXECUTION_HEADER.encode(), execution_id.encode())])

    async def refuse(self, error: SandboxError, extra: Headers | None = None) -> None:
        """Tell what is wrong; a body that nobody wants is not read to its end."""
        body = encode(to_body(error))
        headers: Headers = [_PROTOCOL, _JSON, (b"content-length", b"%d" % len(body)), *(extra or [])]
        if isinstance(error, TryLater):
            headers.append((b"retry-after", _RETRY_SECONDS))
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


def scope_path(scope: Scope) -> bytes:
    raw: bytes | None = scope.get("raw_path")
    return scope["path"].encode() if raw is None else raw


def decode[T](decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """RequestRefused names the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refused(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestRefused(f"The body is not JSON: {error}.", param="body") from None
    except RecursionError:
        raise RequestRefused("The body is nested too deeply.", param="body") from None


def _refused(text: str, kind: type) -> RequestRefused:
    """With what was probably meant, where that can be told."""
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    if (unknown := _UNKNOWN_FIELD.fullmatch(text)) is not None:
        close = difflib.get_close_matches(unknown[1], known, n=1)
        advice = f"; did you mean `{close[0]}`?" if close else "."
        return RequestRefused(f"{text}{advice}", param=unknown[1])
    place = _ERROR_PLACE.search(text)
    param = place[1] if place else None
    choices = getattr(known.get(param or ""), "__value__", None)
    if text.startswith("Invalid enum value") and get_origin(choices) is Literal:
        text += f"; it is one of {', '.join(map(str, get_args(choices)))}"
    return RequestRefused(f"{text}.", param=param)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than {limit} bytes.", param="body")
