"""Runs a command while processes beside it keep the processors busy.

    python -m tools.busy [--processes N] [--seconds N] COMMAND ARGUMENT…

The busy processes end with the command, and when this program is interrupted or killed, or after `--seconds`.
The exit code is the command's.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator

_PR_SET_PDEATHSIG = 1
_DEFAULT_PROCESSES = 10
_DEFAULT_SECONDS = 2 * 60 * 60.0


def keep_busy(parent: int, seconds: float) -> None:
    """Compute until the time is over; the kernel ends this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    until = time.monotonic() + seconds
    while os.getppid() == parent and time.monotonic() < until:
        sum(range(100_000))


@contextlib.contextmanager
def busy_processes(count: int, seconds: float) -> Generator[list[int]]:
    """Their process ids; they are dead and reaped on leaving."""
    parent = os.getpid()
    pids: list[int] = []
    try:
        for _ in range(count):
            if (pid := os.fork()) == 0:
                try:
                    for number in (signal.SIGINT, signal.SIGTERM):
                        signal.signal(number, signal.SIG_DFL)
                    keep_busy(parent, seconds)
                finally:
                    os._exit(0)
            pids.append(pid)
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        for pid in pids:
            os.waitpid(pid, 0)


def _interrupt(number: int, frame: object) -> None:
    del frame
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=_DEFAULT_PROCESSES)
    parser.add_argument("--seconds", type=float, default=_DEFAULT_SECONDS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    with busy_processes(arguments.processes, arguments.seconds) as pids:
        print(f"{len(pids)} busy processes beside it, on {os.cpu_count()} processors", file=sys.stderr)
        try:
            return subprocess.run(arguments.command, check=False).returncode
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
