"""Timings of calls in containers."""

import itertools
from collections.abc import Mapping

import pytest

from fumehood.containers.container_settings import ContainerSettings
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEnd
from fumehood.testing import ScriptedExecution
from fumehood.timed_steps import TimedStep, listen_to_timings
from tests.support.containers import ContainerHarness, container_harness

NEW: Mapping[str, str | int] = {"start": "new"}
REUSED: Mapping[str, str | int] = {"start": "reused"}
OK: Mapping[str, str | int] = {"exit_code": 0, "status": "ok"}


async def timings_of_call(
    running: ContainerHarness, code: str, container_id: str | None = None
) -> tuple[str, list[TimedStep]]:
    """Run a call; return the container's id and the timings."""
    timings: list[TimedStep] = []
    container = await running.open(container_id)
    with listen_to_timings(timings.append):
        await running.run(container, code)
    return container.id, timings


def summarize(timings: list[TimedStep]) -> list[tuple[str, Mapping[str, str | int]]]:
    return [(timing.name, timing.attributes) for timing in timings]


async def test_a_first_call_makes_a_sandbox_and_the_next_one_finds_it() -> None:
    async with container_harness(ScriptedExecution(None), ScriptedExecution(None)) as running:
        container, timings = await timings_of_call(running, "1")
        assert summarize(timings) == [("acquire", NEW), ("files", {}), ("run", OK), ("files", {})]
        for earlier, later in itertools.pairwise(timings):
            assert earlier.duration_ns > 0
            assert earlier.started_at_ns <= later.started_at_ns
        _, timings = await timings_of_call(running, "2", container)
        assert summarize(timings) == [("acquire", REUSED), ("run", OK), ("files", {})]


async def test_packages_are_a_phase_that_the_server_has_measured() -> None:
    end = ExecutionEnd(status="ok", exit_code=0, duration_ms=1, state_kept=True, packages_ms=1)
    async with container_harness(ScriptedExecution(None, [end])) as running:
        _, timings = await timings_of_call(running, "1")
    (packages,) = [timing for timing in timings if timing.name == "packages"]
    (run,) = [timing for timing in timings if timing.name == "run"]
    assert 0 < packages.duration_ns <= 1_000_000
    assert packages.started_at_ns + packages.duration_ns == run.started_at_ns


@pytest.mark.parametrize("status", ["out_of_memory", "timeout", "lost"])
async def test_how_code_ended_is_told(status: str) -> None:
    end = ExecutionEnd(status=status, exit_code=-1, duration_ms=1, state_kept=False)  # type: ignore[arg-type]
    async with container_harness(ScriptedExecution(None, [end]), ScriptedExecution(None)) as running:
        container, timings = await timings_of_call(running, "1")
        ended = {"exit_code": -1, "status": status}
        assert summarize(timings) == [("acquire", NEW), ("files", {}), ("run", ended)]
        assert [timing.error for timing in timings] == ["", "", status]
        # The next one has another.
        _, timings = await timings_of_call(running, "2", container)
        assert summarize(timings)[0] == ("acquire", NEW)


async def test_a_sandbox_for_every_call_is_acquired_every_time() -> None:
    settings = ContainerSettings(isolation="execution")
    async with container_harness(
        ScriptedExecution(None), ScriptedExecution(None), settings=settings
    ) as running:
        container, _ = await timings_of_call(running, "1")
        _, timings = await timings_of_call(running, "2", container)
        assert summarize(timings) == [("acquire", NEW), ("files", {}), ("run", OK), ("files", {})]


async def test_one_that_is_not_to_be_had_is_told_too() -> None:
    settings = ContainerSettings(claim_timeout=0.01)
    async with container_harness(settings=settings, capacity=0) as running:
        _, timings = await timings_of_call(running, "1")
    assert [(timing.name, timing.error) for timing in timings] == [("acquire", "SandboxServerAtCapacity")]
