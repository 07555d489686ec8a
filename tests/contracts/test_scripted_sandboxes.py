"""`ScriptedSandboxProvider` passes the kit."""

from collections.abc import AsyncGenerator

import pytest

from fumehood.interfaces import SandboxProvider
from fumehood.testing import ScriptedSandboxProvider
from fumehood.testing.conformance_kits.sandbox_kit import SandboxKit, SandboxSubject
from tests.support.scripted_sandbox_programs import make_scripted_sandboxes


async def _another() -> SandboxProvider:
    return ScriptedSandboxProvider()


class TestScriptedSandboxes(SandboxKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[SandboxSubject]:
        async with make_scripted_sandboxes() as provider:
            yield SandboxSubject(provider, make_provider=_another)
