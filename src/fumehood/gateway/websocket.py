"""WebSocket on /v1/responses: many responses on one connection; imports msgspec, `interfaces`, `protocol`, siblings.

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

from fumehood.aside import aside
from fumehood.gateway.exchange import VERSION, Exchange
from fumehood.gateway.following import Following
from fumehood.gateway.limits import Room
from fumehood.gateway.messages import Messages, text_message
from fumehood.gateway.metrics import Metrics
from fumehood.gateway.origins import Origins
from fumehood.gateway.reading import decode
from fumehood.gateway.responses import Responses
from fumehood.interfaces import Caller, Run
from fumehood.protocol.conversation import Segment
from fumehood.protocol.errors import (
    ApiError,
    InvalidRequest,
    RateLimited,
    ServerFault,
)
from fumehood.protocol.responses import Response
from fumehood.protocol.shortage import find_shortage
from fumehood.serving.exchange import Receive, Scope, Send
from fumehood.serving.websocket import SHUTDOWN, UNHELD

# As OpenAI has them.
_MOST_AT_ONCE = 16
_MOST_LANES = 32
_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_MOST_WAITING = 64
# What conversations that are not stored may weigh: those of one tenant (an eighth of all), and all of them.
_HELD_BY_ONE = 64 << 20
_HELD_IN_ALL = 512 << 20
_GOING_AWAY = 1001

logger = logging.getLogger(__name__)


class UpgradeRequired(ApiError):
    status = 426
    type = "invalid_request_error"
    code = "upgrade_required"


# --- what is said -------------------------------------------------------------------------------------


class _Envelope(msgspec.Struct):
    """What has to be known of a message before its turn comes."""

    type: str = ""
    stream_id: str | None = None
    previous_response_id: str | None = None


class _Steer(msgspec.Struct):
    previous_response_id: str = ""
    input: Raw = Raw(b"null")


class _SteerError(msgspec.Struct, frozen=True, kw_only=True):
    code: str = "steering_not_supported"
    message: str = "This server does not steer responses; send the input with the next response.create."
    type: str = "invalid_request_error"


class _SteerFailed(msgspec.Struct, tag_field="type", tag="response.steer.failed"):
    steer: _Steer
    error: _SteerError = _SteerError()
    sequence_number: int = 0


_envelopes = msgspec.json.Decoder(_Envelope)
_steers = msgspec.json.Decoder(_Steer)


# --- connections --------------------------------------------------------------------------------------


class Handshake(Exchange):
    """The request by which a connection begins; until it is accepted, it is answered like any other."""

    __slots__ = ("receive", "send_raw")

    def __init__(self, scope: Scope, receive: Receive, send: Send, slowest: int) -> None:
        async def answer(part: MutableMapping[str, Any]) -> None:
            await send({**part, "type": f"websocket.{part['type']}"})

        super().__init__({**scope, "method": "GET"}, receive, answer, slowest)
        self.receive = receive
        self.send_raw = send


class Sockets:
    """Serves connections.

    identify: tells whose connection it is, as long as it may be anybody's; raises ApiError.
    tell: takes note of a response that was answered.
    holdings: what connections hold.
    """

    def __init__(
        self,
        responses: Responses,
        identify: Callable[[Exchange], Awaitable[Caller]],
        origins: Origins,
        metrics: Metrics,
        *,
        tell: Callable[[Exchange], None],
    ) -> None:
        self._origins = origins
        self._metrics = metrics
        self.responses = responses
        self.identify = identify
        self.tell = tell
        self.holdings = _Holdings()

    async def connect(self, exchange: Exchange, caller: Caller) -> None:
        if not isinstance(exchange, Handshake):
            raise UpgradeRequired("This path is for POST, and for GET with an upgrade to WebSocket.")
        self._origins.check_page(exchange)
        await exchange.receive()  # that it wants to connect
        exchange.status = 101
        identity = (b"x-request-id", exchange.request_id.encode())
        largest = self.responses.message_bytes(caller)
        connection = _Connection(self, exchange, caller, largest)
        await exchange.send_raw(
            {
                "type": "websocket.accept",
                "headers": [VERSION, identity],
                "message_bytes": largest,
                "slowest": exchange.slowest,
                "hold": connection.hold_coming,
            }
        )
        self._metrics.sockets += 1
        try:
            await connection.to_the_end()
        finally:
            self._metrics.sockets -= 1
            exchange.noted["responses"] = connection.answered
            exchange.noted["close_code"] = connection.close_code


@dataclass(frozen=True, slots=True)
class _Held:
    """A conversation that is not stored, up to the end of a response."""

    past: Sequence[Segment]
    weight: int


class _Share:
    """What one tenant holds, by the response's id, the oldest first."""

    def __init__(self) -> None:
        self.held: dict[str, _Held] = {}
        self.weight = 0


class _Holdings:
    """What all hold together. Nobody's share takes another's place: where it is too much, the largest gives way."""

    def __init__(self) -> None:
        self._shares: dict[Hashable, _Share] = {}
        self._weight = 0

    def get(self, whose: Hashable, response_id: str) -> _Held | None:
        share = self._shares.get(whose)
        return None if share is None else share.held.get(response_id)

    def put(self, whose: Hashable, response_id: str, held: _Held) -> None:
        if held.weight > _HELD_BY_ONE:
            return
        share = self._shares.setdefault(whose, _Share())
        share.held[response_id] = held
        share.weight += held.weight
        self._weight += held.weight
        while share.weight > _HELD_BY_ONE:
            self.drop(whose, next(iter(share.held)))
        while self._weight > _HELD_IN_ALL:
            largest, share = max(self._shares.items(), key=lambda each: each[1].weight)
            self.drop(largest, next(iter(share.held)))

    def drop(self, whose: Hashable, response_id: str) -> None:
        share = self._shares.get(whose)
        held = None if share is None else share.held.pop(response_id, None)
        if share is None or held is None:
            return
        share.weight -= held.weight
        self._weight -= held.weight
        if not share.held:
            del self._shares[whose]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request whose turn has not come."""

    envelope: _Envelope
    body: bytes
    room: Room


class _Lane:
    """Requests that are answered one after another.

    last: the response of this lane that is held, if its last one is.
    """

    def __init__(self, name: str | None) -> None:
        self.wire = Messages(name)
        self.waiting: deque[_Waiting] = deque()
        self.task: asyncio.Task[None] | None = None
        self.following: Following | None = None
        self.last: str | None = None


class _Connection:
    """One client, until it leaves or the server stops.

    whose: in whose share it holds conversations: its tenant's, or its own.
    close_code: with which the connection ended, or 1006 if it broke.
    """

    def __init__(self, sockets: Sockets, handshake: Handshake, caller: Caller, most_waiting: int) -> None:
        self.answered = 0
        self.close_code = 1006
        self._sockets = sockets
        self._handshake = handshake
        self._caller = caller
        self._most_waiting = most_waiting
        # Without keys everybody is one tenant; then every connection is taken for one.
        self._whose: Hashable = caller.tenant if caller.key else handshake
        self._receive = handshake.receive
        self._send = handshake.send_raw
        self._scope: Scope = {
            "method": "WEBSOCKET",
            "path": handshake.path,
            "query_string": b"",
            "headers": (),
        }
        self._lanes: dict[str | None, _Lane] = {None: _Lane(None)}
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)
        self._coming = sockets.responses.room(caller)  # of the message that has begun
        self._waiting = 0
        self._waiting_bytes = 0
        self._left = False
        self._closing: asyncio.Task[None] | None = None

    def hold_coming(self, size: int) -> None:
        """So much has come of a message that is not whole; raises as `Room.take`."""
        if not self._left:
            self._coming.hold(size)

    async def to_the_end(self) -> None:
        try:
            while (received := await self._receive())["type"] != "websocket.disconnect":
                if received["type"] == SHUTDOWN:
                    self._closing = self._closing or asyncio.ensure_future(self._close())
                    continue
                with self._coming.hand_over() as room:
                    await self._take(received, room)
            self.close_code = received.get("code", self.close_code)
        finally:
            await self._leave()

    async def _close(self) -> None:
        """After what runs has ended, which it does soon when a server stops."""
        await self._idle()
        await self._send({"type": "websocket.close", "code": _GOING_AWAY, "reason": "the server stops"})

    async def _idle(self) -> None:
        while tasks := [lane.task for lane in self._lanes.values() if lane.task is not None]:
            await asyncio.wait(tasks)

    async def _leave(self) -> None:
        """Nobody is there any more: what runs is cancelled, what waits and what is held is forgotten."""
        self._left = True
        self._coming.give_back()
        if self._closing is not None:
            self._closing.cancel()
            await asyncio.gather(self._closing, return_exceptions=True)
        for lane in self._lanes.values():
            while lane.waiting:
                lane.waiting.popleft().room.give_back()
            if lane.following is not None:
                lane.following.leave()
            self._let_go(lane.last)
        await self._idle()

    # ---- messages ---------------------------------------------------------------------------------------------

    async def _take(self, received: MutableMapping[str, Any], room: Room) -> None:
        """Put a request into its lane; what is none, or cannot wait, is answered at once.

        room: holds what was held of it while it came.
        """
        wire = self._lanes[None].wire
        try:
            if received["type"] == UNHELD:
                raise received["error"]
            text: str | None = received.get("text")
            if text is None:
                raise InvalidRequest("A binary message is not understood; send text.", code="invalid_message")
            body = text.encode()
            with suppress(ApiError):  # it is refused when its lane is known
                room.hold(len(body))
            envelope = await aside(len(body), decode, _envelopes, body)
            if envelope.type == "response.create":
                lane = self._lane(envelope.stream_id)
                wire = lane.wire
                self._enqueue(lane, envelope, body, room)
            elif envelope.type == "response.steer":
                steer = await aside(len(body), decode, _steers, body)
                await self._write(text_message(_SteerFailed(steer)))
            elif envelope.type != "response.processed":  # which only tells that an answer was read
                raise InvalidRequest(
                    f"Unknown type of message: {envelope.type[:100]!r}. Send 'response.create'.",
                    param="type",
                    code="unknown_event_type",
                )
        except ApiError as error:
            await self._write(wire.refusal(error))

    def _lane(self, name: str | None) -> _Lane:
        lane = self._lanes.get(name)
        if lane is not None:
            return lane
        if name is None or _LANE.fullmatch(name) is None:
            raise InvalidRequest(
                "'stream_id' must be 1 to 256 letters, digits, underscores, hyphens and periods.",
                param="stream_id",
                code="invalid_stream_id",
            )
        if len(self._lanes) > _MOST_LANES:
            raise InvalidRequest(
                f"This connection has {_MOST_LANES} values of 'stream_id' already; use one of them again, or "
                "connect once more.",
                param="stream_id",
                code="websocket_stream_limit_reached",
            )
        lane = self._lanes[name] = _Lane(name)
        return lane

    def _enqueue(self, lane: _Lane, envelope: _Envelope, body: bytes, room: Room) -> None:
        if self._waiting >= _MOST_WAITING or self._waiting_bytes + len(body) > self._most_waiting:
            raise RateLimited("Too many requests wait on this connection; read their answers first.")
        room.hold(len(body))
        self._waiting += 1
        self._waiting_bytes += len(body)
        lane.waiting.append(_Waiting(envelope, body, room.hand_over()))
        if lane.task is None:
            lane.task = asyncio.ensure_future(self._work(lane))

    async def _write(self, messages: bytearray) -> None:
        await self._send({"type": "websocket.send", "frames": messages})

    async def _pass_on(self, part: MutableMapping[str, Any]) -> None:
        """A piece of an answer, as an `Exchange` sends it."""
        await self._send({"type": "websocket.send", "frames": part["body"]})

    # ---- responses --------------------------------------------------------------------------------------------

    async def _work(self, lane: _Lane) -> None:
        """Answer what waits in the lane."""
        try:
            while lane.waiting:
                async with self._places:
                    if self._left:
                        return
                    request = lane.waiting.popleft()
                    self._waiting -= 1
                    self._waiting_bytes -= len(request.body)
                    with request.room:
                        await self._answer(lane, request)
        finally:
            lane.task = None

    async def _answer(self, lane: _Lane, request: _Waiting) -> None:
        exchange = Exchange(self._scope, self._receive, self._pass_on)
        try:
            await self._respond(exchange, lane, request)
        except ApiError as error:
            await self._refuse(exchange, lane, error)
        except Exception as error:
            lack = find_shortage(error)
            if lack is None:
                logger.exception("A message could not be answered (%s).", exchange.request_id)
            await self._refuse(exchange, lane, lack or ServerFault("The server failed; its log says why."))
        finally:
            self.answered += 1
            self._sockets.tell(exchange)

    async def _refuse(self, exchange: Exchange, lane: _Lane, error: ApiError) -> None:
        exchange.status = error.status
        exchange.note_refusal(error)
        await self._write(lane.wire.refusal(error, exchange.extra))

    async def _respond(self, exchange: Exchange, lane: _Lane, waited: _Waiting) -> None:
        previous, failed = waited.envelope.previous_response_id, True
        try:
            request = await aside(len(waited.body), self._sockets.responses.reader.decode, waited.body)
            request.stream = True
            held = self._find(previous)
            # A key may have been revoked since it opened the connection.
            caller = await self._sockets.identify(self._handshake)
            if caller.key:
                exchange.noted["key"] = caller.key
            run, response = await self._sockets.responses.make(
                exchange,
                caller,
                request,
                partial(self._follow, exchange, lane),
                waited.room,
                held and held.past,
            )
            failed = response is None or response.status == "failed"
            if response is not None and not failed:
                self._hold(lane, run, response, held)
        finally:
            # A client that failed to continue a response begins anew, with all that it stands on.
            if failed and lane.last == previous:
                self._let_go(previous)

    async def _follow(
        self, exchange: Exchange, lane: _Lane, run: Run, include: Collection[str]
    ) -> tuple[int, Response | None]:
        exchange.status = 200
        following = lane.following = Following(exchange, run, include, lane.wire)
        if self._left:  # while it was begun
            following.leave()
        try:
            await following.to_the_end()
        finally:
            lane.following = None
        return following.sent, following.response

    # ---- what is not stored -----------------------------------------------------------------------------------

    def _find(self, response_id: str | None) -> _Held | None:
        """What this connection holds, be it of another lane; nothing of other connections."""
        if response_id is None or all(lane.last != response_id for lane in self._lanes.values()):
            return None
        return self._sockets.holdings.get(self._whose, response_id)

    def _hold(self, lane: _Lane, run: Run, response: Response, before: _Held | None) -> None:
        """The last response of each lane; where that is too much, the oldest give way."""
        self._let_go(lane.last)
        lane.last = None
        if response.store or self._left:
            return
        past = run.conversation()
        if before is not None and len(past) == len(before.past) + 1:
            held = _Held(past, before.weight + past[-1].weight)
        else:
            held = _Held(past, sum(segment.weight for segment in past))
        lane.last = run.id
        self._sockets.holdings.put(self._whose, run.id, held)

    def _let_go(self, response_id: str | None) -> None:
        if response_id is not None:
            self._sockets.holdings.drop(self._whose, response_id)
