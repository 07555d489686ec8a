"""One request to the gateway and its response, and a monitor for client disconnects."""

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import Self, override

import msgspec

from fumehood import __version__
from fumehood.gateway.request_log import LogValue
from fumehood.http_server.asgi_exchange import (
    DIRECT_WRITER,
    JSON_CONTENT_TYPE,
    AsgiExchange,
    DirectWriter,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
)
from fumehood.http_server.slow_clients import MIN_BYTES_PER_SECOND, TransferDeadline
from fumehood.protocol.openai.api_errors import (
    ApiError,
    BodyTooLarge,
    InternalServerError,
    InvalidRequest,
    detect_resource_exhaustion,
    to_error_body,
)

VERSION_HEADER = (b"fumehood-version", __version__.encode())
WARNING_HEADER = b"fumehood-warning"
_BODY_TIMEOUT = 30.0  # seconds to wait for the next chunk
_CHUNK_BYTES = 256 << 10  # size of one write of a large response
# Seconds before a task watches for a disconnect: most responses are complete by then and need no task.
_DISCONNECT_CHECK_AFTER = 0.25

_REQUEST_ID_PREFIX = f"req_{secrets.token_hex(11)}"
_request_numbers = itertools.count(1)

encode_json = msgspec.json.Encoder().encode
logger = logging.getLogger(__name__)


class BodyTimeout(ApiError):
    status = 408
    code = "request_timeout"


class GatewayExchange(AsgiExchange):
    """One request to the gateway and its response.

    log_fields: additional fields of the request's log line.
    extra_headers: additional headers of the response, also of an error response.
    min_bytes_per_second: minimum average rate of the body.
    has_unsupported_encoding: whether Transfer-Encoding or TE has a value other than chunked.
    """

    __slots__ = (
        "_body_deadline",
        "_query_pairs",
        "direct_writer",
        "extra_headers",
        "has_unsupported_encoding",
        "last_sent_at",
        "log_fields",
        "min_bytes_per_second",
        "path",
        "request_id",
        "started_at",
        "status",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, min_bytes_per_second: int = MIN_BYTES_PER_SECOND
    ) -> None:
        super().__init__(scope, receive, send)
        self.started_at = perf_counter()
        self.min_bytes_per_second = min_bytes_per_second
        self._body_deadline = TransferDeadline(_BODY_TIMEOUT, min_bytes_per_second)
        self.request_id = f"{_REQUEST_ID_PREFIX}{next(_request_numbers):010x}"
        self.path: str = scope["path"]
        self.log_fields: dict[str, LogValue] = {}
        self.extra_headers: Headers = []
        self.status = 0
        self.last_sent_at = self.started_at
        self.has_unsupported_encoding = (
            b"transfer-encoding" in self.headers or b"te" in self.headers
        ) and _has_unsupported_encoding(scope["headers"])
        self._query_pairs: list[tuple[str, str]] | None = None
        # Removed from the scope: the writer refers to the scope, and the cycle would need the garbage collector.
        self.direct_writer: DirectWriter | None = scope.pop(DIRECT_WRITER, None)

    @property
    def has_started(self) -> bool:
        """Whether the response has started, so that its status can no longer report an error."""
        return self.status != 0

    # ---- request ------------------------------------------------------------------------------------------

    def query_parameter(self, name: str) -> str | None:
        """The last value of a query parameter."""
        values = self.query_parameters(name)
        return values[-1] if values else None

    def query_parameters(self, name: str) -> list[str]:
        """All values of a query parameter written as `name` or `name[]`."""
        if self._query_pairs is None:
            try:
                self._query_pairs = self.parse_query()
            except ValueError:
                raise InvalidRequest(
                    "The query string is too long, or is not percent-encoded UTF-8."
                ) from None
        names = (name, f"{name}[]")
        return [value for key, value in self._query_pairs if key in names]

    async def read_body(self, limit: int, reserve_memory: Callable[[int], None]) -> bytes:
        """Read the whole body. Raises BodyTooLarge, BodyTimeout, ClientDisconnected.

        reserve_memory: called with the size of each chunk of a body that has several; may raise.
        """
        chunks: list[bytes] = []
        async for chunk in self.iter_chunks(limit):
            if self._has_unread_body or chunks:
                reserve_memory(len(chunk))
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @override
    def _body_too_large(self, limit: int) -> BodyTooLarge:
        return BodyTooLarge(f"The body is larger than {limit} bytes.")

    @override
    async def _receive_message(self) -> Message:
        """The next ASGI message. Raises BodyTimeout."""
        deadline = self._body_deadline
        waiting_since = perf_counter()
        try:
            async with asyncio.timeout(deadline.remaining_seconds):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeout(
                f"Request body timeout: no data for {_BODY_TIMEOUT:g} seconds, or less than "
                f"{self.min_bytes_per_second} bytes per second on average."
            ) from None
        deadline.extend(len(message.get("body", b"")), perf_counter() - waiting_since)
        return message

    # ---- response -------------------------------------------------------------------------------------------

    def elapsed_seconds(self) -> float:
        """Seconds since the request headers arrived."""
        return perf_counter() - self.started_at

    @override
    async def start_response(self, status: int, headers: Headers) -> None:
        self.status = status
        await super().start_response(status, headers + self._common_headers())

    def _common_headers(self) -> Headers:
        return [
            VERSION_HEADER,
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % (self.elapsed_seconds() * 1000)),
            *self.extra_headers,
        ]

    @override
    async def send(self, body: bytes | bytearray, *, more: bool = True) -> None:
        await super().send(body, more=more)
        self.last_sent_at = perf_counter()

    def send_nowait(self, body: bytes | bytearray) -> bool:
        """Send without waiting. Returns False, and sends nothing, if that is not possible; then await `send`."""
        if self.direct_writer is None or not self.direct_writer.write_chunk(body):
            return False
        self.last_sent_at = perf_counter()
        return True

    def break_off(self) -> bool:
        """Close the connection before the end of the response. Returns False if that is not possible."""
        return self.direct_writer is not None and self.direct_writer.break_off()

    async def respond(
        self, body: bytes, status: int = 200, content_type: tuple[bytes, bytes] = JSON_CONTENT_TYPE
    ) -> None:
        headers = [content_type, (b"content-length", b"%d" % len(body))]
        writer = self.direct_writer
        if writer is not None and writer.write_response(status, headers + self._common_headers(), body):
            self.status = status
            return
        await self.start_response(status, headers)
        # Each write waits for the client to read the previous ones, so that the server buffers little.
        for start in range(0, len(body) - _CHUNK_BYTES, _CHUNK_BYTES):
            await self.send(body[start : start + _CHUNK_BYTES])
        await self.send(body[(len(body) - 1) // _CHUNK_BYTES * _CHUNK_BYTES :] if body else body, more=False)

    async def respond_json(self, value: object, status: int = 200) -> None:
        await self.respond(encode_json(value), status)

    def add_warnings(self, warnings: Sequence[str]) -> None:
        """Tell the client, in a header, and the operator, in the log, what of the request is not served."""
        if warnings:
            joined = ", ".join(warnings)
            self.extra_headers.append((WARNING_HEADER, joined.encode()))
            logger.warning("Request %s is served only in part: %s.", self.request_id, joined)

    def log_error(self, error: ApiError) -> None:
        """Add the error to the log line."""
        self.log_fields["error"] = error.wire_code or error.type
        self.log_fields["param"] = error.param

    async def respond_error(self, error: ApiError) -> None:
        """Send an error response."""
        await self.send_and_discard_body(
            error.status, error_headers(error), encode_json(to_error_body(error))
        )


def to_api_error(error: Exception, request_id: str) -> ApiError:
    """The error to send to the client. Logs errors that are not the client's or the model server's."""
    if isinstance(error, ApiError):
        return error
    exhausted = detect_resource_exhaustion(error)
    if exhausted is not None:
        return exhausted
    logger.error("Request %s failed.", request_id, exc_info=error)
    return InternalServerError("Internal server error; see the server log.")


def error_headers(error: ApiError) -> Headers:
    """The headers of an error response."""
    if error.retry_after is None:
        return []
    return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after)))]


def _has_unsupported_encoding(headers: Headers) -> bool:
    """Whether a Transfer-Encoding or TE header has a value other than chunked."""
    return any(
        value.strip().lower() != b"chunked" if name == b"transfer-encoding" else b"chunked" in value.lower()
        for name, value in headers
        if name in (b"transfer-encoding", b"te")
    )


class ClientConnectionMonitor:
    """Context manager that calls `on_disconnect` when the client disconnects, and sends keepalives.

    keepalive: sent when nothing else was sent for `interval` seconds; None sends nothing.
    """

    def __init__(
        self,
        exchange: GatewayExchange,
        on_disconnect: Callable[[], object],
        *,
        keepalive: bytes | None = None,
        interval: float = 15.0,
    ) -> None:
        self.disconnected = False
        self._context = exchange
        self._on_disconnect = on_disconnect
        self._keepalive = keepalive
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._disconnect_task: asyncio.Task[None] | None = None
        self._keepalive_task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        delay = (
            _DISCONNECT_CHECK_AFTER
            if self._keepalive is None
            else min(_DISCONNECT_CHECK_AFTER, self._interval)
        )
        self._timer = self._loop.call_later(delay, self._check)
        return self

    def send_keepalives(self, keepalive: bytes, interval: float) -> None:
        """Send keepalives from now on. Call it once, when the response has started."""
        self._keepalive, self._interval = keepalive, interval
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(min(_DISCONNECT_CHECK_AFTER, interval), self._check)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pending in (self._timer, self._disconnect_task, self._keepalive_task):
            if pending is not None:
                pending.cancel()

    def _check(self) -> None:
        if self._disconnect_task is None:
            self._disconnect_task = self._loop.create_task(self._wait_for_disconnect())
        if self._keepalive is None:
            return
        silent = perf_counter() - self._context.last_sent_at
        if silent >= self._interval:
            silent = 0.0
            if self._keepalive_task is None or self._keepalive_task.done():
                self._keepalive_task = self._loop.create_task(self._send_keepalive(self._keepalive))
        self._timer = self._loop.call_later(self._interval - silent, self._check)

    async def _wait_for_disconnect(self) -> None:
        await self._context.wait_for_disconnect()
        self.disconnected = True
        self._on_disconnect()

    async def _send_keepalive(self, keepalive: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the response just ended
            await self._context.send(keepalive)
