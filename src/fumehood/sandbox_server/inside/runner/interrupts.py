"""Decides when SIGINT reaches the program's code."""

import builtins
import functools
import os
import threading
from collections.abc import Callable
from types import FrameType

globals()["__builtins__"] = dict(vars(builtins))  # see streams.py

_process = os.getpid


class InterruptGuard:
    """Decides when SIGINT becomes KeyboardInterrupt: in user code only, never in the middle of a message.

    `armed` and `depth` are set by plain stores: CPython runs signal handlers after calls and at backward
    jumps, so that nothing can come between such a store and the statement before it.
    """

    __slots__ = ("armed", "delivered", "depth", "forking", "main", "pending")

    def __init__(self) -> None:
        self.armed = False
        self.delivered = False
        self.pending = 0  # the process in which an interrupt waits: a child does not inherit it
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
        """`os.fork` and `os.forkpty` that hold interrupts back while their hooks run: what is raised there is lost.

        A hook of our own could not do it: one that is registered later runs outside of it, and what it
        held back it could not raise.
        """
        return self._wrap_fork(os.fork), self._wrap_fork(os.forkpty)

    def _wrap_fork[Result](self, fork: Callable[[], Result]) -> Callable[[], Result]:
        @functools.wraps(fork)
        def shielded() -> Result:
            me = threading.get_ident()
            self.forking.add(me)
            try:
                return fork()
            finally:
                self.forking.discard(me)
                if self.pending and not self.depth and me == self.main:
                    self._raise_interrupt()

        return shielded

    def reset_after_fork(self) -> None:
        """In the child: the thread that forked is the main one now."""
        me = threading.get_ident()
        if me != self.main:
            self.main = me
            self.depth = 0
        self.forking.intersection_update((me,))
