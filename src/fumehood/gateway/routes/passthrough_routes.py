"""Routes that pass requests through to model servers: /v1/chat/completions and /v1/embeddings."""

import asyncio
from contextlib import aclosing

import msgspec
from msgspec import Raw

from fumehood.cpu_worker import run_in_worker
from fumehood.gateway.body_parsing import check_json_body, decode_json
from fumehood.gateway.gateway_exchange import ClientConnectionMonitor, GatewayExchange, encode_json
from fumehood.gateway.gateway_metrics import GatewayMetrics
from fumehood.gateway.request_limiter import RequestLimiter, RequestMemoryReservation
from fumehood.gateway.routes.content_url_check import (
    FindUrlProblem,
    check_message_urls,
    check_part_urls,
    reject_every_url,
)
from fumehood.gateway.streaming.event_sender import CLIENT_DISCONNECTED
from fumehood.gateway.streaming.server_sent_events import KEEPALIVE_COMMENT, KEEPALIVE_SECONDS, SSE_HEADERS
from fumehood.http_server.asgi_exchange import JSON_CONTENT_TYPE, Headers
from fumehood.interfaces import (
    Caller,
    PassthroughEndpoint,
    PassthroughProvider,
    PassthroughRequest,
    PassthroughResponse,
)
from fumehood.protocol.openai.api_errors import (
    ApiError,
    ModelError,
    ModelTimeout,
    to_error_body,
)
from fumehood.protocol.openai.passthrough_requests import CreateChatCompletion, CreateEmbeddings

MAX_SECONDS = 1800.0


_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_chat_decoder = msgspec.json.Decoder(CreateChatCompletion)
_embeddings_decoder = msgspec.json.Decoder(CreateEmbeddings)


class PassthroughRoutes:
    """Handlers of the endpoints that model servers serve.

    find_url_problem: says which URLs may not be passed on; none may by default.
    max_seconds: until a response must have ended.
    """

    def __init__(
        self,
        provider: PassthroughProvider,
        metrics: GatewayMetrics,
        *,
        limits: RequestLimiter,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
        find_url_problem: FindUrlProblem = reject_every_url,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self._provider = provider
        self._metrics = metrics
        self._limits = limits
        self._keepalive_seconds = keepalive_seconds
        self._find_url_problem = find_url_problem
        self._max_seconds = max_seconds

    async def create_chat_completion(self, exchange: GatewayExchange, caller: Caller) -> None:
        await self._pass_through(exchange, caller, "chat/completions")

    async def create_embeddings(self, exchange: GatewayExchange, caller: Caller) -> None:
        await self._pass_through(exchange, caller, "embeddings")

    async def _pass_through(
        self, exchange: GatewayExchange, caller: Caller, endpoint: PassthroughEndpoint
    ) -> None:
        self._limits.count_request(caller, exchange.extra_headers)
        with self._limits.memory_budget(caller) as budget:
            request = await self._read_request(exchange, caller, endpoint, budget)
            exchange.log_fields["model"] = request.model
            with self._limits.concurrency_slot(caller):
                relay = _ResponseRelay(exchange, self._metrics, self._keepalive_seconds)
                await relay.run(self._provider, request, self._max_seconds)

    async def _read_request(
        self,
        exchange: GatewayExchange,
        caller: Caller,
        endpoint: PassthroughEndpoint,
        budget: RequestMemoryReservation,
    ) -> PassthroughRequest:
        """Raises InvalidRequest and what `GatewayExchange.read_body` raises."""
        check_json_body(exchange)
        body = await exchange.read_body(self._limits.max_body_bytes(caller), budget.reserve)
        return await run_in_worker(len(body), self._parse, endpoint, body)

    def _parse(self, endpoint: PassthroughEndpoint, body: bytes) -> PassthroughRequest:
        """Raises InvalidRequest."""
        if endpoint == "chat/completions":
            chat = decode_json(_chat_decoder, body)
            model, messages, is_streamed = chat.model, chat.messages, bool(chat.stream)
        else:
            embeddings = decode_json(_embeddings_decoder, body)
            model, messages, is_streamed = embeddings.model, embeddings.messages, False
            check_part_urls("input", bytes(embeddings.input), self._find_url_problem)
        check_message_urls(messages, self._find_url_problem)
        return PassthroughRequest(endpoint, model, _fields_decoder.decode(body), is_streamed)


class _ResponseRelay:
    """Sends the response of a model server to one client."""

    def __init__(self, exchange: GatewayExchange, metrics: GatewayMetrics, keepalive_seconds: float) -> None:
        self._exchange = exchange
        self._metrics = metrics
        self._keepalive_seconds = keepalive_seconds
        self._is_streaming = False
        self._task: asyncio.Task[None] | None = None

    def _abort(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def run(self, provider: PassthroughProvider, request: PassthroughRequest, seconds: float) -> None:
        """Relay until the response ends, the time is over, or the client disconnects, which aborts the request."""
        with ClientConnectionMonitor(self._exchange, self._abort) as monitor:
            task = self._task = asyncio.ensure_future(
                self._relay_in_time(provider, request, seconds, monitor)
            )
            try:
                await task
            except asyncio.CancelledError:
                if not monitor.disconnected:
                    raise
                self._exchange.log_fields["outcome"] = CLIENT_DISCONNECTED

    async def _relay_in_time(
        self,
        provider: PassthroughProvider,
        request: PassthroughRequest,
        seconds: float,
        monitor: ClientConnectionMonitor,
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._relay(provider, request, monitor)
        except TimeoutError:
            message = f"The model did not finish its response within {seconds:g} seconds."
            await self._report(ModelTimeout(message))

    async def _relay(
        self, provider: PassthroughProvider, request: PassthroughRequest, monitor: ClientConnectionMonitor
    ) -> None:
        async with provider.open_passthrough(request) as response:
            if request.is_streamed:
                await self._send_stream(response, monitor)
            else:
                await self._send_document(response)
            self._record_end(response)

    async def _send_stream(self, response: PassthroughResponse, monitor: ClientConnectionMonitor) -> None:
        exchange, metrics = self._exchange, self._metrics
        await exchange.start_response(200, [*SSE_HEADERS])
        self._is_streaming = True
        monitor.send_keepalives(KEEPALIVE_COMMENT, self._keepalive_seconds)
        metrics.open_streams += 1
        number = 0
        try:
            async with aclosing(response.iter_body()) as events:
                async for block in events:
                    number += block.startswith(b"data:") + block.count(b"\ndata:")
                    if not exchange.send_nowait(block):
                        await exchange.send(block)
        except ModelError as error:
            await self._report(error)
            return
        finally:
            metrics.open_streams -= 1
            metrics.record_events(number)
            exchange.log_fields["events"] = number
        await exchange.send(b"", more=False)

    async def _report(self, error: ApiError) -> None:
        """Send an error as an event of a stream that has started, else raise it; a document then breaks off."""
        exchange = self._exchange
        if not self._is_streaming:
            raise error
        exchange.log_error(error)
        exchange.log_fields["outcome"] = "failed"
        await exchange.send(b"data: %b\n\n" % encode_json(to_error_body(error)), more=False)

    async def _send_document(self, response: PassthroughResponse) -> None:
        exchange = self._exchange
        async with aclosing(response.iter_body()) as pieces:
            first = await anext(pieces)
            if response.content_length == len(first):
                await exchange.respond(first)
                return
            headers: Headers = [JSON_CONTENT_TYPE]
            if response.content_length is not None:
                headers.append((b"content-length", b"%d" % response.content_length))
            await exchange.start_response(200, headers)
            await exchange.send(first)
            async for piece in pieces:
                await exchange.send(piece)
        await exchange.send(b"", more=False)

    def _record_end(self, response: PassthroughResponse) -> None:
        fields = self._exchange.log_fields
        fields.setdefault("outcome", "completed")
        if (usage := response.usage) is not None:
            fields["input_tokens"], fields["output_tokens"] = usage.input_tokens, usage.output_tokens
            self._metrics.record_tokens(usage)
