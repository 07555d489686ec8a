"""Requests with an Idempotency-Key: sent twice, they run once.

While a run goes on, whoever repeats its request joins it, from the first event on. When it has ended, a response that
is kept is read from the store, and one that is not from here, as long as there is room to remember it; after that it
is still known that it ran. Few requests have such keys, so nothing here needs to be as quick as `sse`.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from typing import Protocol

from fumehood.gateway.gateway_metrics import GatewayMetrics
from fumehood.gateway.request_context import DisconnectMonitor, RequestContext, encode_json
from fumehood.gateway.request_limits import MemoryBudget, RequestLimits
from fumehood.gateway.streaming.event_sender import CLIENT_DISCONNECTED, TERMINAL_EVENTS
from fumehood.gateway.streaming.server_sent_events import (
    DONE_EVENT,
    KEEPALIVE_COMMENT,
    SSE_HEADERS,
    encode_events,
)
from fumehood.interfaces import (
    Caller,
    IdempotencyClaim,
    IdempotencyStore,
    ReserveMemory,
    ResponseStore,
    Run,
    RunService,
)
from fumehood.protocol.openai.api_errors import (
    ApiError,
    Conflict,
    InternalServerError,
    InvalidRequest,
    RateLimited,
    detect_resource_exhaustion,
    to_error_detail,
)
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.response_projection import project_response
from fumehood.protocol.openai.response_replay import replay_response
from fumehood.protocol.openai.responses import CreateResponse, Response
from fumehood.protocol.openai.stream_events import ErrorEvent

IDEMPOTENCY_HEADER = "Idempotency-Key"
RETENTION_SECONDS = 86_400.0
DISCONNECT_GRACE_SECONDS = 10.0
"""Seconds for which a run goes on that nobody sees: its client may be about to come back."""

_MAX_KEY_LENGTH = 255
_MAX_SUBSCRIBERS = 16
_MAX_REPLAY_BYTES = 32 << 20
_MAX_CACHE_BYTES = 64 << 20
_REPLAY_OVERHEAD_BYTES = 6 << 10  # bytes, besides what is on it
_MAX_TOMBSTONES = 10_000  # of each tenant

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """One request, with the key that it came with. The same key in another request is a mistake of the client's."""

    caller: Caller
    key: str
    digest: bytes
    parameters: CreateResponse
    include: Collection[str]

    @property
    def cache_key(self) -> tuple[str, str]:
        return self.caller.tenant, self.key

    @property
    def is_stored(self) -> bool:
        return self.parameters.store is not False


def digest_body(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def parse_key(header: bytes) -> str:
    """Raises InvalidRequest."""
    key = header.decode("latin-1").strip()
    if not 0 < len(key) <= _MAX_KEY_LENGTH or not key.isascii() or not key.isprintable():
        raise InvalidRequest(
            f"{IDEMPOTENCY_HEADER} must have 1 to {_MAX_KEY_LENGTH} visible ASCII characters.",
            param=IDEMPOTENCY_HEADER,
            code="invalid_value",
        )
    return key


class IdempotentResponseStore(IdempotencyStore, ResponseStore, Protocol):
    """Responses and the idempotency keys that stand for them."""


class IdempotentRequests:
    """All requests with keys that this process is serving, or remembers."""

    def __init__(
        self,
        runs: RunService,
        store: IdempotentResponseStore,
        limits: RequestLimits,
        metrics: GatewayMetrics,
        keepalive_seconds: float,
    ) -> None:
        self._runs = runs
        self._store = store
        self._limits = limits
        self._metrics = metrics
        self._keepalive_seconds = keepalive_seconds
        self._shared_runs: dict[tuple[str, str], _SharedRun] = {}
        self._replay_cache = _ReplayCache()

    async def respond(
        self, context: RequestContext, request: IdempotentRequest, budget: MemoryBudget
    ) -> Response | None:
        """As the first request of that key was answered, or is going to be; how the response ended, if the client
        stayed for that. Raises Conflict for another request, and what a request without a key would raise.

        room: what holds the request's body; a run that begins takes it along.
        """
        joint = self._shared_runs.get(request.cache_key) or self._replay_cache.find(request)
        first = joint is None
        if joint is None:
            joint = self._shared_runs[request.cache_key] = _SharedRun(request.digest, new_id("resp"))
            joint.task = asyncio.create_task(
                self._run_shared(joint, request, budget.transfer()),
                name=f"{IDEMPOTENCY_HEADER} of {request.caller.key_id}",
            )
        elif joint.digest != request.digest:
            raise _key_reused()
        kept = await asyncio.shield(joint.started)
        context.log_fields["response_id"] = joint.response_id if kept is None else kept.id
        if not first or kept is not None:
            context.extra_headers.append((b"idempotent-replayed", b"true"))
        if kept is not None:
            return await self._replay_stored(context, request, kept)
        if not request.parameters.stream:
            return await joint.send_response(context)
        self._metrics.open_streams += 1
        try:
            return await joint.send_stream(context, self._keepalive_seconds)
        finally:
            self._metrics.open_streams -= 1

    async def _replay_stored(
        self, context: RequestContext, request: IdempotentRequest, response: Response
    ) -> Response:
        """Raises RateLimited, Unavailable; it is there for whoever comes again."""
        with self._limits.memory_budget(request.caller) as room:
            if not request.parameters.stream:
                body = encode_json(project_response(response, request.include))
                room.reserve_for_response(len(body))
                await context.respond(body)
            else:
                events = encode_events(replay_response(response), request.include) + DONE_EVENT
                room.reserve_for_response(len(events))
                await context.start_response(200, [*SSE_HEADERS])
                await context.send(events, more=False)
        return response

    # ---- the run ----------------------------------------------------------------------------------------------

    async def _run_shared(
        self, shared_run: "_SharedRun", request: IdempotentRequest, budget: MemoryBudget
    ) -> None:
        """A task of its own: whoever was first need not be the last to stay."""
        try:
            with budget, self._limits.concurrency_slot(request.caller):
                earlier = await self._claim_key(request, shared_run.response_id)
                if earlier is not None:
                    shared_run.started.set_result(earlier)
                else:
                    await self._start_run(shared_run, request, budget.reserve)
        except Exception as error:
            if not isinstance(error, ApiError):
                lack = detect_resource_exhaustion(error)
                if lack is None:
                    logger.exception("A request with a key could not be served.")
                error = lack or InternalServerError("The server failed; its log says why.")
            shared_run.fail(error)
        finally:
            del self._shared_runs[request.cache_key]
            # What is kept is asked of the store from now on: there it can be deleted.
            if shared_run.may_have_run and not request.is_stored:
                self._replay_cache.add(request.cache_key, shared_run)

    async def _claim_key(self, request: IdempotentRequest, response_id: str) -> Response | None:
        """What the key stands for; None if that is ours to make."""
        if request.is_stored:
            claim = IdempotencyClaim(request.digest, response_id)
            found = await self._store.claim_idempotency_key(*request.cache_key, claim, RETENTION_SECONDS)
        else:  # nothing of it is written, but another one with this key may be
            found = await self._store.get_idempotency_claim(*request.cache_key)
        if found is None:
            return None
        if found.digest != request.digest:
            raise _key_reused()
        response = await self._store.get_response(request.caller.tenant, found.response_id)
        if response is None:
            raise _response_gone(
                found, "it could not be stored, was deleted, or the server stopped before it was complete"
            )
        if response.status in ("queued", "in_progress"):
            raise Conflict(
                f"The request of this {IDEMPOTENCY_HEADER} is still being served.",
                param=IDEMPOTENCY_HEADER,
                code="idempotency_in_progress",
                retry_after=1.0,
            )
        return response

    async def _start_run(
        self, shared_run: "_SharedRun", request: IdempotentRequest, reserve_memory: ReserveMemory
    ) -> None:
        """Whatever is refused, or fails before anything was made, does not use up the key."""
        try:
            run = await self._runs.start(
                request.parameters, request.caller, shared_run.response_id, reserve_memory=reserve_memory
            )
        except Exception:
            await self._release_claim(shared_run, request)
            raise
        shared_run.attach(run)
        try:
            response = await shared_run.record(run, request)
        except ApiError as error:
            # A blocking one that raises has made nothing, unless it could not be stored.
            if not request.parameters.stream and not error.may_have_run:
                shared_run.may_have_run = False
                await self._release_claim(shared_run, request)
            raise
        self._metrics.record_events(shared_run.event_count)
        if response is not None:
            self._metrics.record_response(response)

    async def _release_claim(self, shared_run: "_SharedRun", request: IdempotentRequest) -> None:
        if request.is_stored:
            await self._store.release_idempotency_key(*request.cache_key, shared_run.response_id)


class _TenantReplays:
    """What is remembered of one tenant, by key, the oldest first.

    tapes: runs that can be told again; `weight` is that of all of them.
    traces: what else ran, and cannot be told again.
    """

    def __init__(self) -> None:
        self.replays: OrderedDict[str, _SharedRun] = OrderedDict()
        self.tombstones: OrderedDict[str, IdempotencyClaim] = OrderedDict()
        self.total_bytes = 0

    def add(self, key: str, shared_run: "_SharedRun") -> None:
        self.replays[key] = shared_run
        self.total_bytes += shared_run.total_bytes + _REPLAY_OVERHEAD_BYTES

    def evict_oldest(self) -> int:
        """Leave a trace of it; how much lighter that is."""
        key, joint = self.replays.popitem(last=False)
        lighter = joint.total_bytes + _REPLAY_OVERHEAD_BYTES
        self.total_bytes -= lighter
        self.add_tombstone(key, joint)
        return lighter

    def add_tombstone(self, key: str, shared_run: "_SharedRun") -> None:
        self.tombstones[key] = IdempotencyClaim(shared_run.digest, shared_run.response_id)
        if len(self.tombstones) > _MAX_TOMBSTONES:
            self.tombstones.popitem(last=False)


class _ReplayCache:
    """The runs that have ended, and whose responses are in no store. Room for them is shared, but whoever has taken
    most of it makes room for others; that something ran is forgotten by nobody else's doing.
    """

    def __init__(self) -> None:
        self._by_tenant: defaultdict[str, _TenantReplays] = defaultdict(_TenantReplays)
        self._total_bytes = 0

    def find(self, request: IdempotentRequest) -> "_SharedRun | None":
        """Raises Conflict where it is only known that it ran."""
        past = self._by_tenant.get(request.caller.tenant)
        if past is None:
            return None
        trace = past.tombstones.get(request.key)
        if trace is None:
            return past.replays.get(request.key)
        if trace.digest != request.digest:
            raise _key_reused()
        raise _response_gone(
            trace, "it was not stored, and broke off, was too long to be remembered, or had to make room"
        )

    def add(self, cache_key: tuple[str, str], shared_run: "_SharedRun") -> None:
        tenant, key = cache_key
        past = self._by_tenant[tenant]
        if not shared_run.is_replayable:
            past.add_tombstone(key, shared_run)
            return
        past.add(key, shared_run)
        self._total_bytes += shared_run.total_bytes + _REPLAY_OVERHEAD_BYTES
        while self._total_bytes > _MAX_CACHE_BYTES:
            heaviest = max(self._by_tenant.values(), key=lambda one: one.total_bytes)
            self._total_bytes -= heaviest.evict_oldest()


@dataclass(slots=True, eq=False)
class _Subscriber:
    """Somebody who is shown a run.

    position: the number of the next piece.
    taken: the bytes before it.
    lost: too much had come that was not taken.
    """

    position: int = 0
    sent_bytes: int = 0
    is_dropped: bool = False
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        await self.wakeup.wait()
        self.wakeup.clear()


class _SharedRun:
    """A run that several may be shown, in the bytes that they all get.

    begun: done when the run has begun; or with the response that the key has stood for since long ago.
    ran: whether code may have run.
    events: how many were told.
    weight: their bytes.
    forgotten: it became too long to be told again; only what somebody still waits for is here.
    """

    def __init__(self, digest: bytes, response_id: str) -> None:
        self.digest = digest
        self.response_id = response_id
        self.started: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.error: ApiError | None = None
        self.may_have_run = False
        self.event_count = 0
        self.total_bytes = 0
        self.is_truncated = False
        self._run: Run | None = None
        self._response: Response | None = None
        self._chunks: list[bytes] = []
        self._first_chunk = 0  # the number of the first piece that is still here
        self._has_ended = False
        self._subscribers: list[_Subscriber] = []
        self._grace_timer: asyncio.TimerHandle | None = None

    @property
    def is_replayable(self) -> bool:
        """Whether it can be told again from the first event to the last."""
        return self._has_ended and self.error is None and not self.is_truncated

    # ---- by the one who makes it --------------------------------------------------------------------------------

    def attach(self, run: Run) -> None:
        self._run = run
        self.may_have_run = True
        self.started.set_result(None)
        self._start_grace_period()

    async def record(self, run: Run, request: IdempotentRequest) -> Response | None:
        """Everything that the run says; raises ApiError where it ends with nothing but that."""
        if request.parameters.stream:
            await self._record_events(run, request.include)
        else:
            self._response = await run.wait()
            self._append(encode_json(project_response(self._response, request.include)))
        self._finish()
        return self._response

    async def _record_events(self, run: Run, include: Collection[str]) -> None:
        async for batch in run.subscribe():
            self._drop_slow_subscribers()
            self._append(bytes(encode_events(batch, include)))
            self.event_count += len(batch)
            if isinstance(batch[-1], TERMINAL_EVENTS):
                self._response = batch[-1].response
        self._append(DONE_EVENT)

    def fail(self, error: ApiError) -> None:
        self.error = error
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # perhaps nobody waits any more
        self._finish()

    def _append(self, piece: bytes) -> None:
        self._chunks.append(piece)
        self.total_bytes += len(piece)
        self.is_truncated = self.total_bytes > _MAX_REPLAY_BYTES
        self._notify()

    def _drop_slow_subscribers(self) -> None:
        """Before more comes: drop those for whom too much is waiting already, and then what nobody has yet to take."""
        for follower in [*self._subscribers]:
            if self.total_bytes - follower.sent_bytes > _MAX_REPLAY_BYTES:
                follower.is_dropped = True
                self._unsubscribe(follower)
        self._trim()

    def _finish(self) -> None:
        self._has_ended = True
        self._cancel_grace_period()
        self._run = None  # it holds the whole conversation, and this may be remembered for long
        self._notify()

    def _notify(self) -> None:
        for follower in self._subscribers:
            follower.wakeup.set()

    # ---- by those who see it ------------------------------------------------------------------------------------

    async def send_response(self, context: RequestContext) -> Response | None:
        """The response, when it is there; None if the client did not wait for it."""
        with self._subscribe() as follower:
            with DisconnectMonitor(context, follower.wakeup.set) as vigil:
                while not self._has_ended and not vigil.disconnected:
                    await follower.wait()
            if vigil.disconnected:
                return None
            if self.error is not None:
                raise self.error
            await context.respond(self._chunks[0])
        return self._response

    async def send_stream(self, context: RequestContext, keepalive_seconds: float) -> Response | None:
        """As `show`, event by event."""
        with self._subscribe() as follower:
            await context.start_response(200, [*SSE_HEADERS])
            with DisconnectMonitor(
                context, follower.wakeup.set, keepalive=KEEPALIVE_COMMENT, interval=keepalive_seconds
            ) as vigil:
                while not vigil.disconnected and not follower.is_dropped:
                    if pieces := self._next_chunks(follower):
                        await context.send(pieces)
                    elif self._has_ended:
                        break
                    else:
                        await follower.wait()
            if vigil.disconnected:
                return None
            error = _reader_too_slow() if follower.is_dropped else self.error
            await context.send(b"" if error is None else self._encode_error(error), more=False)
        return None if follower.is_dropped else self._response

    def _encode_error(self, error: ApiError) -> bytearray:
        """What ends a stream that broke off."""
        told = ErrorEvent(sequence_number=self.event_count, error=to_error_detail(error))
        return encode_events([told], ()) + DONE_EVENT

    @contextlib.contextmanager
    def _subscribe(self) -> Generator[_Subscriber]:
        if self.is_truncated and self._first_chunk:
            raise Conflict(
                f"The response of this {IDEMPOTENCY_HEADER} is too long to be told again; if it is stored, GET "
                "/v1/responses/ID has it.",
                param=IDEMPOTENCY_HEADER,
                code="idempotency_response_too_long",
            )
        if len(self._subscribers) >= _MAX_SUBSCRIBERS:
            raise RateLimited(
                f"Too many requests with this {IDEMPOTENCY_HEADER} are waiting.", retry_after=1.0
            )
        follower = _Subscriber()
        self._subscribers.append(follower)
        self._cancel_grace_period()
        try:
            yield follower
        finally:
            if not follower.is_dropped:
                self._unsubscribe(follower)

    def _unsubscribe(self, subscriber: _Subscriber) -> None:
        self._subscribers.remove(subscriber)
        if not self._subscribers and not self._has_ended:
            self._start_grace_period()

    def _next_chunks(self, subscriber: _Subscriber) -> bytes:
        """What has come since the last time."""
        pieces = b"".join(self._chunks[subscriber.position - self._first_chunk :])
        subscriber.position = self._first_chunk + len(self._chunks)
        subscriber.sent_bytes = self.total_bytes
        self._trim()
        return pieces

    def _trim(self) -> None:
        """Of what cannot be told again, keep only what somebody has yet to take."""
        if self.is_truncated:
            end = self._first_chunk + len(self._chunks)
            done = min((one.position for one in self._subscribers), default=end)
            del self._chunks[: done - self._first_chunk]
            self._first_chunk = done

    def _start_grace_period(self) -> None:
        """Nobody sees it now."""
        if self._run is not None:
            self._grace_timer = asyncio.get_running_loop().call_later(
                DISCONNECT_GRACE_SECONDS, self._run.cancel, CLIENT_DISCONNECTED
            )

    def _cancel_grace_period(self) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
            self._grace_timer = None


def _key_reused() -> Conflict:
    return Conflict(
        f"This {IDEMPOTENCY_HEADER} was used for another request; every request needs a key of its own.",
        param=IDEMPOTENCY_HEADER,
        code="idempotency_key_reused",
    )


def _response_gone(claim: IdempotencyClaim, why: str) -> Conflict:
    return Conflict(
        f"The response of this {IDEMPOTENCY_HEADER}, {claim.response_id}, is not there: {why}. Its code may have run; send another "
        "key to run it again.",
        param=IDEMPOTENCY_HEADER,
        code="idempotency_response_gone",
    )


def _reader_too_slow() -> InternalServerError:
    return InternalServerError(
        "The events were not read fast enough, and more of them are not kept for this stream."
    )
