"""What is counted of containers and their calls; imports pytest and fumehood."""

import asyncio

import pytest

from fumehood.interfaces import Caller, Started
from fumehood.protocol.containers import ContainerSpec
from fumehood.protocol.errors import RateLimited
from fumehood.protocol.sandbox import End, EndStatus, ExecuteRequest
from fumehood.protocol.sandbox_errors import Unreachable
from fumehood.sandbox.container import ContainerSettings
from fumehood.testing import Step, WriteFile
from tests.support.containers import SOMEBODY, Host, host

HOUR = 3600


def ends(status: EndStatus, *, kept: bool) -> End:
    return End(status=status, exit_code=-1, duration_ms=1, state_kept=kept, reason="So it was.")


async def test_calls_are_counted_by_their_ends() -> None:
    steps = [
        Step("fine"),
        Step("slow", [ends("timeout", kept=True)]),
        Step("stubborn", [ends("timeout", kept=False)]),
        Step("greedy", [ends("out_of_memory", kept=False)]),
        Step("gone", [ends("lost", kept=False)]),
    ]
    async with host(*steps) as here:
        container = await here.open()
        for step in steps:
            await here.run(await here.open(container.id), str(step.code))
        here.scripted.trouble = Unreachable("nobody answers")
        await here.run(await here.open(container.id), "nobody there")
        here.scripted.trouble = None
        figures = here.figures
    assert figures.calls == {"ok": 1, "timeout": 2, "out_of_memory": 1, "lost": 2}
    assert figures.running == 0
    # After each sandbox that was lost another one; the last was not to be had.
    assert (figures.starts, figures.acquire.number) == ({"new": 3}, 4)
    assert figures.run.number == 5


async def test_a_call_that_nobody_stayed_for() -> None:
    async with host(Step("slow", [asyncio.Event()])) as here:
        container = await here.open()
        events = container.execute(ExecuteRequest(code="slow"))
        assert await anext(events) == Started()
        begun = asyncio.ensure_future(anext(events))
        while not here.scripted.requests:
            await asyncio.sleep(0)
        assert here.figures.running == 1
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        await events.aclose()
        container.leave()
        assert (here.figures.running, here.figures.calls) == (0, {"abandoned": 1})


async def test_files_take_time() -> None:
    async with host(Step("x", [WriteFile("made.txt", b"made")])) as here:
        await here.run(await here.open(), "x")
        assert here.figures.files.number == 2  # what is put there, and what is found there


async def made(here: Host) -> str:
    return (await here.containers.create(SOMEBODY, ContainerSpec())).id


async def test_containers_are_counted_by_their_ends() -> None:
    async with host(settings=ContainerSettings(life_hours=1)) as here:
        deleted, _idle = await made(here), await made(here)
        assert here.figures.live == 2
        await here.containers.delete(SOMEBODY, deleted)
        here.clock.advance(20 * 60)
        await here.containers.sweep()
        assert (here.figures.ended, here.figures.live) == ({"deleted": 1, "idle": 1}, 0)
        used = await made(here)
        for _ in range(6):
            here.clock.advance(10 * 60)
            await here.containers.container(SOMEBODY, used)
        assert here.figures.ended == {"deleted": 1, "idle": 1, "old": 1}
        assert (here.figures.begun, here.figures.live) == (3, 0)


async def test_an_expired_container_that_is_deleted_has_ended_before() -> None:
    async with host() as here:
        name = await made(here)
        here.clock.advance(20 * 60)
        await here.containers.sweep()
        await here.containers.delete(SOMEBODY, name)
        assert (here.figures.ended, here.figures.live) == ({"idle": 1}, 0)


async def test_the_quota() -> None:
    async with host(settings=ContainerSettings(containers_per_tenant=1, alone=True)) as here:
        evicted = await here.open()
        evicted.leave()
        await made(here)
        with pytest.raises(RateLimited):
            await made(here)
        await here.containers.create(Caller("another"), ContainerSpec())
        figures = here.figures
        assert (figures.begun, figures.refused, figures.ended, figures.live) == (3, 1, {"evicted": 1}, 2)


async def test_containers_lost_with_their_sandbox_server() -> None:
    async with host(Step("x")) as here:
        await here.run(await here.open(), "x")
        await made(here)  # has no sandbox yet
        after = Host(
            here.scripted, ContainerSettings(sandboxes_outlive=False), here.clock, here.kept, here.blobs
        )
        async with after.containers:
            assert (after.figures.ended, after.figures.live) == ({"lost": 1}, 1)


async def test_files_that_had_to_make_room() -> None:
    async with host(settings=ContainerSettings(retained_bytes=10)) as here:
        for _ in range(2):
            name = await made(here)
            await here.containers.put(SOMEBODY, name, "given.txt", b"8 bytes!")
            here.clock.advance(20 * 60)
            await here.containers.sweep()
        assert here.figures.trimmed == 1


async def test_another_process_is_heard_of_at_the_next_sweep() -> None:
    async with host() as here:
        other = here.beside()
        await made(here)
        await made(other)
        assert (here.figures.live, other.figures.live) == (1, 1)
        await here.containers.sweep()
        assert here.figures.live == 2
