"""What the tests of clients share."""

from collections.abc import AsyncGenerator

import pytest_asyncio
from openai import AsyncOpenAI

from tests.e2e.conftest import RunningGateway


@pytest_asyncio.fixture
async def client(gateway: RunningGateway) -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=gateway.process.url, api_key="none", max_retries=0) as client:
        yield client
