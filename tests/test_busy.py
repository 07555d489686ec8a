"""`make test-busy`: the processes that keep the machine busy end with the command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import becomes_true

ROOT = Path(__file__).resolve().parent.parent
# Says who its siblings are, and waits until its standard input ends.
_COMMAND = (
    "import os, pathlib, sys\n"
    "parent = os.getppid()\n"
    "children = pathlib.Path(f'/proc/{parent}/task/{parent}/children').read_text().split()\n"
    "print(*(pid for pid in children if int(pid) != os.getpid()), flush=True)\n"
    "sys.stdin.read()\n"
    "sys.exit(7)\n"
)


def _start() -> tuple[subprocess.Popen[str], list[int]]:
    """The program with two busy processes beside its command, and their ids."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.busy", "--processes=2", "--seconds=60", sys.executable, "-c", _COMMAND],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    return process, pids


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_they_compute_while_the_command_runs_and_end_with_it() -> None:
    process, pids = _start()
    assert all(_is_running(pid) for pid in pids)
    process.communicate("", timeout=60)
    assert process.returncode == 7
    assert not any(_is_running(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_they_end_when_it_is_interrupted_or_killed(number: signal.Signals) -> None:
    process, pids = _start()
    with process:
        os.kill(process.pid, number)
        process.communicate("", timeout=60)  # the command ends, too: its standard input does
    # A process that the kernel kills is gone soon, not at once.
    assert becomes_true(lambda: not any(_is_running(pid) for pid in pids), 30)
    assert process.returncode != 0
