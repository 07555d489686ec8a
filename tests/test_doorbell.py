"""A task that waits at a doorbell goes on when it rings, and at no other time; imports pytest and fumehood."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from fumehood.doorbell import Doorbell

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


async def waiting(bell: Doorbell, heard: list[str]) -> None:
    await bell
    heard.append("once")
    await bell
    heard.append("twice")


async def begun(bell: Doorbell, heard: list[str]) -> asyncio.Task[None]:
    task = asyncio.create_task(waiting(bell, heard))
    await asyncio.sleep(0)
    assert bell.waiting
    return task


@pytest.mark.parametrize("new_loop", LOOPS)
def test_whoever_waits_goes_on_before_ringing_returns(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        bell, heard = Doorbell(loop), list[str]()
        after: list[list[str]] = []

        def ring() -> None:
            bell.ring()
            after.append([*heard])

        task = await begun(bell, heard)
        loop.call_soon(ring)
        loop.call_soon(ring)
        await task
        assert after == [["once"], ["once", "twice"]]
        assert not bell.waiting

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


async def test_a_task_that_rings_is_not_interrupted() -> None:
    bell, heard = Doorbell(asyncio.get_running_loop()), list[str]()
    task = await begun(bell, heard)
    bell.ring()
    assert heard == []
    await asyncio.sleep(0)
    assert heard == ["once"]
    bell.ring()
    await task


async def test_ringing_where_nobody_waits_is_forgotten() -> None:
    bell, heard = Doorbell(asyncio.get_running_loop()), list[str]()
    bell.ring()
    task = await begun(bell, heard)
    await asyncio.sleep(0)
    assert heard == []
    task.cancel()


async def test_cancelling() -> None:
    bell, heard = Doorbell(asyncio.get_running_loop()), list[str]()
    task = await begun(bell, heard)
    task.cancel("enough")
    assert not bell.waiting
    bell.ring()
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await task
    assert heard == []
    again = await begun(bell, heard)  # nothing of it is left
    bell.ring()
    await asyncio.sleep(0)
    assert heard == ["once"]
    again.cancel()


async def test_a_deadline() -> None:
    bell = Doorbell(asyncio.get_running_loop())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await bell


async def test_only_one_waits() -> None:
    bell = Doorbell(asyncio.get_running_loop())
    task = await begun(bell, [])
    with pytest.raises(RuntimeError, match="Somebody else"):
        await bell
    task.cancel()
