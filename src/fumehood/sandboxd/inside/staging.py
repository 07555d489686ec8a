"""Puts files into a sandbox's data directory whole or not at all; imports only the standard library and siblings.

What is not finished lies at the top of the data directory under a name of ours that the supervisor chose: should
the helper be killed, somebody else can still take it away.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Iterable, Iterator

from fumehood.sandboxd.inside import syscalls
from fumehood.sandboxd.inside.files import BENEATH, RESERVED, Found, checked
from fumehood.sandboxd.inside.leave import Leave

CHUNK = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def staging_name(token: str) -> bytes:
    return f"{RESERVED}{token}".encode()


def write(data: int, path: str, source: int, token: str, leave: Leave, *, executable: bool = False) -> Found:
    """Put everything that comes from `source` at `path`, replacing what is there; parents are made."""
    raw = checked(path)
    _check_target(data, raw)
    name = staging_name(token)
    target = syscalls.openat2(data, name, _NEW, 0o755 if executable else 0o644, resolve=BENEATH)
    try:
        received = save(target, received_from(source), leave)
        leave.settle(received)
        with parent_of(data, raw) as parent:
            os.rename(name, raw.rpartition(b"/")[2], src_dir_fd=data, dst_dir_fd=parent)
        return Found.of(path, os.fstat(target))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=data)
        raise
    finally:
        os.close(target)


def received_from(source: int) -> Iterator[bytes]:
    while chunk := os.read(source, CHUNK):
        yield chunk


def save(target: int, chunks: Iterable[bytes], leave: Leave) -> int:
    """Write it all, with leave; returns how much."""
    size = 0
    for chunk in chunks:
        leave.take(len(chunk))
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]
        size += len(chunk)
    return size


def _check_target(data: int, raw: bytes) -> None:
    """Tell at once what would only fail at the end; what changes meanwhile fails there."""
    here = syscalls.openat2(data, b".", _DIRECTORY, resolve=BENEATH)
    *parents, last = raw.split(b"/")
    try:
        for part in parents:
            below = syscalls.openat2(here, part, _DIRECTORY, resolve=BENEATH)
            os.close(here)
            here = below
        if stat.S_ISDIR(os.stat(last, dir_fd=here, follow_symlinks=False).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except FileNotFoundError:
        pass
    finally:
        os.close(here)


@contextlib.contextmanager
def parent_of(data: int, raw: bytes) -> Generator[int]:
    """The directory of a path, made where it is missing; if the body fails, those that were made go again."""
    made: list[bytes] = []
    try:
        parent = make_directory(data, raw.rpartition(b"/")[0], made)
        try:
            yield parent
        finally:
            os.close(parent)
    except BaseException:
        remove_directories(data, made)
        raise


def make_directory(data: int, raw: bytes, made: list[bytes]) -> int:
    """Open the directory `raw`, making what is missing and noting it in `made`; no link is followed."""
    here = syscalls.openat2(data, b".", _DIRECTORY, resolve=BENEATH)
    parts = raw.split(b"/") if raw else []
    for number, part in enumerate(parts):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=here)
                made.append(b"/".join(parts[: number + 1]))
            below = syscalls.openat2(here, part, _DIRECTORY, resolve=BENEATH)
        finally:
            os.close(here)
        here = below
    return here


def open_parent(data: int, raw: bytes) -> int:
    """The directory that holds `raw`, if it is there."""
    return syscalls.openat2(data, raw.rpartition(b"/")[0] or b".", _DIRECTORY, resolve=BENEATH)


def remove_directories(data: int, made: list[bytes]) -> None:
    """Those that were made, unless somebody has put something into them."""
    for raw in reversed(made):
        with contextlib.suppress(OSError):
            parent = open_parent(data, raw)
            try:
                os.rmdir(raw.rpartition(b"/")[2], dir_fd=parent)
            finally:
                os.close(parent)


def discard(data: int, token: str, most: int) -> None:
    """Take away what a helper that was killed left: a file, or a directory with at most so many of them."""
    name = staging_name(token)
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=data)
        except (IsADirectoryError, PermissionError):
            directory = syscalls.openat2(data, name, _DIRECTORY, resolve=BENEATH)
            try:
                empty(directory, most)
            finally:
                os.close(directory)
            os.rmdir(name, dir_fd=data)


def empty(directory: int, most: int) -> None:
    """Remove files; there are no directories below one of ours, and what others put there is theirs."""
    with os.scandir(directory) as listing:
        names = [entry.name for entry, _ in zip(listing, range(most), strict=False)]
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
