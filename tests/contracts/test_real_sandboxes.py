"""The conformance kit on real sandboxes, by every way to them; imports pytest and fumehood.

Each class has one server for all of its tests: what they share, they may not notice.
"""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from fumehood.interfaces import SandboxProvider
from fumehood.sandbox.local import LocalSandboxes, LocalSettings
from fumehood.sandbox.remote import RemoteSandboxes
from fumehood.sandboxd.service import Service
from fumehood.testing.sandbox_kit import SandboxKit, Subject
from tests.support.sandboxes import has_cgroups, settings
from tests.support.server import serving

TOKEN = "a-token-of-some-length"


@pytest_asyncio.fixture(loop_scope="class", scope="class")
async def subject(request: pytest.FixtureRequest) -> AsyncGenerator[Subject]:
    kit = cast("type[Any]", request.cls)  # pyright: ignore[reportUnknownMemberType]
    async with kit.opened() as made:
        yield made


@pytest.mark.asyncio(loop_scope="class")
class TestInProcess(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Subject]:
        async def another() -> SandboxProvider:
            service = Service(settings(preload=()))
            await service.start()
            return cast("SandboxProvider", service)

        async with Service(settings(preload=())) as service:
            # What it gives for references are the sandboxes themselves, since it knows nothing of the seams.
            yield Subject(cast("SandboxProvider", service), another=another)


@pytest.mark.asyncio(loop_scope="class")
class TestOverTcpWithToken(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Subject]:
        async def another() -> SandboxProvider:
            return RemoteSandboxes(server.where, TOKEN)

        async with (
            serving(settings(preload=()), token=TOKEN) as server,
            RemoteSandboxes(server.where, TOKEN) as remote,
        ):
            yield Subject(remote, another=another)


@pytest.mark.slow  # a server in a process of its own, further down, listens on a unix socket as well
@pytest.mark.asyncio(loop_scope="class")
class TestOverUnixSocket(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Subject]:
        async def another() -> SandboxProvider:
            return RemoteSandboxes(server.where)

        with tempfile.TemporaryDirectory(prefix="fh", dir="/tmp") as directory:
            async with (
                serving(settings(preload=()), path=Path(directory) / "socket") as server,
                RemoteSandboxes(server.where) as remote,
            ):
                yield Subject(remote, another=another)


@pytest.mark.asyncio(loop_scope="class")
class TestOnThisHost(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Subject]:
        limits = "enforced" if has_cgroups() else "best-effort"
        chosen = LocalSettings(limits=limits, pool=1, options=("--preload", ""))

        async def another() -> SandboxProvider:
            return LocalSandboxes(chosen)

        async with LocalSandboxes(chosen) as provider:
            yield Subject(provider, another=another)
