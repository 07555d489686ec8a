"""The HTTP face of the service, on bare ASGI; imports starlette's routing and siblings.

It holds no logic of its own: it reads requests, asks the service, writes answers.
"""

import asyncio
import contextlib
import errno
import hmac
import logging
import re
from typing import override

import msgspec
from starlette.routing import Match, Route, Router

from fumehood.protocol.sandbox import (
    ArchiveFormat,
    End,
    ExecuteRequest,
    OneShotRequest,
    ReadRequest,
    SandboxSpec,
)
from fumehood.protocol.sandbox_errors import (
    AtCapacity,
    Forbidden,
    NotAllowed,
    NotThere,
    RequestRefused,
    SandboxError,
)
from fumehood.sandboxd import logs, metrics, openapi
from fumehood.sandboxd.calls import Call
from fumehood.sandboxd.http_exchange import Exchange, MethodNotAllowed, decode, encode
from fumehood.sandboxd.operations import ARCHIVES, OPERATIONS, Interrupted, Operation, SandboxList
from fumehood.sandboxd.served import ServedSandbox
from fumehood.sandboxd.service import NAME, Service, check_name
from fumehood.serving.browsers import HostNames, decode_header, is_foreign_page
from fumehood.serving.exchange import CallerLeft, Receive, Scope, Send
from fumehood.serving.routes import describe_routes

SIGN_OF_LIFE = 10.0
# What code prints at once travels with the head of the answer: one packet, one wake-up of the reader.
_HEAD_START = 0.02
_FIRST_LOOK = 1.0  # seconds until it is worth watching whether a reader is still there
_TENANT = re.compile(r"[A-Za-z0-9_.:@-]{0,128}")
_KINDS: dict[str, ArchiveFormat] = {kind: kind for kind in ARCHIVES}

_encode_lines = msgspec.json.Encoder().encode_lines
_decode_spec = msgspec.json.Decoder(SandboxSpec)
_decode_execute = msgspec.json.Decoder(ExecuteRequest)
_decode_read = msgspec.json.Decoder(ReadRequest)
_decode_one_shot = msgspec.json.Decoder(OneShotRequest)


class App:
    """An ASGI application.

    token: what callers have to show; None serves everybody but the web pages of other sites.
    metrics_token: lets those who show it read the metrics, and nothing else.
    hosts: without a token, the names by which the server may be called; None on a unix socket, which browsers do not
    reach.
    """

    def __init__(
        self,
        service: Service,
        *,
        token: str | None = None,
        metrics_token: str | None = None,
        hosts: HostNames | None = None,
        sign_of_life: float = SIGN_OF_LIFE,
    ) -> None:
        self._service = service
        self._hosts = hosts
        self._token = None if token is None else b"Bearer " + token.encode()
        self._metrics_token = None if metrics_token is None else b"Bearer " + metrics_token.encode()
        self._sign_of_life = sign_of_life
        self._openapi = encode(openapi.document(service.settings, protected=token is not None))
        by_path: dict[str, dict[str, Operation]] = {}
        for operation in OPERATIONS:
            by_path.setdefault(operation.path, {})[operation.method] = operation
        self._router = Router(
            [_Place(self, path, operations) for path, operations in by_path.items()],
            redirect_slashes=False,
            default=self._nowhere,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server does not speak {scope['type']}")
        exchange = Exchange(scope, receive, send)
        scope["exchange"] = exchange
        try:
            scope["path"] = exchange.path()
            await self._router.app(scope, receive, send)
        except SandboxError as error:
            await self._refuse(exchange, error)
        except CallerLeft:
            logs.event("caller_left", level=logging.DEBUG, method=exchange.method)
        except Exception as error:
            lacking = _name_shortage(error)
            if lacking is None:
                logs.logger.exception("A request could not be served.")
            if exchange.started:
                raise
            if lacking is None:
                await self._refuse(exchange, SandboxError("The sandbox server failed; its log says why."))
            else:
                await self._refuse(
                    exchange, AtCapacity(f"The sandbox server is short of {lacking}; try again later.")
                )

    async def _refuse(self, exchange: Exchange, error: SandboxError) -> None:
        self._service.metrics.refused(error.code)
        logs.event(
            "request_refused",
            level=logging.WARNING if error.status >= 500 else logging.INFO,
            method=exchange.method,
            status=error.status,
            code=error.code,
            param=error.param,
            sandbox=_loggable(exchange.parameters.get("id")),
        )
        if not exchange.started:
            extra = [(b"www-authenticate", b"Bearer")] if isinstance(error, NotAllowed) else None
            if isinstance(error, _WrongMethod):
                extra = [(b"allow", error.allowed.encode())]
            await exchange.refuse(error, extra)

    async def _nowhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive, send
        exchange: Exchange = scope["exchange"]
        self.check(exchange)
        path: str = scope["path"]
        served = describe_routes(path, [operation.path for operation in OPERATIONS])
        raise NotThere(f"Unknown request URL: {exchange.method} {path[:200]}. {served}")

    def check(self, exchange: Exchange, *, protected: bool = True, for_metrics: bool = False) -> bool:
        """Whether the caller showed the token; NotAllowed if it is needed, Forbidden for web pages of other sites."""
        if self._token is None:
            self._check_page(exchange)
        allowed = self._token is None or _shows(exchange, self._token)
        if for_metrics and self._metrics_token is not None:
            allowed = allowed or _shows(exchange, self._metrics_token)
        if protected and not allowed:
            raise NotAllowed("This server wants its token: Authorization: Bearer TOKEN.")
        exchange.check_version()
        return allowed

    def _check_page(self, exchange: Exchange) -> None:
        host = exchange.headers.get(b"host", b"")
        if self._hosts is not None and not self._hosts.include(host):
            raise Forbidden(
                f"This server is not called {decode_header(host)[:100]!r}. Call it by its address or as localhost, or "
                "give it a token (--token-file): then any name will do.",
                param="host",
            )
        if is_foreign_page(exchange.headers):
            raise Forbidden("Web pages of other sites may not use this server.", param="origin")

    def _sandbox(self, exchange: Exchange) -> ServedSandbox:
        return self._service.find(_name(exchange, "id"))

    # ---- sandboxes --------------------------------------------------------------------------------------------

    async def put_sandbox(self, exchange: Exchange) -> None:
        name = _name(exchange, "id")
        settings = self._service.settings
        exchange.check_json()
        body = await exchange.body(settings.request_bytes, settings.request_seconds)
        spec = decode(_decode_spec, body) if body.strip() else SandboxSpec()
        served, new = await self._service.put(name, spec)
        await exchange.answer_json(served.info(), 201 if new else 200)

    async def get_sandbox(self, exchange: Exchange) -> None:
        await exchange.answer_json(self._sandbox(exchange).info())

    async def delete_sandbox(self, exchange: Exchange) -> None:
        await self._service.destroy(_Named(_name(exchange, "id")))
        await exchange.answer_nothing()

    async def list_sandboxes(self, exchange: Exchange) -> None:
        tenant = exchange.query("tenant")
        if tenant is not None and _TENANT.fullmatch(tenant) is None:
            raise RequestRefused("A tenant has at most 128 letters, digits and . _ : @ -", param="tenant")
        await exchange.answer_json(SandboxList(sandboxes=await self._service.sandboxes(tenant)))

    # ---- executions -------------------------------------------------------------------------------------------

    async def execute(self, exchange: Exchange) -> None:
        name = _name(exchange, "id")
        settings = self._service.settings
        request = await exchange.read_json(_decode_execute, settings.request_bytes, settings.request_seconds)
        served = self._service.find_any(name) if request.execution_id else self._service.find(name)
        await self._stream(exchange, served.begin(request))

    async def follow(self, exchange: Exchange) -> None:
        served = self._service.find_any(_name(exchange, "id"))
        after = _number(exchange.query("after"), "after", -1)
        if after < -1:
            raise RequestRefused("`after` is the number of an event, or -1.", param="after")
        call = served.calls.find(_name(exchange, "execution_id"))
        served.touch()
        await self._stream(exchange, call, after)

    async def _stream(self, exchange: Exchange, call: Call, after: int = -1) -> None:
        """Write events as they come; the code does not mind when nobody listens any more."""
        if exchange.method == "HEAD":
            await exchange.begin_events(call.id)
            await exchange.send(b"", more=False)
            return
        if not call.execution.log:
            await call.execution.wait_for_more(_HEAD_START)
        await exchange.begin_events(call.id)
        patience = min(_FIRST_LOOK, self._sign_of_life)
        watcher: asyncio.Task[None] | None = None
        silent = 0.0
        try:
            async for batch in call.batches(after, patience=patience):
                if watcher is None and not batch:
                    watcher = asyncio.ensure_future(exchange.until_left())
                    watcher.add_done_callback(lambda _: call.execution.wake_readers())
                if watcher is not None and watcher.done():
                    return
                if batch:
                    silent = 0.0
                    last = isinstance(batch[-1], End)
                    await exchange.send(_encode_lines(batch), more=not last)
                    if last:
                        return
                elif (silent := silent + patience) >= self._sign_of_life:
                    silent = 0.0
                    await exchange.send(b"\n")
            await exchange.send(b"", more=False)
        finally:
            if watcher is not None:
                watcher.cancel()

    async def interrupt(self, exchange: Exchange) -> None:
        served = self._sandbox(exchange)
        execution_id = exchange.query("execution_id")
        if execution_id is not None:
            check_name(execution_id, "execution_id")
        await exchange.answer_json(Interrupted(interrupted=await served.interrupt(execution_id)))

    async def execute_once(self, exchange: Exchange) -> None:
        settings = self._service.settings
        request = await exchange.read_json(
            _decode_one_shot, settings.one_shot_bytes, settings.request_seconds
        )
        work = asyncio.ensure_future(self._service.execute_once(request))
        del request  # it may be large
        watcher = asyncio.ensure_future(exchange.until_left())
        watcher.add_done_callback(lambda _: work.cancel())
        try:
            await exchange.answer_json(await work)
        except asyncio.CancelledError:
            if not watcher.done():
                raise
            raise CallerLeft from None
        finally:
            work.cancel()
            watcher.cancel()

    # ---- files ------------------------------------------------------------------------------------------------

    async def list_files(self, exchange: Exchange) -> None:
        await exchange.answer_json(await self._sandbox(exchange).list(exchange.query("since")))

    async def read_file(self, exchange: Exchange) -> None:
        async with self._sandbox(exchange).open(exchange.parameters["path"]) as opened:
            await exchange.begin_bytes(opened.size)
            if exchange.method == "HEAD":
                await exchange.send(b"", more=False)
                return
            left = opened.size
            async with contextlib.aclosing(opened.chunks()) as chunks:
                async for chunk in chunks:
                    chunk = chunk[:left]
                    left -= len(chunk)
                    await exchange.send(chunk, more=left > 0)
                    if not left:
                        return
            if left == opened.size == 0:
                await exchange.send(b"", more=False)

    async def write_file(self, exchange: Exchange) -> None:
        served = self._sandbox(exchange)
        chunks = exchange.chunks(self._service.settings.file_bytes)
        executable = exchange.query("executable") or "false"
        if executable not in ("true", "false"):
            raise RequestRefused("`executable` is true or false.", param="executable")
        path = exchange.parameters["path"]
        await exchange.answer_json(await served.write(path, chunks, executable=executable == "true"))

    async def read_files(self, exchange: Exchange) -> None:
        served = self._sandbox(exchange)
        settings = self._service.settings
        request = await exchange.read_json(_decode_read, settings.request_bytes, settings.request_seconds)
        async with contextlib.aclosing(served.give(request.paths)) as pieces:
            first = await anext(pieces, b"")  # until then it can be refused
            await exchange.begin_bytes()
            await exchange.send(first)
            async for piece in pieces:
                await exchange.send(piece)
        await exchange.send(b"", more=False)

    async def write_files(self, exchange: Exchange) -> None:
        exchange.check_bytes()
        served = self._sandbox(exchange)
        chunks = exchange.chunks(self._service.settings.file_bytes)
        await exchange.answer_json(await served.receive(chunks))

    async def delete_file(self, exchange: Exchange) -> None:
        await self._sandbox(exchange).delete(exchange.parameters["path"])
        await exchange.answer_nothing()

    async def unpack(self, exchange: Exchange) -> None:
        exchange.check_bytes()
        served = self._sandbox(exchange)
        kind = _KINDS.get(exchange.query("kind") or "")
        if kind is None:
            raise RequestRefused(f"`kind` is one of {', '.join(ARCHIVES)}.", param="kind")
        unpacked = await served.unpack(
            exchange.chunks(self._service.settings.file_bytes),
            kind=kind,
            into=exchange.query("into") or "",
        )
        await exchange.answer_json(unpacked)

    # ---- the server itself ------------------------------------------------------------------------------------

    async def health(self, exchange: Exchange) -> None:
        health = self._service.health()
        status = 200 if health.status == "ok" else 503
        if self.check(exchange, protected=False):
            await exchange.answer_json(health, status)
        else:
            await exchange.answer_json({"status": health.status}, status)

    async def metrics(self, exchange: Exchange) -> None:
        await exchange.answer(200, self._service.metrics.text(), metrics.CONTENT_TYPE.encode())

    async def openapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, self._openapi)


class _Place(Route):
    """All operations of one path."""

    def __init__(self, app: App, path: str, operations: dict[str, Operation]) -> None:
        super().__init__(path.replace("{path}", "{path:path}"), app, methods=[*operations])
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)  # a name may hold a newline
        self._application = app
        self._operations = {
            method: (getattr(app, operation.handler), operation) for method, operation in operations.items()
        }
        if "GET" in self._operations:
            self._operations["HEAD"] = self._operations["GET"]
        self.methods = {*self._operations}

    @override
    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = self.path_regex.match(scope["path"])
        if found is None:
            return Match.NONE, {}
        return Match.FULL, {"path_params": found.groupdict()}

    @override
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive, send
        exchange: Exchange = scope["exchange"]
        operation = self._operations.get(exchange.method)
        if operation is None:
            self._application.check(exchange)
            raise _WrongMethod(", ".join(sorted(self._operations)))
        handler, described = operation
        if described.protected:
            self._application.check(exchange, for_metrics=described.for_metrics)
        exchange.parameters = scope["path_params"]
        await handler(exchange)


class _WrongMethod(MethodNotAllowed):
    def __init__(self, allowed: str) -> None:
        super().__init__(f"This path allows {allowed}.")
        self.allowed = allowed


class _Named:
    def __init__(self, name: str) -> None:
        self.id = name


def _shows(exchange: Exchange, token: bytes) -> bool:
    shown = exchange.tokens()
    return len(shown) == 1 and hmac.compare_digest(shown[0], token)


def _name(exchange: Exchange, parameter: str) -> str:
    return check_name(exchange.parameters[parameter], parameter)


def _number(text: str | None, parameter: str, default: int) -> int:
    if text is None:
        return default
    if re.fullmatch(r"-?[0-9]{1,18}", text) is None:
        raise RequestRefused(f"`{parameter}` is not a number.", param=parameter)
    return int(text)


def _name_shortage(error: Exception) -> str | None:
    """What there was too little of when that was raised; None if it is about something else."""
    if isinstance(error, MemoryError):
        return "memory"
    scarce = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return "file descriptors" if scarce else None


def _loggable(name: str | None) -> str | None:
    return name if name is not None and NAME.fullmatch(name) else None
