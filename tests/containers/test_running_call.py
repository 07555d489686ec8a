"""How calls end that lose their sandbox or run out of time."""

import asyncio

import pytest

from fumehood.containers.container_settings import ContainerSettings
from fumehood.interfaces import ContainerEvent, ExecutionStarted
from fumehood.protocol.sandbox.sandbox_errors import (
    ExecutionNotFound,
    SandboxConflict,
    SandboxError,
    SandboxGone,
    SandboxPayloadTooLarge,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, Stdout
from fumehood.testing import ScriptedExecution
from tests.support.containers import ContainerHarness, container_harness


@pytest.mark.parametrize(
    ("error", "state_kept", "reason"),
    [
        (SandboxGone("gone: somebody pulled the plug"), False, "The sandbox was lost."),
        (SandboxConflict("That was another code."), True, "The sandbox refused: That was another code."),
        (SandboxPayloadTooLarge("Too much code."), True, "The sandbox refused: Too much code."),
        (ExecutionNotFound("It was forgotten."), True, "The sandbox refused: It was forgotten."),
        (
            SandboxServerUnreachable("http://10.0.0.1 is away"),
            True,
            "The connection to the sandbox was lost and could not be restored.",
        ),
    ],
)
async def test_an_error_after_the_code_began_is_the_end(
    error: SandboxError, state_kept: bool, reason: str
) -> None:
    async with container_harness(ScriptedExecution("x", [Stdout("a"), Stdout("b"), error])) as harness:
        outcome = await harness.run(await harness.open(), "x")
        assert outcome.events[:-1] == [Stdout("a"), Stdout("b")]
        assert (outcome.end.status, outcome.end.exit_code, outcome.end.state_kept) == ("lost", -1, state_kept)
        assert outcome.end.reason.startswith(
            f"{reason} The code may have run, in part or to its end: check what it did before you run it again."
        )
        assert ("Variables are gone: the next call" in outcome.end.reason) == (not state_kept)
        assert len(harness.scripted.requests) == 1


async def test_only_what_has_surely_not_begun_may_begin_elsewhere() -> None:
    unsure = SandboxGone("its server died")
    steps = [
        ScriptedExecution("a"),
        ScriptedExecution("b", [unsure]),
        ScriptedExecution("c"),
        ScriptedExecution("d"),
    ]
    async with container_harness(*steps) as harness:
        container = await harness.open()
        await harness.run(container, "a")
        end = (await harness.run(await harness.open(container.id), "b")).end
        assert (end.status, end.state_kept) == ("lost", False)
        assert (await harness.run(await harness.open(container.id), "c")).end.status == "ok"
        await harness.scripted.end_sandbox((await harness.record(container)).sandbox, "it is gone")
        outcome = await harness.run(await harness.open(container.id), "d")
        assert (outcome.end.status, len(outcome.notes)) == ("ok", 1)
        assert [request.code for _, request in harness.scripted.requests] == ["a", "b", "c", "d"]


async def run_within(harness: ContainerHarness, code: str, timeout: float) -> list[ContainerEvent]:
    container = await harness.open()
    async with asyncio.timeout(10):
        return [event async for event in container.execute(ExecuteRequest(code=code), timeout)]


@pytest.mark.parametrize("isolation", ["container", "execution"])
async def test_code_that_takes_too_long_is_stopped(isolation: str) -> None:
    settings = ContainerSettings(isolation="execution" if isolation == "execution" else "container")
    step = ScriptedExecution("x", [Stdout("a"), asyncio.Event()])
    async with container_harness(step, settings=settings) as harness:
        started, output, end = await run_within(harness, "x", 0.01)
        assert (started, output) == (ExecutionStarted(), Stdout("a"))
        assert isinstance(end, ExecutionEnd)
        assert (end.status, end.reason) == (
            "timeout",
            "The time for this response is over; the code was stopped.",
        )
        assert end.duration_ms >= 500
        (request,) = [request for _, request in harness.scripted.requests]
        assert request.timeout_seconds == 0.01
        assert not [info for info in await harness.scripted.list_sandboxes() if info.running]
        assert len(harness.scripted.specs) == (isolation == "container")
        assert (harness.stats.running_calls, harness.stats.ended_calls) == (0, {"timeout": 1})


async def test_waiting_for_a_sandbox_takes_too_long() -> None:
    async with container_harness(capacity=0) as harness:
        (end,) = await run_within(harness, "x", 0.01)
        assert isinstance(end, ExecutionEnd)
        assert end.status == "timeout"
