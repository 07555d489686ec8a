"""Calls that are two items each, in the loop: the hosted shell over scripted sandboxes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fumehood.containers.container_service import SandboxContainerService
from fumehood.protocol.openai.items import LocalEnvironment, ShellCall, ShellCallOutput
from fumehood.protocol.openai.stream_events import ShellCallOutputDelta, StreamEvent
from fumehood.protocol.sandbox.sandbox_messages import Stdout
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.testing import (
    FakeClock,
    MemoryBlobStore,
    MemoryStore,
    ScriptedExecution,
    ScriptedModel,
    ScriptedSandboxProvider,
)
from fumehood.testing.fakes.scripted_model import calls, says
from fumehood.tools.shell_tool import ShellTool
from tests.support.engine_harness import EngineHarness, read_batches
from tests.support.stream_checks import check_invariants

SHELL = {"type": "shell", "environment": {"type": "container_auto"}}
STEPS = (
    ScriptedExecution("ls", [Stdout("a\n")]),
    ScriptedExecution("sleep", [Stdout("b\n"), asyncio.Event()]),
)


@dataclass
class House:
    shell: ShellTool
    store: MemoryStore
    provider: ScriptedSandboxProvider


@asynccontextmanager
async def house() -> AsyncGenerator[House]:
    clock = FakeClock()
    store = MemoryStore(clock)
    async with ScriptedSandboxProvider(repeatable=STEPS) as provider:
        containers = SandboxContainerService(
            provider, store, GarbageCollectedBlobs(MemoryBlobStore(), store), clock
        )
        yield House(ShellTool(containers, clock), store, provider)


async def test_calls_side_by_side() -> None:
    turn = [*calls("shell", {"commands": ["ls"]}), *calls("shell", {"commands": ["ls", "ls"]})]
    async with house() as at, ScriptedModel(turn, says("Done.")) as model:
        engine = EngineHarness(model, [at.shell])
        events = await engine.stream(tools=[SHELL])
        response = check_invariants(events)
        kinds = [type(item).__name__ for item in response.output]
        assert kinds == ["ShellCall", "ShellCall", "ShellCallOutput", "ShellCallOutput", "OutputMessage"]
        kept = await engine.store.get_response("", response.id)
        assert kept == response
        exchanges = [entry.exchange for entry in model.requests[1].segments[-1].entries]
        assert [exchange.half for exchange in exchanges if exchange] == ["call", "call", "result", "result"]


async def test_one_that_is_cancelled_while_it_runs() -> None:
    async with house() as at, ScriptedModel(calls("shell", {"commands": ["ls", "sleep", "ls"]})) as model:
        run = await EngineHarness(model, [at.shell]).start(tools=[SHELL])
        events: list[StreamEvent] = []
        async for batch in read_batches(run):
            events += batch
            if any(isinstance(event, ShellCallOutputDelta) and event.command_index == 1 for event in batch):
                run.cancel("nobody wants it")
        response = check_invariants(events)
        assert response.status == "cancelled"
        called, said = response.output
        assert isinstance(said, ShellCallOutput)
        assert said.status == "incomplete"
        assert [output.stdout for output in said.output] == ["a\n", "b\n", ""]
        assert "cancelled" in said.output[1].stderr
        assert getattr(called, "status", None) == "completed"


async def test_the_clients_own_shell_is_its_own() -> None:
    async with house() as at, ScriptedModel(calls("shell", {"commands": ["ls"]})) as model:
        response = await EngineHarness(model, [at.shell]).create(tools=[{"type": "shell"}])
        (request,) = model.requests
        assert [spec.name for spec in request.function_tools] == ["shell"]
        (called,) = response.output
        assert isinstance(called, ShellCall)
        assert called.environment == LocalEnvironment()
