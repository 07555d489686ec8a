"""Places that tenants share."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from fumehood.sandbox_server.packages.installer import TenantLimiter


class TenantWork:
    """Waits for a place, holds it until it is told to go."""

    def __init__(self, turns: TenantLimiter, tenant: str, begun: list[str]) -> None:
        self.leave = asyncio.Event()
        self.task = asyncio.ensure_future(self._work(turns, tenant, begun))

    async def _work(self, turns: TenantLimiter, tenant: str, begun: list[str]) -> None:
        async with turns.slot(tenant):
            begun.append(tenant)
            await self.leave.wait()


async def _run_pending_callbacks() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_tenant_leaves_a_place_for_the_others() -> None:
    turns, begun = TenantLimiter(3, 2), list[str]()
    busy = [TenantWork(turns, "busy", begun) for _ in range(10)]
    await _run_pending_callbacks()
    assert begun == ["busy", "busy"]
    other = TenantWork(turns, "other", begun)
    await _run_pending_callbacks()
    assert begun == ["busy", "busy", "other"]
    for worker in (*busy, other):
        worker.leave.set()
    await asyncio.gather(*(worker.task for worker in (*busy, other)))
    assert begun.count("busy") == 10


async def test_tenants_come_in_turn() -> None:
    turns, begun = TenantLimiter(1, 1), list[str]()
    names = ["a", "a", "a", "b", "c", "b"]
    workers = [TenantWork(turns, name, begun) for name in names]
    await _run_pending_callbacks()
    for worker in workers:
        worker.leave.set()
    await asyncio.gather(*(worker.task for worker in workers))
    assert begun == ["a", "b", "c", "a", "b", "a"]


async def test_whoever_gives_up_takes_no_place() -> None:
    turns, begun = TenantLimiter(1, 1), list[str]()
    first, second, third = (TenantWork(turns, name, begun) for name in ("a", "b", "c"))
    await _run_pending_callbacks()
    second.task.cancel()
    first.leave.set()
    third.leave.set()
    await asyncio.gather(first.task, third.task)
    with pytest.raises(asyncio.CancelledError):
        await second.task
    assert begun == ["a", "c"]
    async with AsyncExitStack() as stack, asyncio.timeout(1):
        await stack.enter_async_context(turns.slot("d"))


async def test_a_place_that_was_given_to_one_who_gave_up_is_free_again() -> None:
    turns, begun = TenantLimiter(1, 1), list[str]()
    first, second = TenantWork(turns, "a", begun), TenantWork(turns, "b", begun)
    await _run_pending_callbacks()
    first.leave.set()
    while not first.task.done():
        await asyncio.sleep(0)
    second.task.cancel()  # it has the place, and has not begun
    with pytest.raises(asyncio.CancelledError):
        await second.task
    async with asyncio.timeout(1), turns.slot("c"):
        begun.append("c")
    assert begun == ["a", "c"]
