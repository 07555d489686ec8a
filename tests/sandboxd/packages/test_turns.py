"""Places that tenants share; imports only `fumehood.sandboxd.packages.turns`."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from fumehood.sandboxd.packages.turns import Turns


class Worker:
    """Waits for a place, holds it until it is told to go."""

    def __init__(self, turns: Turns, tenant: str, begun: list[str]) -> None:
        self.leave = asyncio.Event()
        self.task = asyncio.ensure_future(self._work(turns, tenant, begun))

    async def _work(self, turns: Turns, tenant: str, begun: list[str]) -> None:
        async with turns.place(tenant):
            begun.append(tenant)
            await self.leave.wait()


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_tenant_leaves_a_place_for_the_others() -> None:
    turns, begun = Turns(3, 2), list[str]()
    busy = [Worker(turns, "busy", begun) for _ in range(10)]
    await _settle()
    assert begun == ["busy", "busy"]
    other = Worker(turns, "other", begun)
    await _settle()
    assert begun == ["busy", "busy", "other"]
    for worker in (*busy, other):
        worker.leave.set()
    await asyncio.gather(*(worker.task for worker in (*busy, other)))
    assert begun.count("busy") == 10


async def test_tenants_come_in_turn() -> None:
    turns, begun = Turns(1, 1), list[str]()
    names = ["a", "a", "a", "b", "c", "b"]
    workers = [Worker(turns, name, begun) for name in names]
    await _settle()
    for worker in workers:
        worker.leave.set()
    await asyncio.gather(*(worker.task for worker in workers))
    assert begun == ["a", "b", "c", "a", "b", "a"]


async def test_whoever_gives_up_takes_no_place() -> None:
    turns, begun = Turns(1, 1), list[str]()
    first, second, third = (Worker(turns, name, begun) for name in ("a", "b", "c"))
    await _settle()
    second.task.cancel()
    first.leave.set()
    third.leave.set()
    await asyncio.gather(first.task, third.task)
    with pytest.raises(asyncio.CancelledError):
        await second.task
    assert begun == ["a", "c"]
    async with AsyncExitStack() as stack, asyncio.timeout(1):
        await stack.enter_async_context(turns.place("d"))


async def test_a_place_that_was_given_to_one_who_gave_up_is_free_again() -> None:
    turns, begun = Turns(1, 1), list[str]()
    first, second = Worker(turns, "a", begun), Worker(turns, "b", begun)
    await _settle()
    first.leave.set()
    while not first.task.done():
        await asyncio.sleep(0)
    second.task.cancel()  # it has the place, and has not begun
    with pytest.raises(asyncio.CancelledError):
        await second.task
    async with asyncio.timeout(1), turns.place("c"):
        begun.append("c")
    assert begun == ["a", "c"]
