"""Gateways, one per module: with scripted runs, which are reset for every test, and for blocking clients."""

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from http.client import HTTPConnection

import pytest
import pytest_asyncio

from fumehood.testing import ScriptedModel, says
from tests.support.engine_harness import EngineHarness
from tests.support.gateway_thread import run_in_thread
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


class Target:
    """A gateway whose model always says the same, for blocking clients."""

    def __init__(self, gateway: ScriptedGateway) -> None:
        self.port = gateway.port

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, body, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    engine = EngineHarness(ScriptedModel(*([says("yes")] * 5000)))
    with run_in_thread(run_gateway(runs=engine.runs, store=engine.store, body_bytes=200_000)) as gateway:
        yield Target(gateway)
