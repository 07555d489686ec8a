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
import time

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
_look_at_child = os.waitid
_sleep = time.sleep
_POLL_SECONDS = 0.002


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
        """Kill the command with all that it started, and return when they are dead.

        They are stopped first, so that none can start another one. There is no time limit here: the supervisor
        has one, and then kills the sandbox.
        """
        self.code = INTERRUPTED
        killed: set[int] = set()
        while stopped := self._stop_all(killed):
            for pid in stopped:
                _send(pid, signal.SIGKILL)
            killed |= stopped
            self._kill_leader()
            _wait_until_dead(stopped)
        self._kill_leader()

    def _stop_all(self, known: set[int]) -> set[int]:
        """Stop every process of the command that is not among the known ones."""
        stopped: set[int] = set()
        while found := self._doomed() - stopped - known:
            for pid in found:
                _send(pid, signal.SIGSTOP)
            stopped |= found
        return stopped

    def _kill_leader(self) -> None:
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


def _wait_until_dead(pids: set[int]) -> None:
    """Poll instead of opening descriptors: a program may have left none."""
    alive = pids
    while alive := {pid for pid in alive if _is_alive(pid)}:
        _sleep(_POLL_SECONDS)


def _is_alive(pid: int) -> bool:
    """A child that has ended stays its parent's to reap; whatever is not a child here, the first process reaps."""
    try:
        return _look_at_child(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    except ChildProcessError:
        pass
    try:
        _kill(pid, 0)
    except OSError:  # gone; or not ours to signal, so no process of the command
        return False
    return True
