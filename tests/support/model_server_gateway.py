"""A gateway on a real socket, with the real engine and model backends, before a model server that follows a script."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fumehood.engine.agent_loop import LoopLimits
from fumehood.engine.run_service import EngineRunService
from fumehood.models.model_settings import ModelSettings
from fumehood.models.registry import open_model_registry
from fumehood.store.aes_gcm_sealer import KEY_BYTES, AesGcmSealer
from fumehood.testing import FakeClock, MemoryStore
from tests.support import raw_model_server
from tests.support.raw_model_server import RawModelServer, Responder
from tests.support.recording_clock import RecordingClock
from tests.support.scripted_gateway import ScriptedGateway, run_gateway

SEALER = AesGcmSealer([bytes(KEY_BYTES)])


@asynccontextmanager
async def run_gateway_before(
    *answers: Responder, backend: Any = "chat_completions", **settings: Any
) -> AsyncGenerator[tuple[ScriptedGateway, RawModelServer]]:
    """One whose model server answers with these, and that server."""
    async with raw_model_server.open_raw_model_server(*answers) as server:
        entry = ModelSettings(base_url=server.url, backend=backend, **settings)
        models = open_model_registry([entry], RecordingClock(), {})
        clock = FakeClock()
        store = MemoryStore(clock)
        runs = EngineRunService(models, [], store, clock, limits=LoopLimits(characters=50_000), sealer=SEALER)
        async with run_gateway(runs=runs, store=store) as gateway:
            yield gateway, server
        await models.close()
