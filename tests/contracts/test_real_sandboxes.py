"""Real sandboxes pass the kit, over every transport. All tests of a class share one server."""

import secrets
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fumehood.interfaces import SandboxProvider, SandboxRef
from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec
from fumehood.sandbox_client.local_server_provider import LocalServerProvider, LocalServerSettings
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.sandbox_server.api.sandbox_service import SandboxService
from fumehood.sandbox_server.supervisor.in_process_sandbox import InProcessSandbox
from fumehood.testing.conformance_kits.sandbox_kit import SandboxKit, SandboxSubject
from tests.support.sandbox_runs import has_cgroups, settings
from tests.support.sandbox_server import run_server

TOKEN = "a-token-of-some-length"


class InProcessProvider:
    """The seam `SandboxProvider` on a service of this process."""

    def __init__(self, service: SandboxService) -> None:
        self._service = service
        self.close = service.close
        self.list_sandboxes = service.list_sandboxes

    async def create(self, spec: SandboxSpec, name: str | None = None) -> SandboxRef:
        sandbox, _ = await self._service.get_or_create(secrets.token_hex(8) if name is None else name, spec)
        return SandboxRef(sandbox.name)

    async def attach(self, ref: SandboxRef) -> InProcessSandbox:
        return InProcessSandbox(self._service.get(ref.id))

    async def destroy(self, ref: SandboxRef) -> None:
        await self._service.delete(ref.id)

    async def extend_lifetime(self, ref: SandboxRef, until: float) -> None:
        pass  # its sandboxes have no age


@pytest.mark.asyncio(loop_scope="class")
class TestInProcess(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def open_subject() -> AsyncGenerator[SandboxSubject]:
        async def make_provider() -> SandboxProvider:
            service = SandboxService(settings(preload=()))
            await service.start()
            return InProcessProvider(service)

        async with SandboxService(settings(preload=())) as service:
            yield SandboxSubject(InProcessProvider(service), make_provider=make_provider)


@pytest.mark.asyncio(loop_scope="class")
class TestOverTcpWithToken(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def open_subject() -> AsyncGenerator[SandboxSubject]:
        async def make_provider() -> SandboxProvider:
            return RemoteSandboxProvider(server.where, TOKEN)

        async with (
            run_server(settings(preload=()), token=TOKEN) as server,
            RemoteSandboxProvider(server.where, TOKEN) as remote,
        ):
            yield SandboxSubject(remote, make_provider=make_provider)


@pytest.mark.slow  # a server process, below, listens on a unix socket as well
@pytest.mark.asyncio(loop_scope="class")
class TestOverUnixSocket(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def open_subject() -> AsyncGenerator[SandboxSubject]:
        async def make_provider() -> SandboxProvider:
            return RemoteSandboxProvider(server.where)

        with tempfile.TemporaryDirectory(prefix="fh", dir="/tmp") as directory:
            async with (
                run_server(settings(preload=()), path=Path(directory) / "socket") as server,
                RemoteSandboxProvider(server.where) as remote,
            ):
                yield SandboxSubject(remote, make_provider=make_provider)


@pytest.mark.asyncio(loop_scope="class")
class TestOnThisHost(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def open_subject() -> AsyncGenerator[SandboxSubject]:
        limits = "enforced" if has_cgroups() else "best-effort"
        chosen = LocalServerSettings(limits=limits, pool=1, options=("--preload", ""))

        async def make_provider() -> SandboxProvider:
            return LocalServerProvider(chosen)

        async with LocalServerProvider(chosen) as provider:
            yield SandboxSubject(provider, make_provider=make_provider)
