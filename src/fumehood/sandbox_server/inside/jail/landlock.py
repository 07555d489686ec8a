"""Landlock rules: which files the process may use, as a second barrier behind the mounts."""

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
_DEVICE = _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
# Device nodes may not be created, not even in writable trees.
_READ_WRITE = ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV)
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
    """Restrict the calling thread and everything it starts; returns the ABI version used, 0 without Landlock.

    Missing paths are skipped. In a network namespace of its own TCP is not restricted: a rule could not be relaxed
    later for the egress listener.
    """
    abi = syscalls.landlock_abi()
    if abi:
        grants: list[tuple[str | int, int]] = [(path, _READ_ONLY) for path in read_only]
        grants += [(path, _READ_WRITE) for path in read_write]
        grants += [(path, _DEVICE) for path in devices]
        _enforce(abi, grants, deny_tcp=deny_tcp)
    return abi


def restrict_to_directory(directory: int) -> None:
    """Restrict a helper: it may read everything (its imports) and write below one directory; no TCP, no signals.

    ABI 1 would also forbid moving files between directories, so it is not used there.
    """
    abi = syscalls.landlock_abi()
    if abi >= _FIRST_WITH_REFER:
        _enforce(abi, [("/", _READ_ONLY), (directory, _READ_WRITE)], deny_tcp=True)


def _enforce(abi: int, grants: list[tuple[str | int, int]], *, deny_tcp: bool) -> None:
    """Allow only these rights below these paths or descriptors; scopes keep signals and abstract sockets inside."""
    handled = _handled_rights(abi)
    network = _BIND_TCP | _CONNECT_TCP if deny_tcp and abi >= 4 else 0
    scoped = _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL if abi >= 6 else 0
    ruleset = syscalls.landlock_create(handled, network, scoped)
    try:
        for target, rights in grants:
            if isinstance(target, int):
                syscalls.landlock_allow(ruleset, target, rights & handled)
            else:
                _allow_path(ruleset, target, rights & handled)
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
