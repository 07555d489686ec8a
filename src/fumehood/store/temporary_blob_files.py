"""Writes blobs to a temporary directory, until they are complete and can be published.

Many small blobs are written together. One by one, each would need three fsyncs: for its content, its directory and its
name. Together they are written, synced, renamed, and synced again; for more than a few files with `syncfs`, which
guarantees the same.
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

_MAX_SINGLE_FSYNCS = 8  # syncfs also waits for other writers on the disk


class TemporaryBlobFiles:
    """One streamed blob or many small ones, not yet published. Used by one thread at a time.

    The directory is locked, so that it is not removed as left by a dead process.

    blob_path: returns the final path of a blob.
    """

    def __init__(self, directory: Path, blob_path: Callable[[str], str], min_free_bytes: int) -> None:
        self._directory = directory
        self._blob_path = blob_path
        self._min_free_bytes = min_free_bytes
        self._contents: dict[str, bytes] = {}
        self._written: set[str] = set()
        self._stream = hashlib.sha256()
        self._path = directory
        self._lock = -1
        self._busy = threading.Lock()
        self._discarded = False

    def append(self, chunk: bytes) -> None:
        """Append to the streamed blob."""
        with self._busy:
            self._create_directory()
            check_free_space(self._lock, self._min_free_bytes, len(chunk))
            self._stream.update(chunk)
            self._write_file("stream", chunk)

    def finish_stream(self, rest: bytes) -> list[str]:
        """Append the rest, sync the streamed blob, and return its name."""
        self.append(rest)
        with self._busy:
            name = self._stream.hexdigest()
            os.rename(f"{self._path}/stream", f"{self._path}/{name}")
            fsync_path(f"{self._path}/{name}")
            self._written.add(name)
        return [name]

    def write(self, contents: Sequence[bytes]) -> list[str]:
        """Write and sync the contents, and return their names. Existing blobs are skipped: replacing them is slow."""
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
        """Rename the blobs to their final paths."""
        with self._busy:
            changed: set[str] = set()
            for name in self._written | self._contents.keys():
                path = self._blob_path(name)
                directory = path.rpartition("/")[0]
                if name not in self._written and not _touch_if_exists(path):
                    fsync_path(self._write_blob(name))  # deleted since `write`
                if directory not in changed:
                    changed.update(make_directories(directory), [directory])
                if name in self._written:
                    os.rename(f"{self._path}/{name}", path)
            fsync_paths(self._lock, changed)
            self._remove_directory()

    def _write_blob(self, name: str) -> str:
        path = self._write_file(name, self._contents[name])
        self._written.add(name)
        return path

    def _write_file(self, name: str, content: bytes) -> str:
        path = f"{self._path}/{name}"
        rest = memoryview(content)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)
        return path

    def discard(self) -> None:
        """Delete everything, after a thread that may still write."""
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
            with suppress(FileNotFoundError):  # removed before it was locked
                self._lock = _lock(self._path, fcntl.LOCK_EX)


def check_free_space(file: int, min_free_bytes: int, size: int) -> None:
    """Raises OSError if writing `size` bytes would leave less than `min_free_bytes` free."""
    if not min_free_bytes:
        return
    disk = os.fstatvfs(file)
    if disk.f_bavail * disk.f_frsize < min_free_bytes + size:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} except the reserve")


def make_directories(path: str) -> list[str]:
    """Create a directory and its parent, if missing; return the directories to sync."""
    parent = path.rpartition("/")[0]
    changed: list[str] = []
    for directory in (parent, path):
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
            changed.append(directory.rpartition("/")[0])
    return changed


def _touch_if_exists(path: str) -> bool:
    """Update the modification time; False if there is no file."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def fsync_path(path: str) -> None:
    """Sync a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_paths(descriptor: int, paths: Iterable[str]) -> None:
    """Sync files or directories on the file system of the descriptor."""
    pending = list(paths)
    if len(pending) > _MAX_SINGLE_FSYNCS and _sync_filesystem(descriptor):
        return
    for path in pending:
        fsync_path(path)


def _sync_filesystem(descriptor: int) -> bool:
    """Call syncfs; False if there is none. Raises OSError."""
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
    """Lock a path within the block. Raises BlockingIOError if it is locked, FileNotFoundError if it is gone."""
    lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        os.close(lock)


def _lock(path: Path, how: int) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        path.stat()  # it may have been removed
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
