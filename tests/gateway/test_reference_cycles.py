"""What a request leaves behind in memory: nothing that only a search for cycles would find.

Such cycles cost the search, and the memory of a request that nobody reuses while it is still in the processor's cache.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

from fumehood.engine.run_service import EngineRunService
from fumehood.models.model_settings import ModelSettings
from fumehood.models.registry import open_model_registry
from fumehood.testing import FakeClock, MemoryStore
from tests.support.raw_model_server import chunk, open_raw_model_server, stream
from tests.support.scripted_gateway import run_gateway


@contextmanager
def collected_only() -> Generator[list[str]]:
    """The names of our types of which objects went away in cycles, once the block is left."""
    names: list[str] = []
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield names
        gc.collect()
        kinds = {cast("type[object]", type(found)) for found in gc.garbage}
        names += [
            kind.__qualname__ for kind in kinds if kind.__module__.startswith(("fumehood.", "uvicorn."))
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()


async def test_a_request_leaves_no_cycles() -> None:
    answer = stream(chunk({"content": "Hello"}), chunk({"content": " there"}, finish="stop"))
    async with open_raw_model_server(*[answer] * 6) as server:
        models = open_model_registry([ModelSettings(base_url=server.url)], FakeClock(), {})
        store = MemoryStore(FakeClock())
        runs = EngineRunService(models, [], store, FakeClock())
        async with run_gateway(runs=runs, store=store) as gateway:
            for streamed in (False, True):
                assert (
                    await gateway.create_response(stream=streamed)
                ).status == 200  # what only the first one makes
                with collected_only() as left:
                    assert (await gateway.create_response(stream=streamed)).status == 200
                    assert (await gateway.create_response(stream=streamed)).status == 200
                assert left == []
        await models.close()
