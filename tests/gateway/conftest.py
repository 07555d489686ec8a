"""One gateway over scripted runs for all tests of a module, with doubles that each of them finds new; imports those."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.gateway import Served, serving_gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Served]:
    async with serving_gateway(body_bytes=100_000) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(running: Served) -> Served:
    running.runs.reset()
    running.files.reset()
    return running
