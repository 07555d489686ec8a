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


def make_end(status: ExecutionEndStatus, *, state_kept: bool) -> ExecutionEnd:
    return ExecutionEnd(
        status=status, exit_code=-1, duration_ms=1, state_kept=state_kept, reason="So it was."
    )


async def test_calls_are_counted_by_their_ends() -> None:
    steps = [
        ExecutionStep("fine"),
        ExecutionStep("slow", [make_end("timeout", state_kept=True)]),
        ExecutionStep("stubborn", [make_end("timeout", state_kept=False)]),
        ExecutionStep("greedy", [make_end("out_of_memory", state_kept=False)]),
        ExecutionStep("gone", [make_end("lost", state_kept=False)]),
    ]
    async with container_harness(*steps) as harness:
        container = await harness.open()
        for step in steps:
            await harness.run(await harness.open(container.id), str(step.code))
        harness.scripted.error = SandboxServerUnreachable("nobody answers")
        await harness.run(await harness.open(container.id), "nobody there")
        harness.scripted.error = None
        stats = harness.stats
    assert stats.ended_calls == {"ok": 1, "timeout": 2, "out_of_memory": 1, "lost": 2}
    assert stats.running_calls == 0
    # After each sandbox that was lost another one; the last was not to be had.
    assert (stats.sandbox_starts, stats.acquire_seconds.count) == ({"new": 3}, 4)
    assert stats.run_seconds.count == 5


async def test_a_call_that_nobody_stayed_for() -> None:
    async with container_harness(ExecutionStep("slow", [asyncio.Event()])) as harness:
        container = await harness.open()
        events = container.execute(ExecuteRequest(code="slow"))
        assert await anext(events) == ExecutionStarted()
        begun = asyncio.ensure_future(anext(events))
        while not harness.scripted.requests:
            await asyncio.sleep(0)
        assert harness.stats.running_calls == 1
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        await events.aclose()
        container.release()
        assert (harness.stats.running_calls, harness.stats.ended_calls) == (0, {"abandoned": 1})


async def test_files_take_time() -> None:
    async with container_harness(ExecutionStep("x", [WriteFile("made.txt", b"made")])) as harness:
        await harness.run(await harness.open(), "x")
        assert harness.stats.file_seconds.count == 2  # what is put there, and what is found there


async def create_container(harness: ContainerHarness) -> str:
    return (await harness.containers.create_container(SOMEBODY, ContainerSpec())).id


async def test_containers_are_counted_by_their_ends() -> None:
    async with container_harness(settings=ContainerSettings(max_lifetime_hours=1)) as harness:
        deleted, _idle = await create_container(harness), await create_container(harness)
        assert harness.stats.live_containers == 2
        await harness.containers.delete_container(SOMEBODY, deleted)
        await harness.sweep_after(20 * 60)
        assert (harness.stats.ended, harness.stats.live_containers) == ({"deleted": 1, "idle": 1}, 0)
        used = await create_container(harness)
        for _ in range(6):
            harness.clock.advance(10 * 60)
            await harness.containers.get_container(SOMEBODY, used)
        assert harness.stats.ended == {"deleted": 1, "idle": 1, "old": 1}
        assert (harness.stats.created, harness.stats.live_containers) == (3, 0)


async def test_an_expired_container_that_is_deleted_has_ended_before() -> None:
    async with container_harness() as harness:
        name = await create_container(harness)
        await harness.sweep_after(20 * 60)
        await harness.containers.delete_container(SOMEBODY, name)
        assert (harness.stats.ended, harness.stats.live_containers) == ({"idle": 1}, 0)


async def test_the_quota() -> None:
    async with container_harness(settings=ContainerSettings(containers_per_tenant=1)) as harness:
        evicted = await harness.open()
        evicted.release()
        await create_container(harness)
        with pytest.raises(RateLimited):
            await create_container(harness)
        await harness.containers.create_container(Caller("another"), ContainerSpec())
        stats = harness.stats
        assert (stats.created, stats.rejected, stats.ended, stats.live_containers) == (
            3,
            1,
            {"evicted": 1},
            2,
        )


async def test_containers_lost_with_their_sandbox_server() -> None:
    async with container_harness(ExecutionStep("x")) as harness:
        await harness.run(await harness.open(), "x")
        await create_container(harness)  # has no sandbox yet
        after = ContainerHarness(
            harness.scripted,
            ContainerSettings(sandboxes_survive_restart=False),
            harness.clock,
            harness.store,
            harness.blobs,
        )
        async with after.containers:
            assert (after.stats.ended, after.stats.live_containers) == ({"lost": 1}, 1)


async def test_files_that_had_to_make_room() -> None:
    async with container_harness(settings=ContainerSettings(retained_bytes=10)) as harness:
        for _ in range(2):
            name = await create_container(harness)
            await harness.containers.write_file(SOMEBODY, name, "given.txt", b"8 bytes!")
            await harness.sweep_after(20 * 60)
        assert harness.stats.purged == 1


async def test_another_process_is_heard_of_at_the_next_sweep() -> None:
    async with container_harness() as harness:
        other = harness.second_process()
        await create_container(harness)
        await create_container(other)
        assert (harness.stats.live_containers, other.stats.live_containers) == (1, 1)
        await harness.containers.sweep()
        assert harness.stats.live_containers == 2
