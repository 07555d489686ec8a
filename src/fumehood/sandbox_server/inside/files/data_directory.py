"""Work on a sandbox's files that trusts neither names nor types nor timing.

The same functions serve the supervisor, for reading, and the short-lived helper that runs as the sandbox's
user in its cgroup, for writing: root cannot create files on that tmpfs (its owner is not mapped there), and
pages must count against the sandbox that asked for them.
"""

import contextlib
import errno
import os
import stat
from dataclasses import dataclass

from fumehood.sandbox_server.inside import syscalls

MAX_DEPTH = 32
MAX_ENTRIES = 20_000
MAX_NAME_BYTES = 4 << 20  # of all paths in one listing
# What a helper has not finished lies at the top of the data directory under such a name.
RESERVED_PREFIX = ".fumehood-"
RESOLVE_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_XDEV
_MAX_BUSY_RETRIES = 5


class UnsafePath(ValueError):
    """A name that could mean anything but a plain path below the data directory."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """A regular file. Code may set size and modification time; changed_ns, inode and blocks tell a change too."""

    path: str
    size: int
    modified_ns: int
    changed_ns: int
    inode: int
    blocks: int
    executable: bool = False

    @classmethod
    def from_stat(cls, path: str, about: os.stat_result) -> "FileStat":
        return cls(
            path,
            about.st_size,
            about.st_mtime_ns,
            about.st_ctime_ns,
            about.st_ino,
            about.st_blocks,
            bool(about.st_mode & stat.S_IXUSR),
        )


def check_path(path: str) -> bytes:
    """A relative path as bytes, or UnsafePath: no `..`, no empty parts, no NUL, bounded."""
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
    """Open a regular file below `data` for reading; never blocks, never leaves the tree, never follows a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    for attempt in range(_MAX_BUSY_RETRIES):
        try:
            fd = syscalls.openat2(data_fd, check_path(path), flags, resolve=RESOLVE_BENEATH)
            break
        except OSError as error:
            # EAGAIN: a rename raced with the look-up, or somebody holds a lease on the file.
            if error.errno != errno.EAGAIN or attempt == _MAX_BUSY_RETRIES - 1:
                raise
    else:
        raise AssertionError("unreachable")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd


def list_files(data_fd: int) -> tuple[list[FileStat], bool]:
    """Regular files below `data`, sorted by path, and whether some are left out: too many, too deep, no text.

    Iterative, by descriptors: a directory moved or replaced meanwhile leads nowhere else.
    """
    walking = _DirectoryWalk()
    while walking.pending and not walking.is_full:
        prefix = walking.pending.pop()
        try:
            directory = _open_directory(data_fd, prefix)
        except OSError:
            continue  # gone or unreadable since it was seen
        try:
            with os.scandir(directory) as listing:
                for entry in listing:
                    if not walking.add_entry(prefix, entry):
                        break
        except OSError:
            continue
        finally:
            os.close(directory)
    return sorted(walking.files, key=lambda item: item.path), walking.is_incomplete


class _DirectoryWalk:
    def __init__(self) -> None:
        self.files: list[FileStat] = []
        self.pending = [""]
        self.is_incomplete = self.is_full = False
        self._entries = self._name_bytes = 0

    def add_entry(self, prefix: str, entry: os.DirEntry[str]) -> bool:
        """False once there is no room for more."""
        path = f"{prefix}{entry.name}"
        self._entries += 1
        self._name_bytes += len(path)
        if self._entries > MAX_ENTRIES or self._name_bytes > MAX_NAME_BYTES:
            self.is_incomplete = self.is_full = True
            return False
        if path.startswith(RESERVED_PREFIX):  # counted all the same: code may make any number of them
            return True
        if not _is_utf8(entry.name):
            self.is_incomplete = True  # nobody could ask for it: the wire speaks UTF-8
        elif entry.is_dir(follow_symlinks=False):
            if path.count("/") + 1 >= MAX_DEPTH:
                self.is_incomplete = True
            else:
                self.pending.append(path + "/")
        elif entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # removed since it was seen
                self.files.append(FileStat.from_stat(path, entry.stat(follow_symlinks=False)))
        return True


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open_directory(data: int, prefix: str) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
    if not prefix:
        # A descriptor of its own: reading through a shared one would move everybody's position.
        return syscalls.openat2(data, b".", flags, resolve=RESOLVE_BENEATH)
    return syscalls.openat2(data, os.fsencode(prefix[:-1]), flags, resolve=RESOLVE_BENEATH)


def delete_file(data_fd: int, path: str) -> None:
    """Remove one file, or whatever else bears that name and is not a directory."""
    raw = check_path(path)
    parent, _, name = raw.rpartition(b"/")
    directory = syscalls.openat2(
        data_fd, parent or b".", os.O_RDONLY | os.O_DIRECTORY, resolve=RESOLVE_BENEATH
    )
    try:
        os.unlink(name, dir_fd=directory)
    finally:
        os.close(directory)
