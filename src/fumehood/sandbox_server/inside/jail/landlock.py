"""Landlock, the second wall behind the mounts: which trees may be touched."""

import os
import stat
from collections.abc import Iterable

from fumehood.sandbox_server.inside import syscalls

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_MAKE_CHAR = 1 << 6
_MAKE_BLOCK = 1 << 11
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15
_BIND_TCP = 1 << 0
_CONNECT_TCP = 1 << 1
_SCOPE_ABSTRACT_UNIX = 1 << 0
_SCOPE_SIGNAL = 1 << 1

_READ_ONLY = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
_FIRST_WITH_REFER = 2


def _handled_rights(abi: int) -> int:
    rights = (1 << 13) - 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        if abi >= since:
            rights |= right
    return rights


def restrict(
    *,
    read_only: Iterable[str],
    read_write: Iterable[str],
    devices: Iterable[str],
    deny_tcp: bool = False,
) -> int:
    """Confine the calling thread and all it starts; returns the Landlock version used, 0 for none.

    What does not exist is passed over. Device nodes may never be made, not even in writable trees.
    """
    abi = syscalls.landlock_abi()
    if not abi:
        return 0
    handled = _handled_rights(abi)
    # TCP is left alone in a network namespace of its own: a rule there could not be loosened later for the
    # egress listener. Scopes keep signals and abstract sockets inside.
    network = _BIND_TCP | _CONNECT_TCP if deny_tcp and abi >= 4 else 0
    scoped = _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL if abi >= 6 else 0
    ruleset = syscalls.landlock_create(handled, network, scoped)
    try:
        grants = (
            (read_only, _READ_ONLY),
            (read_write, handled & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV)),
            (devices, _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV),
        )
        for paths, rights in grants:
            for path in paths:
                _allow_path(ruleset, path, rights & handled)
        syscalls.landlock_enforce(ruleset)
    finally:
        os.close(ruleset)
    return abi


def restrict_to_directory(directory: int) -> None:
    """For a helper: everything may be read (its imports), one open directory may be written; no TCP, no signals.

    The first version would also forbid to move files from one directory to another: there, nothing is done.
    """
    abi = syscalls.landlock_abi()
    if abi < _FIRST_WITH_REFER:
        return
    handled = _handled_rights(abi)
    network = _BIND_TCP | _CONNECT_TCP if abi >= 4 else 0
    scoped = _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL if abi >= 6 else 0
    ruleset = syscalls.landlock_create(handled, network, scoped)
    try:
        _allow_path(ruleset, "/", _READ_ONLY)
        syscalls.landlock_allow(ruleset, directory, handled & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV))
        syscalls.landlock_enforce(ruleset)
    finally:
        os.close(ruleset)


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        anchor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(anchor).st_mode):
            rights &= _FILE_RIGHTS
        syscalls.landlock_allow(ruleset, anchor, rights)
    finally:
        os.close(anchor)
