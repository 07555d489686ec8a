"""Routes of /v1/responses: create (blocking or streamed), get, delete, cancel, count tokens, compact."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

from fumehood.cpu_worker import run_in_worker
from fumehood.gateway.body_parsing import CreateResponseParser, check_include
from fumehood.gateway.gateway_exchange import ClientConnectionMonitor, GatewayExchange, encode_json
from fumehood.gateway.gateway_metrics import GatewayMetrics
from fumehood.gateway.idempotency import (
    IdempotencyRegistry,
    IdempotentRequest,
    IdempotentResponseStore,
    digest_body,
    parse_key,
)
from fumehood.gateway.request_limiter import RequestLimiter, RequestMemoryReservation
from fumehood.gateway.routes.input_item_projection import project_item
from fumehood.gateway.routes.list_pagination import make_page, parse_page_query
from fumehood.gateway.streaming.event_sender import CLIENT_DISCONNECTED
from fumehood.gateway.streaming.server_sent_events import KEEPALIVE_SECONDS, send_run
from fumehood.http_server.asgi_exchange import ClientDisconnected
from fumehood.interfaces import Caller, ConversationStore, ReadableRun, Run, RunService
from fumehood.protocol.conversation import ConversationSegment
from fumehood.protocol.openai.api_errors import InvalidRequest, NotFound
from fumehood.protocol.openai.pagination import find_page
from fumehood.protocol.openai.response_projection import ONLY_OPENAI_EVENTS, project_response
from fumehood.protocol.openai.responses import (
    CompactedResponse,
    CreateResponse,
    DeletedObject,
    Response,
    Usage,
)

# Streams a run; returns the number of events sent and the terminal response, None if the client disconnected.
type SendEvents = Callable[[ReadableRun, Collection[str]], Awaitable[tuple[int, Response | None]]]


class ResponseRouteStore(IdempotentResponseStore, ConversationStore, Protocol):
    """What the response routes read and write."""


class ResponseRoutes:
    """Handlers of /v1/responses.

    always_include: `include` values applied to every response.
    """

    def __init__(
        self,
        runs: RunService,
        store: ResponseRouteStore,
        metrics: GatewayMetrics,
        *,
        limits: RequestLimiter,
        always_include: Collection[str] = (),
        keepalive_seconds: float = KEEPALIVE_SECONDS,
        parser: CreateResponseParser | None = None,
    ) -> None:
        self.parser = parser or CreateResponseParser()
        self._runs = runs
        self._store = store
        self._metrics = metrics
        self._limits = limits
        self._always_include = frozenset(always_include)
        self._keepalive_seconds = keepalive_seconds
        self._idempotent_requests = IdempotencyRegistry(runs, store, limits, metrics)

    async def create(self, exchange: GatewayExchange, caller: Caller) -> None:
        with self._limits.memory_budget(caller) as budget:
            request, body = await self._read_request(exchange, caller, budget)
            send_events = partial(send_run, exchange, keepalive_seconds=self._keepalive_seconds)
            header = exchange.headers.get(b"idempotency-key")
            if header is None:
                del body  # free it: it may be large and the run long
                await self._run_and_respond(exchange, caller, request, send_events, budget)
                return
            digest = await run_in_worker(len(body), digest_body, body)
            del body
            keyed = IdempotentRequest(caller, parse_key(header), digest, request)
            async with self._idempotent_requests.open_run(exchange, keyed, budget) as run:
                await self._respond(exchange, run, request, send_events)

    async def create_from_message(
        self,
        exchange: GatewayExchange,
        caller: Caller,
        request: CreateResponse,
        send_events: SendEvents,
        budget: RequestMemoryReservation,
        past: Sequence[ConversationSegment] | None,
    ) -> tuple[Run, Response | None]:
        """Run a request that arrived as a WebSocket message, and stream it with `send_events`.

        Returns the run and its terminal response, None if the client disconnected. `past` is as in `RunService.start`.
        """
        self._limits.count_request(caller, exchange.extra_headers)
        exchange.log_fields["model"] = request.model
        return await self._run_and_respond(exchange, caller, request, send_events, budget, past)

    async def _read_request(
        self, exchange: GatewayExchange, caller: Caller, budget: RequestMemoryReservation
    ) -> tuple[CreateResponse, bytes]:
        self._limits.count_request(caller, exchange.extra_headers)
        request, body = await self.parser.read_request(
            exchange, self._limits.max_body_bytes(caller), budget.reserve
        )
        exchange.log_fields["model"] = request.model
        return request, body

    async def _run_and_respond(
        self,
        exchange: GatewayExchange,
        caller: Caller,
        request: CreateResponse,
        send_events: SendEvents,
        budget: RequestMemoryReservation,
        past: Sequence[ConversationSegment] | None = None,
    ) -> tuple[Run, Response | None]:
        with self._limits.concurrency_slot(caller):
            run = await self._runs.start(request, caller, past=past, reserve_memory=budget.reserve)
            response = await self._respond(exchange, run, request, send_events)
        if response is not None:
            self._metrics.record_response(response)
        return run, response

    async def _respond(
        self, exchange: GatewayExchange, run: ReadableRun, request: CreateResponse, send_events: SendEvents
    ) -> Response | None:
        exchange.log_fields["response_id"] = run.id
        exchange.add_warnings(run.warnings)
        include = self._effective_include(exchange, request)
        if request.stream:
            response = await self._stream(exchange, run, include, send_events)
        else:
            response = await self._send_when_complete(exchange, run, include)
        self._log_outcome(exchange, response)
        return response

    async def _stream(
        self, exchange: GatewayExchange, run: ReadableRun, include: Collection[str], send_events: SendEvents
    ) -> Response | None:
        self._metrics.open_streams += 1
        try:
            events, response = await send_events(run, include)
        finally:
            self._metrics.open_streams -= 1
        exchange.log_fields["events"] = events
        self._metrics.record_events(events)
        return response

    async def _send_when_complete(
        self, exchange: GatewayExchange, run: ReadableRun, include: Collection[str]
    ) -> Response | None:
        try:
            with ClientConnectionMonitor(exchange, lambda: run.cancel(CLIENT_DISCONNECTED)):
                response = await run.wait()
        except ClientDisconnected:  # of a run that others read, too
            return None
        await exchange.respond_json(project_response(response, include))
        return response

    def _log_outcome(self, exchange: GatewayExchange, response: Response | None) -> None:
        if response is None:
            exchange.log_fields["outcome"] = CLIENT_DISCONNECTED
            return
        exchange.log_fields["outcome"] = response.status
        if response.usage is not None:
            self._log_usage(exchange, response.usage)

    def _log_usage(self, exchange: GatewayExchange, usage: Usage) -> None:
        exchange.log_fields["input_tokens"] = usage.input_tokens
        exchange.log_fields["output_tokens"] = usage.output_tokens

    def _effective_include(self, exchange: GatewayExchange, request: CreateResponse) -> frozenset[str]:
        include = self._always_include.union(request.include or ())
        return include.union((ONLY_OPENAI_EVENTS,)) if _rejects_unknown_events(exchange.headers) else include

    async def count_input_tokens(self, exchange: GatewayExchange, caller: Caller) -> None:
        with self._limits.memory_budget(caller) as budget:
            request, _ = await self._read_request(exchange, caller, budget)
            with self._limits.concurrency_slot(caller):
                counted = await self._runs.count_tokens(request, caller, reserve_memory=budget.reserve)
        exchange.add_warnings(counted.warnings or ())
        await exchange.respond_json(counted)

    async def compact(self, exchange: GatewayExchange, caller: Caller) -> None:
        with self._limits.memory_budget(caller) as budget:
            request, _ = await self._read_request(exchange, caller, budget)
            with self._limits.concurrency_slot(caller):
                compacted = await self._compact_while_connected(exchange, caller, request, budget)
        self._log_usage(exchange, compacted.usage)
        self._metrics.record_compaction(compacted.usage)
        exchange.add_warnings(compacted.warnings or ())
        await exchange.respond_json(compacted)

    async def _compact_while_connected(
        self,
        exchange: GatewayExchange,
        caller: Caller,
        request: CreateResponse,
        budget: RequestMemoryReservation,
    ) -> CompactedResponse:
        task = asyncio.ensure_future(self._runs.compact(request, caller, reserve_memory=budget.reserve))
        with ClientConnectionMonitor(exchange, task.cancel) as monitor:
            try:
                return await task
            except asyncio.CancelledError:
                if monitor.disconnected:
                    raise ClientDisconnected from None
                raise

    async def get(self, exchange: GatewayExchange, caller: Caller) -> None:
        include = self._parse_include(exchange)
        if exchange.query_parameter("stream") in ("true", "1"):
            raise InvalidRequest("Only a background response can be streamed again.", param="stream")
        response = await self._find_response(exchange, caller)
        with self._limits.memory_budget(caller) as budget:
            await _send_large_response(exchange, budget, project_response(response, include))

    async def delete(self, exchange: GatewayExchange, caller: Caller) -> None:
        response_id = exchange.path_parameters["response_id"]
        if not await self._store.delete_response(caller.tenant, response_id):
            raise _response_not_found(response_id)
        await exchange.respond_json(DeletedObject(id=response_id, object="response"))

    async def cancel(self, exchange: GatewayExchange, caller: Caller) -> None:
        response = await self._find_response(exchange, caller)
        if not response.background:
            raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id")
        await exchange.respond_json(project_response(response, self._always_include))

    async def list_input_items(self, exchange: GatewayExchange, caller: Caller) -> None:
        include, query = self._parse_include(exchange), parse_page_query(exchange)
        response_id = exchange.path_parameters["response_id"]
        entries = await self._store.list_input_items(caller.tenant, response_id)
        if entries is None:
            raise _response_not_found(response_id)
        # An item that was referred to again is listed once: pages are found by id.
        unique = {entry.id: entry for entry in entries}
        size = sum([entry.size for entry in entries])
        with self._limits.memory_budget(caller) as budget:
            budget.reserve_for_response(size)
            found = find_page(query, [*unique.values()])
            page = await run_in_worker(
                size, make_page, query, found, lambda entry: project_item(entry, include)
            )
            await _send_large_response(exchange, budget, page)

    async def _find_response(self, exchange: GatewayExchange, caller: Caller) -> Response:
        response_id = exchange.path_parameters["response_id"]
        response = await self._store.get_response(caller.tenant, response_id)
        if response is None:
            raise _response_not_found(response_id)
        return response

    def _parse_include(self, exchange: GatewayExchange) -> frozenset[str]:
        include = exchange.query_parameters("include")
        check_include(include)
        return self._always_include.union(include)


async def _send_large_response(
    exchange: GatewayExchange, budget: RequestMemoryReservation, value: object
) -> None:
    """Send a response that may be large. Raises RateLimited, ServiceUnavailable; the client can retry."""
    body = encode_json(value)
    budget.reserve_for_response(len(body))
    await exchange.respond(body)


def _rejects_unknown_events(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the client is `responses.stream()` of openai-node, which throws on unknown events."""
    return (
        headers.get(b"x-stainless-helper-method") == b"stream" and headers.get(b"x-stainless-lang") == b"js"
    )


def _response_not_found(response_id: str) -> NotFound:
    return NotFound(f"Response with id {response_id[:100]!r} not found.", param="response_id")
