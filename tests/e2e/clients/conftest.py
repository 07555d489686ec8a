"""What the tests of clients share."""

from collections.abc import AsyncGenerator

import pytest_asyncio
from openai import AsyncOpenAI

from tests.e2e.conftest import House


@pytest_asyncio.fixture
async def client(house: House) -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=house.served.url, api_key="none", max_retries=0) as client:
        yield client
