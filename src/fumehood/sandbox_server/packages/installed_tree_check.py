"""Verifies the tree that an install jail wrote before it becomes a layer.

The tree is untrusted: it is walked by descriptors that follow no link, and may hold directories and plain files only,
of limited number and size. The jail has ended, so nothing changes it meanwhile.
"""

import contextlib
import ctypes
import os
import stat
from pathlib import Path

from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.inside.files.untrusted_files import RESOLVE_BENEATH

_MAX_ENTRIES = 200_000
_MAX_DEPTH = 48
_libc = ctypes.CDLL(None, use_errno=True)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class InvalidInstallTree(Exception):
    """The tree cannot become a layer; the text says why."""


def verify_tree(path: str, *, max_bytes: int) -> tuple[int, int]:
    """Check a tree, take ownership, set modes 0644 and 0755, and sync it to disk; return its files and bytes.

    Raises InvalidInstallTree, OSError.
    """
    with syscalls.closing_fd(os.open(path, _DIRECTORY | os.O_CLOEXEC)) as root:
        size = _verify_entries(root, max_bytes)
        # One call for all files: fsync of each takes milliseconds.
        if _libc.syncfs(root):
            raise OSError(ctypes.get_errno(), "syncfs")
    return size


def _verify_entries(root: int, max_bytes: int) -> tuple[int, int]:
    entries = files = total = 0
    pending = [b"."]
    while pending:
        prefix = pending.pop()
        with syscalls.closing_fd(
            syscalls.openat2(root, prefix, _DIRECTORY, resolve=RESOLVE_BENEATH)
        ) as directory:
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
    return files, total


def _verify_file(directory: int, name: bytes) -> int:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInstallTree(f"{name[:100]!r} is neither a file nor a directory")
    if status.st_nlink != 1:
        raise InvalidInstallTree(f"{name[:100]!r} is a file with several hard links")
    with syscalls.closing_fd(syscalls.openat2(directory, name, _FILE, resolve=RESOLVE_BENEATH)) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidInstallTree(f"{name[:100]!r} is not a plain file")
        _take_ownership(fd, 0o755 if status.st_mode & 0o111 else 0o644)
    return max(status.st_size, status.st_blocks * 512)


def _take_ownership(fd: int, mode: int) -> None:
    if os.geteuid() == 0:
        os.fchown(fd, 0, 0)  # also clears set-uid bits
    os.fchmod(fd, mode)


def measure_disk_usage(path: Path) -> int:
    """Return the disk usage below a directory that others may be changing; opens directories only."""
    total = 0
    for _, _, files, directory in os.fwalk(path, onerror=None):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(name, dir_fd=directory, follow_symlinks=False).st_blocks * 512
    return total
