"""One HTTP request to the sandbox server, and its response."""

import asyncio
import difflib
import re
from typing import Literal, get_args, get_origin, override
from urllib.parse import unquote_to_bytes

import msgspec

from fumehood.http_server.asgi_exchange import (
    DIRECT_WRITER,
    JSON_CONTENT_TYPE,
    AsgiExchange,
    DirectWriter,
    Headers,
    Receive,
    Scope,
    Send,
)
from fumehood.http_server.cross_site_protection import (
    content_media_type,
    decode_header,
    is_form_type,
    is_json_type,
)
from fumehood.http_server.json_decode_errors import explain_json_error
from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidSandboxRequest,
    RetryLater,
    SandboxError,
    SandboxPayloadTooLarge,
    UnsupportedMediaType,
    to_sandbox_error_body,
)
from fumehood.protocol.sandbox.sandbox_messages import PROTOCOL_VERSION

PROTOCOL_HEADER = "fumehood-sandbox-protocol"
EXECUTION_HEADER = "fumehood-execution-id"
PROTOCOL_VERSION_HEADER = (PROTOCOL_HEADER.encode(), str(PROTOCOL_VERSION).encode())
_NDJSON_HEADERS: Headers = [
    PROTOCOL_VERSION_HEADER,
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-store"),
]
_RETRY_SECONDS = b"1"
_ERROR_PATH = re.compile(r" - at `(?:key in )?\$(?:\.([^.\[`]+))?")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([\w-]{1,64})`", re.ASCII)

encode_json = msgspec.json.Encoder().encode


class SandboxMethodNotAllowed(InvalidSandboxRequest):
    """`allowed` is the value of the Allow header."""

    code = "method_not_allowed"
    status = 405

    def __init__(self, allowed: str) -> None:
        super().__init__(f"This path allows {allowed}.")
        self.allowed = allowed


class RequestTimeout(InvalidSandboxRequest):
    code = "request_timeout"
    status = 408


class SandboxHttpExchange(AsgiExchange):
    """Reads the request and writes the response."""

    __slots__ = ("_direct_writer", "_query", "scope", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.scope = scope
        self.started = False
        # Removed from the scope: the writer refers to the scope, and the cycle would need the garbage collector.
        self._direct_writer: DirectWriter | None = scope.pop(DIRECT_WRITER, None)
        self._query: dict[str, str] | None = None

    # ---- the request ------------------------------------------------------------------------------------------

    def authorization_headers(self) -> list[bytes]:
        return [value for name, value in self.scope["headers"] if name == b"authorization"]

    def check_protocol_version(self) -> None:
        version = self.headers.get(PROTOCOL_VERSION_HEADER[0])
        if version is not None and version.partition(b".")[0].strip() != PROTOCOL_VERSION_HEADER[1]:
            raise InvalidSandboxRequest(
                f"This server speaks version {PROTOCOL_VERSION} of the sandbox protocol, not the one asked for.",
                param=PROTOCOL_HEADER,
            )

    def decode_path(self) -> str:
        """The percent-decoded path; raises InvalidSandboxRequest if it is not UTF-8."""
        raw: bytes = read_raw_path(self.scope)
        try:
            return (unquote_to_bytes(raw) if b"%" in raw else raw).decode()
        except UnicodeDecodeError:
            raise InvalidSandboxRequest("The path is not percent-encoded UTF-8.", param="path") from None

    def query_value(self, name: str) -> str | None:
        if self._query is None:
            self._query = self._decode_query()
        return self._query.get(name)

    def _decode_query(self) -> dict[str, str]:
        try:
            pairs = self.parse_query()
        except ValueError:
            raise InvalidSandboxRequest(
                "The query is not percent-encoded UTF-8, or too long.", param="query"
            ) from None
        found: dict[str, str] = {}
        for name, value in pairs:
            if name in found:
                raise InvalidSandboxRequest("Duplicate query parameter.", param=name[:100])
            found[name] = value
        return found

    @override
    def _body_too_large(self, limit: int) -> SandboxPayloadTooLarge:
        return SandboxPayloadTooLarge(f"The body is larger than {limit} bytes.", param="body")

    async def read_body(self, limit: int, seconds: float) -> bytes:
        """The whole body; raises RequestTimeout after `seconds`, even while data trickles in."""
        if not self._has_unread_body:
            return b""
        try:
            async with asyncio.timeout(seconds):
                chunks = [chunk async for chunk in self.iter_chunks(limit)]
        except TimeoutError:
            raise RequestTimeout(
                f"The body did not arrive within {seconds:g} s; send it again, faster.", param="body"
            ) from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def require_json(self) -> None:
        """Raises UnsupportedMediaType. A web page can make a browser post plain text to any site, but not JSON."""
        kind = content_media_type(self.headers)
        if self._has_unread_body and not is_json_type(kind):
            raise UnsupportedMediaType(
                f"The body is {_describe_media_type(kind)}; send JSON, with Content-Type: application/json.",
                param="content-type",
            )

    def require_binary(self) -> None:
        """Raises UnsupportedMediaType for a POST that a form could send. For PUT browsers ask first (CORS)."""
        kind = content_media_type(self.headers)
        if self.method == "POST" and is_form_type(kind):
            raise UnsupportedMediaType(
                f"The body is {_describe_media_type(kind)}; send bytes, with Content-Type: application/octet-stream.",
                param="content-type",
            )

    async def read_json[T](self, decoder: msgspec.json.Decoder[T], limit: int, seconds: float) -> T:
        self.require_json()
        return decode_json(decoder, await self.read_body(limit, seconds))

    # ---- the response -----------------------------------------------------------------------------------------

    @override
    async def start_response(self, status: int, headers: Headers) -> None:
        self.started = True
        await super().start_response(status, headers)

    async def send_response(self, status: int, body: bytes, content_type: bytes | None = None) -> None:
        kind = JSON_CONTENT_TYPE if content_type is None else (b"content-type", content_type)
        await self.start_response(
            status, [PROTOCOL_VERSION_HEADER, kind, (b"content-length", b"%d" % len(body))]
        )
        await self.send(body, more=False)

    async def send_json(self, value: object, status: int = 200) -> None:
        await self.send_response(status, encode_json(value))

    async def send_no_content(self) -> None:
        await self.start_response(204, [PROTOCOL_VERSION_HEADER])
        await self.send(b"", more=False)

    async def start_binary_response(self, size: int | None = None) -> None:
        """Start an application/octet-stream response, with Content-Length if the size is known."""
        length: Headers = [] if size is None else [(b"content-length", b"%d" % size)]
        await self.start_response(
            200, [PROTOCOL_VERSION_HEADER, (b"content-type", b"application/octet-stream"), *length]
        )

    async def start_event_stream(self, execution_id: str, first: bytes = b"") -> None:
        """Start an NDJSON response, with the first lines if there are some: both in one packet where possible."""
        headers = [*_NDJSON_HEADERS, (EXECUTION_HEADER.encode(), execution_id.encode())]
        if self._direct_writer is not None and self._direct_writer.start_chunks(200, headers, first):
            self.started = True
            return
        await self.start_response(200, headers)
        if first:
            await self.send(first)

    async def send_error(self, error: SandboxError, extra: Headers | None = None) -> None:
        headers: Headers = [PROTOCOL_VERSION_HEADER, *(extra or [])]
        if isinstance(error, RetryLater):
            headers.append((b"retry-after", _RETRY_SECONDS))
        await self.send_and_discard_body(error.status, headers, encode_json(to_sandbox_error_body(error)))


def _describe_media_type(kind: bytes) -> str:
    return decode_header(kind)[:100] or "of no type"


def read_raw_path(scope: Scope) -> bytes:
    raw: bytes | None = scope.get("raw_path")
    return scope["path"].encode() if raw is None else raw


def decode_json[T](decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises InvalidSandboxRequest, which names the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _describe_validation_error(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidSandboxRequest(explain_json_error(body, error), param="body") from None
    except RecursionError:
        raise InvalidSandboxRequest("The body is nested too deeply.", param="body") from None


def _describe_validation_error(text: str, kind: type) -> InvalidSandboxRequest:
    """Includes a suggestion for a misspelled field."""
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    if (unknown := _UNKNOWN_FIELD.fullmatch(text)) is not None:
        close = difflib.get_close_matches(unknown[1], known, n=1)
        advice = f"; did you mean `{close[0]}`?" if close else "."
        return InvalidSandboxRequest(f"{text}{advice}", param=unknown[1])
    location = _ERROR_PATH.search(text)
    param = location[1] if location else None
    choices = getattr(known.get(param or ""), "__value__", None)
    if text.startswith("Invalid enum value") and get_origin(choices) is Literal:
        text += f"; it is one of {', '.join(map(str, get_args(choices)))}"
    return InvalidSandboxRequest(f"{text}.", param=param)
