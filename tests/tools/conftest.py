"""Real sandboxes for the tests of a module."""

from collections.abc import AsyncGenerator

import pytest_asyncio

from fumehood.sandbox_client.local_server_provider import LocalServerProvider
from tests.support.interpreter_harness import local_server_settings


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider() -> AsyncGenerator[LocalServerProvider]:
    async with LocalServerProvider(local_server_settings()) as provider:
        yield provider
