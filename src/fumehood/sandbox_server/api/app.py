"""The ASGI application of the sandbox server: reads requests, calls the service, writes responses."""

import asyncio
import contextlib
import errno
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Generator

import msgspec
from starlette.routing import compile_path

from fumehood.http_server.asgi_exchange import ClientDisconnected, Receive, Scope, Send
from fumehood.http_server.cross_site_protection import AllowedHosts, decode_header, is_cross_site
from fumehood.http_server.route_suggestions import suggest_routes
from fumehood.protocol.sandbox.sandbox_errors import (
    ForbiddenOrigin,
    InvalidSandboxRequest,
    InvalidServerToken,
    SandboxError,
    SandboxResourceNotFound,
    SandboxServerAtCapacity,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    ExecuteRequest,
    ExecutionEnd,
    InterruptResponse,
    OneShotRequest,
    ReadFilesRequest,
    SandboxList,
    SandboxSpec,
)
from fumehood.sandbox_server import structured_logging
from fumehood.sandbox_server.api import openapi, sandbox_metrics
from fumehood.sandbox_server.api.http_operations import (
    ARCHIVE_FORMATS,
    OPERATIONS,
    ApiOperation,
)
from fumehood.sandbox_server.api.sandbox_http_exchange import (
    SandboxHttpExchange,
    SandboxMethodNotAllowed,
    decode_json,
    encode_json,
)
from fumehood.sandbox_server.api.sandbox_service import NAME_PATTERN, SandboxService, validate_name
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution
from fumehood.sandbox_server.supervisor.sandbox_files import OpenFile
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance

KEEPALIVE_SECONDS = 10.0
# Output that comes at once is sent with the response headers, in one packet.
_FIRST_EVENT_WAIT = 0.02
_DISCONNECT_CHECK_AFTER = 1.0
_TENANT_PATTERN = re.compile(r"[A-Za-z0-9_.:@-]{0,128}")
_ARCHIVE_FORMATS: dict[str, ArchiveFormat] = {kind: kind for kind in ARCHIVE_FORMATS}

type Handler = Callable[[SandboxHttpExchange], Awaitable[None]]
type _PathRoutes = dict[str, tuple[Handler, ApiOperation]]  # by method

_encode_lines = msgspec.json.Encoder().encode_lines
_decode_spec = msgspec.json.Decoder(SandboxSpec)
_decode_execute = msgspec.json.Decoder(ExecuteRequest)
_decode_read = msgspec.json.Decoder(ReadFilesRequest)
_decode_one_shot = msgspec.json.Decoder(OneShotRequest)


class SandboxServerApp:
    """An ASGI application.

    token: bearer token required of callers; None serves everybody except web pages of other sites.
    metrics_token: bearer token that gives access to the metrics only.
    host_names: without a token, the allowed Host headers; None on a unix socket, which browsers do not reach.
    """

    def __init__(
        self,
        service: SandboxService,
        *,
        token: str | None = None,
        metrics_token: str | None = None,
        host_names: AllowedHosts | None = None,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
    ) -> None:
        self._service = service
        self._host_names = host_names
        self._token = None if token is None else b"Bearer " + token.encode()
        self._metrics_token = None if metrics_token is None else b"Bearer " + metrics_token.encode()
        self._keepalive_seconds = keepalive_seconds
        self._openapi = encode_json(openapi.build_document(service.settings, protected=token is not None))
        by_path: dict[str, _PathRoutes] = {}
        for operation in OPERATIONS:
            handler: Handler = getattr(self, operation.handler)
            by_path.setdefault(operation.path, {})[operation.method] = handler, operation
        self._routes = [(_compile_path(path), routes) for path, routes in by_path.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server does not speak {scope['type']}")
        context = SandboxHttpExchange(scope, receive, send)
        try:
            handler = self._find_handler(context, context.decode_path())
            await handler(context)
        except SandboxError as error:
            await self._send_error(context, error)
        except ClientDisconnected:
            structured_logging.log_event("client_disconnected", level=logging.DEBUG, method=context.method)
        except Exception as error:
            exhausted = _find_exhausted_resource(error)
            if exhausted is None:
                structured_logging.logger.exception("Unhandled error in a request.")
            if context.started:
                raise
            if exhausted is None:
                await self._send_error(context, SandboxError("The sandbox server failed; its log says why."))
            else:
                await self._send_error(
                    context,
                    SandboxServerAtCapacity(f"The sandbox server is short of {exhausted}; try again later."),
                )

    async def _send_error(self, exchange: SandboxHttpExchange, error: SandboxError) -> None:
        self._service.metrics.record_error(error.code)
        structured_logging.log_event(
            "request_rejected",
            level=logging.WARNING if error.status >= 500 else logging.INFO,
            method=exchange.method,
            status=error.status,
            code=error.code,
            param=error.param,
            sandbox=_sandbox_for_log(exchange.path_parameters.get("id")),
        )
        if not exchange.started:
            extra = [(b"www-authenticate", b"Bearer")] if isinstance(error, InvalidServerToken) else None
            if isinstance(error, SandboxMethodNotAllowed):
                extra = [(b"allow", error.allowed.encode())]
            await exchange.send_error(error, extra)

    def _find_handler(self, exchange: SandboxHttpExchange, path: str) -> Handler:
        """Find the handler of a request, and check that the caller may use it."""
        routes = self._match_path(exchange, path)
        if routes is None:
            self._authorize(exchange)
            suggestion = suggest_routes(path, [operation.path for operation in OPERATIONS])
            raise SandboxResourceNotFound(
                f"Unknown request URL: {exchange.method} {path[:200]}. {suggestion}"
            )
        route = routes.get("GET" if exchange.method == "HEAD" else exchange.method)
        if route is None:
            self._authorize(exchange)
            methods = {*routes, "HEAD"} if "GET" in routes else {*routes}
            raise SandboxMethodNotAllowed(", ".join(sorted(methods)))
        handler, operation = route
        if operation.protected:
            self._authorize(exchange, for_metrics=operation.accepts_metrics_token)
        return handler

    def _match_path(self, exchange: SandboxHttpExchange, path: str) -> _PathRoutes | None:
        for pattern, routes in self._routes:
            if (match := pattern.match(path)) is not None:
                exchange.path_parameters = match.groupdict()
                return routes
        return None

    def _authorize(
        self, exchange: SandboxHttpExchange, *, protected: bool = True, for_metrics: bool = False
    ) -> bool:
        """Whether the caller sent the token.

        Raises InvalidServerToken if it is required, ForbiddenOrigin for web pages of other sites.
        """
        if self._token is None:
            self._check_origin(exchange)
        allowed = self._token is None or _has_token(exchange, self._token)
        if for_metrics and self._metrics_token is not None:
            allowed = allowed or _has_token(exchange, self._metrics_token)
        if protected and not allowed:
            raise InvalidServerToken("Missing or invalid token; send the header Authorization: Bearer TOKEN.")
        exchange.check_protocol_version()
        return allowed

    def _check_origin(self, exchange: SandboxHttpExchange) -> None:
        host = exchange.headers.get(b"host", b"")
        if self._host_names is not None and not self._host_names.matches(host):
            raise ForbiddenOrigin(
                f"This server is not called {decode_header(host)[:100]!r}. Call it by its address or as localhost, or "
                "give it a token (--token-file): then any name will do.",
                param="host",
            )
        if is_cross_site(exchange.headers):
            raise ForbiddenOrigin("Web pages of other sites may not use this server.", param="origin")

    def _find_sandbox(self, exchange: SandboxHttpExchange) -> SandboxInstance:
        return self._service.get(_read_name(exchange, "id"))

    @contextlib.contextmanager
    def _use_sandbox(self, exchange: SandboxHttpExchange) -> Generator[SandboxInstance]:
        sandbox = self._find_sandbox(exchange)
        with sandbox.in_use():
            yield sandbox

    # ---- sandboxes --------------------------------------------------------------------------------------------

    async def put_sandbox(self, exchange: SandboxHttpExchange) -> None:
        name = _read_name(exchange, "id")
        settings = self._service.settings
        exchange.require_json()
        body = await exchange.read_body(settings.request_bytes, settings.request_seconds)
        spec = decode_json(_decode_spec, body) if body.strip() else SandboxSpec()
        sandbox, new = await self._service.get_or_create(name, spec)
        await exchange.send_json(sandbox.info(), 201 if new else 200)

    async def get_sandbox(self, exchange: SandboxHttpExchange) -> None:
        await exchange.send_json(self._find_sandbox(exchange).info())

    async def delete_sandbox(self, exchange: SandboxHttpExchange) -> None:
        await self._service.delete(_read_name(exchange, "id"))
        await exchange.send_no_content()

    async def list_sandboxes(self, exchange: SandboxHttpExchange) -> None:
        tenant = exchange.query_value("tenant")
        if tenant is not None and _TENANT_PATTERN.fullmatch(tenant) is None:
            raise InvalidSandboxRequest(
                "A tenant has at most 128 letters, digits and . _ : @ -", param="tenant"
            )
        await exchange.send_json(SandboxList(sandboxes=await self._service.list_sandboxes(tenant)))

    # ---- executions -------------------------------------------------------------------------------------------

    async def execute(self, exchange: SandboxHttpExchange) -> None:
        name = _read_name(exchange, "id")
        settings = self._service.settings
        request = await exchange.read_json(_decode_execute, settings.request_bytes, settings.request_seconds)
        sandbox = self._service.get_live_or_ended(name) if request.execution_id else self._service.get(name)
        await self._stream_events(exchange, self._service.start_execution(sandbox, request))

    async def follow(self, exchange: SandboxHttpExchange) -> None:
        sandbox = self._service.get_live_or_ended(_read_name(exchange, "id"))
        after = _parse_number(exchange.query_value("after"), "after", -1)
        if after < -1:
            raise InvalidSandboxRequest("`after` is the number of an event, or -1.", param="after")
        execution = sandbox.executions.get(_read_name(exchange, "execution_id"))
        sandbox.touch()
        await self._stream_events(exchange, execution, after)

    async def _stream_events(
        self, exchange: SandboxHttpExchange, execution: SandboxExecution, after: int = -1
    ) -> None:
        """Send events as they come; the execution goes on when the client disconnects."""
        if exchange.method == "HEAD":
            await exchange.start_event_stream(execution.id)
            await exchange.send(b"", more=False)
            return
        if not execution.event_log:
            await execution.wait_for_events(_FIRST_EVENT_WAIT)
        first = execution.next_batch(after + 1)
        await exchange.start_event_stream(execution.id, _encode_lines(first))
        after += len(first)
        timeout = min(_DISCONNECT_CHECK_AFTER, self._keepalive_seconds)
        disconnect: asyncio.Task[None] | None = None
        silent = 0.0
        try:
            async for batch in execution.event_batches(after, timeout=timeout):
                if disconnect is None and not batch:
                    disconnect = asyncio.ensure_future(exchange.wait_for_disconnect())
                    disconnect.add_done_callback(lambda _: execution.notify_readers())
                if disconnect is not None and disconnect.done():
                    return
                if batch:
                    silent = 0.0
                    last = isinstance(batch[-1], ExecutionEnd)
                    await exchange.send(_encode_lines(batch), more=not last)
                    if last:
                        return
                elif (silent := silent + timeout) >= self._keepalive_seconds:
                    silent = 0.0
                    await exchange.send(b"\n")
            await exchange.send(b"", more=False)
        finally:
            if disconnect is not None:
                disconnect.cancel()

    async def interrupt(self, exchange: SandboxHttpExchange) -> None:
        with self._use_sandbox(exchange) as sandbox:
            execution_id = exchange.query_value("execution_id")
            if execution_id is not None:
                validate_name(execution_id, "execution_id")
            interrupted = sandbox.executions.interrupt(execution_id)
        await exchange.send_json(InterruptResponse(interrupted=interrupted))

    async def execute_once(self, exchange: SandboxHttpExchange) -> None:
        settings = self._service.settings
        request = await exchange.read_json(
            _decode_one_shot, settings.one_shot_bytes, settings.request_seconds
        )
        work = asyncio.ensure_future(self._service.execute_once(request))
        del request  # it may be large
        disconnect = asyncio.ensure_future(exchange.wait_for_disconnect())
        disconnect.add_done_callback(lambda _: work.cancel())
        try:
            await exchange.send_json(await work)
        except asyncio.CancelledError:
            if not disconnect.done():
                raise
            raise ClientDisconnected from None
        finally:
            work.cancel()
            disconnect.cancel()

    # ---- files ------------------------------------------------------------------------------------------------

    async def list_files(self, exchange: SandboxHttpExchange) -> None:
        with self._use_sandbox(exchange) as sandbox:
            await exchange.send_json(await sandbox.files.list(exchange.query_value("since")))

    async def read_file(self, exchange: SandboxHttpExchange) -> None:
        with self._use_sandbox(exchange) as sandbox:
            async with await sandbox.files.open(exchange.path_parameters["path"]) as opened:
                try:
                    await self._send_file(exchange, opened)
                finally:
                    self._service.metrics.record_file_bytes("out", opened.bytes_read)

    async def _send_file(self, exchange: SandboxHttpExchange, opened: OpenFile) -> None:
        await exchange.start_binary_response(opened.size)
        left = 0 if exchange.method == "HEAD" else opened.size
        if not left:
            await exchange.send(b"", more=False)
            return
        async with contextlib.aclosing(opened.chunks()) as chunks:
            async for chunk in chunks:
                left -= len(chunk)
                await exchange.send(chunk, more=left > 0)

    async def write_file(self, exchange: SandboxHttpExchange) -> None:
        with self._use_sandbox(exchange) as sandbox:
            chunks = exchange.iter_chunks(self._service.settings.file_bytes)
            executable = exchange.query_value("executable") or "false"
            if executable not in ("true", "false"):
                raise InvalidSandboxRequest("`executable` is true or false.", param="executable")
            path = exchange.path_parameters["path"]
            entry = await sandbox.files.write(path, chunks, executable=executable == "true")
        self._service.metrics.record_file_bytes("in", entry.size)
        await exchange.send_json(entry)

    async def read_files(self, exchange: SandboxHttpExchange) -> None:
        settings = self._service.settings
        with self._use_sandbox(exchange) as sandbox:
            request = await exchange.read_json(_decode_read, settings.request_bytes, settings.request_seconds)
            async with contextlib.aclosing(sandbox.files.read_bundle(request.paths)) as chunks:
                first = await anext(chunks, b"")  # before that, an error can still be sent as a response
                await exchange.start_binary_response()
                await self._send_read_chunk(exchange, first)
                async for chunk in chunks:
                    await self._send_read_chunk(exchange, chunk)
        await exchange.send(b"", more=False)

    async def _send_read_chunk(self, exchange: SandboxHttpExchange, chunk: bytes) -> None:
        self._service.metrics.record_file_bytes("out", len(chunk))
        await exchange.send(chunk)

    async def write_files(self, exchange: SandboxHttpExchange) -> None:
        exchange.require_binary()
        with self._use_sandbox(exchange) as sandbox:
            chunks = exchange.iter_chunks(self._service.settings.file_bytes)
            written = await sandbox.files.write_bundle(chunks)
        self._service.metrics.record_file_bytes("in", written.bytes)
        await exchange.send_json(written)

    async def delete_file(self, exchange: SandboxHttpExchange) -> None:
        with self._use_sandbox(exchange) as sandbox:
            await sandbox.files.delete(exchange.path_parameters["path"])
        await exchange.send_no_content()

    async def unpack(self, exchange: SandboxHttpExchange) -> None:
        exchange.require_binary()
        with self._use_sandbox(exchange) as sandbox:
            kind = _ARCHIVE_FORMATS.get(exchange.query_value("kind") or "")
            if kind is None:
                raise InvalidSandboxRequest(f"`kind` is one of {', '.join(ARCHIVE_FORMATS)}.", param="kind")
            chunks = exchange.iter_chunks(self._service.settings.file_bytes)
            unpacked = await sandbox.files.unpack(chunks, kind=kind, into=exchange.query_value("into") or "")
        self._service.metrics.record_file_bytes("in", unpacked.bytes)
        await exchange.send_json(unpacked)

    # ---- the server itself ------------------------------------------------------------------------------------

    async def health(self, exchange: SandboxHttpExchange) -> None:
        health = self._service.health()
        status = 200 if health.status == "ok" else 503
        if self._authorize(exchange, protected=False):
            await exchange.send_json(health, status)
        else:
            await exchange.send_json({"status": health.status}, status)

    async def metrics(self, exchange: SandboxHttpExchange) -> None:
        await exchange.send_response(
            200, self._service.metrics.render(), sandbox_metrics.CONTENT_TYPE.encode()
        )

    async def openapi(self, exchange: SandboxHttpExchange) -> None:
        await exchange.send_response(200, self._openapi)


def _compile_path(path: str) -> re.Pattern[str]:
    pattern, _, _ = compile_path(path.replace("{path}", "{path:path}"))
    return re.compile(pattern.pattern, re.DOTALL)  # a file name may contain a newline


def _has_token(exchange: SandboxHttpExchange, token: bytes) -> bool:
    sent = exchange.authorization_headers()
    return len(sent) == 1 and hmac.compare_digest(sent[0], token)


def _read_name(exchange: SandboxHttpExchange, parameter: str) -> str:
    return validate_name(exchange.path_parameters[parameter], parameter)


def _parse_number(text: str | None, parameter: str, default: int) -> int:
    if text is None:
        return default
    if re.fullmatch(r"-?[0-9]{1,18}", text) is None:
        raise InvalidSandboxRequest(f"`{parameter}` is not a number.", param=parameter)
    return int(text)


def _find_exhausted_resource(error: Exception) -> str | None:
    """The resource whose lack raised the error; None for any other error."""
    if isinstance(error, MemoryError):
        return "memory"
    scarce = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return "file descriptors" if scarce else None


def _sandbox_for_log(name: str | None) -> str | None:
    return name if name is not None and NAME_PATTERN.fullmatch(name) else None
