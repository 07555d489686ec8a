"""One gateway with scripted runs per module; its fakes are reset for every test."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.scripted_gateway import ScriptedGateway, run_gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[ScriptedGateway]:
    async with run_gateway(body_bytes=100_000) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(running: ScriptedGateway) -> ScriptedGateway:
    running.runs.reset()
    running.files.reset()
    return running
