"""Keeps libraries' fork hooks from running in every sandbox's start.

Python calls them in each child: `threading` and `logging` renew locks, `random` its state, and so on. In a child of
the zygote, which has one thread and holds no lock, that is of no use, and it is a third of all pages which such a
child copies. So they are held back while the zygote imports, and take effect in the sandbox, for the forks of its
program. Handlers that libraries have given to the C library cannot be held back; `plain_fork` passes them over.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

_deferred_hooks: list[dict[str, Callable[[], Any]]] = []
_register = os.register_at_fork


_python = ctypes.PyDLL(None, use_errno=True)
_fork: Callable[[], int] | None = getattr(_python, "_Fork", None)  # of glibc 2.34 and later
# Looked up once, and not in every child.
_before, _in_parent, _in_child = (
    _python.PyOS_BeforeFork,
    _python.PyOS_AfterFork_Parent,
    _python.PyOS_AfterFork_Child,
)


def plain_fork() -> int:
    """As os.fork, for a process with one thread: what a lock may need in others is left out."""
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
    """Before anything is imported that has some."""

    def register_at_fork(**hooks: Callable[[], Any]) -> None:
        _deferred_hooks.append(hooks)

    os.register_at_fork = register_at_fork


def restore_hooks() -> None:
    """In a sandbox's interpreter: from here on forks are the program's."""
    os.register_at_fork = _register
    for hooks in _deferred_hooks:
        _register(**hooks)
    threading: Any = sys.modules["threading"]
    threading.main_thread()._set_native_id()  # the one thing of all those that a new process needs
