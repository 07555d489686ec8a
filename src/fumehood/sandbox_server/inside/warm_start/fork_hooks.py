"""Keeps the fork hooks of libraries out of the start of every sandbox.

Python calls these hooks in each child: `threading` and `logging` renew locks, `random` its state. A child of the
zygote, which has one thread and holds no lock, needs none of that, yet the hooks cause a third of the pages that it
copies. So they are deferred while the zygote imports, and registered in the sandbox for the forks of its program.
Handlers of the C library (pthread_atfork) cannot be deferred; `plain_fork` skips them.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

_deferred_hooks: list[dict[str, Callable[[], Any]]] = []
_register = os.register_at_fork
_python = ctypes.PyDLL(None, use_errno=True)
_fork: Callable[[], int] | None = getattr(_python, "_Fork", None)  # glibc 2.34 and later
# Looked up once, not in every child.
_before, _in_parent, _in_child = (
    _python.PyOS_BeforeFork,
    _python.PyOS_AfterFork_Parent,
    _python.PyOS_AfterFork_Child,
)


def plain_fork() -> int:
    """Fork a single-threaded process without the C library's handlers; returns as os.fork does."""
    if _fork is None:
        return os.fork()
    _before()
    pid = _fork()
    if pid == 0:
        _in_child()
        return 0
    number = ctypes.get_errno()
    _in_parent()
    if pid < 0:
        raise OSError(number, os.strerror(number))
    return pid


def defer_hooks() -> None:
    """Collect fork hooks instead of registering them; call it before importing what registers some."""

    def register_at_fork(**hooks: Callable[[], Any]) -> None:
        _deferred_hooks.append(hooks)

    os.register_at_fork = register_at_fork


def restore_hooks() -> None:
    """Register the deferred hooks, in a sandbox's interpreter: later forks are the program's."""
    os.register_at_fork = _register
    for hooks in _deferred_hooks:
        _register(**hooks)
    threading: Any = sys.modules["threading"]
    threading.main_thread()._set_native_id()  # the only thing of all hooks that a new process needs
