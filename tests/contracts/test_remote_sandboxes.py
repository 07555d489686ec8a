"""The conformance kit on the client of the sandbox protocol, with a double behind it; imports pytest, fumehood."""

from collections.abc import AsyncGenerator

import pytest

from fumehood.interfaces import SandboxProvider
from fumehood.sandbox.remote import RemoteSandboxes
from fumehood.testing.sandbox_kit import SandboxKit, Subject
from tests.support.behaviours import scripted
from tests.support.sandbox_http import Manners, served


class TestWithScriptedSandboxes(SandboxKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[Subject]:
        async def another() -> SandboxProvider:
            return RemoteSandboxes(server.url, "a-token")

        async with (
            scripted() as provider,
            served(provider, Manners(token="a-token")) as server,
            RemoteSandboxes(server.url, "a-token") as remote,
        ):
            yield Subject(remote, another=another)
