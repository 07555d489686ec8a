"""Runs commands of the shell for the runner, and ends all they started when they must end; imports only siblings.

A command is a process of its own session: nothing that a program did to this interpreter (directory, environment,
limits that it lowered excepted) reaches it. What it leaves in the background lives on, as what a program leaves does;
but a command that is interrupted takes everything along that has begun since, wherever it has moved to.
"""

import builtins
import contextlib
import os
import signal
import subprocess

from fumehood.sandboxd.inside import layout
from fumehood.sandboxd.inside.interrupts import Guard

globals()["__builtins__"] = dict(vars(builtins))  # see streams.py

_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
NOT_STARTED = 126
INTERRUPTED = 130
# What a program may replace in its own interpreter.
_popen = subprocess.Popen[bytes]
_kill = os.kill
_wait = os.waitpid
_exit_code = os.waitstatus_to_exitcode


class Commands:
    """One after another; `code` is the last one's exit code."""

    def __init__(self, guard: Guard) -> None:
        self.code = 0
        self._guard = guard
        self._directory = layout.DATA
        self._environment: dict[str, str] = {}
        self._leader: subprocess.Popen[bytes] | None = None
        self._before: set[int] = set()

    def configure(self, directory: str, environment: dict[str, str]) -> None:
        """Where commands run and what they find there; before any program could have changed it."""
        self._directory = directory
        self._environment = environment

    def run(self, command: str) -> None:
        """Wait for it; interrupts reach this as they reach a program, and then `end` has to be called."""
        self.code = NOT_STARTED
        self._before = self._around()
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # then nobody could tell how it ended
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        guard = self._guard
        guard.depth += 1  # whoever is started has to be known
        try:
            self._leader = _popen(
                [_shell(), "-c", command],
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            guard.leave()
        self._reap(self._leader)

    def _reap(self, leader: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(ChildProcessError):  # a thread of the program waits for any child
            code = _exit_code(_wait(leader.pid, 0)[1])
            self.code = code if code >= 0 else 128 - code
        leader.returncode = self.code  # nobody is to wait for it again
        self._leader = None

    def end(self) -> None:
        """Kill the command with all that it started. They are stopped first, so that none can start another one."""
        self.code = INTERRUPTED
        stopped: set[int] = set()
        while found := self._doomed() - stopped:
            for pid in found:
                _send(pid, signal.SIGSTOP)
            stopped |= found
        for pid in stopped:
            _send(pid, signal.SIGKILL)
        if self._leader is not None:
            _send(-self._leader.pid, signal.SIGKILL)  # where nobody may look at /proc, its group at least
            self._reap(self._leader)
            self.code = INTERRUPTED

    def _doomed(self) -> set[int]:
        """Everything that was not there when the command began: whose parents have ended, the first process adopts."""
        found: set[int] = set()
        new = self._around() - self._before
        while new:
            found |= new
            new = {child for pid in new for child in _children(pid)} - found
        return found

    def _around(self) -> set[int]:
        return {*_children(os.getpid()), *_children(os.getppid() or 1)} - {os.getpid()}


def _shell() -> str:
    return next((path for path in _SHELLS if os.path.exists(path)), _SHELLS[-1])


def _children(pid: int) -> list[int]:
    """Of all threads of a process; none of one that has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        _kill(pid, number)
