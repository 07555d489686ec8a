"""Many small blobs that come to a disk together.

One after another, each would wait for the disk three times: for its content, its directory and its name. Together they
are written in a passing directory, synced, renamed, and synced again. Where they are more than a few, the kernel is
asked once to write down all that the file system holds, which is no less than what it would do for each of them.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_MAX_SINGLE_FSYNCS = 8  # files that are synced one by one: others may have much to write on the same disk


class BlobBatch:
    """Blobs that are not there yet, in a passing directory, used by one thread after another. The directory is locked,
    so that nobody takes it for what a dead process left.

    place: the path of the blob of a name.
    """

    def __init__(self, directory: Path, blob_path: Callable[[str], str], min_free_bytes: int) -> None:
        self._directory = directory
        self._blob_path = blob_path
        self._min_free_bytes = min_free_bytes
        self._contents: dict[str, bytes] = {}
        self._written: set[str] = set()
        self._path = directory
        self._lock = -1
        self._busy = threading.Lock()
        self._discarded = False

    def write(self, contents: Sequence[bytes]) -> list[str]:
        """All of them are on the disk; their names, which they do not have yet. What is there already is not written
        again: what is replaced would have to be deleted, which takes longer than all the rest.
        """
        names = [hashlib.sha256(content).hexdigest() for content in contents]
        with self._busy:
            self._create_directory()
            self._contents = dict(zip(names, contents, strict=True))
            missing = [name for name in self._contents if not os.path.exists(self._blob_path(name))]
            check_free_space(
                self._lock, self._min_free_bytes, sum(len(self._contents[name]) for name in missing)
            )
            fsync_paths(self._lock, [self._write_blob(name) for name in missing])
        return names

    def publish(self) -> None:
        """There by their names."""
        with self._busy:
            changed: set[str] = set()
            for name in self._contents:
                path = self._blob_path(name)
                directory = path.rpartition("/")[0]
                if name not in self._written and not _touch_if_exists(path):
                    fsync_path(self._write_blob(name))  # it was deleted meanwhile
                if directory not in changed:
                    changed.update(make_directories(directory), [directory])
                if name in self._written:
                    os.rename(f"{self._path}/{name}", path)
            fsync_paths(self._lock, changed)
            self._remove_directory()

    def _write_blob(self, name: str) -> str:
        path = f"{self._path}/{name}"
        content = memoryview(self._contents[name])
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            while content:
                content = content[os.write(file, content) :]
        finally:
            os.close(file)
        self._written.add(name)
        return path

    def discard(self) -> None:
        with self._busy:
            self._discarded = True
            if self._lock >= 0:
                self._remove_directory()

    def _remove_directory(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def _create_directory(self) -> None:
        if self._discarded:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        while self._lock < 0:
            self._path = self._directory / os.urandom(16).hex()
            self._path.mkdir(mode=0o700)
            with suppress(FileNotFoundError):  # swept between its making and its locking
                self._lock = _lock(self._path, fcntl.LOCK_EX)


def check_free_space(file: int, min_free_bytes: int, size: int) -> None:
    """Whether the disk takes so many bytes and has the spare ones left; raises OSError."""
    if not min_free_bytes:
        return
    disk = os.fstatvfs(file)
    if disk.f_bavail * disk.f_frsize < min_free_bytes + size:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} but what is kept spare")


def make_directories(path: str) -> list[str]:
    """A directory two levels below one that is there; those that have got a new one in them."""
    above = path.rpartition("/")[0]
    changed: list[str] = []
    for directory in (above, path):
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
            changed.append(directory.rpartition("/")[0])
    return changed


def _touch_if_exists(path: str) -> bool:
    """If so, it is as new as if it had just come."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def fsync_path(path: str) -> None:
    """A file or a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_paths(descriptor: int, paths: Iterable[str]) -> None:
    """These files or directories, of the file system of the descriptor."""
    some = list(paths)
    if len(some) > _MAX_SINGLE_FSYNCS and _sync_filesystem(descriptor):
        return
    for path in some:
        fsync_path(path)


def _sync_filesystem(descriptor: int) -> bool:
    """All of a file system, if there is a call for that; raises OSError."""
    if _syncfs is None:
        return False
    if _syncfs(descriptor) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.ENOSYS:
        return False
    raise OSError(number, os.strerror(number))


@contextmanager
def try_lock(path: Path) -> Generator[None]:
    """Raises BlockingIOError if somebody else has it, FileNotFoundError if it is gone."""
    lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        os.close(lock)


def _lock(path: Path, how: int) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        path.stat()  # it may have gone meanwhile
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
