"""A gateway over scripted runs for each test; imports the support beside it."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.gateway import Served, serving_gateway


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[Served]:
    async with serving_gateway(body_bytes=100_000) as served:
        yield served
