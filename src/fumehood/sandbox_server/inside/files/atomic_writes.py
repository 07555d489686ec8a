"""Writes files into a sandbox's data directory completely or not at all.

An unfinished file has a staging name, chosen by the supervisor, at the top of the data directory: if the helper is
killed, another one can remove it.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Iterable, Iterator

from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.inside.files.quota_requests import WriteQuota
from fumehood.sandbox_server.inside.files.untrusted_files import (
    OPEN_DIRECTORY,
    RESERVED_PREFIX,
    RESOLVE_BENEATH,
    FileStat,
    check_path,
    open_parent,
)

CHUNK_BYTES = 1 << 20
_CREATE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def staging_name(token: str) -> bytes:
    """Return the staging name for a token."""
    return f"{RESERVED_PREFIX}{token}".encode()


def write_file(
    data_fd: int, path: str, source_fd: int, token: str, permit: WriteQuota, *, executable: bool = False
) -> FileStat:
    """Write everything from `source_fd` to `path`, replacing what is there; creates parent directories.

    Raises UnsafePath, FileTaskRefused, OSError.
    """
    raw = check_path(path)
    _check_not_directory(data_fd, raw)
    name = staging_name(token)
    mode = 0o755 if executable else 0o644
    with syscalls.closing_fd(
        syscalls.openat2(data_fd, name, _CREATE_NEW, mode, resolve=RESOLVE_BENEATH)
    ) as target:
        try:
            received = write_chunks(target, read_chunks(source_fd), permit)
            permit.confirm_complete(received)
            with open_or_make_parent(data_fd, raw) as parent:
                os.rename(name, raw.rpartition(b"/")[2], src_dir_fd=data_fd, dst_dir_fd=parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=data_fd)
            raise
        return FileStat.from_stat(path, os.fstat(target))


def read_chunks(source_fd: int) -> Iterator[bytes]:
    """Yield what can be read until the end."""
    while chunk := os.read(source_fd, CHUNK_BYTES):
        yield chunk


def write_chunks(target_fd: int, chunks: Iterable[bytes], permit: WriteQuota) -> int:
    """Reserve and write all chunks; returns the number of bytes."""
    size = 0
    for chunk in chunks:
        permit.reserve(len(chunk))
        view = memoryview(chunk)
        while view:
            view = view[os.write(target_fd, view) :]
        size += len(chunk)
    return size


def _check_not_directory(data: int, raw: bytes) -> None:
    """Raise now what would otherwise fail after the upload; later changes fail then."""
    here = syscalls.openat2(data, b".", OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)
    *parents, last = raw.split(b"/")
    try:
        for part in parents:
            below = syscalls.openat2(here, part, OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)
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
    """Open the directory of a path, creating what is missing; if the body fails, created directories are removed."""
    created: list[bytes] = []
    try:
        directory = open_or_make_directory(data_fd, raw.rpartition(b"/")[0], created)
        with syscalls.closing_fd(directory) as parent:
            yield parent
    except BaseException:
        remove_directories(data_fd, created)
        raise


def open_or_make_directory(data: int, raw: bytes, created: list[bytes]) -> int:
    """Open the directory `raw` without following links; creates what is missing and appends it to `created`."""
    here = syscalls.openat2(data, b".", OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)
    parts = raw.split(b"/") if raw else []
    for number, part in enumerate(parts):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=here)
                created.append(b"/".join(parts[: number + 1]))
            below = syscalls.openat2(here, part, OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)
        finally:
            os.close(here)
        here = below
    return here


def remove_directories(data: int, created: list[bytes]) -> None:
    """Remove created directories, unless something is in them."""
    for raw in reversed(created):
        with contextlib.suppress(OSError), open_parent(data, raw) as parent:
            os.rmdir(raw.rpartition(b"/")[2], dir_fd=parent)


def discard_staged(data: int, token: str, max_entries: int) -> None:
    """Remove what a killed helper left: a file, or a directory with at most `max_entries` files."""
    name = staging_name(token)
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=data)
        except (IsADirectoryError, PermissionError):
            with syscalls.closing_fd(
                syscalls.openat2(data, name, OPEN_DIRECTORY, resolve=RESOLVE_BENEATH)
            ) as directory:
                remove_files(directory, max_entries)
            os.rmdir(name, dir_fd=data)


def remove_files(directory: int, max_entries: int) -> None:
    """Remove files of a staging directory, which has no subdirectories of ours."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry, _ in zip(entries, range(max_entries), strict=False)]
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
