"""Real sandboxes pass the kit, over every transport. All tests of a class share one server."""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from fumehood.interfaces import SandboxProvider
from fumehood.sandbox_client.local_provider import LocalSandboxProvider, LocalServerSettings
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.sandbox_server.api.sandbox_service import SandboxService
from fumehood.testing.kits.sandbox_kit import SandboxKit, SandboxSubject
from tests.support.sandbox_runs import has_cgroups, settings
from tests.support.sandbox_server import run_server

TOKEN = "a-token-of-some-length"


@pytest_asyncio.fixture(loop_scope="class", scope="class")
async def subject(request: pytest.FixtureRequest) -> AsyncGenerator[SandboxSubject]:
    kit = cast("type[Any]", request.cls)  # pyright: ignore[reportUnknownMemberType]
    async with kit.open_subject() as subject:
        yield subject


@pytest.mark.asyncio(loop_scope="class")
class TestInProcess(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def open_subject() -> AsyncGenerator[SandboxSubject]:
        async def make_provider() -> SandboxProvider:
            service = SandboxService(settings(preload=()))
            await service.start()
            return cast("SandboxProvider", service)

        async with SandboxService(settings(preload=())) as service:
            # Its references are the sandboxes themselves, since it does not know the seams.
            yield SandboxSubject(cast("SandboxProvider", service), make_provider=make_provider)


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
            return LocalSandboxProvider(chosen)

        async with LocalSandboxProvider(chosen) as provider:
            yield SandboxSubject(provider, make_provider=make_provider)
