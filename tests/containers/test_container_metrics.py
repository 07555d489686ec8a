"""What is counted of containers and their calls."""

import asyncio

import pytest

from fumehood.containers.container_state import ContainerSettings
from fumehood.interfaces import Caller, ExecutionStarted
from fumehood.protocol.openai.api_errors import RateLimited
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.sandbox.sandbox_errors import SandboxServerUnreachable
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, ExecutionEndStatus
from fumehood.testing import ExecutionStep, WriteFile
from tests.support.containers import SOMEBODY, ContainerHarness, container_harness

HOUR = 3600


def ends(status: ExecutionEndStatus, *, kept: bool) -> ExecutionEnd:
    return ExecutionEnd(status=status, exit_code=-1, duration_ms=1, state_kept=kept, reason="So it was.")


async def test_calls_are_counted_by_their_ends() -> None:
    steps = [
        ExecutionStep("fine"),
        ExecutionStep("slow", [ends("timeout", kept=True)]),
        ExecutionStep("stubborn", [ends("timeout", kept=False)]),
        ExecutionStep("greedy", [ends("out_of_memory", kept=False)]),
        ExecutionStep("gone", [ends("lost", kept=False)]),
    ]
    async with container_harness(*steps) as here:
        container = await here.open()
        for step in steps:
            await here.run(await here.open(container.id), str(step.code))
        here.scripted.error = SandboxServerUnreachable("nobody answers")
        await here.run(await here.open(container.id), "nobody there")
        here.scripted.error = None
        figures = here.metrics
    assert figures.ended_calls == {"ok": 1, "timeout": 2, "out_of_memory": 1, "lost": 2}
    assert figures.running_calls == 0
    # After each sandbox that was lost another one; the last was not to be had.
    assert (figures.sandbox_starts, figures.acquire_seconds.count) == ({"new": 3}, 4)
    assert figures.run_seconds.count == 5


async def test_a_call_that_nobody_stayed_for() -> None:
    async with container_harness(ExecutionStep("slow", [asyncio.Event()])) as here:
        container = await here.open()
        events = container.execute(ExecuteRequest(code="slow"))
        assert await anext(events) == ExecutionStarted()
        begun = asyncio.ensure_future(anext(events))
        while not here.scripted.requests:
            await asyncio.sleep(0)
        assert here.metrics.running_calls == 1
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        await events.aclose()
        container.release()
        assert (here.metrics.running_calls, here.metrics.ended_calls) == (0, {"abandoned": 1})


async def test_files_take_time() -> None:
    async with container_harness(ExecutionStep("x", [WriteFile("made.txt", b"made")])) as here:
        await here.run(await here.open(), "x")
        assert here.metrics.file_seconds.count == 2  # what is put there, and what is found there


async def made(here: ContainerHarness) -> str:
    return (await here.containers.create_container(SOMEBODY, ContainerSpec())).id


async def test_containers_are_counted_by_their_ends() -> None:
    async with container_harness(settings=ContainerSettings(max_lifetime_hours=1)) as here:
        deleted, _idle = await made(here), await made(here)
        assert here.metrics.live_containers == 2
        await here.containers.delete_container(SOMEBODY, deleted)
        here.clock.advance(20 * 60)
        await here.containers.sweep()
        assert (here.metrics.ended, here.metrics.live_containers) == ({"deleted": 1, "idle": 1}, 0)
        used = await made(here)
        for _ in range(6):
            here.clock.advance(10 * 60)
            await here.containers.get_container(SOMEBODY, used)
        assert here.metrics.ended == {"deleted": 1, "idle": 1, "old": 1}
        assert (here.metrics.created, here.metrics.live_containers) == (3, 0)


async def test_an_expired_container_that_is_deleted_has_ended_before() -> None:
    async with container_harness() as here:
        name = await made(here)
        here.clock.advance(20 * 60)
        await here.containers.sweep()
        await here.containers.delete_container(SOMEBODY, name)
        assert (here.metrics.ended, here.metrics.live_containers) == ({"idle": 1}, 0)


async def test_the_quota() -> None:
    async with container_harness(
        settings=ContainerSettings(containers_per_tenant=1, single_process=True)
    ) as here:
        evicted = await here.open()
        evicted.release()
        await made(here)
        with pytest.raises(RateLimited):
            await made(here)
        await here.containers.create_container(Caller("another"), ContainerSpec())
        figures = here.metrics
        assert (figures.created, figures.rejected, figures.ended, figures.live_containers) == (
            3,
            1,
            {"evicted": 1},
            2,
        )


async def test_containers_lost_with_their_sandbox_server() -> None:
    async with container_harness(ExecutionStep("x")) as here:
        await here.run(await here.open(), "x")
        await made(here)  # has no sandbox yet
        after = ContainerHarness(
            here.scripted,
            ContainerSettings(sandboxes_survive_restart=False),
            here.clock,
            here.kept,
            here.blobs,
        )
        async with after.containers:
            assert (after.metrics.ended, after.metrics.live_containers) == ({"lost": 1}, 1)


async def test_files_that_had_to_make_room() -> None:
    async with container_harness(settings=ContainerSettings(retained_bytes=10)) as here:
        for _ in range(2):
            name = await made(here)
            await here.containers.write_file(SOMEBODY, name, "given.txt", b"8 bytes!")
            here.clock.advance(20 * 60)
            await here.containers.sweep()
        assert here.metrics.purged == 1


async def test_another_process_is_heard_of_at_the_next_sweep() -> None:
    async with container_harness() as here:
        other = here.second_process()
        await made(here)
        await made(other)
        assert (here.metrics.live_containers, other.metrics.live_containers) == (1, 1)
        await here.containers.sweep()
        assert here.metrics.live_containers == 2
