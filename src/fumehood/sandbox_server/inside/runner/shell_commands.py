"""Runs shell commands for the runner and, on an interrupt, kills everything they started.

A command is a process in its own session, with the configured directory and environment, whatever a program did to this
interpreter (lowered limits stay). Background processes outlive a command that ends; an interrupted command is killed
with every process that started since it began, even those that have moved to another session.
"""

import builtins
import contextlib
import os
import signal
import subprocess
import time

from fumehood.sandbox_server.inside import layout
from fumehood.sandbox_server.inside.runner.interrupts import InterruptGuard

globals()["__builtins__"] = dict(vars(builtins))  # see output_capture.py

_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
NOT_STARTED = 126
INTERRUPTED = 130
# Bound now: a program may replace them in its interpreter.
_popen = subprocess.Popen[bytes]
_kill = os.kill
_wait = os.waitpid
_exit_code = os.waitstatus_to_exitcode
_look_at_child = os.waitid
_sleep = time.sleep
_POLL_SECONDS = 0.002


class ShellCommandRunner:
    """Runs one command at a time; `exit_code` is the last one's."""

    def __init__(self, guard: InterruptGuard) -> None:
        self.exit_code = 0
        self._guard = guard
        self._directory = layout.DATA_DIRECTORY
        self._environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pids_before: set[int] = set()

    def configure(self, directory: str, environment: dict[str, str]) -> None:
        """Set directory and environment of commands, before any program could change this process's own."""
        self._directory = directory
        self._environment = environment

    def run(self, command: str) -> None:
        """Run a command and wait for it. After an interrupt (KeyboardInterrupt), call `kill`."""
        self.exit_code = NOT_STARTED
        self._pids_before = self._find_nearby_pids()
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # else its exit code is lost
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        guard = self._guard
        guard.depth += 1  # no interrupt between the start and the assignment
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
        with contextlib.suppress(ChildProcessError):  # a thread of the program has waited for any child
            code = _exit_code(_wait(process.pid, 0)[1])
            self.exit_code = code if code >= 0 else 128 - code
        process.returncode = self.exit_code  # so that Popen does not wait again
        self._process = None

    def kill(self) -> None:
        """Kill the command and everything it started; returns when they are dead.

        Processes are stopped first, so that none can start another one. There is no timeout here: the supervisor has
        one, and then kills the sandbox.
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
        """Stop every process of the command that is not in `known`; returns them."""
        stopped: set[int] = set()
        while found := self._find_descendants() - stopped - known:
            for pid in found:
                _send_signal(pid, signal.SIGSTOP)
            stopped |= found
        return stopped

    def _kill_process(self) -> None:
        if self._process is not None:
            _send_signal(-self._process.pid, signal.SIGKILL)  # its group, in case /proc is unreadable
            self._reap(self._process)
            self.exit_code = INTERRUPTED

    def _find_descendants(self) -> set[int]:
        """Return processes that started since the command began; init has adopted those whose parents ended."""
        found: set[int] = set()
        new = self._find_nearby_pids() - self._pids_before
        while new:
            found |= new
            new = {child for pid in new for child in child_pids(pid)} - found
        return found

    def _find_nearby_pids(self) -> set[int]:
        return {*child_pids(os.getpid()), *child_pids(os.getppid() or 1)} - {os.getpid()}


def _shell() -> str:
    return next((path for path in _SHELLS if os.path.exists(path)), _SHELLS[-1])


def child_pids(pid: int) -> list[int]:
    """Return the children of all threads of a process; none if it has ended."""
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
    """Poll, since a program may have left no descriptor for pidfds."""
    alive = pids
    while alive := {pid for pid in alive if _is_alive(pid)}:
        _sleep(_POLL_SECONDS)


def _is_alive(pid: int) -> bool:
    """Whether a process runs; an ended child is not reaped here, and init reaps what is not our child."""
    try:
        return _look_at_child(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    except ChildProcessError:
        pass
    try:
        _kill(pid, 0)
    except OSError:  # gone; or not ours to signal, so no process of the command
        return False
    return True
