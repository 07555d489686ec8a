"""Any provider behind the sandbox protocol, for tests of its client.

Simple where the real server is careful: no limits, no health, one token.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
from aiohttp import web

from fumehood.interfaces import SandboxProvider, SandboxRef
from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    InvalidSandboxRequest,
    InvalidServerToken,
    SandboxError,
    SandboxFileNotFound,
    SandboxPayloadTooLarge,
    to_sandbox_error_body,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    ExecuteRequest,
    ExecutionEvent,
    ReadFilesRequest,
    SandboxInfo,
    SandboxSpec,
)

OUTCOMES: dict[type[SandboxError], int] = {SandboxFileNotFound: 1, FileRefused: 2, SandboxPayloadTooLarge: 3}

type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ServerBehaviour:
    """How the server behaves; may be changed while it runs.

    chunk_size: events are sent in pieces of so many bytes; blank_lines: with so many blank lines before each event.
    """

    token: str | None = None
    version: str | None = "1"
    chunk_size: int = 1 << 16
    blank_lines: int = 0


class _Server:
    def __init__(self, provider: SandboxProvider, behaviour: ServerBehaviour) -> None:
        self.provider = provider
        self.behaviour = behaviour
        self.requests: list[str] = []

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._answer], client_max_size=0)
        app.add_routes(
            [
                web.get("/sandboxes", self._sandboxes),
                web.put("/sandboxes/{id}", self._create),
                web.get("/sandboxes/{id}", self._info),
                web.delete("/sandboxes/{id}", self._destroy),
                web.post("/sandboxes/{id}/execute", self._execute),
                web.get("/sandboxes/{id}/executions/{eid}", self._follow),
                web.post("/sandboxes/{id}/interrupt", self._interrupt),
                web.get("/sandboxes/{id}/files", self._list),
                web.get("/sandboxes/{id}/files/{path:(?s:.*)}", self._read),
                web.put("/sandboxes/{id}/files/{path:(?s:.*)}", self._write),
                web.delete("/sandboxes/{id}/files/{path:(?s:.*)}", self._delete),
                web.post("/sandboxes/{id}/read", self._read_all),
                web.post("/sandboxes/{id}/write", self._write_all),
                web.post("/sandboxes/{id}/unpack", self._unpack),
            ]
        )
        return app

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.raw_path}")
        try:
            if self.behaviour.token is not None:
                expected = f"Bearer {self.behaviour.token}"
                if request.headers.get("Authorization") != expected:
                    raise InvalidServerToken("A token is needed.")
            return await handler(request)
        except SandboxError as error:
            return self._json(to_sandbox_error_body(error), error.status)

    def _json(self, value: object, status: int = 200) -> web.Response:
        headers = self._headers()
        return web.Response(
            status=status, body=msgspec.json.encode(value), content_type="application/json", headers=headers
        )

    def _headers(self) -> dict[str, str]:
        return {} if self.behaviour.version is None else {"fumehood-sandbox-protocol": self.behaviour.version}

    async def _info_of(self, sandbox_id: str) -> SandboxInfo:
        await self.provider.attach(SandboxRef(sandbox_id))
        return next(info for info in await self.provider.list_sandboxes() if info.id == sandbox_id)

    async def _sandboxes(self, _: web.Request) -> web.Response:
        return self._json({"sandboxes": await self.provider.list_sandboxes()})

    async def _create(self, request: web.Request) -> web.Response:
        spec = msgspec.json.decode(await request.read() or b"{}", type=SandboxSpec)
        ref = await self.provider.create(spec, request.match_info["id"])
        return self._json(await self._info_of(ref.id), 201)

    async def _info(self, request: web.Request) -> web.Response:
        return self._json(await self._info_of(request.match_info["id"]))

    async def _destroy(self, request: web.Request) -> web.Response:
        await self.provider.destroy(SandboxRef(request.match_info["id"]))
        return web.Response(status=204, headers=self._headers())

    async def _sandbox(self, request: web.Request):
        return await self.provider.attach(SandboxRef(request.match_info["id"]))

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        sandbox = await self._sandbox(request)
        try:
            asked = msgspec.json.decode(await request.read(), type=ExecuteRequest)
        except msgspec.ValidationError as error:
            raise InvalidSandboxRequest(str(error)) from error
        return await self._stream(request, sandbox.execute(asked))

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        sandbox = await self._sandbox(request)
        after = int(request.query.get("after", "-1"))
        return await self._stream(request, sandbox.follow(request.match_info["eid"], after=after))

    async def _stream(
        self, request: web.Request, events: AsyncGenerator[ExecutionEvent]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=self._headers())
        response.content_type = "application/x-ndjson"
        async with aclosing(events):
            first = await anext(events, None)  # errors before the stream begins
            await response.prepare(request)
            if first is not None:
                await self._send(response, first)
            async for event in events:
                await self._send(response, event)
        await response.write_eof()
        return response

    async def _send(self, response: web.StreamResponse, event: ExecutionEvent) -> None:
        content = b"\n" * self.behaviour.blank_lines + msgspec.json.encode(event) + b"\n"
        for start in range(0, len(content), self.behaviour.chunk_size):
            await response.write(content[start : start + self.behaviour.chunk_size])

    async def _interrupt(self, request: web.Request) -> web.Response:
        sandbox = await self._sandbox(request)
        return self._json({"interrupted": await sandbox.interrupt(request.query.get("execution_id"))})

    async def _list(self, request: web.Request) -> web.Response:
        return self._json(await (await self._sandbox(request)).list_files(request.query.get("since")))

    async def _read(self, request: web.Request) -> web.StreamResponse:
        sandbox = await self._sandbox(request)
        chunks = [chunk async for chunk in sandbox.read_file(request.match_info["path"])]
        response = web.StreamResponse(headers=self._headers())
        response.content_length = sum(map(len, chunks))
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
        return response

    async def _write(self, request: web.Request) -> web.Response:
        sandbox = await self._sandbox(request)
        return self._json(await sandbox.write_file(request.match_info["path"], request.content.iter_any()))

    async def _read_all(self, request: web.Request) -> web.StreamResponse:
        sandbox = await self._sandbox(request)
        paths = msgspec.json.decode(await request.read(), type=ReadFilesRequest).paths
        response = web.StreamResponse(headers=self._headers())
        await response.prepare(request)
        async for contents in sandbox.read_files(paths):
            for content in contents:
                outcome = 0 if isinstance(content, bytes) else OUTCOMES[type(content)]
                body = content if isinstance(content, bytes) else b""
                await response.write(bytes([outcome]) + len(body).to_bytes(4) + body)
        await response.write_eof()
        return response

    async def _write_all(self, request: web.Request) -> web.Response:
        sandbox = await self._sandbox(request)

        async def files() -> AsyncGenerator[list[tuple[str, bytes]]]:
            take = request.content.readexactly
            while (await take(1)) == b"\x01":
                path, content = int.from_bytes(await take(2)), int.from_bytes(await take(4))
                yield [((await take(path)).decode("utf-8", "surrogatepass"), await take(content))]
            assert await request.content.read() == bytes(6)

        return self._json(await sandbox.write_files(files))

    async def _delete(self, request: web.Request) -> web.Response:
        await (await self._sandbox(request)).delete_file(request.match_info["path"])
        return web.Response(status=204, headers=self._headers())

    async def _unpack(self, request: web.Request) -> web.Response:
        sandbox = await self._sandbox(request)
        kind = cast(ArchiveFormat, request.query["kind"])
        content = request.content.iter_any()
        return self._json(
            await sandbox.unpack_archive(content, kind=kind, into=request.query.get("into", ""))
        )


@dataclass
class ProviderServer:
    url: str
    port: int
    requests: list[str]


@asynccontextmanager
async def serve_provider(
    provider: SandboxProvider, behaviour: ServerBehaviour | None = None, *, socket: Path | None = None
) -> AsyncGenerator[ProviderServer]:
    """The provider on a port of the loopback interface, or on a unix socket."""
    server = _Server(provider, behaviour or ServerBehaviour())
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        if socket is not None:
            await web.UnixSite(runner, socket).start()
            yield ProviderServer(f"unix:{socket}", 0, server.requests)
            return
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        yield ProviderServer(f"http://127.0.0.1:{port}", port, server.requests)
    finally:
        await runner.cleanup()
