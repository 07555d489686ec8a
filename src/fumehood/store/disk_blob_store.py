"""Bytes on a disk, by the hash of their content.

A blob is written under a passing name, synced, and renamed: what has its name is whole. Equal contents are one blob,
so whoever deletes one must know that nobody else needs it.
"""

import asyncio
import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from fumehood.protocol.openai.api_errors import ServiceUnavailable
from fumehood.store.blob_batch import BlobBatch, check_free_space, fsync_path, make_directories, try_lock
from fumehood.store.migrations import StoreOpenError

_NAME = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 256 << 10
_WRITE_BUFFER_BYTES = 1 << 20


def blob_path(directory: Path, name: str) -> str | None:
    """Where the blob of that name is; None for what is no name."""
    return f"{directory}/{name[:2]}/{name[2:4]}/{name}" if _NAME.fullmatch(name) else None


class DiskBlobStore:
    """A `BlobStore` in a directory, which it makes if it is not there. Raises StoreOpenError, OSError.

    owner: the database whose records refer to these blobs. No other one may be given this directory, as it would
        delete everything here that its own records do not know.
    min_free_bytes: of the disk, that are left to others; whatever arrives is looked at as it is written, so all that
        arrives at once has no more than the rest.
    """

    def __init__(self, directory: Path, owner: str | None = None, min_free_bytes: int = 0) -> None:
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._incoming = directory / "incoming"
        self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        if owner is not None:
            _claim_directory(directory / "owner", owner)
        _delete_abandoned(self._incoming)

    async def put(
        self,
        content: bytes | AsyncIterable[bytes],
        before_commit: Callable[[str], Awaitable[None]] | None = None,
    ) -> str:
        """Raises Unavailable where the disk does not take it; then nothing of it is left."""
        incoming = _IncomingBlob(self._incoming, self._min_free_bytes)
        try:
            rest = content if isinstance(content, bytes) else await _write_chunks(incoming, content)
            name = await _run_in_thread(incoming.finish, rest)
            if before_commit is not None:
                await before_commit(name)
            await _finish_despite_cancellation(_run_in_thread(self._publish, incoming, name))
        except BaseException as error:
            await _discard_in_thread(incoming, error)
            raise
        return name

    async def put_many(
        self,
        contents: Sequence[bytes],
        before_commit: Callable[[Sequence[str]], Awaitable[None]] | None = None,
    ) -> Sequence[str]:
        """Raises Unavailable as `put` does."""
        batch = BlobBatch(self._incoming, self._locate, self._min_free_bytes)
        try:
            names = await _run_in_thread(batch.write, contents)
            if before_commit is not None:
                await before_commit(names)
            await _finish_despite_cancellation(_run_in_thread(batch.publish))
        except BaseException as error:
            await _discard_in_thread(batch, error)
            raise
        return names

    async def get_size(self, name: str) -> int:
        return await _run_in_thread(_stat_size, self._locate_path(name), name)

    async def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        reading = await _run_in_thread(_BlobReader, self._locate_path(name), name, start, end)
        try:
            while piece := await _run_in_thread(reading.read_chunk):
                yield piece
        finally:
            reading.close()

    async def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        return await _run_in_thread(self._read_many, names)

    def _read_many(self, names: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for name in names:
            try:
                with open(self._locate(name), "rb", buffering=0) as file:
                    found.append(file.readall())
            except (KeyError, FileNotFoundError):
                found.append(None)
        return found

    async def delete(self, *names: str) -> None:
        await _finish_despite_cancellation(_run_in_thread(self._delete, names))

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(KeyError, FileNotFoundError):
                os.unlink(self._locate(name))

    async def list_names(self, older_than: float) -> AsyncGenerator[Sequence[str]]:
        until = time.time() - older_than
        for number in range(256):
            found = await _run_in_thread(_list_older_names, self._directory / f"{number:02x}", until)
            if found:
                yield found

    def _locate_path(self, name: str) -> Path:
        return Path(self._locate(name))

    def _locate(self, name: str) -> str:
        """Raises KeyError for what is no name."""
        path = blob_path(self._directory, name)
        if path is None:
            raise KeyError(name)
        return path

    def _publish(self, incoming: "_IncomingBlob", name: str) -> None:
        path = self._locate_path(name)
        for changed in make_directories(str(path.parent)):
            fsync_path(changed)
        incoming.publish(path)


class _IncomingBlob:
    """A blob that is not yet whole, written by one thread after another. Its file is locked, so that nobody takes it
    for what a dead process left.
    """

    def __init__(self, directory: Path, min_free_bytes: int) -> None:
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._hash = hashlib.sha256()
        self._busy = threading.Lock()
        self._path = self._new_path()
        self._file: BinaryIO | None = None
        self._discarded = False

    def write(self, content: bytes) -> None:
        with self._busy:
            file = self._open_file()
            check_free_space(file.fileno(), self._min_free_bytes, len(content))
            self._hash.update(content)
            file.write(content)

    def finish(self, rest: bytes) -> str:
        """All of it is on the disk; its name, which it does not have yet."""
        self.write(rest)
        with self._busy:
            file = self._open_file()
            file.flush()
            os.fsync(file.fileno())
        return self._hash.hexdigest()

    def publish(self, path: Path) -> None:
        """There by name; equal content that is there already is replaced."""
        with self._busy:
            file = self._open_file()
            self._path.rename(path)
            fsync_path(str(path.parent))
            file.close()

    def discard(self) -> None:
        """For whoever was cancelled, too, while a thread still writes: that is waited for."""
        with self._busy:
            self._discarded = True
            self._path.unlink(missing_ok=True)
            if self._file is not None:
                with suppress(OSError):  # what could not be written cannot be flushed either
                    self._file.close()

    def _open_file(self) -> BinaryIO:
        if self._discarded:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        while self._file is None:
            opened = open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")  # noqa: SIM115
            fcntl.flock(opened, fcntl.LOCK_EX)
            if os.fstat(opened.fileno()).st_nlink:
                self._file = opened
            else:
                opened.close()  # swept between its making and its locking
                self._path = self._new_path()
        return self._file

    def _new_path(self) -> Path:
        return self._directory / os.urandom(16).hex()


class _BlobReader:
    """A blob that is being read, from `start` up to `end`, by one thread after another. Whoever is cancelled closes it
    while a thread may still read: then that one does, since the descriptor could be somebody else's file by then.
    """

    def __init__(self, path: Path, name: str, start: int, end: int | None) -> None:
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            raise KeyError(name) from None
        self._file.seek(start)
        self._remaining = sys.maxsize if end is None else max(end - start, 0)
        self._busy = threading.Lock()
        self._closed = False

    def read_chunk(self) -> bytes:
        with self._busy:
            piece = b"" if self._closed else self._file.read(min(_CHUNK_BYTES, self._remaining))
        self._remaining -= len(piece)
        if self._closed:
            self._file.close()
        return piece

    def close(self) -> None:
        self._closed = True
        if self._busy.acquire(blocking=False):
            self._file.close()
            self._busy.release()


async def _discard_in_thread(arriving: _IncomingBlob | BlobBatch, error: BaseException) -> None:
    discarding = asyncio.get_running_loop().run_in_executor(None, arriving.discard)
    if isinstance(error, Exception):  # whoever is cancelled does not wait for a thread that still writes
        with suppress(OSError):  # what went wrong first is told
            await discarding


async def _write_chunks(incoming: _IncomingBlob, content: AsyncIterable[bytes]) -> bytes:
    """All but what is too little to be written alone."""
    waiting = bytearray()
    async for piece in content:
        waiting += piece
        if len(waiting) >= _WRITE_BUFFER_BYTES:
            await _run_in_thread(incoming.write, bytes(waiting))
            waiting.clear()
    return bytes(waiting)


def _stat_size(path: Path, name: str) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise KeyError(name) from None


def _list_older_names(directory: Path, until: float) -> list[str]:
    """Those two levels below that were put before that time; blobs may come and go meanwhile."""
    found: list[str] = []
    for path in directory.glob("*/*"):
        with suppress(FileNotFoundError):
            if _NAME.fullmatch(path.name) and path.stat().st_mtime < until:
                found.append(path.name)
    return found


def _claim_directory(path: Path, owner: str) -> None:
    """Raises StoreOpenError."""
    if not path.exists():
        whole = path.with_suffix(".new")
        whole.write_text(owner)
        whole.rename(path)
    if path.read_text() != owner:
        raise StoreOpenError(
            f"The directory {path.parent} holds the files of another database. Give this one a directory of its own "
            f"(storage.blobs), or delete {path} to let it have this one, with all that it does not know deleted."
        )


def _delete_abandoned(directory: Path) -> None:
    """Remove what processes left that are no more."""
    for path in directory.iterdir():
        with suppress(FileNotFoundError, BlockingIOError), try_lock(path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


async def _run_in_thread[**P, T](work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread; only what the disk says becomes Unavailable, not what the source of the bytes does."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ServiceUnavailable(
            f"The gateway's disk cannot be used now: {reason}. Try again later."
        ) from error


async def _finish_despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Whoever is cancelled meanwhile leaves when it is done: else nobody could tell whether the blob is there."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
