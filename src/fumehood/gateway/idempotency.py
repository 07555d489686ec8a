"""Requests with an Idempotency-Key run once, however often they are sent.

A retry joins the run while it lasts, from its first event. After that, a stored response is replayed from the store,
an unstored one from a bounded cache, which keeps a tombstone when it drops a response.
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
"""Seconds for which a run without clients goes on: the client may be about to retry."""

_MAX_KEY_LENGTH = 255
_MAX_SUBSCRIBERS = 16
_MAX_REPLAY_BYTES = 32 << 20
_MAX_CACHE_BYTES = 64 << 20
_REPLAY_OVERHEAD_BYTES = 6 << 10  # memory besides the bytes to replay
_MAX_TOMBSTONES = 10_000  # of each tenant

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request with an Idempotency-Key. The digest detects another request with the same key."""

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
    """The requests with keys that this process serves or remembers."""

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
        """Send the response of the first request with this key. Returns it; None if the client disconnected.

        Raises Conflict if the key was used for another request, and what a request without a key raises.

        budget: the memory of the request; moved to the run if one starts.
        """
        shared_run = self._shared_runs.get(request.cache_key) or self._replay_cache.find(request)
        first = shared_run is None
        if shared_run is None:
            shared_run = self._shared_runs[request.cache_key] = _SharedRun(request.digest, new_id("resp"))
            shared_run.task = asyncio.create_task(
                self._run_shared(shared_run, request, budget.transfer()),
                name=f"{IDEMPOTENCY_HEADER} of {request.caller.key_id}",
            )
        elif shared_run.digest != request.digest:
            raise _key_reused()
        stored = await asyncio.shield(shared_run.started)
        context.log_fields["response_id"] = shared_run.response_id if stored is None else stored.id
        if not first or stored is not None:
            context.extra_headers.append((b"idempotent-replayed", b"true"))
        if stored is not None:
            return await self._replay_stored(context, request, stored)
        if not request.parameters.stream:
            return await shared_run.send_response(context)
        self._metrics.open_streams += 1
        try:
            return await shared_run.send_stream(context, self._keepalive_seconds)
        finally:
            self._metrics.open_streams -= 1

    async def _replay_stored(
        self, context: RequestContext, request: IdempotentRequest, response: Response
    ) -> Response:
        """Raises RateLimited, ServiceUnavailable; the client can retry."""
        with self._limits.memory_budget(request.caller) as budget:
            if not request.parameters.stream:
                body = encode_json(project_response(response, request.include))
                budget.reserve_for_response(len(body))
                await context.respond(body)
            else:
                events = encode_events(replay_response(response), request.include) + DONE_EVENT
                budget.reserve_for_response(len(events))
                await context.start_response(200, [*SSE_HEADERS])
                await context.send(events, more=False)
        return response

    # ---- the run ----------------------------------------------------------------------------------------------

    async def _run_shared(
        self, shared_run: "_SharedRun", request: IdempotentRequest, budget: MemoryBudget
    ) -> None:
        """Runs in a task of its own: the first client may disconnect before others."""
        try:
            with budget, self._limits.concurrency_slot(request.caller):
                earlier = await self._claim_key(request, shared_run.response_id)
                if earlier is not None:
                    shared_run.started.set_result(earlier)
                else:
                    await self._start_run(shared_run, request, budget.reserve)
        except Exception as error:
            if not isinstance(error, ApiError):
                exhausted = detect_resource_exhaustion(error)
                if exhausted is None:
                    logger.exception("Request with an Idempotency-Key failed.")
                error = exhausted or InternalServerError("Internal server error; see the server log.")
            shared_run.fail(error)
        finally:
            del self._shared_runs[request.cache_key]
            # A stored response is read from the store from now on, where it can be deleted.
            if shared_run.may_have_run and not request.is_stored:
                self._replay_cache.add(request.cache_key, shared_run)

    async def _claim_key(self, request: IdempotentRequest, response_id: str) -> Response | None:
        """The response of an earlier request with this key; None if this one is the first. Raises Conflict."""
        if request.is_stored:
            claim = IdempotencyClaim(request.digest, response_id)
            found = await self._store.claim_idempotency_key(*request.cache_key, claim, RETENTION_SECONDS)
        else:  # writes no claim, but a stored request may have one
            found = await self._store.get_idempotency_claim(*request.cache_key)
        if found is None:
            return None
        if found.digest != request.digest:
            raise _key_reused()
        response = await self._store.get_response(request.caller.tenant, found.response_id)
        if response is None:
            raise _response_gone(
                found, "it was deleted, could not be stored, or the server stopped before it was complete"
            )
        if response.status in ("queued", "in_progress"):
            raise Conflict(
                f"The request with this {IDEMPOTENCY_HEADER} is still in progress.",
                param=IDEMPOTENCY_HEADER,
                code="idempotency_in_progress",
                retry_after=1.0,
            )
        return response

    async def _start_run(
        self, shared_run: "_SharedRun", request: IdempotentRequest, reserve_memory: ReserveMemory
    ) -> None:
        """Releases the key if the request is rejected or fails before anything ran."""
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
            # A blocking run that raises has produced nothing, unless it could not be stored.
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
    """The cache of one tenant, by key, oldest first.

    replays: finished runs that can be replayed; `total_bytes` is their size.
    tombstones: keys whose response can no longer be replayed.
    """

    def __init__(self) -> None:
        self.replays: OrderedDict[str, _SharedRun] = OrderedDict()
        self.tombstones: OrderedDict[str, IdempotencyClaim] = OrderedDict()
        self.total_bytes = 0

    def add(self, key: str, shared_run: "_SharedRun") -> None:
        self.replays[key] = shared_run
        self.total_bytes += shared_run.total_bytes + _REPLAY_OVERHEAD_BYTES

    def evict_oldest(self) -> int:
        """Replace the oldest replay by a tombstone; return the bytes freed."""
        key, shared_run = self.replays.popitem(last=False)
        freed = shared_run.total_bytes + _REPLAY_OVERHEAD_BYTES
        self.total_bytes -= freed
        self.add_tombstone(key, shared_run)
        return freed

    def add_tombstone(self, key: str, shared_run: "_SharedRun") -> None:
        self.tombstones[key] = IdempotencyClaim(shared_run.digest, shared_run.response_id)
        if len(self.tombstones) > _MAX_TOMBSTONES:
            self.tombstones.popitem(last=False)


class _ReplayCache:
    """Finished runs whose responses are not stored. Beyond the limit, the largest tenant loses its oldest replay;
    tombstones are limited per tenant.
    """

    def __init__(self) -> None:
        self._by_tenant: defaultdict[str, _TenantReplays] = defaultdict(_TenantReplays)
        self._total_bytes = 0

    def find(self, request: IdempotentRequest) -> "_SharedRun | None":
        """Raises Conflict if only a tombstone is left."""
        tenant_replays = self._by_tenant.get(request.caller.tenant)
        if tenant_replays is None:
            return None
        tombstone = tenant_replays.tombstones.get(request.key)
        if tombstone is None:
            return tenant_replays.replays.get(request.key)
        if tombstone.digest != request.digest:
            raise _key_reused()
        raise _response_gone(
            tombstone,
            "it was not stored, and it failed, was too long to cache, or was evicted from the cache",
        )

    def add(self, cache_key: tuple[str, str], shared_run: "_SharedRun") -> None:
        tenant, key = cache_key
        tenant_replays = self._by_tenant[tenant]
        if not shared_run.is_replayable:
            tenant_replays.add_tombstone(key, shared_run)
            return
        tenant_replays.add(key, shared_run)
        self._total_bytes += shared_run.total_bytes + _REPLAY_OVERHEAD_BYTES
        while self._total_bytes > _MAX_CACHE_BYTES:
            heaviest = max(self._by_tenant.values(), key=lambda one: one.total_bytes)
            self._total_bytes -= heaviest.evict_oldest()


@dataclass(slots=True, eq=False)
class _Subscriber:
    """One client of a shared run.

    position: number of the next chunk. sent_bytes: the bytes before it.
    is_dropped: the client was too far behind.
    """

    position: int = 0
    sent_bytes: int = 0
    is_dropped: bool = False
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        await self.wakeup.wait()
        self.wakeup.clear()


class _SharedRun:
    """A run that several requests read, as encoded chunks.

    started: done when the run has started; its result is the response of an earlier request, if there is one.
    may_have_run: whether code may have run.
    is_truncated: too long to replay; only chunks that a subscriber still needs are kept.
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
        self._first_chunk = 0  # number of the first chunk that is kept
        self._has_ended = False
        self._subscribers: list[_Subscriber] = []
        self._grace_timer: asyncio.TimerHandle | None = None

    @property
    def is_replayable(self) -> bool:
        """Whether the whole run can be replayed."""
        return self._has_ended and self.error is None and not self.is_truncated

    # ---- producer --------------------------------------------------------------------------------

    def attach(self, run: Run) -> None:
        self._run = run
        self.may_have_run = True
        self.started.set_result(None)
        self._start_grace_period()

    async def record(self, run: Run, request: IdempotentRequest) -> Response | None:
        """Record the run to its end. Raises ApiError if it fails without a response."""
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
            self.started.exception()  # retrieved: perhaps nobody waits any more
        self._finish()

    def _append(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self.total_bytes += len(chunk)
        self.is_truncated = self.total_bytes > _MAX_REPLAY_BYTES
        self._notify()

    def _drop_slow_subscribers(self) -> None:
        """Drop subscribers that are too far behind, and the chunks that nobody needs."""
        for subscriber in [*self._subscribers]:
            if self.total_bytes - subscriber.sent_bytes > _MAX_REPLAY_BYTES:
                subscriber.is_dropped = True
                self._unsubscribe(subscriber)
        self._trim()

    def _finish(self) -> None:
        self._has_ended = True
        self._cancel_grace_period()
        self._run = None  # it holds the whole conversation; this object may be cached for long
        self._notify()

    def _notify(self) -> None:
        for subscriber in self._subscribers:
            subscriber.wakeup.set()

    # ---- subscribers ------------------------------------------------------------------------------------

    async def send_response(self, context: RequestContext) -> Response | None:
        """Send the response when it is complete; None if the client disconnected."""
        with self._subscribe() as subscriber:
            with DisconnectMonitor(context, subscriber.wakeup.set) as monitor:
                while not self._has_ended and not monitor.disconnected:
                    await subscriber.wait()
            if monitor.disconnected:
                return None
            if self.error is not None:
                raise self.error
            await context.respond(self._chunks[0])
        return self._response

    async def send_stream(self, context: RequestContext, keepalive_seconds: float) -> Response | None:
        """Send the events; None if the client disconnected or was dropped."""
        with self._subscribe() as subscriber:
            await context.start_response(200, [*SSE_HEADERS])
            with DisconnectMonitor(
                context, subscriber.wakeup.set, keepalive=KEEPALIVE_COMMENT, interval=keepalive_seconds
            ) as monitor:
                while not monitor.disconnected and not subscriber.is_dropped:
                    if chunks := self._next_chunks(subscriber):
                        await context.send(chunks)
                    elif self._has_ended:
                        break
                    else:
                        await subscriber.wait()
            if monitor.disconnected:
                return None
            error = _reader_too_slow() if subscriber.is_dropped else self.error
            await context.send(b"" if error is None else self._encode_error(error), more=False)
        return None if subscriber.is_dropped else self._response

    def _encode_error(self, error: ApiError) -> bytearray:
        """The end of a stream that failed."""
        event = ErrorEvent(sequence_number=self.event_count, error=to_error_detail(error))
        return encode_events([event], ()) + DONE_EVENT

    @contextlib.contextmanager
    def _subscribe(self) -> Generator[_Subscriber]:
        if self.is_truncated and self._first_chunk:
            raise Conflict(
                f"The response of this {IDEMPOTENCY_HEADER} is too long to be replayed; if it is stored, GET "
                "/v1/responses/ID returns it.",
                param=IDEMPOTENCY_HEADER,
                code="idempotency_response_too_long",
            )
        if len(self._subscribers) >= _MAX_SUBSCRIBERS:
            raise RateLimited(
                f"Too many concurrent requests with this {IDEMPOTENCY_HEADER}.", retry_after=1.0
            )
        subscriber = _Subscriber()
        self._subscribers.append(subscriber)
        self._cancel_grace_period()
        try:
            yield subscriber
        finally:
            if not subscriber.is_dropped:
                self._unsubscribe(subscriber)

    def _unsubscribe(self, subscriber: _Subscriber) -> None:
        self._subscribers.remove(subscriber)
        if not self._subscribers and not self._has_ended:
            self._start_grace_period()

    def _next_chunks(self, subscriber: _Subscriber) -> bytes:
        """The chunks since the last call, joined."""
        joined = b"".join(self._chunks[subscriber.position - self._first_chunk :])
        subscriber.position = self._first_chunk + len(self._chunks)
        subscriber.sent_bytes = self.total_bytes
        self._trim()
        return joined

    def _trim(self) -> None:
        """Of a truncated run, keep only chunks that a subscriber still needs."""
        if self.is_truncated:
            end = self._first_chunk + len(self._chunks)
            done = min((one.position for one in self._subscribers), default=end)
            del self._chunks[: done - self._first_chunk]
            self._first_chunk = done

    def _start_grace_period(self) -> None:
        """Cancel the run soon unless somebody subscribes."""
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
        f"This {IDEMPOTENCY_HEADER} was used for another request; use a new key for each request.",
        param=IDEMPOTENCY_HEADER,
        code="idempotency_key_reused",
    )


def _response_gone(claim: IdempotencyClaim, why: str) -> Conflict:
    return Conflict(
        f"The response of this {IDEMPOTENCY_HEADER}, {claim.response_id}, is gone: {why}. Its code may have run; to "
        "run it again, use a new key.",
        param=IDEMPOTENCY_HEADER,
        code="idempotency_response_gone",
    )


def _reader_too_slow() -> InternalServerError:
    return InternalServerError("The client reads the stream too slowly.")
