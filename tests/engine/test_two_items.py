"""Calls that are two items each, in the loop: the hosted shell over scripted sandboxes; imports the support."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fumehood.protocol.events import ShellOutputDelta, StreamEvent
from fumehood.protocol.items import ShellCallOutput
from fumehood.protocol.sandbox import Stdout
from fumehood.sandbox.containers import SandboxContainers
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.testing import FakeClock, MemoryBlobs, MemoryStore, ScriptedModel, ScriptedSandboxes, Step
from fumehood.testing.scripted_model import calls, says
from fumehood.tools.shell import Shell
from tests.support.engines import Engine
from tests.support.streams import check_invariants

SHELL = {"type": "shell", "environment": {"type": "container_auto"}}
STEPS = (Step("ls", [Stdout("a\n")]), Step("sleep", [Stdout("b\n"), asyncio.Event()]))


@dataclass
class House:
    shell: Shell
    store: MemoryStore
    provider: ScriptedSandboxes


@asynccontextmanager
async def house() -> AsyncGenerator[House]:
    clock = FakeClock()
    store = MemoryStore(clock)
    async with ScriptedSandboxes(always=STEPS) as provider:
        containers = SandboxContainers(provider, store, ReferredBlobs(MemoryBlobs(), store), clock)
        yield House(Shell(containers, clock), store, provider)


async def test_calls_side_by_side() -> None:
    turn = [*calls("shell", {"commands": ["ls"]}), *calls("shell", {"commands": ["ls", "ls"]})]
    async with house() as at, ScriptedModel(turn, says("Done.")) as model:
        engine = Engine(model, [at.shell])
        events = await engine.stream(tools=[SHELL])
        response = check_invariants(events)
        kinds = [type(item).__name__ for item in response.output]
        assert kinds == ["ShellCall", "ShellCall", "ShellCallOutput", "ShellCallOutput", "Message"]
        kept = await engine.store.response("", response.id)
        assert kept == response
        exchanges = [entry.exchange for entry in model.requests[1].segments[-1].entries]
        assert [exchange.tells for exchange in exchanges if exchange] == ["call", "call", "result", "result"]


async def test_one_that_is_cancelled_while_it_runs() -> None:
    async with house() as at, ScriptedModel(calls("shell", {"commands": ["ls", "sleep", "ls"]})) as model:
        run = await Engine(model, [at.shell]).start(tools=[SHELL])
        events: list[StreamEvent] = []
        async for batch in run.subscribe():
            events += batch
            if any(isinstance(event, ShellOutputDelta) and event.command_index == 1 for event in batch):
                run.cancel("nobody wants it")
        response = check_invariants(events)
        assert response.status == "cancelled"
        called, said = response.output
        assert isinstance(said, ShellCallOutput)
        assert said.status == "incomplete"
        assert [output.stdout for output in said.output] == ["a\n", "b\n", ""]
        assert "cancelled" in said.output[1].stderr
        assert getattr(called, "status", None) == "completed"


async def test_the_clients_own_shell_is_passed_by() -> None:
    async with house() as at, ScriptedModel(says("Hello.")) as model:
        await Engine(model, [at.shell]).block(tools=[{"type": "shell"}])
        (request,) = model.requests
        assert [spec.type for spec in request.others] == ["shell"]
        assert not request.functions
