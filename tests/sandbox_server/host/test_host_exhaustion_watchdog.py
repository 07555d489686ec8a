"""The resource watchdog with simulated kernel tables."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fumehood.sandbox_server.host import host_exhaustion_watchdog


class FakeWatchedSandbox:
    def __init__(self, *pids: int) -> None:
        self.reason: str | None = None
        self.ended = asyncio.Event()
        self._pids = [*pids]

    def kill(self, reason: str) -> None:
        self.reason = reason
        self.ended.set()

    def processes(self) -> list[int]:
        if not self._pids:
            raise FileNotFoundError
        return self._pids

    def init_pid(self) -> int | None:
        return None

    def device_number(self) -> int | None:
        return None

    def unreclaimable_memory(self) -> int:
        return len(self.processes())


@pytest.mark.parametrize(
    ("numbers", "found"),
    [("501 0 1000", True), ("499 0 1000", False), ("900000 0 1000000", False)],
    ids=["too many", "enough are left", "they are others'"],
)
async def test_whoever_has_most_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: str, found: bool
) -> None:
    """This process has a table of 64 files or more."""
    (tmp_path / "file-nr").write_text(numbers)
    monkeypatch.setattr(host_exhaustion_watchdog, "_FILE_NR_PATH", str(tmp_path / "file-nr"))
    greedy, gone = FakeWatchedSandbox(os.getpid()), FakeWatchedSandbox()
    assert [sandbox for sandbox, _ in host_exhaustion_watchdog.find_offenders([gone, greedy])] == (
        [greedy] if found else []
    )


async def test_a_look_that_fails_is_not_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever uses up the supervisor's descriptors must not be rid of it."""
    monkeypatch.setattr(host_exhaustion_watchdog, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(host_exhaustion_watchdog, "_FILE_NR_PATH", str(tmp_path / "file-nr"))
    greedy, looks = FakeWatchedSandbox(os.getpid()), 0

    def sandboxes() -> list[FakeWatchedSandbox]:
        nonlocal looks
        looks += 1
        if looks == 3:
            (tmp_path / "file-nr").write_text("999 0 1000")
        return [greedy]

    watching = asyncio.ensure_future(host_exhaustion_watchdog.watch_kernel_objects(sandboxes))
    async with asyncio.timeout(30):
        await greedy.ended.wait()
    watching.cancel()
    assert greedy.reason == "it held too many of the files that this host can open (fs.file-max)"
    assert looks >= 3


class FakeMemory:
    """The memory of all, of which `reclaimable` could be taken back."""

    def __init__(self, current: int, reclaimable: int = 0) -> None:
        self.current = current
        self.looked = asyncio.Event()
        self._reclaimable = reclaimable

    def memory_current(self) -> int:
        self.looked.set()
        if not self.current:
            raise FileNotFoundError
        return self.current

    def unreclaimable_memory(self) -> int:
        return self.current - self._reclaimable


async def watched(
    memory: FakeMemory, sandboxes: list[FakeWatchedSandbox], *, looks: int = 3
) -> list[FakeWatchedSandbox]:
    """Who was ended when so many looks had been taken."""
    watching = asyncio.ensure_future(
        host_exhaustion_watchdog.watch_memory(lambda: sandboxes, memory, 100 << 30)
    )
    async with asyncio.timeout(30):
        for _ in range(looks):
            memory.looked.clear()
            await memory.looked.wait()
    watching.cancel()
    return [sandbox for sandbox in sandboxes if sandbox.reason is not None]


async def test_whoever_holds_most_goes_before_all_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_exhaustion_watchdog, "_MEMORY_CHECK_INTERVAL", 0.001)
    monkeypatch.setattr(host_exhaustion_watchdog, "_KILL_TIMEOUT", 0.0)
    small, greedy, gone = FakeWatchedSandbox(1), FakeWatchedSandbox(1, 2), FakeWatchedSandbox()
    assert await watched(FakeMemory(91 << 30), [small, greedy, gone]) == [greedy]
    assert greedy.reason == "all sandboxes together had nearly used up their memory, and it held most of it"


@pytest.mark.parametrize(
    "memory",
    [FakeMemory(89 << 30), FakeMemory(99 << 30, reclaimable=10 << 30), FakeMemory(0)],
    ids=["enough is left", "enough can be taken back", "nobody counts any more"],
)
async def test_nobody_goes_without_need(monkeypatch: pytest.MonkeyPatch, memory: FakeMemory) -> None:
    monkeypatch.setattr(host_exhaustion_watchdog, "_MEMORY_CHECK_INTERVAL", 0.001)
    assert await watched(memory, [FakeWatchedSandbox(1), FakeWatchedSandbox(1, 2)]) == []


async def test_one_alone_may_have_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_exhaustion_watchdog, "_MEMORY_CHECK_INTERVAL", 0.001)
    assert await watched(FakeMemory(99 << 30), [FakeWatchedSandbox(1)]) == []


async def test_the_next_one_goes_when_what_the_last_one_held_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_exhaustion_watchdog, "_MEMORY_CHECK_INTERVAL", 0.001)
    sandboxes = [FakeWatchedSandbox(1), FakeWatchedSandbox(1, 2), FakeWatchedSandbox(1, 2, 3)]
    watching = asyncio.ensure_future(
        host_exhaustion_watchdog.watch_memory(lambda: sandboxes, FakeMemory(99 << 30), 100 << 30)
    )
    async with asyncio.timeout(30):
        await sandboxes[2].ended.wait()
        assert sandboxes[1].reason is None
        last = sandboxes.pop()
        await sandboxes[1].ended.wait()
    watching.cancel()
    assert (last.reason is not None, sandboxes[0].reason) == (True, None)


async def test_locks_are_not_looked_at_again_for_each_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few sandboxes, each within its bound, could keep the supervisor busy with nothing else."""

    class Locks(list[tuple[int, int]]):
        looks = 0

        def __iter__(self) -> Iterator[tuple[int, int]]:
            self.looks += 1
            return super().__iter__()

    locks = Locks((number % 50, 7) for number in range(host_exhaustion_watchdog.MAX_LOCKS + 1))
    monkeypatch.setattr(host_exhaustion_watchdog, "_read_locks", lambda: locks)
    assert (
        host_exhaustion_watchdog.find_offenders([FakeWatchedSandbox(1000 + number) for number in range(100)])
        == []
    )
    assert locks.looks <= 2
