"""Decides when SIGINT interrupts the program's code."""

import builtins
import functools
import os
import threading
from collections.abc import Callable
from types import FrameType

globals()["__builtins__"] = dict(vars(builtins))  # see output_capture.py

_process = os.getpid


class InterruptGuard:
    """Turns SIGINT into KeyboardInterrupt in user code only, never while a message is being sent.

    `armed` and `depth` are set by plain stores: CPython runs signal handlers after calls and at backward jumps, so no
    handler runs between such a store and the statement before it.

    armed: user code runs. depth: nested critical sections of the main thread. delivered: an interrupt was raised.
    """

    __slots__ = ("armed", "delivered", "depth", "forking", "main", "pending")

    def __init__(self) -> None:
        self.armed = False
        self.delivered = False
        self.pending = 0  # pid of the process that an interrupt waits for: forks do not inherit it
        self.depth = 0
        self.forking: set[int] = set()
        self.main = threading.get_ident()

    def handle_sigint(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 (signature of a handler)
        if not self.armed:
            return
        if self.depth or (self.forking and threading.get_ident() in self.forking):
            self.pending = _process()
            return
        self.delivered = True
        raise KeyboardInterrupt

    def leave_critical_section(self) -> None:
        """Decrease `depth`; raises a KeyboardInterrupt that arrived meanwhile."""
        self.depth -= 1
        if self.pending and not self.depth:
            self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        process = self.pending
        self.pending = 0
        if self.armed and process == _process():
            self.delivered = True
            raise KeyboardInterrupt

    # --- forks ------------------------------------------------------------------------------------

    def wrap_forks(self) -> tuple[Callable[[], int], Callable[[], tuple[int, int]]]:
        """Return `os.fork` and `os.forkpty` that defer interrupts while fork hooks run, where exceptions are lost.

        A fork hook cannot do this: later hooks run outside of it, and it cannot raise what it deferred.
        """
        return self._wrap_fork(os.fork), self._wrap_fork(os.forkpty)

    def _wrap_fork[Result](self, fork: Callable[[], Result]) -> Callable[[], Result]:
        @functools.wraps(fork)
        def interruptible_after() -> Result:
            thread = threading.get_ident()
            self.forking.add(thread)
            try:
                return fork()
            finally:
                self.forking.discard(thread)
                if self.pending and not self.depth and thread == self.main:
                    self._raise_interrupt()

        return interruptible_after

    def reset_after_fork(self) -> None:
        """In the child: make the forking thread the main thread."""
        thread = threading.get_ident()
        if thread != self.main:
            self.main = thread
            self.depth = 0
        self.forking.intersection_update((thread,))
