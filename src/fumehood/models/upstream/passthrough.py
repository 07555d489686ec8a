"""Passes requests for chat completions and embeddings through to one model server."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from fumehood.cpu_worker import run_in_worker
from fumehood.interfaces import PassthroughEndpoint, PassthroughRequest
from fumehood.models.model_settings import ModelSettings, RequestFields
from fumehood.models.upstream.event_stream_relay import EventStreamRelay, read_payload, read_usage
from fumehood.models.upstream.http1_client import Http1Connection, UpstreamTransportError
from fumehood.models.upstream.stream_parser import MAX_RESPONSE_BYTES
from fumehood.models.upstream.turn_retries import RecordedTurn, TurnRetries
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.models.upstream.upstream_server import UpstreamServer
from fumehood.protocol.openai.api_errors import ModelError
from fumehood.protocol.openai.responses import Usage

_API_NAMES: dict[PassthroughEndpoint, str] = {
    "chat/completions": "chat completions",
    "embeddings": "embeddings",
}
_INPUT_FIELDS: dict[PassthroughEndpoint, str] = {"chat/completions": "messages", "embeddings": "input"}
_WHOLE_DOCUMENT_BYTES = 1 << 20  # up to this size, a document is read before anything of it is passed on
_TAIL_BYTES = 1 << 10  # of a larger document: its end, where servers put the usage
_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*\})')


class UpstreamPassthrough:
    """Sends requests to one server, with the gateway's key and the server's name of the model.

    retries: repeats requests whose response has not started, and counts them.
    """

    def __init__(self, settings: ModelSettings, server: UpstreamServer, retries: TurnRetries) -> None:
        self._settings = settings
        self._server = server
        self._retries = retries

    @asynccontextmanager
    async def open(self, request: PassthroughRequest) -> "AsyncGenerator[RelayedResponse]":
        """See `PassthroughProvider.open_passthrough`."""
        endpoint = request.endpoint
        errors = self._server.create_error_factory(
            request.model, _API_NAMES[endpoint], _INPUT_FIELDS[endpoint]
        )
        size = sum(map(len, request.fields.values()))
        body = await run_in_worker(size, self._encode_body, request)
        with self._retries.record_turn() as turn:
            async with AsyncExitStack() as stack:
                connection = await self._send(stack, turn, f"/{endpoint}", errors, body)
                del body
                yield RelayedResponse(
                    connection,
                    errors,
                    turn,
                    read_timeout=self._settings.read_timeout,
                    is_stream=request.is_streamed,
                )

    async def _send(
        self,
        stack: AsyncExitStack,
        turn: RecordedTurn,
        path: str,
        errors: UpstreamErrorFactory,
        body: bytes,
    ) -> Http1Connection:
        """Send until the response starts. Raises ModelError."""
        while True:
            try:
                return await stack.enter_async_context(self._server.request(path, errors, [body]))
            except ModelError as error:
                await self._retries.wait_or_raise(turn, error)

    def _encode_body(self, request: PassthroughRequest) -> bytes:
        fields: RequestFields = {**request.fields, "model": self._settings.name or request.model}
        if request.endpoint == "chat/completions" and self._settings.backend == "chat_completions":
            self._settings.apply_extra_body(fields)
        return msgspec.json.encode(fields)


class RelayedResponse:
    """A `PassthroughResponse` on a connection to the server."""

    def __init__(
        self,
        connection: Http1Connection,
        errors: UpstreamErrorFactory,
        turn: RecordedTurn,
        *,
        read_timeout: float,
        is_stream: bool,
    ) -> None:
        self._connection = connection
        self._errors = errors
        self._turn = turn
        self._read_timeout = read_timeout
        self._is_stream = is_stream
        self.usage: Usage | None = None
        self.content_length = None if is_stream else _read_content_length(connection)
        self._media_type = connection.get_header(b"content-type").partition(";")[0].strip().lower()

    async def iter_body(self) -> AsyncGenerator[bytes]:
        """See `PassthroughResponse.iter_body`."""
        try:
            pieces = self._iter_events() if self._is_stream else self._iter_document()
            async for piece in pieces:
                self._turn.mark_started()
                yield piece
            self._turn.outcome = "ended"
        except ModelError as error:
            self._turn.fail(error)
            raise
        except UpstreamTransportError as error:
            failure = self._errors.from_transport(error, self._read_timeout)
            self._turn.fail(failure)
            raise failure from error

    async def _iter_events(self) -> AsyncGenerator[bytes]:
        if self._media_type == "application/json":
            await self._reject_document()
        connection, relay = self._connection, EventStreamRelay(self._errors)
        while not relay.is_over:
            chunk = await connection.read()
            if not chunk:
                events = await run_in_worker(relay.buffered_bytes, relay.finish)
            else:
                cost = relay.buffered_bytes if b"\n" in chunk else 0
                events = await run_in_worker(cost, relay.feed, chunk)
            self.usage = relay.usage
            if events:
                yield events
            if not chunk:
                break
            if connection.has_unread:
                await asyncio.sleep(0)  # let other tasks run
        if relay.failure is not None:
            raise relay.failure
        connection.reuse = True

    async def _reject_document(self) -> None:
        """Raises ModelError: the server's own error, if the document is one."""
        document = await self._connection.read_all(_WHOLE_DOCUMENT_BYTES)
        _, error = await run_in_worker(len(document), read_payload, document, self._errors)
        raise error or self._errors.invalid_response("it sent no stream although the request asked for one")

    async def _iter_document(self) -> AsyncGenerator[bytes]:
        if self.content_length is not None and self.content_length > MAX_RESPONSE_BYTES:
            raise self._errors.response_too_large()
        start, is_whole = await self._read_start()
        if not start.lstrip().startswith(b"{"):
            raise self._errors.invalid_response("it is no JSON document")
        if is_whole:
            self.usage, error = await run_in_worker(len(start), read_payload, start, self._errors)
            if error is not None:
                raise error
            self.content_length = len(start)
            self._turn.outcome = "ended"  # who has the whole document need not read on
            yield start
            return
        yield start
        size, tail = len(start), b""
        while chunk := await self._connection.read():
            size += len(chunk)
            if size > MAX_RESPONSE_BYTES:
                raise self._errors.response_too_large()
            tail = (tail + chunk)[-_TAIL_BYTES:]
            yield chunk
            if self._connection.has_unread:
                await asyncio.sleep(0)  # let other tasks run
        if found := _USAGE.search(tail):
            self.usage = read_usage(found[1])

    async def _read_start(self) -> tuple[bytes, bool]:
        """The first MiB of the document, and whether that is all of it."""
        chunks: list[bytes] = []
        size = 0
        while size <= _WHOLE_DOCUMENT_BYTES:
            chunk = await self._connection.read()
            if not chunk:
                return b"".join(chunks), True
            chunks.append(chunk)
            size += len(chunk)
        return b"".join(chunks), False


def _read_content_length(connection: Http1Connection) -> int | None:
    length = connection.get_header(b"content-length")
    is_chunked = connection.get_header(b"transfer-encoding") != ""
    return int(length) if length.isdigit() and len(length) < 16 and not is_chunked else None
