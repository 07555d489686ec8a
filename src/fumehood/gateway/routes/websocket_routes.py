"""WebSocket route of /v1/responses: many responses on one connection.

The client sends `response.create`; the server sends the stream events, one message each. Requests with the same
`stream_id` run one after another, others in parallel. The connection keeps the conversation of an unstored response,
so that the next request can continue it.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from fumehood.cpu_worker import run_in_worker
from fumehood.gateway.body_parsing import decode_json
from fumehood.gateway.cors import CorsPolicy
from fumehood.gateway.gateway_exchange import VERSION_HEADER, GatewayExchange, to_api_error
from fumehood.gateway.gateway_metrics import GatewayMetrics
from fumehood.gateway.request_limiter import RequestLimiter, RequestMemoryReservation
from fumehood.gateway.routes.response_routes import ResponseRoutes
from fumehood.gateway.streaming.event_sender import EventSender
from fumehood.gateway.streaming.websocket_frame_encoder import WebSocketEncoder, encode_text_message
from fumehood.gateway.tenant_fair_cache import TenantFairCache
from fumehood.http_server.asgi_exchange import DIRECT_WRITER, Receive, Scope, Send
from fumehood.http_server.uvicorn_websocket import MESSAGE_REJECTED, SHUTDOWN_MESSAGE
from fumehood.interfaces import Caller, ReadableRun, Run
from fumehood.protocol.conversation import ConversationSegment
from fumehood.protocol.openai.api_errors import (
    ApiError,
    InvalidRequest,
    RateLimited,
)
from fumehood.protocol.openai.responses import Response

# The limits of OpenAI.
_MAX_CONCURRENT = 16
_MAX_STREAMS = 32
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_MAX_QUEUED = 64
# Unstored conversations of one tenant, and of all.
_MAX_UNSTORED_BYTES_PER_TENANT = 64 << 20
_MAX_UNSTORED_BYTES = 512 << 20
_GOING_AWAY = 1001

logger = logging.getLogger(__name__)


class UpgradeRequired(ApiError):
    status = 426
    code = "upgrade_required"


# --- messages -------------------------------------------------------------------------------------


class _MessageEnvelope(msgspec.Struct):
    """The fields of a message that are needed before it is processed."""

    type: str = ""
    stream_id: str | None = None
    previous_response_id: str | None = None


class _SteerMessage(msgspec.Struct):
    previous_response_id: str = ""
    input: Raw = Raw(b"null")


class _SteerError(msgspec.Struct, frozen=True, kw_only=True):
    code: str = "steering_not_supported"
    message: str = "Steering is not supported; send the input with the next response.create."
    type: str = "invalid_request_error"


class _SteerFailed(msgspec.Struct, tag_field="type", tag="response.steer.failed"):
    steer: _SteerMessage
    error: _SteerError = _SteerError()
    sequence_number: int = 0


_envelope_decoder = msgspec.json.Decoder(_MessageEnvelope)
_steer_decoder = msgspec.json.Decoder(_SteerMessage)


# --- connections --------------------------------------------------------------------------------------


class WebSocketUpgradeRequest(GatewayExchange):
    """The opening request of a connection; until it is accepted, it can be answered like any other."""

    __slots__ = ("receive", "send_raw")

    def __init__(self, scope: Scope, receive: Receive, send: Send, min_bytes_per_second: int) -> None:
        async def send_http(message: MutableMapping[str, Any]) -> None:
            await send({**message, "type": f"websocket.{message['type']}"})

        scope["method"] = "GET"
        super().__init__(scope, receive, send_http, min_bytes_per_second)
        self.receive = receive
        self.send_raw = send


class WebSocketRoutes:
    """Serves WebSocket connections.

    authenticate: called for the connection and for every message; raises ApiError.
    record_request: called after every response.
    unstored: the unstored conversations of all connections.
    """

    def __init__(
        self,
        responses: ResponseRoutes,
        authenticate: Callable[[GatewayExchange], Awaitable[Caller]],
        cors: CorsPolicy,
        limits: RequestLimiter,
        metrics: GatewayMetrics,
        *,
        record_request: Callable[[GatewayExchange], None],
    ) -> None:
        self._cors = cors
        self._metrics = metrics
        self.responses = responses
        self.limits = limits
        self.authenticate = authenticate
        self.record_request = record_request
        self.unstored = TenantFairCache[_UnstoredConversation](
            _MAX_UNSTORED_BYTES, _MAX_UNSTORED_BYTES_PER_TENANT
        )

    async def connect(self, exchange: GatewayExchange, caller: Caller) -> None:
        if not isinstance(exchange, WebSocketUpgradeRequest):
            raise UpgradeRequired(
                "GET on this path needs an upgrade to WebSocket; to create a response over HTTP, use POST."
            )
        self._cors.check_origin(exchange)
        await exchange.receive()  # websocket.connect
        exchange.status = 101
        identity = (b"x-request-id", exchange.request_id.encode())
        max_message_bytes = self.limits.max_body_bytes(caller)
        connection = _WebSocketConnection(self, exchange, caller, max_message_bytes)
        await exchange.send_raw(
            {
                "type": "websocket.accept",
                "headers": [VERSION_HEADER, identity],
                "max_message_bytes": max_message_bytes,
                "min_bytes_per_second": exchange.min_bytes_per_second,
                "on_message_size": connection.reserve_incoming,
            }
        )
        self._metrics.open_websockets += 1
        try:
            await connection.run()
        finally:
            self._metrics.open_websockets -= 1
            exchange.log_fields["responses"] = connection.response_count
            exchange.log_fields["close_code"] = connection.close_code


@dataclass(frozen=True, slots=True)
class _UnstoredConversation:
    """The conversation up to an unstored response."""

    segments: Sequence[ConversationSegment]
    total_bytes: int


@dataclass(frozen=True, slots=True)
class _QueuedRequest:
    """A request that waits."""

    envelope: _MessageEnvelope
    body: bytes
    budget: RequestMemoryReservation


class _StreamQueue:
    """The requests of one `stream_id`, processed one after another.

    last_response_id: the last response of this queue, if its conversation is kept.
    """

    def __init__(self, name: str | None) -> None:
        self.encoder = WebSocketEncoder(name)
        self.requests: deque[_QueuedRequest] = deque()
        self.task: asyncio.Task[None] | None = None
        self.sender: EventSender | None = None
        self.last_response_id: str | None = None


class _WebSocketConnection:
    """One connection, until the client disconnects or the server stops.

    max_queued_bytes: size limit of the requests that wait.
    close_code: the close code of the client; 1006 without a close frame.
    """

    def __init__(
        self,
        routes: WebSocketRoutes,
        handshake: WebSocketUpgradeRequest,
        caller: Caller,
        max_queued_bytes: int,
    ) -> None:
        self.response_count = 0
        self.close_code = 1006
        self._routes = routes
        self._handshake = handshake
        self._caller = caller
        self._max_queued_bytes = max_queued_bytes
        # Without keys all clients share a tenant, so each connection counts as an owner.
        self._owner: Hashable = caller.tenant if caller.key_id else handshake
        self._receive = handshake.receive
        self._send = handshake.send_raw
        self._scope: Scope = {
            "method": "WEBSOCKET",
            "path": handshake.path,
            "query_string": b"",
            "headers": (),
        }
        self._queues: dict[str | None, _StreamQueue] = {None: _StreamQueue(None)}
        self._concurrency_limiter = asyncio.Semaphore(_MAX_CONCURRENT)
        self._incoming_budget = routes.limits.memory_budget(caller)  # of the incomplete message
        self._queued_count = 0
        self._queued_bytes = 0
        self._disconnected = False
        self._close_task: asyncio.Task[None] | None = None

    def reserve_incoming(self, size: int) -> None:
        """Reserve memory for the received part of a message. Raises as `RequestMemoryReservation.reserve`."""
        if not self._disconnected:
            self._incoming_budget.resize(size)

    async def run(self) -> None:
        try:
            while (received := await self._receive())["type"] != "websocket.disconnect":
                if received["type"] == SHUTDOWN_MESSAGE:
                    self._close_task = self._close_task or asyncio.ensure_future(self._close_when_idle())
                    continue
                with self._incoming_budget.transfer() as budget:
                    await self._receive_message(received, budget)
            self.close_code = received.get("code", self.close_code)
        finally:
            await self._disconnect()

    async def _close_when_idle(self) -> None:
        """Close the connection when its running responses have ended."""
        await self._wait_until_idle()
        await self._send({"type": "websocket.close", "code": _GOING_AWAY, "reason": "server shutdown"})

    async def _wait_until_idle(self) -> None:
        while tasks := [queue.task for queue in self._queues.values() if queue.task is not None]:
            await asyncio.wait(tasks)

    async def _disconnect(self) -> None:
        """Cancel running responses; drop queued requests and unstored conversations."""
        self._disconnected = True
        self._incoming_budget.release()
        if self._close_task is not None:
            self._close_task.cancel()
            await asyncio.gather(self._close_task, return_exceptions=True)
        for queue in self._queues.values():
            while queue.requests:
                queue.requests.popleft().budget.release()
            if queue.sender is not None:
                queue.sender.disconnect()
            self._drop_unstored(queue.last_response_id)
        await self._wait_until_idle()

    # ---- messages ---------------------------------------------------------------------------------------------

    async def _receive_message(
        self, received: MutableMapping[str, Any], budget: RequestMemoryReservation
    ) -> None:
        """Queue a request; answer anything else at once.

        budget: the memory reserved while the message arrived.
        """
        encoder = self._queues[None].encoder
        try:
            if received["type"] == MESSAGE_REJECTED:
                raise received["error"]
            text: str | None = received.get("text")
            if text is None:
                raise InvalidRequest("Binary messages are not supported; send text.", code="invalid_message")
            body = text.encode()
            with suppress(ApiError):  # rejected below, once its queue is known
                budget.resize(len(body))
            envelope = await run_in_worker(len(body), decode_json, _envelope_decoder, body)
            if envelope.type == "response.create":
                queue = self._find_queue(envelope.stream_id)
                encoder = queue.encoder
                self._enqueue(queue, envelope, body, budget)
            elif envelope.type == "response.steer":
                steer = await run_in_worker(len(body), decode_json, _steer_decoder, body)
                await self._send_frames(encode_text_message(_SteerFailed(steer)))
            elif envelope.type != "response.processed":  # an acknowledgement
                raise InvalidRequest(
                    f"Unknown message type: {envelope.type[:100]!r}. Send 'response.create'.",
                    param="type",
                    code="unknown_event_type",
                )
        except ApiError as error:
            await self._send_frames(encoder.encode_error(error))

    def _find_queue(self, name: str | None) -> _StreamQueue:
        queue = self._queues.get(name)
        if queue is not None:
            return queue
        if name is None or _STREAM_ID.fullmatch(name) is None:
            raise InvalidRequest(
                "'stream_id' must be 1 to 256 letters, digits, underscores, hyphens and periods.",
                param="stream_id",
                code="invalid_stream_id",
            )
        if len(self._queues) > _MAX_STREAMS:
            raise InvalidRequest(
                f"This connection already has {_MAX_STREAMS} values of 'stream_id'; reuse one, or open another "
                "connection.",
                param="stream_id",
                code="websocket_stream_limit_reached",
            )
        queue = self._queues[name] = _StreamQueue(name)
        return queue

    def _enqueue(
        self, queue: _StreamQueue, envelope: _MessageEnvelope, body: bytes, budget: RequestMemoryReservation
    ) -> None:
        if self._queued_count >= _MAX_QUEUED or self._queued_bytes + len(body) > self._max_queued_bytes:
            raise RateLimited("Too many requests are queued on this connection; read their responses first.")
        budget.resize(len(body))
        self._queued_count += 1
        self._queued_bytes += len(body)
        queue.requests.append(_QueuedRequest(envelope, body, budget.transfer()))
        if queue.task is None:
            queue.task = asyncio.ensure_future(self._process_queue(queue))

    async def _send_frames(self, messages: bytearray) -> None:
        await self._send({"type": "websocket.send", "frames": messages})

    async def _send_body(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of a response; the `send` of its `GatewayExchange`."""
        await self._send({"type": "websocket.send", "frames": message["body"]})

    # ---- responses --------------------------------------------------------------------------------------------

    async def _process_queue(self, queue: _StreamQueue) -> None:
        """Process the requests of a queue."""
        try:
            while queue.requests:
                async with self._concurrency_limiter:
                    if self._disconnected:
                        return
                    request = queue.requests.popleft()
                    self._queued_count -= 1
                    self._queued_bytes -= len(request.body)
                    with request.budget:
                        await self._handle_request(queue, request)
        finally:
            queue.task = None

    async def _handle_request(self, queue: _StreamQueue, request: _QueuedRequest) -> None:
        scope = {**self._scope, DIRECT_WRITER: self._handshake.direct_writer}
        context = GatewayExchange(scope, self._receive, self._send_body)
        try:
            await self._create_response(context, queue, request)
        except Exception as error:
            await self._send_error(context, queue, to_api_error(error, context.request_id))
        finally:
            self.response_count += 1
            self._routes.record_request(context)

    async def _send_error(self, exchange: GatewayExchange, queue: _StreamQueue, error: ApiError) -> None:
        exchange.status = error.status
        exchange.log_error(error)
        await self._send_frames(queue.encoder.encode_error(error, exchange.extra_headers))

    async def _create_response(
        self, exchange: GatewayExchange, queue: _StreamQueue, queued: _QueuedRequest
    ) -> None:
        previous, failed = queued.envelope.previous_response_id, True
        try:
            request = await run_in_worker(len(queued.body), self._routes.responses.parser.parse, queued.body)
            request.stream = True
            conversation = self._find_unstored(previous)
            # The key may have been revoked since the connection was opened.
            caller = await self._routes.authenticate(self._handshake)
            if caller.key_id:
                exchange.log_fields["key"] = caller.key_id
            run, response = await self._routes.responses.create_from_message(
                exchange,
                caller,
                request,
                partial(self._send_events, exchange, queue),
                queued.budget,
                conversation and conversation.segments,
            )
            failed = response is None or response.status == "failed"
            if response is not None and not failed:
                self._keep_unstored(queue, run, response, conversation)
        finally:
            # After a failure the client starts again with the whole conversation.
            if failed and queue.last_response_id == previous:
                self._drop_unstored(previous)

    async def _send_events(
        self, exchange: GatewayExchange, queue: _StreamQueue, run: ReadableRun, include: Collection[str]
    ) -> tuple[int, Response | None]:
        exchange.status = 200
        sender = queue.sender = EventSender(exchange, run, include, queue.encoder)
        if self._disconnected:  # while the run started
            sender.disconnect()
        try:
            await sender.run()
        finally:
            queue.sender = None
        return sender.sent_count, sender.response

    # ---- unstored conversations -----------------------------------------------------------------------------------

    def _find_unstored(self, response_id: str | None) -> _UnstoredConversation | None:
        """The conversation of a response of this connection, from any of its queues."""
        if response_id is None or all(
            queue.last_response_id != response_id for queue in self._queues.values()
        ):
            return None
        return self._routes.unstored.get(self._owner, response_id)

    def _keep_unstored(
        self, queue: _StreamQueue, run: Run, response: Response, before: _UnstoredConversation | None
    ) -> None:
        """Keep the conversation of the last response of a queue."""
        self._drop_unstored(queue.last_response_id)
        queue.last_response_id = None
        if response.store or self._disconnected:
            return
        segments = run.get_conversation()
        if before is not None and len(segments) == len(before.segments) + 1:
            conversation = _UnstoredConversation(segments, before.total_bytes + segments[-1].memory_bytes)
        else:
            conversation = _UnstoredConversation(segments, sum(each.memory_bytes for each in segments))
        queue.last_response_id = run.id
        self._routes.unstored.put(self._owner, run.id, conversation, conversation.total_bytes)

    def _drop_unstored(self, response_id: str | None) -> None:
        if response_id is not None:
            self._routes.unstored.drop(self._owner, response_id)
