"""Reads, lists and deletes files of a sandbox without trusting names, types or timing.

The supervisor reads with these functions. Writing is done by a helper as the sandbox's user in its cgroup: root cannot
create files on that tmpfs (its owner is not mapped there), and the pages must count against the sandbox.
"""

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from typing import NamedTuple

from fumehood.sandbox_server.inside import syscalls

MAX_DEPTH = 32
MAX_ENTRIES = 20_000
MAX_NAME_BYTES = 4 << 20  # all paths of a listing together
# Prefix of a helper's staging names at the top of the data directory.
RESERVED_PREFIX = ".fumehood-"
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
RESOLVE_BENEATH = syscalls.RESOLVE_STRICTLY
_MAX_BUSY_RETRIES = 5


class UnsafePath(ValueError):
    """A path that is not a plain relative path below the data directory."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """A regular file. Code can set its size and modification time; changed_ns, inode and blocks reveal that."""

    path: str
    size: int
    modified_ns: int
    changed_ns: int
    inode: int
    blocks: int
    executable: bool = False

    @classmethod
    def from_stat(cls, path: str, status: os.stat_result) -> "FileStat":
        return cls(
            path,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
            status.st_blocks,
            bool(status.st_mode & stat.S_IXUSR),
        )


def check_path(path: str) -> bytes:
    """Return a relative path as bytes. Raises UnsafePath for `..`, empty parts, NUL, or too long a path."""
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise UnsafePath("the path is not valid text") from None
    parts = raw.split(b"/")
    if not raw or len(raw) > 4096 or b"\0" in raw or any(part in (b"", b".", b"..") for part in parts):
        raise UnsafePath("a path is relative, without empty parts, '.' or '..'")
    if len(parts) > MAX_DEPTH or any(len(part) > 255 for part in parts):
        raise UnsafePath(f"a path has at most {MAX_DEPTH} parts of at most 255 bytes")
    if parts[0].startswith(RESERVED_PREFIX.encode()):
        raise UnsafePath(f"names that begin with {RESERVED_PREFIX} are the server's own")
    return raw


def open_regular_file(data_fd: int, path: str) -> int:
    """Open a regular file below the data directory for reading, without blocking or following a link.

    Raises UnsafePath, OSError.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    for attempt in range(_MAX_BUSY_RETRIES):
        try:
            fd = syscalls.openat2(data_fd, check_path(path), flags, resolve=RESOLVE_BENEATH)
            break
        except OSError as error:
            # EAGAIN: a rename raced with the lookup, or a process holds a lease on the file.
            if error.errno != errno.EAGAIN or attempt == _MAX_BUSY_RETRIES - 1:
                raise
    else:
        raise AssertionError("unreachable")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd


class DirectoryListing(NamedTuple):
    """Regular files and symbolic links, each sorted by path.

    is_truncated: whether some are missing: too many, too deep, or not UTF-8. links: path and target of each; a link is
    never followed.
    """

    files: list[FileStat]
    is_truncated: bool
    links: list[tuple[str, str]]


def list_files(data_fd: int) -> DirectoryListing:
    """List everything below the data directory.

    The walk uses descriptors: a directory that is moved or replaced meanwhile does not lead outside.
    """
    walk = _DirectoryWalk()
    while walk.pending and not walk.is_full:
        prefix = walk.pending.pop()
        with (
            contextlib.suppress(OSError),  # removed or unreadable since it was listed
            syscalls.closing_fd(_open_directory(data_fd, prefix)) as directory,
            os.scandir(directory) as entries,
        ):
            for entry in entries:
                if not walk.add_entry(prefix, entry, directory):
                    break
    files = sorted(walk.files, key=lambda file: file.path)
    return DirectoryListing(files, walk.is_incomplete, sorted(walk.links))


class _DirectoryWalk:
    def __init__(self) -> None:
        self.files: list[FileStat] = []
        self.links: list[tuple[str, str]] = []
        self.pending = [""]
        self.is_incomplete = self.is_full = False
        self._entries = self._name_bytes = 0

    def add_entry(self, prefix: str, entry: os.DirEntry[str], directory: int) -> bool:
        """Add an entry of a directory; returns False once the listing is full."""
        path = f"{prefix}{entry.name}"
        self._entries += 1
        self._name_bytes += len(path)
        if self._entries > MAX_ENTRIES or self._name_bytes > MAX_NAME_BYTES:
            self.is_incomplete = self.is_full = True
            return False
        if path.startswith(RESERVED_PREFIX):  # counted: code may create any number of them
            return True
        if not _is_utf8(entry.name):
            self.is_incomplete = True  # cannot be requested: the protocol is UTF-8
        elif entry.is_dir(follow_symlinks=False):
            if path.count("/") + 1 >= MAX_DEPTH:
                self.is_incomplete = True
            else:
                self.pending.append(path + "/")
        elif entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                self.files.append(FileStat.from_stat(path, entry.stat(follow_symlinks=False)))
        elif entry.is_symlink():
            self._add_link(path, entry.name, directory)
        return True

    def _add_link(self, path: str, name: str, directory: int) -> None:
        with contextlib.suppress(OSError):  # removed or replaced since it was listed
            target = os.readlink(name, dir_fd=directory)
            self._name_bytes += len(target)
            if _is_utf8(target):
                self.links.append((path, target))
            else:
                self.is_incomplete = True


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open_directory(data: int, prefix: str) -> int:
    # Always a new descriptor: reading moves the position of a shared one.
    path = os.fsencode(prefix[:-1]) or b"."
    return syscalls.openat2(data, path, OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)


def open_parent(data: int, raw: bytes) -> contextlib.AbstractContextManager[int]:
    """Open the existing directory that holds `raw`, within the context."""
    parent = raw.rpartition(b"/")[0] or b"."
    return syscalls.closing_fd(syscalls.openat2(data, parent, OPEN_DIRECTORY, resolve=RESOLVE_BENEATH))


def delete_file(data_fd: int, path: str) -> None:
    """Remove a file, or anything else of that name that is not a directory. Raises UnsafePath, OSError."""
    raw = check_path(path)
    with open_parent(data_fd, raw) as parent:
        os.unlink(raw.rpartition(b"/")[2], dir_fd=parent)
