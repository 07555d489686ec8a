"""A sandbox server for tests, on a real socket, and a client for it."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from fumehood.http_server.listening_sockets import ListenAddress, listen
from fumehood.sandbox_server.api.app import KEEPALIVE_SECONDS
from fumehood.sandbox_server.api.sandbox_service import SandboxService
from fumehood.sandbox_server.api.server import SandboxServer
from fumehood.sandbox_server.settings import SandboxServerSettings

TIMEOUT_SECONDS = 30
_TAKES_BYTES = r"/sandboxes/[^/]*/(files/|write|unpack)"


@dataclass(frozen=True)
class HttpAnswer:
    """What came back, whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str, str | None]:
        """Status, code and parameter of a refusal."""
        found = self.json["error"]
        return self.status, found["code"], found["param"]

    @property
    def events(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines() if line]


def content_type_for(path: str) -> str:
    """What the body of a request to that path is sent as."""
    return "application/octet-stream" if re.search(_TAKES_BYTES, path) else "application/json"


class SandboxApiClient:
    """Asks one server; `base` is what its ready line says."""

    def __init__(self, base: str, token: str | None = None) -> None:
        self._url = "http://sandboxes" if base.startswith("unix:") else base
        connector = aiohttp.UnixConnector(base[5:]) if base.startswith("unix:") else None
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self.session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        )

    def url(self, path: str) -> Any:
        import yarl

        return yarl.URL(self._url + path, encoded=True)

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> HttpAnswer:
        """`body` is sent as it is if it is bytes, else as JSON; as bytes only to where bytes belong."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if data is None else {"content-type": content_type_for(path)}
        headers |= options.pop("headers", {})
        async with self.session.request(
            method, self.url(path), data=data, headers=headers, **options
        ) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return HttpAnswer(response.status, headers, await response.read())

    async def create_sandbox(self, name: str, **spec: Any) -> None:
        answer = await self.request("PUT", f"/sandboxes/{name}", spec)
        assert answer.status == 201, answer.body

    async def run_code(self, name: str, code: str, **request: Any) -> list[Any]:
        answer = await self.request("POST", f"/sandboxes/{name}/execute", {"code": code, **request})
        assert answer.status == 200, answer.body
        return answer.events

    async def delete_all(self) -> None:
        """End whatever lives."""
        for sandbox in (await self.request("GET", "/sandboxes")).json["sandboxes"]:
            await self.request("DELETE", f"/sandboxes/{sandbox['id']}")


@dataclass(frozen=True)
class RunningServer:
    """A server that runs in this process."""

    where: str
    server: SandboxServer
    client: SandboxApiClient
    task: asyncio.Task[None]

    @property
    def service(self) -> SandboxService:
        return self.server.service


@asynccontextmanager
async def run_server(
    settings: SandboxServerSettings,
    *,
    path: Path | None = None,
    token: str | None = None,
    metrics_token: str | None = None,
    grace: float = 0.0,
    keepalive_seconds: float = KEEPALIVE_SECONDS,
) -> AsyncGenerator[RunningServer]:
    """A server on a free port or on a unix socket, until the block is left."""
    listener = listen(ListenAddress(port=0, path=path))
    server = SandboxServer(
        settings,
        listener,
        token=token,
        metrics_token=metrics_token,
        grace_seconds=grace,
        keepalive_seconds=keepalive_seconds,
    )
    ready = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(server.serve(lambda: ready.set_result(None)))
    await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    client = SandboxApiClient(listener.url, token)
    try:
        yield RunningServer(listener.url, server, client, task)
    finally:
        await client.session.close()
        server.stop()
        await task
