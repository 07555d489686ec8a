"""The remote provider passes the kit, with a fake sandbox server."""

from collections.abc import AsyncGenerator

import pytest

from fumehood.interfaces import SandboxProvider
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.testing.conformance_kits.sandbox_kit import SandboxKit, SandboxSubject
from tests.support.sandbox_http import ServerBehaviour, serve_provider
from tests.support.scripted_sandbox_programs import make_scripted_sandboxes


class TestWithScriptedSandboxes(SandboxKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[SandboxSubject]:
        async def another() -> SandboxProvider:
            return RemoteSandboxProvider(server.url, "a-token")

        async with (
            make_scripted_sandboxes() as provider,
            serve_provider(provider, ServerBehaviour(token="a-token")) as server,
            RemoteSandboxProvider(server.url, "a-token") as remote,
        ):
            yield SandboxSubject(remote, make_provider=another)
