"""What is counted of containers and their calls."""

from fumehood.containers.container_settings import ContainerSettings
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.sandbox.sandbox_errors import SandboxServerUnreachable
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEnd, ExecutionEndStatus
from fumehood.testing import ScriptedExecution, WriteFile
from tests.support.containers import SOMEBODY, ContainerHarness, container_harness

HOUR = 3600


def make_end(status: ExecutionEndStatus, *, state_kept: bool) -> ExecutionEnd:
    return ExecutionEnd(
        status=status, exit_code=-1, duration_ms=1, state_kept=state_kept, reason="So it was."
    )


async def test_calls_are_counted_by_their_ends() -> None:
    steps = [
        ScriptedExecution("fine"),
        ScriptedExecution("slow", [make_end("timeout", state_kept=True)]),
        ScriptedExecution("stubborn", [make_end("timeout", state_kept=False)]),
        ScriptedExecution("greedy", [make_end("out_of_memory", state_kept=False)]),
        ScriptedExecution("gone", [make_end("lost", state_kept=False)]),
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


async def test_files_take_time() -> None:
    async with container_harness(ScriptedExecution("x", [WriteFile("made.txt", b"made")])) as harness:
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


async def test_another_process_is_heard_of_at_the_next_sweep() -> None:
    async with container_harness() as harness:
        other = harness.second_process()
        await create_container(harness)
        await create_container(other)
        assert (harness.stats.live_containers, other.stats.live_containers) == (1, 1)
        await harness.containers.sweep()
        assert harness.stats.live_containers == 2
