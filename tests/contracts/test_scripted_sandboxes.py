"""The conformance kit on the scripted double; imports pytest and fumehood."""

from collections.abc import AsyncGenerator

import pytest

from fumehood.interfaces import SandboxProvider
from fumehood.testing import ScriptedSandboxes
from fumehood.testing.sandbox_kit import SandboxKit, Subject
from tests.support.behaviours import scripted


async def _another() -> SandboxProvider:
    return ScriptedSandboxes()


class TestScriptedSandboxes(SandboxKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[Subject]:
        async with scripted() as provider:
            yield Subject(provider, another=_another)
