"""Runs commands of the shell for the runner, and ends all they started when they must end.

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

from fumehood.sandbox_server.inside import layout
from fumehood.sandbox_server.inside.runner.interrupts import InterruptGuard

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


class ShellCommands:
    """One after another; `code` is the last one's exit code."""

    def __init__(self, guard: InterruptGuard) -> None:
        self.exit_code = 0
        self._guard = guard
        self._directory = layout.DATA_DIRECTORY
        self._environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pids_before: set[int] = set()

    def configure(self, directory: str, environment: dict[str, str]) -> None:
        """Where commands run and what they find there; before any program could have changed it."""
        self._directory = directory
        self._environment = environment

    def run(self, command: str) -> None:
        """Wait for it; interrupts reach this as they reach a program, and then `end` has to be called."""
        self.exit_code = NOT_STARTED
        self._pids_before = self._find_nearby_pids()
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # then nobody could tell how it ended
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        guard = self._guard
        guard.depth += 1  # whoever is started has to be known
        try:
            self._process = _popen(
                [_shell(), "-c", command],
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            guard.leave_critical_section()
        self._reap(self._process)

    def _reap(self, process: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(ChildProcessError):  # a thread of the program waits for any child
            code = _exit_code(_wait(process.pid, 0)[1])
            self.exit_code = code if code >= 0 else 128 - code
        process.returncode = self.exit_code  # nobody is to wait for it again
        self._process = None

    def kill(self) -> None:
        """Kill the command with all that it started, and return when they are dead.

        They are stopped first, so that none can start another one. There is no time limit here: the supervisor
        has one, and then kills the sandbox.
        """
        self.exit_code = INTERRUPTED
        killed: set[int] = set()
        while stopped := self._stop_all(killed):
            for pid in stopped:
                _send_signal(pid, signal.SIGKILL)
            killed |= stopped
            self._kill_process()
            _wait_until_gone(stopped)
        self._kill_process()

    def _stop_all(self, known: set[int]) -> set[int]:
        """Stop every process of the command that is not among the known ones."""
        stopped: set[int] = set()
        while found := self._find_descendants() - stopped - known:
            for pid in found:
                _send_signal(pid, signal.SIGSTOP)
            stopped |= found
        return stopped

    def _kill_process(self) -> None:
        if self._process is not None:
            _send_signal(
                -self._process.pid, signal.SIGKILL
            )  # where nobody may look at /proc, its group at least
            self._reap(self._process)
            self.exit_code = INTERRUPTED

    def _find_descendants(self) -> set[int]:
        """Everything that was not there when the command began: whose parents have ended, the first process adopts."""
        found: set[int] = set()
        new = self._find_nearby_pids() - self._pids_before
        while new:
            found |= new
            new = {child for pid in new for child in _child_pids(pid)} - found
        return found

    def _find_nearby_pids(self) -> set[int]:
        return {*_child_pids(os.getpid()), *_child_pids(os.getppid() or 1)} - {os.getpid()}


def _shell() -> str:
    return next((path for path in _SHELLS if os.path.exists(path)), _SHELLS[-1])


def _child_pids(pid: int) -> list[int]:
    """Of all threads of a process; none of one that has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        _kill(pid, number)


def _wait_until_gone(pids: set[int]) -> None:
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
