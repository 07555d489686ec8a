"""Zygotes that die and forks that fail: waiting callers still get a sandbox."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fumehood.protocol.sandbox.sandbox_errors import SandboxGone, SandboxStartFailed
from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec
from fumehood.sandbox_server.host.cgroups import CgroupLimits
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from fumehood.sandbox_server.supervisor.zygote_connection import ZygoteConnection
from tests.support.host_census import descendants
from tests.support.sandbox_runs import run, settings, start, wait_for_outcome
from tests.support.waiting import wait_until


@pytest.mark.parametrize("who", ["jail", "spawner", "zygote"])
async def test_callers_who_wait_when_the_zygote_dies_are_served_by_the_next(who: str) -> None:
    async with Supervisor(settings(preload=(), pool=1, capacity=32)) as supervisor:
        for _ in range(2):  # as often as is made good at once
            spawner, zygote = _forkers(supervisor)
            victim = {"jail": supervisor.zygote.pid, "spawner": spawner, "zygote": zygote}[who]
            assert victim is not None
            callers = [asyncio.create_task(supervisor.create()) for _ in range(8)]
            await wait_until(lambda: supervisor.live_count >= 4)  # some are on their way
            os.kill(victim, signal.SIGKILL)
            boxes = await asyncio.gather(*callers, return_exceptions=True)
            assert [box for box in boxes if isinstance(box, BaseException)] == []
            await wait_until(lambda: supervisor.can_create)
        assert (await run(await supervisor.create(), "1 + 1")).result == "2"


async def test_a_zygote_whose_death_is_heard_of_late_costs_nobody_a_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Supervisor(settings(preload=(), pool=0)) as supervisor:
        pid, start = supervisor.zygote.pid, supervisor._start  # pyright: ignore[reportPrivateUsage]
        assert pid is not None

        async def starting(order: Any) -> SandboxInstance:
            monkeypatch.undo()
            (await start(order)).kill("a part of its jail has ended")
            asyncio.get_running_loop().call_later(0.02, os.kill, pid, signal.SIGKILL)
            raise SandboxStartFailed("The sandbox ended.")

        monkeypatch.setattr(supervisor, "_start", starting)
        assert (await run(await supervisor.create(), "1 + 1")).result == "2"
        assert supervisor.zygote.pid != pid


async def test_a_zygote_that_dies_while_it_starts_costs_nobody_a_sandbox() -> None:
    async with Supervisor(settings(preload=(), pool=0)) as supervisor:
        first = supervisor.zygote.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: not supervisor.can_create)  # before that, it may still fork
        caller = asyncio.create_task(supervisor.create())
        async with asyncio.timeout(20):
            while not (started := _jails() - {first}):
                await asyncio.sleep(0)
        os.kill(started.pop(), signal.SIGKILL)
        assert (await run(await caller, "1 + 1")).result == "2"


async def test_a_zygotes_start_outlives_the_caller_that_caused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Supervisor(settings(preload=(), pool=0)) as supervisor:
        managed_zygote = supervisor._shards[0]  # pyright: ignore[reportPrivateUsage]
        gate, starts, start = asyncio.Event(), 0, managed_zygote._start  # pyright: ignore[reportPrivateUsage]

        async def start_slowly() -> ZygoteConnection:
            nonlocal starts
            starts += 1
            await gate.wait()
            return await start()

        monkeypatch.setattr(managed_zygote, "_start", start_slowly)
        first = supervisor.zygote.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(supervisor.create(), 0.3)
        assert starts == 1
        gate.set()
        assert (await run(await supervisor.create(), "1 + 1")).result == "2"
        assert starts == 1


async def test_closing_ends_a_zygotes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Supervisor(settings(preload=(), pool=0)) as closed:
        managed_zygote = closed._shards[0]  # pyright: ignore[reportPrivateUsage]
        never = asyncio.Event()

        async def start_never() -> ZygoteConnection:
            await never.wait()
            raise AssertionError

        monkeypatch.setattr(managed_zygote, "_start", start_never)
        pid = closed.zygote.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while closed.can_create:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(closed.create())
        while managed_zygote._starting is None:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.001)
    with pytest.raises(SandboxStartFailed):
        await waiting


async def test_a_shard_that_dies_takes_none_of_the_others_sandboxes() -> None:
    async with Supervisor(settings(preload=(), pool=0, shards=2)) as sharded:
        strangers = [await sharded.create() for _ in range(4)]
        victim = sharded.zygote
        assert victim.pid is not None
        # Whoever names no tenant goes where the fewest are, in turns.
        assert [box.zygote is victim for box in strangers] == [True, False, True, False]
        homes = {name: await sharded.create(SandboxSpec(tenant=name)) for name in ("a", "b", "c", "d")}
        again = {name: await sharded.create(SandboxSpec(tenant=name)) for name in homes}
        assert {name: box.zygote for name, box in again.items()} == {
            name: box.zygote for name, box in homes.items()
        }
        boxes = [*strangers, *homes.values(), *again.values()]
        spared = [box for box in boxes if box.zygote is not victim]
        lost = [box for box in boxes if box.zygote is victim]
        assert {box.zygote is victim for box in homes.values()} == {True, False}
        for number, box in enumerate(spared):
            assert (await run(box, f"kept = {number}")).end.status == "ok"
        running = start(spared[0], "import os\nwhile not os.path.exists('go'): pass\nkept", timeout=60)

        os.kill(victim.pid, signal.SIGKILL)
        await wait_until(lambda: not set(sharded.claimed_sandboxes()) & set(lost))
        assert set(sharded.claimed_sandboxes()) == set(spared)
        for box in lost:
            with pytest.raises(SandboxGone):
                start(box, "1", timeout=1)
        await spared[0].files.write("go", b"")
        assert (await wait_for_outcome(running)).result == "0"
        assert [(await run(box, "kept")).result for box in spared] == [str(n) for n in range(len(spared))]

        newcomer = await sharded.create()
        assert (newcomer.zygote is sharded.zygote, newcomer.zygote is victim) == (True, False)
        assert sharded.zygote_restarts == 1
        for name, box in homes.items():
            later = await sharded.create(SandboxSpec(tenant=name))
            assert later.zygote is (newcomer.zygote if box.zygote is victim else box.zygote)
            assert (await run(later, "1 + 1")).result == "2"


@pytest.mark.root
async def test_a_fork_that_fails_says_why() -> None:
    """The host has no room for one more process: of the zygote, or of the spawner."""
    async with Supervisor(settings(preload=())) as crowded:
        spawner, zygote = _forkers(crowded)
        resources = crowded._resource_allocator  # pyright: ignore[reportPrivateUsage]
        assert resources.cgroup_tree is not None
        assert resources.zygote_cgroup is not None
        for pid in (zygote, spawner):
            alone = resources.cgroup_tree.create("alone", CgroupLimits(memory=1 << 30, pids=1))
            alone.add(pid)
            with pytest.raises(SandboxStartFailed, match=r"no process could be forked .* too few processes"):
                await crowded.create()
            resources.zygote_cgroup.add(pid)
            assert alone.remove()
            assert (await run(await crowded.create(), "1 + 1")).result == "2"
        await wait_until(lambda: crowded.live_count <= 2)


def _forkers(running: Supervisor) -> tuple[int, int]:
    """The spawner and its zygote, the oldest processes of the jail that Python runs in."""
    top = running.zygote.pid
    assert top is not None
    found = [
        pid
        for pid in descendants(top)
        if b"spawner.main" in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b" ", b"")
    ]
    spawner, zygote, *_ = sorted(found)
    return spawner, zygote


def _jails() -> set[int]:
    """Children of this process that are, or will be, the outermost of a zygote."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            found |= {int(pid)} if b"outer_jail" in line else set()
    return found
