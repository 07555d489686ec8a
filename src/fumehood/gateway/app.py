"""The gateway's HTTP face: which path is whose, and what becomes of errors; imports starlette's routing and siblings.

It holds no logic of its own: it reads requests, asks what is behind the interfaces, writes answers.
"""

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from re import Pattern

from starlette.routing import compile_path

from fumehood.gateway.auth import Callers, Everybody, Forbidden, check_scope, identified
from fumehood.gateway.containers import ContainerFiles, ContainerRoutes
from fumehood.gateway.exchange import Exchange, encode
from fumehood.gateway.files import Uploads
from fumehood.gateway.limits import Limits
from fumehood.gateway.metrics import CONTENT_TYPE, Metrics
from fumehood.gateway.models import ModelCards
from fumehood.gateway.openapi import PUBLIC, document
from fumehood.gateway.origins import Origins
from fumehood.gateway.reading import RequestReader
from fumehood.gateway.request_log import RequestLog, to_logging
from fumehood.gateway.responses import Responses
from fumehood.gateway.sse import SILENCE
from fumehood.gateway.websocket import Handshake, Sockets
from fumehood.interfaces import Caller, Containers, Files, Models, Runs, Store
from fumehood.protocol.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    ServerFault,
    Unavailable,
)
from fumehood.protocol.keys import KeyScope
from fumehood.protocol.shortage import find_shortage
from fumehood.serving.browsers import needs_no_preflight
from fumehood.serving.exchange import CallerLeft, Receive, Scope, Send
from fumehood.serving.routes import describe_routes, show_path
from fumehood.serving.stalled import SLOWEST

type Handler = Callable[[Exchange, Caller], Awaitable[None]]
type _RouteEntry = tuple[str, str, KeyScope | None, Handler]

NOBODY = Caller()
_SOCKET_PATH = "/v1/responses"
FILE_BYTES = 2 << 30

logger = logging.getLogger(__name__)


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class Gateway:
    """An ASGI application, for `server.Server`: WebSockets need its protocol.

    origins: the web pages that may ask.
    always_include: what every response shows, asked for or not.
    unready: tells why this gateway cannot serve now, None if it can.
    silence: seconds after which a stream that has nothing to say shows that it is alive.
    file_bytes: the largest file that anybody may upload.
    slowest: bytes in a second that a body has to come with, on the whole; 0 lets it drip.
    pass_fields: fields of requests that model servers are given as they came, besides those that all are.
    """

    def __init__(
        self,
        *,
        runs: Runs,
        store: Store,
        models: Models,
        containers: Containers,
        files: Files,
        callers: Callers | None = None,
        metrics: Metrics | None = None,
        log: RequestLog = to_logging,
        limits: Limits | None = None,
        origins: Origins | None = None,
        always_include: Collection[str] = (),
        unready: Callable[[], Awaitable[str | None]] | None = None,
        silence: float = SILENCE,
        file_bytes: int = FILE_BYTES,
        slowest: int = SLOWEST,
        show_metrics: bool = True,
        pass_fields: Collection[str] = (),
    ) -> None:
        self.metrics = metrics or Metrics()
        self.origins = origins or Origins()
        self._callers = callers or Everybody()
        self._log = log
        self._described: bytes | None = None
        self._unready = unready
        self._slowest = slowest
        limits = limits or Limits()
        self.metrics.limited = limits.refused
        responses = self.responses = Responses(
            runs,
            store,
            self.metrics,
            limits=limits,
            always=always_include,
            silence=silence,
            reader=RequestReader(pass_fields),
        )
        sockets = Sockets(
            responses,
            self._identify_socket,
            self.origins,
            self.metrics,
            tell=lambda exchange: self._tell(exchange, self._socket_place),
        )
        cards = ModelCards(models)
        container = ContainerRoutes(containers, limits)
        container_files = ContainerFiles(containers, limits, self.metrics, file_bytes)
        uploads = Uploads(files, limits, self.metrics, file_bytes)
        metrics_routes: list[_RouteEntry] = [("GET", "/metrics", "metrics", self._figures)]
        self._routes = _Routes(
            ("POST", "/v1/responses", "responses", responses.create),
            ("GET", _SOCKET_PATH, "responses", sockets.connect),
            ("POST", "/v1/responses/input_tokens", "responses", responses.count),
            ("POST", "/v1/responses/compact", "responses", responses.compact),
            ("GET", "/v1/responses/{response_id}", "responses", responses.get),
            ("DELETE", "/v1/responses/{response_id}", "responses", responses.delete),
            ("POST", "/v1/responses/{response_id}/cancel", "responses", responses.cancel),
            ("GET", "/v1/responses/{response_id}/input_items", "responses", responses.input_items),
            ("GET", "/v1/models", "models", cards.list),
            ("GET", "/v1/models/{model:path}", "models", cards.get),
            ("POST", "/v1/containers", "containers", container.create),
            ("GET", "/v1/containers", "containers", container.list),
            ("GET", "/v1/containers/{container_id}", "containers", container.get),
            ("DELETE", "/v1/containers/{container_id}", "containers", container.delete),
            ("POST", "/v1/containers/{container_id}/files", "containers", container_files.create),
            ("GET", "/v1/containers/{container_id}/files", "containers", container_files.list),
            ("GET", "/v1/containers/{container_id}/files/{file_id}", "containers", container_files.get),
            ("DELETE", "/v1/containers/{container_id}/files/{file_id}", "containers", container_files.delete),
            (
                "GET",
                "/v1/containers/{container_id}/files/{file_id}/content",
                "containers",
                container_files.content,
            ),
            ("POST", "/v1/files", "files", uploads.create),
            ("GET", "/v1/files", "files", uploads.list),
            ("GET", "/v1/files/{upload_id}", "files", uploads.get),
            ("DELETE", "/v1/files/{upload_id}", "files", uploads.delete),
            ("GET", "/v1/files/{upload_id}/content", "files", uploads.content),
            ("GET", "/healthz", None, self._health),
            ("GET", "/readyz", None, self._readiness),
            ("GET", "/openapi.json", None, self._description),
            *(metrics_routes if show_metrics else []),
        )
        self._socket_place = self._routes.at(_SOCKET_PATH)

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Methods and paths of everything that is served."""
        return [*self._routes.scopes]

    @property
    def scopes(self) -> dict[tuple[str, str], KeyScope | None]:
        """What a key has to be for, by method and path of everything that is served; None where no key is needed."""
        return self._routes.scopes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_socket = scope["type"] == "websocket"
        made = Handshake if is_socket else Exchange
        exchange = made(scope, receive, send, self._slowest)
        place = self._routes.find(exchange)
        try:
            if exchange.transfer_fault:
                raise InvalidRequest("A body may come in chunks, and in no other encoding.")
            if is_socket and place is not self._socket_place:
                raise NotFound(
                    f"There is no WebSocket at {exchange.path[:200]}; there is one at {_SOCKET_PATH}."
                )
            if b"origin" in exchange.headers:
                exchange.extra += self.origins.headers(exchange)
                if self.origins.is_asked(exchange):
                    methods = "" if place is None else ", ".join(sorted(place.routes))
                    await self.origins.answer(exchange, methods)
                    return
                if exchange.method == "POST" and needs_no_preflight(exchange.method, exchange.headers):
                    self.origins.check_page(exchange)
            caller = NOBODY if place is not None and place.path in PUBLIC else await self._identify(exchange)
            route = self._routes.route(place, exchange)
            if route.scope is not None:
                self._check_scope(caller, route.scope)
            await route.handler(exchange, caller)
        except ApiError as error:
            await self._refuse(exchange, error)
        except CallerLeft:
            exchange.noted["outcome"] = "the client left before its request was complete"
        except Exception as error:
            lack = find_shortage(error)
            if lack is None:
                logger.exception("A request could not be served (%s).", exchange.request_id)
            if exchange.started:
                raise
            await self._refuse(exchange, lack or ServerFault("The server failed; its log says why."))
        finally:
            self._tell(exchange, place)

    async def _identify(self, exchange: Exchange) -> Caller:
        headers = exchange.headers
        key = headers.get(b"authorization")
        try:
            caller = await identified(self._callers, key, headers.get(b"host", b""))
        except NotAuthenticated:
            self.metrics.not_allowed("no_key" if key is None else "wrong_key")
            raise
        except Forbidden:
            self.metrics.not_allowed("host")
            raise
        if caller.key:
            exchange.noted["key"] = caller.key
        return caller

    async def _identify_socket(self, exchange: Exchange) -> Caller:
        """Who sends the next message of a WebSocket."""
        caller = await self._identify(exchange)
        self._check_scope(caller, "responses")
        return caller

    def _check_scope(self, caller: Caller, scope: KeyScope) -> None:
        try:
            check_scope(caller, scope)
        except Forbidden:
            self.metrics.not_allowed("scope")
            raise

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        exchange.note_refusal(error)
        if exchange.started:
            raise error
        if isinstance(error, MethodNotAllowed):
            exchange.extra.append((b"allow", error.allowed.encode()))
        elif isinstance(error, NotAuthenticated):
            exchange.extra.append((b"www-authenticate", b"Bearer"))
        elif error.may_have_run or (isinstance(error, Conflict) and error.retry_after is None):
            exchange.extra.append((b"x-should-retry", b"false"))  # OpenAI's SDKs would repeat it
        await exchange.refuse(error)

    def _tell(self, exchange: Exchange, place: "_Path | None") -> None:
        route = "(unknown)" if place is None else place.path
        if exchange.status == 101:  # which takes as long as the client stays
            route += " (websocket)"
        seconds = exchange.elapsed()
        self.metrics.answered(route, exchange.status, seconds)
        self._log(
            logging.WARNING if exchange.status >= 500 else logging.INFO,
            {
                "request_id": exchange.request_id,
                "method": exchange.method,
                "route": route,
                "status": exchange.status,
                "ms": round(seconds * 1000, 3),
                **exchange.noted,
            },
        )

    # ---- the server itself ------------------------------------------------------------------------------------

    async def _health(self, exchange: Exchange, caller: Caller) -> None:
        del caller
        await exchange.answer_json({"status": "ok"})

    async def _readiness(self, exchange: Exchange, caller: Caller) -> None:
        del caller
        if self._unready is not None and (reason := await self._unready()) is not None:
            raise Unavailable(reason)
        await exchange.answer_json({"status": "ready"})

    async def _description(self, exchange: Exchange, caller: Caller) -> None:
        del caller
        if self._described is None:
            self._described = encode(document(self.routes))
        await exchange.answer(self._described)

    async def _figures(self, exchange: Exchange, caller: Caller) -> None:
        del caller
        await exchange.answer(await self.metrics.page(), content_type=CONTENT_TYPE)


@dataclass(frozen=True, slots=True)
class _Route:
    """What serves one method on one path.

    scope: what a key has to be for; None where no key is needed.
    """

    handler: Handler
    scope: KeyScope | None


class _Path:
    """All routes of one path, which is written as people read it. HEAD is served where GET is."""

    def __init__(self, path: str) -> None:
        self.path = show_path(path)
        self.routes: dict[str, _Route] = {}

    def add(self, method: str, route: _Route) -> None:
        self.routes[method] = route
        if method == "GET":
            self.routes["HEAD"] = route


class _Routes:
    """Paths without parameters are looked up, the others are tried one after another."""

    def __init__(self, *routes: _RouteEntry) -> None:
        self.scopes: dict[tuple[str, str], KeyScope | None] = {
            (method, path): scope for method, path, scope, _ in routes
        }
        places: dict[str, _Path] = {}
        for method, path, scope, handler in routes:
            places.setdefault(path, _Path(path)).add(method, _Route(handler, scope))
        self._places = {path: place for path, place in places.items() if "{" not in path}
        self._patterns: list[tuple[Pattern[str], _Path]] = [
            (compile_path(path)[0], place) for path, place in places.items() if "{" in path
        ]

    def at(self, path: str) -> _Path:
        """The place of a path without parameters."""
        return self._places[path]

    def find(self, exchange: Exchange) -> _Path | None:
        place = self._places.get(exchange.path)
        if place is not None:
            return place
        for pattern, place in self._patterns:
            if (found := pattern.match(exchange.path)) is not None:
                exchange.parameters = found.groupdict()
                return place
        return None

    def route(self, place: _Path | None, exchange: Exchange) -> _Route:
        """Raises NotFound, MethodNotAllowed."""
        if place is None:
            served = describe_routes(exchange.path, [path for _, path in self.scopes])
            raise NotFound(f"Unknown request URL: {exchange.method} {exchange.path[:200]}. {served}")
        route = place.routes.get(exchange.method)
        if route is None:
            allowed = ", ".join(sorted(place.routes))
            raise MethodNotAllowed(
                f"Not allowed to {exchange.method} on {place.path}; try {allowed}.", allowed
            )
        return route
