"""Slots that tenants share."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from fumehood.sandbox_server.packages.installer import TenantLimiter


class TenantWork:
    """Waits for a slot and holds it until `leave` is set."""

    def __init__(self, limiter: TenantLimiter, tenant: str, started: list[str]) -> None:
        self.leave = asyncio.Event()
        self.task = asyncio.ensure_future(self._work(limiter, tenant, started))

    async def _work(self, limiter: TenantLimiter, tenant: str, started: list[str]) -> None:
        async with limiter.slot(tenant):
            started.append(tenant)
            await self.leave.wait()


async def _run_pending_callbacks() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_tenant_leaves_a_slot_for_the_others() -> None:
    limiter, started = TenantLimiter(3, 2), list[str]()
    busy = [TenantWork(limiter, "busy", started) for _ in range(10)]
    await _run_pending_callbacks()
    assert started == ["busy", "busy"]
    other = TenantWork(limiter, "other", started)
    await _run_pending_callbacks()
    assert started == ["busy", "busy", "other"]
    for worker in (*busy, other):
        worker.leave.set()
    await asyncio.gather(*(worker.task for worker in (*busy, other)))
    assert started.count("busy") == 10


async def test_tenants_come_in_turn() -> None:
    limiter, started = TenantLimiter(1, 1), list[str]()
    names = ["a", "a", "a", "b", "c", "b"]
    workers = [TenantWork(limiter, name, started) for name in names]
    await _run_pending_callbacks()
    for worker in workers:
        worker.leave.set()
    await asyncio.gather(*(worker.task for worker in workers))
    assert started == ["a", "b", "c", "a", "b", "a"]


async def test_whoever_gives_up_takes_no_place() -> None:
    limiter, started = TenantLimiter(1, 1), list[str]()
    first, second, third = (TenantWork(limiter, name, started) for name in ("a", "b", "c"))
    await _run_pending_callbacks()
    second.task.cancel()
    first.leave.set()
    third.leave.set()
    await asyncio.gather(first.task, third.task)
    with pytest.raises(asyncio.CancelledError):
        await second.task
    assert started == ["a", "c"]
    async with AsyncExitStack() as stack, asyncio.timeout(1):
        await stack.enter_async_context(limiter.slot("d"))


async def test_a_place_that_was_given_to_one_who_gave_up_is_free_again() -> None:
    limiter, started = TenantLimiter(1, 1), list[str]()
    first, second = TenantWork(limiter, "a", started), TenantWork(limiter, "b", started)
    await _run_pending_callbacks()
    first.leave.set()
    while not first.task.done():
        await asyncio.sleep(0)
    second.task.cancel()  # it has the slot, but has not started
    with pytest.raises(asyncio.CancelledError):
        await second.task
    async with asyncio.timeout(1), limiter.slot("c"):
        started.append("c")
    assert started == ["a", "c"]
