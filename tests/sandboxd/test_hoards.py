"""Who is found to hold too much, where that cannot be tried for real; imports `fumehood.sandboxd`."""

import asyncio
import os
from pathlib import Path

import pytest

from fumehood.sandboxd import hoards


class Holding:
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

    def first_process(self) -> int | None:
        return None

    def own_device(self) -> int | None:
        return None


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
    monkeypatch.setattr(hoards, "_FILE_NUMBERS", str(tmp_path / "file-nr"))
    greedy, gone = Holding(os.getpid()), Holding()
    assert [holder for holder, _ in hoards.find([gone, greedy])] == ([greedy] if found else [])


async def test_a_look_that_fails_is_not_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever uses up the supervisor's descriptors must not be rid of it."""
    monkeypatch.setattr(hoards, "EVERY", 0.01)
    monkeypatch.setattr(hoards, "_FILE_NUMBERS", str(tmp_path / "file-nr"))
    greedy, looks = Holding(os.getpid()), 0

    def holders() -> list[Holding]:
        nonlocal looks
        looks += 1
        if looks == 3:
            (tmp_path / "file-nr").write_text("999 0 1000")
        return [greedy]

    watching = asyncio.ensure_future(hoards.watch(holders))
    async with asyncio.timeout(30):
        await greedy.ended.wait()
    watching.cancel()
    assert greedy.reason == "it held too many of the files that this host can open (fs.file-max)"
    assert looks >= 3
