"""WebSocket on /v1/responses: many responses on one connection.

The client sends `response.create`, the server the events that it would send as a stream, one message each. Requests of
one lane (`stream_id`, or none) are answered one after another, those of different lanes side by side. Of a response
that is not stored, the connection itself holds what the next one needs to continue it.
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

from fumehood.gateway.body_parsing import decode_json
from fumehood.gateway.cors import CorsPolicy
from fumehood.gateway.gateway_metrics import GatewayMetrics
from fumehood.gateway.request_context import VERSION_HEADER, RequestContext
from fumehood.gateway.request_limits import MemoryBudget
from fumehood.gateway.routes.response_routes import ResponseRoutes
from fumehood.gateway.streaming.event_sender import EventSender
from fumehood.gateway.streaming.websocket_framing import WebSocketEncoder, encode_text_message
from fumehood.http_server.asgi_request import Receive, Scope, Send
from fumehood.http_server.websocket_protocol import MESSAGE_REJECTED, SHUTDOWN_MESSAGE
from fumehood.interfaces import Caller, Run
from fumehood.protocol.conversation import ConversationSegment
from fumehood.protocol.openai.api_errors import (
    ApiError,
    InternalServerError,
    InvalidRequest,
    RateLimited,
    detect_resource_exhaustion,
)
from fumehood.protocol.openai.responses import Response
from fumehood.worker_threads import run_in_worker

# As OpenAI has them.
_MAX_CONCURRENT = 16
_MAX_STREAMS = 32
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_MAX_QUEUED = 64
# What conversations that are not stored may weigh: those of one tenant (an eighth of all), and all of them.
_MAX_UNSTORED_BYTES_PER_TENANT = 64 << 20
_MAX_UNSTORED_BYTES = 512 << 20
_GOING_AWAY = 1001

logger = logging.getLogger(__name__)


class UpgradeRequired(ApiError):
    status = 426
    type = "invalid_request_error"
    code = "upgrade_required"


# --- what is said -------------------------------------------------------------------------------------


class _MessageEnvelope(msgspec.Struct):
    """What has to be known of a message before its turn comes."""

    type: str = ""
    stream_id: str | None = None
    previous_response_id: str | None = None


class _SteerMessage(msgspec.Struct):
    previous_response_id: str = ""
    input: Raw = Raw(b"null")


class _SteerError(msgspec.Struct, frozen=True, kw_only=True):
    code: str = "steering_not_supported"
    message: str = "This server does not steer responses; send the input with the next response.create."
    type: str = "invalid_request_error"


class _SteerFailed(msgspec.Struct, tag_field="type", tag="response.steer.failed"):
    steer: _SteerMessage
    error: _SteerError = _SteerError()
    sequence_number: int = 0


_envelope_decoder = msgspec.json.Decoder(_MessageEnvelope)
_steer_decoder = msgspec.json.Decoder(_SteerMessage)


# --- connections --------------------------------------------------------------------------------------


class WebSocketHandshake(RequestContext):
    """The request by which a connection begins; until it is accepted, it is answered like any other."""

    __slots__ = ("receive", "send_raw")

    def __init__(self, scope: Scope, receive: Receive, send: Send, min_bytes_per_second: int) -> None:
        async def answer(part: MutableMapping[str, Any]) -> None:
            await send({**part, "type": f"websocket.{part['type']}"})

        super().__init__({**scope, "method": "GET"}, receive, answer, min_bytes_per_second)
        self.receive = receive
        self.send_raw = send


class WebSocketRoutes:
    """Serves connections.

    identify: tells whose connection it is, as long as it may be anybody's; raises ApiError.
    tell: takes note of a response that was answered.
    holdings: what connections hold.
    """

    def __init__(
        self,
        responses: ResponseRoutes,
        authenticate: Callable[[RequestContext], Awaitable[Caller]],
        cors: CorsPolicy,
        metrics: GatewayMetrics,
        *,
        record_request: Callable[[RequestContext], None],
    ) -> None:
        self._cors = cors
        self._metrics = metrics
        self.responses = responses
        self.authenticate = authenticate
        self.record_request = record_request
        self.unstored = _UnstoredConversations()

    async def connect(self, context: RequestContext, caller: Caller) -> None:
        if not isinstance(context, WebSocketHandshake):
            raise UpgradeRequired("This path is for POST, and for GET with an upgrade to WebSocket.")
        self._cors.check_origin(context)
        await context.receive()  # that it wants to connect
        context.status = 101
        identity = (b"x-request-id", context.request_id.encode())
        largest = self.responses.max_message_bytes(caller)
        connection = _WebSocketConnection(self, context, caller, largest)
        await context.send_raw(
            {
                "type": "websocket.accept",
                "headers": [VERSION_HEADER, identity],
                "max_message_bytes": largest,
                "min_bytes_per_second": context.min_bytes_per_second,
                "on_message_size": connection.reserve_incoming,
            }
        )
        self._metrics.open_websockets += 1
        try:
            await connection.run()
        finally:
            self._metrics.open_websockets -= 1
            context.log_fields["responses"] = connection.response_count
            context.log_fields["close_code"] = connection.close_code


@dataclass(frozen=True, slots=True)
class _UnstoredConversation:
    """A conversation that is not stored, up to the end of a response."""

    segments: Sequence[ConversationSegment]
    total_bytes: int


class _TenantConversations:
    """What one tenant holds, by the response's id, the oldest first."""

    def __init__(self) -> None:
        self.by_response: dict[str, _UnstoredConversation] = {}
        self.total_bytes = 0


class _UnstoredConversations:
    """What all hold together. Nobody's share takes another's place: where it is too much, the largest gives way."""

    def __init__(self) -> None:
        self._by_owner: dict[Hashable, _TenantConversations] = {}
        self._total_bytes = 0

    def get(self, owner: Hashable, response_id: str) -> _UnstoredConversation | None:
        share = self._by_owner.get(owner)
        return None if share is None else share.by_response.get(response_id)

    def put(self, owner: Hashable, response_id: str, conversation: _UnstoredConversation) -> None:
        if conversation.total_bytes > _MAX_UNSTORED_BYTES_PER_TENANT:
            return
        share = self._by_owner.setdefault(owner, _TenantConversations())
        share.by_response[response_id] = conversation
        share.total_bytes += conversation.total_bytes
        self._total_bytes += conversation.total_bytes
        while share.total_bytes > _MAX_UNSTORED_BYTES_PER_TENANT:
            self.drop(owner, next(iter(share.by_response)))
        while self._total_bytes > _MAX_UNSTORED_BYTES:
            largest, share = max(self._by_owner.items(), key=lambda each: each[1].total_bytes)
            self.drop(largest, next(iter(share.by_response)))

    def drop(self, owner: Hashable, response_id: str) -> None:
        share = self._by_owner.get(owner)
        held = None if share is None else share.by_response.pop(response_id, None)
        if share is None or held is None:
            return
        share.total_bytes -= held.total_bytes
        self._total_bytes -= held.total_bytes
        if not share.by_response:
            del self._by_owner[owner]


@dataclass(frozen=True, slots=True)
class _QueuedRequest:
    """A request whose turn has not come."""

    envelope: _MessageEnvelope
    body: bytes
    budget: MemoryBudget


class _StreamQueue:
    """Requests that are answered one after another.

    last: the response of this lane that is held, if its last one is.
    """

    def __init__(self, name: str | None) -> None:
        self.encoder = WebSocketEncoder(name)
        self.requests: deque[_QueuedRequest] = deque()
        self.task: asyncio.Task[None] | None = None
        self.sender: EventSender | None = None
        self.last_response_id: str | None = None


class _WebSocketConnection:
    """One client, until it leaves or the server stops.

    whose: in whose share it holds conversations: its tenant's, or its own.
    close_code: with which the connection ended, or 1006 if it broke.
    """

    def __init__(
        self, routes: WebSocketRoutes, handshake: WebSocketHandshake, caller: Caller, max_queued_bytes: int
    ) -> None:
        self.response_count = 0
        self.close_code = 1006
        self._routes = routes
        self._handshake = handshake
        self._caller = caller
        self._max_queued_bytes = max_queued_bytes
        # Without keys everybody is one tenant; then every connection is taken for one.
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
        self._incoming_budget = routes.responses.memory_budget(caller)  # of the message that has begun
        self._queued_count = 0
        self._queued_bytes = 0
        self._disconnected = False
        self._close_task: asyncio.Task[None] | None = None

    def reserve_incoming(self, size: int) -> None:
        """So much has come of a message that is not whole; raises as `Room.take`."""
        if not self._disconnected:
            self._incoming_budget.resize(size)

    async def run(self) -> None:
        try:
            while (received := await self._receive())["type"] != "websocket.disconnect":
                if received["type"] == SHUTDOWN_MESSAGE:
                    self._close_task = self._close_task or asyncio.ensure_future(self._close_when_idle())
                    continue
                with self._incoming_budget.transfer() as room:
                    await self._receive_message(received, room)
            self.close_code = received.get("code", self.close_code)
        finally:
            await self._disconnect()

    async def _close_when_idle(self) -> None:
        """After what runs has ended, which it does soon when a server stops."""
        await self._wait_until_idle()
        await self._send({"type": "websocket.close", "code": _GOING_AWAY, "reason": "the server stops"})

    async def _wait_until_idle(self) -> None:
        while tasks := [lane.task for lane in self._queues.values() if lane.task is not None]:
            await asyncio.wait(tasks)

    async def _disconnect(self) -> None:
        """Nobody is there any more: what runs is cancelled, what waits and what is held is forgotten."""
        self._disconnected = True
        self._incoming_budget.release()
        if self._close_task is not None:
            self._close_task.cancel()
            await asyncio.gather(self._close_task, return_exceptions=True)
        for lane in self._queues.values():
            while lane.requests:
                lane.requests.popleft().budget.release()
            if lane.sender is not None:
                lane.sender.disconnect()
            self._drop_unstored(lane.last_response_id)
        await self._wait_until_idle()

    # ---- messages ---------------------------------------------------------------------------------------------

    async def _receive_message(self, received: MutableMapping[str, Any], budget: MemoryBudget) -> None:
        """Put a request into its lane; what is none, or cannot wait, is answered at once.

        room: holds what was held of it while it came.
        """
        wire = self._queues[None].encoder
        try:
            if received["type"] == MESSAGE_REJECTED:
                raise received["error"]
            text: str | None = received.get("text")
            if text is None:
                raise InvalidRequest("A binary message is not understood; send text.", code="invalid_message")
            body = text.encode()
            with suppress(ApiError):  # it is refused when its lane is known
                budget.resize(len(body))
            envelope = await run_in_worker(len(body), decode_json, _envelope_decoder, body)
            if envelope.type == "response.create":
                lane = self._find_queue(envelope.stream_id)
                wire = lane.encoder
                self._enqueue(lane, envelope, body, budget)
            elif envelope.type == "response.steer":
                steer = await run_in_worker(len(body), decode_json, _steer_decoder, body)
                await self._send_frames(encode_text_message(_SteerFailed(steer)))
            elif envelope.type != "response.processed":  # which only tells that an answer was read
                raise InvalidRequest(
                    f"Unknown type of message: {envelope.type[:100]!r}. Send 'response.create'.",
                    param="type",
                    code="unknown_event_type",
                )
        except ApiError as error:
            await self._send_frames(wire.encode_error(error))

    def _find_queue(self, name: str | None) -> _StreamQueue:
        lane = self._queues.get(name)
        if lane is not None:
            return lane
        if name is None or _STREAM_ID.fullmatch(name) is None:
            raise InvalidRequest(
                "'stream_id' must be 1 to 256 letters, digits, underscores, hyphens and periods.",
                param="stream_id",
                code="invalid_stream_id",
            )
        if len(self._queues) > _MAX_STREAMS:
            raise InvalidRequest(
                f"This connection has {_MAX_STREAMS} values of 'stream_id' already; use one of them again, or "
                "connect once more.",
                param="stream_id",
                code="websocket_stream_limit_reached",
            )
        lane = self._queues[name] = _StreamQueue(name)
        return lane

    def _enqueue(
        self, queue: _StreamQueue, envelope: _MessageEnvelope, body: bytes, budget: MemoryBudget
    ) -> None:
        if self._queued_count >= _MAX_QUEUED or self._queued_bytes + len(body) > self._max_queued_bytes:
            raise RateLimited("Too many requests wait on this connection; read their answers first.")
        budget.resize(len(body))
        self._queued_count += 1
        self._queued_bytes += len(body)
        queue.requests.append(_QueuedRequest(envelope, body, budget.transfer()))
        if queue.task is None:
            queue.task = asyncio.ensure_future(self._process_queue(queue))

    async def _send_frames(self, messages: bytearray) -> None:
        await self._send({"type": "websocket.send", "frames": messages})

    async def _send_body(self, part: MutableMapping[str, Any]) -> None:
        """A piece of an answer, as an `Exchange` sends it."""
        await self._send({"type": "websocket.send", "frames": part["body"]})

    # ---- responses --------------------------------------------------------------------------------------------

    async def _process_queue(self, queue: _StreamQueue) -> None:
        """Answer what waits in the lane."""
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
        exchange = RequestContext(self._scope, self._receive, self._send_body)
        try:
            await self._create_response(exchange, queue, request)
        except ApiError as error:
            await self._send_error(exchange, queue, error)
        except Exception as error:
            lack = detect_resource_exhaustion(error)
            if lack is None:
                logger.exception("A message could not be answered (%s).", exchange.request_id)
            await self._send_error(
                exchange, queue, lack or InternalServerError("The server failed; its log says why.")
            )
        finally:
            self.response_count += 1
            self._routes.record_request(exchange)

    async def _send_error(self, context: RequestContext, queue: _StreamQueue, error: ApiError) -> None:
        context.status = error.status
        context.log_error(error)
        await self._send_frames(queue.encoder.encode_error(error, context.extra_headers))

    async def _create_response(
        self, context: RequestContext, queue: _StreamQueue, queued: _QueuedRequest
    ) -> None:
        previous, failed = queued.envelope.previous_response_id, True
        try:
            request = await run_in_worker(len(queued.body), self._routes.responses.parser.parse, queued.body)
            request.stream = True
            held = self._find_unstored(previous)
            # A key may have been revoked since it opened the connection.
            caller = await self._routes.authenticate(self._handshake)
            if caller.key_id:
                context.log_fields["key"] = caller.key_id
            run, response = await self._routes.responses.create_from_message(
                context,
                caller,
                request,
                partial(self._send_events, context, queue),
                queued.budget,
                held and held.segments,
            )
            failed = response is None or response.status == "failed"
            if response is not None and not failed:
                self._keep_unstored(queue, run, response, held)
        finally:
            # A client that failed to continue a response begins anew, with all that it stands on.
            if failed and queue.last_response_id == previous:
                self._drop_unstored(previous)

    async def _send_events(
        self, context: RequestContext, queue: _StreamQueue, run: Run, include: Collection[str]
    ) -> tuple[int, Response | None]:
        context.status = 200
        following = queue.sender = EventSender(context, run, include, queue.encoder)
        if self._disconnected:  # while it was begun
            following.disconnect()
        try:
            await following.run()
        finally:
            queue.sender = None
        return following.sent_count, following.response

    # ---- what is not stored -----------------------------------------------------------------------------------

    def _find_unstored(self, response_id: str | None) -> _UnstoredConversation | None:
        """What this connection holds, be it of another lane; nothing of other connections."""
        if response_id is None or all(lane.last_response_id != response_id for lane in self._queues.values()):
            return None
        return self._routes.unstored.get(self._owner, response_id)

    def _keep_unstored(
        self, queue: _StreamQueue, run: Run, response: Response, before: _UnstoredConversation | None
    ) -> None:
        """The last response of each lane; where that is too much, the oldest give way."""
        self._drop_unstored(queue.last_response_id)
        queue.last_response_id = None
        if response.store or self._disconnected:
            return
        past = run.get_conversation()
        if before is not None and len(past) == len(before.segments) + 1:
            held = _UnstoredConversation(past, before.total_bytes + past[-1].memory_bytes)
        else:
            held = _UnstoredConversation(past, sum(segment.memory_bytes for segment in past))
        queue.last_response_id = run.id
        self._routes.unstored.put(self._owner, run.id, held)

    def _drop_unstored(self, response_id: str | None) -> None:
        if response_id is not None:
            self._routes.unstored.drop(self._owner, response_id)
