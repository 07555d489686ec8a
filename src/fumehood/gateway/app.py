"""The gateway's ASGI application: routing, authentication, error responses and the request log."""

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from re import Pattern

import msgspec
from starlette.routing import compile_path

from fumehood.gateway.authentication import (
    AnonymousAuthenticator,
    Authenticator,
    PermissionDenied,
    authenticate_or_refresh,
    check_scope,
)
from fumehood.gateway.body_parsing import CreateResponseParser
from fumehood.gateway.cors import CorsPolicy
from fumehood.gateway.gateway_exchange import GatewayExchange, encode_json, to_api_error
from fumehood.gateway.gateway_metrics import CONTENT_TYPE, GatewayMetrics
from fumehood.gateway.openapi import PUBLIC_PATHS, build_document
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.gateway.request_log import RequestLog, log_to_logger
from fumehood.gateway.routes.container_routes import ContainerFileRoutes, ContainerRoutes
from fumehood.gateway.routes.content_url_check import FindUrlProblem, reject_every_url
from fumehood.gateway.routes.file_routes import FileRoutes
from fumehood.gateway.routes.passthrough_routes import MAX_SECONDS, PassthroughRoutes
from fumehood.gateway.routes.response_routes import ResponseRoutes, ResponseRouteStore
from fumehood.gateway.routes.websocket_routes import WebSocketRoutes, WebSocketUpgradeRequest
from fumehood.gateway.streaming.server_sent_events import KEEPALIVE_SECONDS
from fumehood.http_server.asgi_exchange import (
    REQUEST_OUTCOME,
    ClientDisconnected,
    Receive,
    RequestOutcome,
    Scope,
    Send,
)
from fumehood.http_server.cross_site_protection import is_simple_request
from fumehood.http_server.route_suggestions import format_path, suggest_routes
from fumehood.http_server.slow_clients import MIN_BYTES_PER_SECOND
from fumehood.interfaces import (
    Caller,
    ContainerService,
    DegradedUpstream,
    FileService,
    ModelProvider,
    PassthroughProvider,
    RunService,
)
from fumehood.protocol.api_keys import ApiKeyScope
from fumehood.protocol.file_types import UploadFileTypes
from fumehood.protocol.model_turns import ModelCard, ModelList
from fumehood.protocol.openai.api_errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    ServiceUnavailable,
)

type Handler = Callable[[GatewayExchange, Caller], Awaitable[None]]
type _RouteEntry = tuple[str, str, ApiKeyScope | None, Handler]

ANONYMOUS = Caller()
_WEBSOCKET_PATH = "/v1/responses"
MAX_FILE_BYTES = 2 << 30

logger = logging.getLogger(__name__)


class MethodNotAllowed(ApiError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class Gateway:
    """The ASGI application. Run it on `GatewayWebServer`: WebSockets need its protocol.

    cors: the web pages that may use the gateway; none by default.
    always_include: `include` values applied to every response.
    readiness_problem: returns why the gateway cannot serve now, or None.
    find_degraded: returns the model servers that cannot serve, without waiting for them.
    keepalive_seconds: a stream that is silent for this long gets a keepalive.
    max_file_bytes: size limit of an uploaded file.
    accepted_types: of files that are uploaded into containers; by default those of docs/files.md.
    min_bytes_per_second: minimum average rate of a request body; 0 disables the check.
    serve_metrics: whether to serve /metrics.
    pass_fields: additional request fields that are passed to model servers unchanged.
    hosted_tools: types of the tools that every model gets; /v1/models announces them.
    passthrough: passes chat completions and embeddings through to model servers.
    find_url_problem: says which URLs in them may not be passed on; none may by default.
    max_passthrough_seconds: until such a response must have ended.
    """

    def __init__(
        self,
        *,
        runs: RunService,
        store: ResponseRouteStore,
        models: ModelProvider,
        passthrough: PassthroughProvider,
        containers: ContainerService,
        files: FileService,
        authenticator: Authenticator | None = None,
        metrics: GatewayMetrics | None = None,
        request_log: RequestLog = log_to_logger,
        limits: RequestLimiter | None = None,
        cors: CorsPolicy | None = None,
        always_include: Collection[str] = (),
        readiness_problem: Callable[[], Awaitable[str | None]] | None = None,
        find_degraded: Callable[[], Sequence[DegradedUpstream]] = tuple,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
        max_file_bytes: int = MAX_FILE_BYTES,
        accepted_types: UploadFileTypes | None = None,
        min_bytes_per_second: int = MIN_BYTES_PER_SECOND,
        serve_metrics: bool = True,
        pass_fields: Collection[str] = (),
        hosted_tools: Sequence[str] = (),
        find_url_problem: FindUrlProblem = reject_every_url,
        max_passthrough_seconds: float = MAX_SECONDS,
    ) -> None:
        self.metrics = metrics or GatewayMetrics()
        self.cors = cors or CorsPolicy()
        self._authenticator = authenticator or AnonymousAuthenticator()
        self._request_log = request_log
        self._openapi_json: bytes | None = None
        self._readiness_problem = readiness_problem
        self._find_degraded = find_degraded
        self._models = models
        self._hosted_tools = hosted_tools
        self._min_bytes_per_second = min_bytes_per_second
        limits = limits or RequestLimiter()
        self.metrics.limit_rejections = limits.rejections
        responses = self.responses = ResponseRoutes(
            runs,
            store,
            self.metrics,
            limits=limits,
            always_include=always_include,
            keepalive_seconds=keepalive_seconds,
            parser=CreateResponseParser(pass_fields),
        )
        websockets = self.websockets = WebSocketRoutes(
            responses,
            self._authenticate_websocket,
            self.cors,
            limits,
            self.metrics,
            record_request=lambda context: self._record_request(context, self._websocket_routes),
        )
        passthrough_routes = PassthroughRoutes(
            passthrough,
            self.metrics,
            limits=limits,
            keepalive_seconds=keepalive_seconds,
            find_url_problem=find_url_problem,
            max_seconds=max_passthrough_seconds,
        )
        container_routes = ContainerRoutes(containers, limits)
        container_files = ContainerFileRoutes(
            containers, limits, self.metrics, max_file_bytes, accepted_types or UploadFileTypes()
        )
        file_routes = FileRoutes(files, limits, self.metrics, max_file_bytes)
        metrics_routes: list[_RouteEntry] = [("GET", "/metrics", "metrics", self._get_metrics)]
        self._routes = _Router(
            ("POST", "/v1/responses", "responses", responses.create),
            ("GET", _WEBSOCKET_PATH, "responses", websockets.connect),
            ("POST", "/v1/responses/input_tokens", "responses", responses.count_input_tokens),
            ("POST", "/v1/responses/compact", "responses", responses.compact),
            ("GET", "/v1/responses/{response_id}", "responses", responses.get),
            ("DELETE", "/v1/responses/{response_id}", "responses", responses.delete),
            ("POST", "/v1/responses/{response_id}/cancel", "responses", responses.cancel),
            ("GET", "/v1/responses/{response_id}/input_items", "responses", responses.list_input_items),
            ("POST", "/v1/chat/completions", "responses", passthrough_routes.create_chat_completion),
            ("POST", "/v1/embeddings", "responses", passthrough_routes.create_embeddings),
            ("GET", "/v1/models", "models", self._list_models),
            ("GET", "/v1/models/{model:path}", "models", self._get_model),
            ("POST", "/v1/containers", "containers", container_routes.create),
            ("GET", "/v1/containers", "containers", container_routes.list),
            ("GET", "/v1/containers/{container_id}", "containers", container_routes.get),
            ("DELETE", "/v1/containers/{container_id}", "containers", container_routes.delete),
            ("POST", "/v1/containers/{container_id}/files", "containers", container_files.create),
            ("GET", "/v1/containers/{container_id}/files", "containers", container_files.list),
            ("GET", "/v1/containers/{container_id}/files/{file_id}", "containers", container_files.get),
            ("DELETE", "/v1/containers/{container_id}/files/{file_id}", "containers", container_files.delete),
            (
                "GET",
                "/v1/containers/{container_id}/files/{file_id}/content",
                "containers",
                container_files.get_content,
            ),
            ("POST", "/v1/files", "files", file_routes.create),
            ("GET", "/v1/files", "files", file_routes.list),
            ("GET", "/v1/files/{upload_id}", "files", file_routes.get),
            ("DELETE", "/v1/files/{upload_id}", "files", file_routes.delete),
            ("GET", "/v1/files/{upload_id}/content", "files", file_routes.get_content),
            ("GET", "/healthz", None, self._get_health),
            ("GET", "/readyz", None, self._get_readiness),
            ("GET", "/openapi.json", None, self._get_openapi),
            *(metrics_routes if serve_metrics else []),
        )
        self._websocket_routes = self._routes.exact_paths[_WEBSOCKET_PATH]

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of every route."""
        return [*self._routes.scopes]

    @property
    def scopes(self) -> dict[tuple[str, str], ApiKeyScope | None]:
        """The scope that each route requires, by method and path; None where no key is needed."""
        return self._routes.scopes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_websocket = scope["type"] == "websocket"
        context_type = WebSocketUpgradeRequest if is_websocket else GatewayExchange
        context = context_type(scope, receive, send, self._min_bytes_per_second)
        path_routes = self._routes.match(context)
        try:
            if context.has_unsupported_encoding:
                raise InvalidRequest("Unsupported Transfer-Encoding or TE: only chunked is supported.")
            if is_websocket and path_routes is not self._websocket_routes:
                raise NotFound(
                    f"There is no WebSocket at {context.path[:200]}; there is one at {_WEBSOCKET_PATH}."
                )
            if b"origin" in context.headers:
                context.extra_headers += self.cors.response_headers(context)
                if self.cors.is_preflight(context):
                    methods = "" if path_routes is None else ", ".join(sorted(path_routes.by_method))
                    await self.cors.send_preflight_response(context, methods)
                    return
                if context.method == "POST" and is_simple_request(context.method, context.headers):
                    self.cors.check_origin(context)
            caller = (
                ANONYMOUS
                if path_routes is not None and path_routes.path in PUBLIC_PATHS
                else await self._authenticate(context)
            )
            route = self._routes.select(path_routes, context)
            if route.scope is not None:
                self._check_scope(caller, route.scope)
            await route.handler(context, caller)
        except ClientDisconnected:
            context.log_fields["outcome"] = "client disconnected before the request was complete"
        except Exception as error:
            await self._send_error(context, to_api_error(error, context.request_id))
        finally:
            path = "" if path_routes is None else path_routes.path
            scope[REQUEST_OUTCOME] = RequestOutcome(path, context.status)
            self._record_request(context, path_routes)

    async def _authenticate(self, exchange: GatewayExchange) -> Caller:
        headers = exchange.headers
        key = headers.get(b"authorization")
        try:
            caller = await authenticate_or_refresh(self._authenticator, key, headers.get(b"host", b""))
        except NotAuthenticated:
            self.metrics.record_auth_rejection("missing_key" if key is None else "unknown_key")
            raise
        except PermissionDenied:
            self.metrics.record_auth_rejection("host")
            raise
        if caller.key_id:
            exchange.log_fields["key"] = caller.key_id
        return caller

    async def _authenticate_websocket(self, exchange: GatewayExchange) -> Caller:
        """Authenticate the sender of the next message of a WebSocket."""
        caller = await self._authenticate(exchange)
        self._check_scope(caller, "responses")
        return caller

    def _check_scope(self, caller: Caller, scope: ApiKeyScope) -> None:
        try:
            check_scope(caller, scope)
        except PermissionDenied:
            self.metrics.record_auth_rejection("scope")
            raise

    async def _send_error(self, exchange: GatewayExchange, error: ApiError) -> None:
        exchange.log_error(error)
        if exchange.has_started:
            if not exchange.break_off():
                raise error
            logger.warning("The response to request %s broke off: %s", exchange.request_id, error)
            return
        if isinstance(error, MethodNotAllowed):
            exchange.extra_headers.append((b"allow", error.allowed.encode()))
        elif isinstance(error, NotAuthenticated):
            exchange.extra_headers.append((b"www-authenticate", b"Bearer"))
        elif error.may_have_run or (isinstance(error, Conflict) and error.retry_after is None):
            exchange.extra_headers.append((b"x-should-retry", b"false"))  # OpenAI's SDKs would retry
        await exchange.respond_error(error)

    def _record_request(self, exchange: GatewayExchange, path_routes: "_PathRoutes | None") -> None:
        route = "(unknown)" if path_routes is None else path_routes.path
        if exchange.status == 101:  # its duration is that of the connection
            route += " (websocket)"
        seconds = exchange.elapsed_seconds()
        self.metrics.record_request(route, exchange.status, seconds)
        self._request_log(
            logging.WARNING if exchange.status >= 500 else logging.INFO,
            {
                "request_id": exchange.request_id,
                "method": exchange.method,
                "route": route,
                "status": exchange.status,
                "ms": round(seconds * 1000, 3),
                **exchange.log_fields,
            },
        )

    # ---- models, health, metrics, OpenAPI -----------------------------------------------------------------------

    async def _list_models(self, exchange: GatewayExchange, _caller: Caller) -> None:
        await exchange.respond_json(ModelList(data=await self._list_cards()))

    async def _list_cards(self) -> list[ModelCard]:
        """The models with the tools that they get: all that are hosted here, and those that their server hosts."""
        return [
            msgspec.structs.replace(card, tools=[*dict.fromkeys((*self._hosted_tools, *card.tools))])
            for card in await self._models.list_models()
        ]

    async def _get_model(self, exchange: GatewayExchange, _caller: Caller) -> None:
        wanted = exchange.path_parameters["model"]
        for card in await self._list_cards():
            if card.id == wanted:
                await exchange.respond_json(card)
                return
        raise NotFound(
            f"The model {wanted[:256]!r} does not exist; GET /v1/models lists the models.",
            param="model",
            code="model_not_found",
        )

    async def _get_health(self, exchange: GatewayExchange, _caller: Caller) -> None:
        await exchange.respond_json({"status": "ok"})

    async def _get_readiness(self, exchange: GatewayExchange, _caller: Caller) -> None:
        if self._readiness_problem is not None and (reason := await self._readiness_problem()) is not None:
            raise ServiceUnavailable(reason)
        degraded = self._find_degraded()
        if degraded:
            await exchange.respond_json({"status": "degraded", "degraded": degraded})
        else:
            await exchange.respond_json({"status": "ready"})

    async def _get_openapi(self, exchange: GatewayExchange, _caller: Caller) -> None:
        if self._openapi_json is None:
            self._openapi_json = encode_json(build_document(self.routes))
        await exchange.respond(self._openapi_json)

    async def _get_metrics(self, exchange: GatewayExchange, _caller: Caller) -> None:
        await exchange.respond(await self.metrics.render(), content_type=CONTENT_TYPE)


@dataclass(frozen=True, slots=True)
class _Route:
    """The handler of one method on one path, and the key scope that it requires, if any."""

    handler: Handler
    scope: ApiKeyScope | None


class _PathRoutes:
    """The routes of one path by method. HEAD uses the route of GET."""

    def __init__(self, path: str) -> None:
        self.path = format_path(path)
        self.by_method: dict[str, _Route] = {}

    def add(self, method: str, route: _Route) -> None:
        self.by_method[method] = route
        if method == "GET":
            self.by_method["HEAD"] = route


class _Router:
    """Finds the routes of a path: exact paths by lookup, patterns one after another.

    exact_paths: the routes of paths without parameters.
    """

    def __init__(self, *routes: _RouteEntry) -> None:
        self.scopes: dict[tuple[str, str], ApiKeyScope | None] = {
            (method, path): scope for method, path, scope, _ in routes
        }
        paths: dict[str, _PathRoutes] = {}
        for method, path, scope, handler in routes:
            paths.setdefault(path, _PathRoutes(path)).add(method, _Route(handler, scope))
        self.exact_paths = {path: entry for path, entry in paths.items() if "{" not in path}
        self._patterns: list[tuple[Pattern[str], _PathRoutes]] = [
            (compile_path(path)[0], entry) for path, entry in paths.items() if "{" in path
        ]

    def match(self, exchange: GatewayExchange) -> _PathRoutes | None:
        path_routes = self.exact_paths.get(exchange.path)
        if path_routes is not None:
            return path_routes
        for pattern, path_routes in self._patterns:
            if (found := pattern.match(exchange.path)) is not None:
                exchange.path_parameters = found.groupdict()
                return path_routes
        return None

    def select(self, path_routes: _PathRoutes | None, exchange: GatewayExchange) -> _Route:
        """Raises NotFound, MethodNotAllowed."""
        if path_routes is None:
            suggestion = suggest_routes(exchange.path, [path for _, path in self.scopes])
            raise NotFound(f"Unknown request URL: {exchange.method} {exchange.path[:200]}. {suggestion}")
        route = path_routes.by_method.get(exchange.method)
        if route is None:
            allowed = ", ".join(sorted(path_routes.by_method))
            raise MethodNotAllowed(
                f"Not allowed to {exchange.method} on {path_routes.path}; try {allowed}.", allowed
            )
        return route
