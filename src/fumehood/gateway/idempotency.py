"""Requests with an Idempotency-Key run once, however often they are sent.

A retry joins the run while it lasts, and reads its event log from the first event. After that the response is replayed:
a stored one from the store, an unstored one from a bounded cache. A key outlives its cached response as a tombstone.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Raw

from fumehood.gateway.gateway_exchange import GatewayExchange, encode_json
from fumehood.gateway.gateway_metrics import GatewayMetrics
from fumehood.gateway.request_limiter import RequestLimiter, RequestMemoryReservation
from fumehood.gateway.streaming.event_sender import CLIENT_DISCONNECTED, TERMINAL_EVENTS
from fumehood.gateway.tenant_fair_cache import TenantFairCache
from fumehood.http_server.asgi_exchange import ClientDisconnected
from fumehood.http_server.slow_clients import do_nothing
from fumehood.interfaces import (
    Caller,
    IdempotencyClaim,
    IdempotencyStore,
    ReadableRun,
    ReserveMemory,
    ResponseStore,
    Run,
    RunService,
)
from fumehood.protocol.openai.api_errors import ApiError, Conflict, InvalidRequest, RateLimited
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import AuthoredItem
from fumehood.protocol.openai.response_replay import replay_response
from fumehood.protocol.openai.responses import CreateResponse, Response
from fumehood.protocol.openai.stream_events import StreamEvent

IDEMPOTENCY_HEADER = "Idempotency-Key"
RETENTION_SECONDS = 86_400.0
DISCONNECT_GRACE_SECONDS = 10.0
"""Seconds for which a run without clients goes on: the client may be about to retry."""

_MAX_KEY_LENGTH = 255
_MAX_JOINED = 16
_MAX_REPLAY_BYTES = 32 << 20
_MAX_CACHE_BYTES = 64 << 20
_CACHE_OVERHEAD_BYTES = 6 << 10  # of each response, besides its JSON
_MAX_UNSTORED_KEYS = 20_000  # of each tenant


class _CachedResponse(msgspec.Struct):
    """A response with its output apart: items that a model server made are of types that are unknown here.

    foreign: the indices of such items.
    """

    response: Response
    output: list[Raw]
    foreign: list[int]


_cached_decoder = msgspec.json.Decoder(_CachedResponse)
_item_decoder: msgspec.json.Decoder[AuthoredItem] = msgspec.json.Decoder(AuthoredItem)


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request with an Idempotency-Key. The digest detects another request with the same key."""

    caller: Caller
    key: str
    digest: bytes
    parameters: CreateResponse

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


class IdempotencyRegistry:
    """The requests with keys that this process serves or remembers."""

    def __init__(
        self,
        runs: RunService,
        store: IdempotentResponseStore,
        limits: RequestLimiter,
        metrics: GatewayMetrics,
    ) -> None:
        self._runs = runs
        self._store = store
        self._limits = limits
        self._metrics = metrics
        self._shared_runs: dict[tuple[str, str], _SharedRun] = {}
        self._unstored = _UnstoredResponses()

    @asynccontextmanager
    async def open_run(
        self, exchange: GatewayExchange, request: IdempotentRequest, budget: RequestMemoryReservation
    ) -> AsyncGenerator[ReadableRun]:
        """Start the run of this key, join it, or replay its response.

        budget: the memory of the request; moved to the run if one starts.

        Raises Conflict if the key was used for another request, and what a request without a key raises.
        """
        shared_run = self._shared_runs.get(request.cache_key)
        is_first = shared_run is None
        if shared_run is None:
            shared_run = self._start_shared(request, budget)
        elif shared_run.digest != request.digest:
            raise _key_reused()
        started = await asyncio.shield(shared_run.started)
        if isinstance(started, Response) or not is_first:
            exchange.extra_headers.append((b"idempotent-replayed", b"true"))
        if isinstance(started, Response):
            budget.reserve_for_response(len(encode_json(started)))
            yield _ReplayedRun(started)
        else:
            with shared_run.join(started) as run:
                yield run

    def _start_shared(self, request: IdempotentRequest, budget: RequestMemoryReservation) -> "_SharedRun":
        """The run has a task of its own: the first client may disconnect before others."""
        shared_run = self._shared_runs[request.cache_key] = _SharedRun(request.digest)
        shared_run.task = asyncio.create_task(
            self._run_shared(shared_run, request, budget.transfer()),
            name=f"{IDEMPOTENCY_HEADER} of {request.caller.key_id}",
        )
        return shared_run

    async def _run_shared(
        self, shared_run: "_SharedRun", request: IdempotentRequest, budget: RequestMemoryReservation
    ) -> None:
        """Start the run, unless an earlier one had this key, and record its end."""
        try:
            with budget, self._limits.concurrency_slot(request.caller):
                started = await self._claim_and_start(request, budget.reserve)
                shared_run.started.set_result(started)
                if not isinstance(started, Response):
                    shared_run.start_grace_period(started)
                    await self._record_end(started, request)
        except Exception as error:
            if shared_run.started.done():
                raise
            shared_run.started.set_exception(error)
        finally:
            shared_run.cancel_grace_period()
            del self._shared_runs[request.cache_key]

    async def _claim_and_start(
        self, request: IdempotentRequest, reserve_memory: ReserveMemory
    ) -> Run | Response:
        """The response of an earlier request with this key, or a new run. Releases the key if that does not start."""
        response_id = new_id("resp")
        earlier = self._unstored.find(request) or await self._claim_key(request, response_id)
        if earlier is not None:
            return earlier
        try:
            return await self._runs.start(
                request.parameters,
                request.caller,
                response_id,
                reserve_memory=reserve_memory,
                retain_bytes=_MAX_REPLAY_BYTES,
            )
        except Exception:
            await self._release_key(request, response_id)
            raise

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
        if response.status in ("queued", "in_progress"):  # in another gateway on the same store
            raise Conflict(
                f"The request with this {IDEMPOTENCY_HEADER} is still in progress.",
                param=IDEMPOTENCY_HEADER,
                code="idempotency_in_progress",
                retry_after=1.0,
            )
        return response

    async def _record_end(self, run: Run, request: IdempotentRequest) -> None:
        """Wait until the run has ended. Releases the key if nothing ran."""
        try:
            response = await run.wait()
        except Exception as error:
            # A blocking run that raises has produced nothing, unless it could not be stored.
            if not request.parameters.stream and isinstance(error, ApiError) and not error.may_have_run:
                await self._release_key(request, run.id)
                return
            response = _read_terminal_response(run)
        if response is not None:
            self._metrics.record_response(response)
        # A stored response is read from the store from now on, where it can be deleted.
        if not request.is_stored:
            self._unstored.add(request, run.id, response)

    async def _release_key(self, request: IdempotentRequest, response_id: str) -> None:
        if request.is_stored:
            await self._store.release_idempotency_key(*request.cache_key, response_id)


class _SharedRun:
    """The run of one key, which several requests read.

    task: starts the run, and ends when its end is recorded.
    started: the run, or the response of an earlier request with this key.
    joined_count: number of requests that read it.
    """

    task: asyncio.Task[None]

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.started: asyncio.Future[Run | Response] = asyncio.get_running_loop().create_future()
        self.joined_count = 0
        self._grace_timer: asyncio.TimerHandle | None = None

    @contextmanager
    def join(self, run: Run) -> Generator["_JoinedRun"]:
        """The run as one request reads it. Raises Conflict, RateLimited."""
        if not run.holds_all_events:
            raise Conflict(
                f"The response of this {IDEMPOTENCY_HEADER} is too long to be replayed; if it is stored, GET "
                "/v1/responses/ID returns it.",
                param=IDEMPOTENCY_HEADER,
                code="idempotency_response_too_long",
            )
        if self.joined_count >= _MAX_JOINED:
            raise RateLimited(
                f"Too many concurrent requests with this {IDEMPOTENCY_HEADER}.", retry_after=1.0
            )
        self.joined_count += 1
        self.cancel_grace_period()
        try:
            yield _JoinedRun(run, self.task)
        finally:
            self.joined_count -= 1
            if not self.joined_count and not self.task.done():
                self.start_grace_period(run)

    def start_grace_period(self, run: Run) -> None:
        """Cancel the run soon unless a request joins it."""
        self._grace_timer = asyncio.get_running_loop().call_later(
            DISCONNECT_GRACE_SECONDS, run.cancel, CLIENT_DISCONNECTED
        )

    def cancel_grace_period(self) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
            self._grace_timer = None


class _JoinedRun:
    """A shared run as one request reads it: to cancel it only leaves it."""

    def __init__(self, run: Run, recorded: asyncio.Future[None]) -> None:
        self.id = run.id
        self.warnings = run.warnings
        self.open_reader = run.open_reader
        self._run = run
        self._recorded = recorded
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Response:
        """Raises ClientDisconnected after `cancel`, and as `Run.wait`."""
        await asyncio.wait([self._recorded, self._left], return_when=asyncio.FIRST_COMPLETED)
        if not self._recorded.done():
            raise ClientDisconnected
        return await self._run.wait()

    def cancel(self, reason: str) -> None:
        del reason
        if not self._left.done():
            self._left.set_result(None)


class _ReplayedRun:
    """A response that has ended, as a run. It is its own reader, of events made from the response."""

    is_exhausted = True

    def __init__(self, response: Response) -> None:
        self.id = response.id
        self.warnings = response.warnings or ()
        self._response = response
        self._unread: Sequence[StreamEvent] = ()

    def open_reader(self, on_available: Callable[[], None]) -> "_ReplayedRun":
        del on_available  # all events are available at once
        self._unread = replay_response(self._response)
        return self

    def read_available(self) -> Sequence[StreamEvent]:
        events, self._unread = self._unread, ()
        return events

    def close(self) -> None:
        """There is nothing to close."""

    async def wait(self) -> Response:
        return self._response

    def cancel(self, reason: str) -> None:
        """It has ended."""


class _UnstoredResponses:
    """Finished responses that are not stored, as JSON, and the keys that stand for them."""

    def __init__(self) -> None:
        self._claims: defaultdict[str, dict[str, IdempotencyClaim]] = defaultdict(dict)
        self._responses = TenantFairCache[bytes](_MAX_CACHE_BYTES)

    def find(self, request: IdempotentRequest) -> Response | None:
        """The response of a key; None if it was not used. Raises Conflict."""
        claim = self._claims.get(request.caller.tenant, {}).get(request.key)
        if claim is None:
            return None
        if claim.digest != request.digest:
            raise _key_reused()
        response = self._responses.get(*request.cache_key)
        if response is None:
            raise _response_gone(
                claim,
                "it was not stored, and it failed, was too long to cache, or was evicted from the cache",
            )
        return _decode_cached(response)

    def add(self, request: IdempotentRequest, response_id: str, response: Response | None) -> None:
        tenant, key = request.cache_key
        claims = self._claims[tenant]
        claims[key] = IdempotencyClaim(request.digest, response_id)
        if len(claims) > _MAX_UNSTORED_KEYS:
            oldest = next(iter(claims))
            del claims[oldest]
            self._responses.drop(tenant, oldest)
        encoded = b"" if response is None else _encode_cached(response)
        if 0 < len(encoded) <= _MAX_REPLAY_BYTES:
            self._responses.put(tenant, key, encoded, len(encoded) + _CACHE_OVERHEAD_BYTES)


def _encode_cached(response: Response) -> bytes:
    foreign = [index for index, item in enumerate(response.output) if isinstance(item, Raw)]
    output = [Raw(encode_json(item)) for item in response.output]
    return encode_json(_CachedResponse(msgspec.structs.replace(response, output=[]), output, foreign))


def _decode_cached(encoded: bytes) -> Response:
    cached = _cached_decoder.decode(encoded)
    cached.response.output = [
        item if index in cached.foreign else _item_decoder.decode(item)
        for index, item in enumerate(cached.output)
    ]
    return cached.response


def _read_terminal_response(run: Run) -> Response | None:
    """The response in the last event of a run that has ended, if that is kept."""
    reader = run.open_reader(do_nothing)
    events = reader.read_available() if run.holds_all_events else ()
    reader.close()
    return events[-1].response if events and isinstance(events[-1], TERMINAL_EVENTS) else None


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
