"""Routes model names to backends and lists the models."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import msgspec

from fumehood.gateway_stats import ModelStats
from fumehood.interfaces import Clock, ModelBackend, PassthroughRequest, PassthroughResponse
from fumehood.models.chat_completions.chat_backend import ChatCompletionsBackend
from fumehood.models.direct_execution import DirectExecutionBackend
from fumehood.models.model_settings import ModelSettings
from fumehood.models.responses_api.responses_backend import ResponsesApiBackend
from fumehood.models.retrying_backend import RetryingBackend
from fumehood.models.upstream.http1_client import PooledHttpClient
from fumehood.models.upstream.passthrough import UpstreamPassthrough
from fumehood.models.upstream.turn_retries import TurnRetries
from fumehood.models.upstream_health import ProbedUpstream, UpstreamHealth
from fumehood.protocol.model_turns import ModelCard
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest, ModelError

logger = logging.getLogger(__name__)

_OWNER = "fumehood"
_CLIENT_TOOLS = ("function", "custom")  # the client runs them
_MODEL_LIST_TTL = 60.0  # seconds for which a server's model list is cached
_MODEL_LIST_TIMEOUT = 5.0


@dataclass(slots=True, eq=False)
class ModelRoute:
    """The backend of all model names that match a pattern. The first matching route wins.

    name: the model name that the list shows for this route; None for a pattern.
    passthrough: passes requests through to the server; None if there is none.
    probed: the server, for health checks; None if there is none.
    list_models: asks the server for the models behind a pattern, raises ModelError; None if there is nothing to list.
    passed_tools: types of hosted tools that its server gets unchanged.
    """

    match: str
    backend: ModelBackend
    name: str | None = None
    passed_tools: Sequence[str] = ()
    passthrough: UpstreamPassthrough | None = None
    probed: ProbedUpstream | None = None
    list_models: Callable[[], Awaitable[Sequence[ModelCard]]] | None = None
    cached_models: Sequence[ModelCard] = ()
    cached_at: float | None = None
    refresh_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def matches(self, model: str) -> bool:
        return self.match == "*" or fnmatchcase(model, self.match)


class ModelRegistry:
    """A `ModelProvider` and `PassthroughProvider` that picks the first route whose pattern matches the name."""

    def __init__(
        self, routes: Sequence[ModelRoute], clock: Clock, client: PooledHttpClient | None = None
    ) -> None:
        self._routes = routes
        self._clock = clock
        self._client = client
        self._started_at = int(clock.now())

    def get_backend(self, model: str) -> ModelBackend:
        return self._get_route(model).backend

    def open_passthrough(
        self, request: PassthroughRequest
    ) -> AbstractAsyncContextManager[PassthroughResponse]:
        passthrough = self._get_route(request.model).passthrough
        if passthrough is None:
            raise InvalidRequest(
                f"The model '{sanitize_name(request.model)}' has no model server: it runs code and has no "
                f"/v1/{request.endpoint}. Use POST /v1/responses, or another model.",
                param="model",
                code="unsupported_model",
            )
        return passthrough.open(request)

    async def list_models(self) -> Sequence[ModelCard]:
        found = await asyncio.gather(*(self._list_route_models(route) for route in self._routes))
        cards: dict[str, ModelCard] = {}
        for route, listed in zip(self._routes, found, strict=True):
            for card in listed:
                if self._find_route(card.id) is route:
                    cards.setdefault(card.id, msgspec.structs.replace(card, tools=[*route.passed_tools]))
        return list(cards.values())

    def open_health(self) -> UpstreamHealth:
        """The health of all model servers, each probed once however many routes lead to it."""
        upstreams: dict[tuple[str, bytes], ProbedUpstream] = {}
        for route in self._routes:
            if (probed := route.probed) is not None:
                known = upstreams.get(key := (probed.base_url, probed.server.headers))
                models = (*(known.models if known else ()), *probed.models)
                upstreams[key] = replace(probed, models=models)
        return UpstreamHealth([*upstreams.values()], self._clock)

    async def close(self) -> None:
        for route in self._routes:
            await route.backend.close()
        if self._client is not None:
            await self._client.close()

    def _get_route(self, model: str) -> ModelRoute:
        """Raises InvalidRequest."""
        route = self._find_route(model)
        if route is None:
            raise InvalidRequest(
                f"The model '{sanitize_name(model)}' does not exist; GET /v1/models lists those that do.",
                param="model",
                code="model_not_found",
            )
        return route

    def _find_route(self, model: str) -> ModelRoute | None:
        return next((route for route in self._routes if route.matches(model)), None)

    async def _list_route_models(self, route: ModelRoute) -> Sequence[ModelCard]:
        own = (
            []
            if route.name is None
            else [ModelCard(id=route.name, created=self._started_at, owned_by=_OWNER)]
        )
        if route.list_models is None:
            return own
        async with route.refresh_lock:
            if route.cached_at is None or self._clock.monotonic() - route.cached_at >= _MODEL_LIST_TTL:
                route.cached_models = await self._fetch_models(route, route.list_models)
                route.cached_at = self._clock.monotonic()
        return [*own, *route.cached_models]

    async def _fetch_models(
        self, route: ModelRoute, list_models: Callable[[], Awaitable[Sequence[ModelCard]]]
    ) -> Sequence[ModelCard]:
        """Ask the server for its models; fall back on the cached list if that fails."""
        try:
            async with asyncio.timeout(_MODEL_LIST_TIMEOUT):
                return await list_models()
        except (ModelError, TimeoutError) as error:
            logger.warning("Cannot list the models of %r: %s", route.match, error or "timed out")
            return route.cached_models


def open_model_registry(
    entries: Sequence[ModelSettings],
    clock: Clock,
    environment: Mapping[str, str] | None = None,
    stats: dict[str, ModelStats] | None = None,
) -> ModelRegistry:
    """Create the routes of these settings, without connecting; without settings, route every name to `direct`.

    environment: where API keys are read from; `os.environ` by default.
    stats: receives the counters of each route, by its pattern.
    Raises ValueError if an API key is missing.
    """
    client = PooledHttpClient()
    variables = os.environ if environment is None else environment
    stats = {} if stats is None else stats
    if not entries:
        direct = RetryingBackend(
            DirectExecutionBackend(), 0, clock, stats=stats.setdefault("*", ModelStats())
        )
        return ModelRegistry([ModelRoute("*", direct, name="direct")], clock)
    routes = [
        _open_route(settings, client, clock, variables, stats.setdefault(settings.match, ModelStats()))
        for settings in entries
    ]
    return ModelRegistry(routes, clock, client)


def _open_route(
    settings: ModelSettings,
    client: PooledHttpClient,
    clock: Clock,
    environment: Mapping[str, str],
    stats: ModelStats,
) -> ModelRoute:
    name = None if settings.is_pattern else settings.match
    if settings.backend == "direct":
        return ModelRoute(
            settings.match, RetryingBackend(DirectExecutionBackend(), 0, clock, stats=stats), name=name
        )
    backend_class = ResponsesApiBackend if settings.backend == "responses" else ChatCompletionsBackend
    http_backend = backend_class(settings, client, settings.read_api_key(environment))
    server = http_backend.server
    backend = RetryingBackend(http_backend, settings.retries, clock, stats=stats)
    passthrough = UpstreamPassthrough(settings, server, TurnRetries(settings.retries, clock, stats=stats))
    # If all names of a pattern mean one model, there is nothing to list.
    listable = settings.is_pattern and settings.name is None
    return ModelRoute(
        settings.match,
        backend,
        name=name,
        passthrough=passthrough,
        probed=ProbedUpstream(server, (settings.match,), http_backend.endpoint, settings.base_url or ""),
        list_models=server.list_models if listable else None,
        passed_tools=[kind for kind in settings.pass_tools if kind not in _CLIENT_TOOLS],
    )
