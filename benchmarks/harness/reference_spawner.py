"""Starts reference programs and measures them, in a small process of its own.

Lines of JSON in, lines of JSON out: `{"argv": […], "env": {…}}` runs the program once and answers with the seconds
until its first output and until its end, with the CPU seconds of it and of everything it started, and with what it
printed. Run by path with `python -I -S`: from here a start costs as little as it can.
"""

import ctypes
import json
import os
import resource
import sys
import time
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


def _read_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _reap() -> None:
    """Also what the program left behind: bubblewrap's outer process does not wait for its inner one."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def run(argv: list[str], env: dict[str, str], null: int) -> dict[str, Any]:
    reader, writer = os.pipe()
    actions = [
        (os.POSIX_SPAWN_DUP2, null, 0),
        (os.POSIX_SPAWN_DUP2, writer, 1),
        (os.POSIX_SPAWN_CLOSE, reader),
    ]
    cpu_before, began = _read_cpu_seconds(), time.perf_counter()
    os.posix_spawn(argv[0], argv, env, file_actions=actions)
    os.close(writer)
    text = os.read(reader, 65536)
    first = time.perf_counter()
    while chunk := os.read(reader, 65536):
        text += chunk
    os.close(reader)
    _reap()
    ended = time.perf_counter()
    return {
        "first": first - began,
        "whole": ended - began,
        "cpu": _read_cpu_seconds() - cpu_before,
        "text": text.decode(errors="replace"),
    }


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(request["argv"], request["env"], null)), flush=True)


if __name__ == "__main__":
    main()
