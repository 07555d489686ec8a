"""Puts files into a sandbox's data directory whole or not at all.

What is not finished lies at the top of the data directory under a name of ours that the supervisor chose: should
the helper be killed, somebody else can still take it away.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Iterable, Iterator

from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.inside.files.data_directory import (
    RESERVED_PREFIX,
    RESOLVE_BENEATH,
    FileStat,
    check_path,
)
from fumehood.sandbox_server.inside.files.quota_permit import QuotaPermit

CHUNK_BYTES = 1 << 20
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
_CREATE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def staging_name(token: str) -> bytes:
    return f"{RESERVED_PREFIX}{token}".encode()


def write_file(
    data_fd: int, path: str, source_fd: int, token: str, permit: QuotaPermit, *, executable: bool = False
) -> FileStat:
    """Put everything that comes from `source` at `path`, replacing what is there; parents are made."""
    raw = check_path(path)
    _check_not_directory(data_fd, raw)
    name = staging_name(token)
    target = syscalls.openat2(
        data_fd, name, _CREATE_NEW, 0o755 if executable else 0o644, resolve=RESOLVE_BENEATH
    )
    try:
        received = write_chunks(target, read_chunks(source_fd), permit)
        permit.confirm_complete(received)
        with open_or_make_parent(data_fd, raw) as parent:
            os.rename(name, raw.rpartition(b"/")[2], src_dir_fd=data_fd, dst_dir_fd=parent)
        return FileStat.from_stat(path, os.fstat(target))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=data_fd)
        raise
    finally:
        os.close(target)


def read_chunks(source_fd: int) -> Iterator[bytes]:
    while chunk := os.read(source_fd, CHUNK_BYTES):
        yield chunk


def write_chunks(target_fd: int, chunks: Iterable[bytes], permit: QuotaPermit) -> int:
    """Write it all, with leave; returns how much."""
    size = 0
    for chunk in chunks:
        permit.reserve(len(chunk))
        view = memoryview(chunk)
        while view:
            view = view[os.write(target_fd, view) :]
        size += len(chunk)
    return size


def _check_not_directory(data: int, raw: bytes) -> None:
    """Tell at once what would only fail at the end; what changes meanwhile fails there."""
    here = syscalls.openat2(data, b".", _OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)
    *parents, last = raw.split(b"/")
    try:
        for part in parents:
            below = syscalls.openat2(here, part, _OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)
            os.close(here)
            here = below
        if stat.S_ISDIR(os.stat(last, dir_fd=here, follow_symlinks=False).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except FileNotFoundError:
        pass
    finally:
        os.close(here)


@contextlib.contextmanager
def open_or_make_parent(data_fd: int, raw: bytes) -> Generator[int]:
    """The directory of a path, made where it is missing; if the body fails, those that were made go again."""
    made: list[bytes] = []
    try:
        parent = open_or_make_directory(data_fd, raw.rpartition(b"/")[0], made)
        try:
            yield parent
        finally:
            os.close(parent)
    except BaseException:
        remove_directories(data_fd, made)
        raise


def open_or_make_directory(data: int, raw: bytes, made: list[bytes]) -> int:
    """Open the directory `raw`, making what is missing and noting it in `made`; no link is followed."""
    here = syscalls.openat2(data, b".", _OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)
    parts = raw.split(b"/") if raw else []
    for number, part in enumerate(parts):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=here)
                made.append(b"/".join(parts[: number + 1]))
            below = syscalls.openat2(here, part, _OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)
        finally:
            os.close(here)
        here = below
    return here


def open_parent(data: int, raw: bytes) -> int:
    """The directory that holds `raw`, if it is there."""
    return syscalls.openat2(data, raw.rpartition(b"/")[0] or b".", _OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)


def remove_directories(data: int, made: list[bytes]) -> None:
    """Those that were made, unless somebody has put something into them."""
    for raw in reversed(made):
        with contextlib.suppress(OSError):
            parent = open_parent(data, raw)
            try:
                os.rmdir(raw.rpartition(b"/")[2], dir_fd=parent)
            finally:
                os.close(parent)


def discard_staged(data: int, token: str, max_entries: int) -> None:
    """Take away what a helper that was killed left: a file, or a directory with at most so many of them."""
    name = staging_name(token)
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=data)
        except (IsADirectoryError, PermissionError):
            directory = syscalls.openat2(data, name, _OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)
            try:
                remove_files(directory, max_entries)
            finally:
                os.close(directory)
            os.rmdir(name, dir_fd=data)


def remove_files(directory: int, max_entries: int) -> None:
    """Remove files; there are no directories below one of ours, and what others put there is theirs."""
    with os.scandir(directory) as listing:
        names = [entry.name for entry, _ in zip(listing, range(max_entries), strict=False)]
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
