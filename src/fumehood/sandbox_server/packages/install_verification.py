"""Makes what an install jail left behind fit to be shared: looked through, owned, read-only.

Nothing about such a tree is believed: it is walked by descriptors that follow no link, and holds directories and plain
files only, of bounded number and size. The jail has ended, so nobody changes it meanwhile.
"""

import contextlib
import ctypes
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from fumehood.sandbox_server.inside import syscalls

_MAX_ENTRIES = 200_000
_MAX_DEPTH = 48
_libc = ctypes.CDLL(None, use_errno=True)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_XDEV


class InvalidInstallTree(Exception):
    """Something in it does not belong into a layer; the text says what."""


@dataclass(frozen=True, slots=True)
class TreeSize:
    files: int
    bytes: int


def verify_tree(path: str, *, max_bytes: int) -> TreeSize:
    """Check a tree and make it ours: owner, modes 0644 and 0755, nothing but files and directories; on disk."""
    root = os.open(path, _DIRECTORY | os.O_CLOEXEC)
    try:
        size = _verify_entries(root, max_bytes)
        # One call for all files: each by itself would take milliseconds.
        if _libc.syncfs(root):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(root)
    return size


def _verify_entries(root: int, max_bytes: int) -> TreeSize:
    entries = files = total = 0
    pending = [b"."]
    while pending:
        prefix = pending.pop()
        directory = syscalls.openat2(root, prefix, _DIRECTORY, resolve=_BENEATH)
        try:
            _take_ownership(directory, 0o755)
            with os.scandir(directory) as listing:
                for entry in listing:
                    entries += 1
                    if entries > _MAX_ENTRIES:
                        raise InvalidInstallTree(f"more than {_MAX_ENTRIES} files")
                    name = os.fsencode(entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        if prefix.count(b"/") >= _MAX_DEPTH:
                            raise InvalidInstallTree(f"directories deeper than {_MAX_DEPTH}")
                        pending.append(prefix + b"/" + name)
                        continue
                    files += 1
                    total += _verify_file(directory, name)
                    if total > max_bytes:
                        raise InvalidInstallTree(f"more than {max_bytes >> 20} MiB")
        finally:
            os.close(directory)
    return TreeSize(files, total)


def _verify_file(directory: int, name: bytes) -> int:
    about = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(about.st_mode):
        raise InvalidInstallTree(f"{name[:100]!r} is neither a file nor a directory")
    if about.st_nlink != 1:
        raise InvalidInstallTree(f"{name[:100]!r} is a file with several names")
    fd = syscalls.openat2(directory, name, _FILE, resolve=_BENEATH)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidInstallTree(f"{name[:100]!r} is no plain file")
        _take_ownership(fd, 0o755 if about.st_mode & 0o111 else 0o644)
    finally:
        os.close(fd)
    return max(about.st_size, about.st_blocks * 512)


def _take_ownership(fd: int, mode: int) -> None:
    if os.geteuid() == 0:
        os.fchown(fd, 0, 0)  # takes set-uid bits away as well
    os.fchmod(fd, mode)


def measure_disk_usage(path: Path) -> int:
    """What lies below a directory that others may be changing; nothing is opened but directories."""
    total = 0
    for _, _, files, directory in os.fwalk(path, onerror=None):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(name, dir_fd=directory, follow_symlinks=False).st_blocks * 512
    return total
