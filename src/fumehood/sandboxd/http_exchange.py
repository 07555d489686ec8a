"""One request to the sandbox server and its answer; imports msgspec, `serving` and siblings."""

import asyncio
import difflib
import re
from collections.abc import AsyncGenerator
from typing import Literal, get_args, get_origin, override
from urllib.parse import unquote_to_bytes

import msgspec

from fumehood.protocol.sandbox import PROTOCOL_VERSION
from fumehood.protocol.sandbox_errors import (
    RequestRefused,
    SandboxError,
    TooLarge,
    TryLater,
    UnsupportedType,
    to_body,
)
from fumehood.serving.browsers import decode_header, is_form_type, is_json, media_type
from fumehood.serving.exchange import JSON, BareExchange, BodyExceeds, Headers, Receive, Scope, Send
from fumehood.serving.json_bodies import explain_json_fault

PROTOCOL_HEADER = "fumehood-sandbox-protocol"
EXECUTION_HEADER = "fumehood-execution-id"
PROTOCOL = (PROTOCOL_HEADER.encode(), str(PROTOCOL_VERSION).encode())
_NDJSON_HEADERS: Headers = [
    PROTOCOL,
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-store"),
]
_RETRY_SECONDS = b"1"
_ERROR_PLACE = re.compile(r" - at `(?:key in )?\$(?:\.([^.\[`]+))?")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([\w-]{1,64})`", re.ASCII)

encode = msgspec.json.Encoder().encode


class MethodNotAllowed(RequestRefused):
    code = "method_not_allowed"
    status = 405


class TookTooLong(RequestRefused):
    code = "request_timeout"
    status = 408


class Exchange(BareExchange):
    """One request to the sandbox server, and its answer."""

    __slots__ = ("_query", "scope", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.scope = scope
        self.started = False
        self._query: dict[str, str] | None = None

    # ---- the request ------------------------------------------------------------------------------------------

    def tokens(self) -> list[bytes]:
        return [value for name, value in self.scope["headers"] if name == b"authorization"]

    def check_version(self) -> None:
        version = self.headers.get(PROTOCOL[0])
        if version is not None and version.partition(b".")[0].strip() != PROTOCOL[1]:
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
        try:
            pairs = self.parse_query()
        except ValueError:
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
        try:
            async for piece in self.pieces(limit):
                yield piece
        except BodyExceeds:
            raise TooLarge(f"The body is larger than {limit} bytes.", param="body") from None

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

    def check_json(self) -> None:
        """Raises UnsupportedType. A web page can have any browser post plain text anywhere, but not JSON."""
        kind = media_type(self.headers)
        if self._unread and not is_json(kind):
            raise UnsupportedType(
                f"The body is {_shown_type(kind)}; send JSON, with Content-Type: application/json.",
                param="content-type",
            )

    def check_bytes(self) -> None:
        """Raises UnsupportedType for a POST that a form could have sent. Browsers ask before they PUT."""
        kind = media_type(self.headers)
        if self.method == "POST" and is_form_type(kind):
            raise UnsupportedType(
                f"The body is {_shown_type(kind)}; send bytes, with Content-Type: application/octet-stream.",
                param="content-type",
            )

    async def read_json[T](self, decoder: msgspec.json.Decoder[T], limit: int, seconds: float) -> T:
        self.check_json()
        return decode(decoder, await self.body(limit, seconds))

    # ---- the answer -------------------------------------------------------------------------------------------

    @override
    async def begin(self, status: int, headers: Headers) -> None:
        self.started = True
        await super().begin(status, headers)

    async def answer(self, status: int, body: bytes, content_type: bytes | None = None) -> None:
        kind = JSON if content_type is None else (b"content-type", content_type)
        await self.begin(status, [PROTOCOL, kind, (b"content-length", b"%d" % len(body))])
        await self.send(body, more=False)

    async def answer_json(self, value: object, status: int = 200) -> None:
        await self.answer(status, encode(value))

    async def answer_nothing(self) -> None:
        await self.begin(204, [PROTOCOL])
        await self.send(b"", more=False)

    async def begin_bytes(self, size: int | None = None) -> None:
        """`size`, where it is known before."""
        length: Headers = [] if size is None else [(b"content-length", b"%d" % size)]
        await self.begin(200, [PROTOCOL, (b"content-type", b"application/octet-stream"), *length])

    async def begin_events(self, execution_id: str) -> None:
        await self.begin(200, [*_NDJSON_HEADERS, (EXECUTION_HEADER.encode(), execution_id.encode())])

    async def refuse(self, error: SandboxError, extra: Headers | None = None) -> None:
        """Tell what is wrong."""
        headers: Headers = [PROTOCOL, *(extra or [])]
        if isinstance(error, TryLater):
            headers.append((b"retry-after", _RETRY_SECONDS))
        await self.end_early(error.status, headers, encode(to_body(error)))


def _shown_type(kind: bytes) -> str:
    return decode_header(kind)[:100] or "of no type"


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
        raise RequestRefused(explain_json_fault(body, error), param="body") from None
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
