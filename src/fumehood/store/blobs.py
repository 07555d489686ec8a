"""Bytes on a disk, by the hash of their content; imports `protocol` and siblings.

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

from fumehood.protocol.errors import Unavailable
from fumehood.store.blob_batches import Batch, check_room, locked, make_directories, sync
from fumehood.store.migrations import StoreRefused

_NAME = re.compile(r"[0-9a-f]{64}")
_PIECE = 256 << 10
_WRITE_AT_ONCE = 1 << 20


def blob_path(directory: Path, name: str) -> str | None:
    """Where the blob of that name is; None for what is no name."""
    return f"{directory}/{name[:2]}/{name[2:4]}/{name}" if _NAME.fullmatch(name) else None


class DiskBlobs:
    """A `BlobStore` in a directory, which it makes if it is not there. Raises StoreRefused, OSError.

    owner: the database whose records refer to these blobs. No other one may be given this directory, as it would
        delete everything here that its own records do not know.
    spare_bytes: of the disk, that are left to others; whatever arrives is looked at as it is written, so all that
        arrives at once has no more than the rest.
    """

    def __init__(self, directory: Path, owner: str | None = None, spare_bytes: int = 0) -> None:
        self._directory = directory
        self._spare_bytes = spare_bytes
        self._incoming = directory / "incoming"
        self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        if owner is not None:
            _claim(directory / "owner", owner)
        _sweep(self._incoming)

    async def put(
        self,
        content: bytes | AsyncIterable[bytes],
        named: Callable[[str], Awaitable[None]] | None = None,
    ) -> str:
        """Raises Unavailable where the disk does not take it; then nothing of it is left."""
        incoming = _Incoming(self._incoming, self._spare_bytes)
        try:
            rest = content if isinstance(content, bytes) else await _write(incoming, content)
            name = await _on_disk(incoming.complete, rest)
            if named is not None:
                await named(name)
            await _uninterrupted(_on_disk(self._move, incoming, name))
        except BaseException as error:
            await _discarded(incoming, error)
            raise
        return name

    async def put_all(
        self,
        contents: Sequence[bytes],
        named: Callable[[Sequence[str]], Awaitable[None]] | None = None,
    ) -> Sequence[str]:
        """Raises Unavailable as `put` does."""
        batch = Batch(self._incoming, self._place, self._spare_bytes)
        try:
            names = await _on_disk(batch.write, contents)
            if named is not None:
                await named(names)
            await _uninterrupted(_on_disk(batch.move))
        except BaseException as error:
            await _discarded(batch, error)
            raise
        return names

    async def size(self, name: str) -> int:
        return await _on_disk(_size, self._path(name), name)

    async def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        reading = await _on_disk(_Reading, self._path(name), name, start, end)
        try:
            while piece := await _on_disk(reading.next):
                yield piece
        finally:
            reading.close()

    async def read_all(self, names: Sequence[str]) -> Sequence[bytes | None]:
        return await _on_disk(self._read_all, names)

    def _read_all(self, names: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for name in names:
            try:
                with open(self._place(name), "rb", buffering=0) as file:
                    found.append(file.readall())
            except (KeyError, FileNotFoundError):
                found.append(None)
        return found

    async def delete(self, *names: str) -> None:
        await _uninterrupted(_on_disk(self._delete, names))

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(KeyError, FileNotFoundError):
                os.unlink(self._place(name))

    async def names(self, older_than: float) -> AsyncGenerator[Sequence[str]]:
        until = time.time() - older_than
        for number in range(256):
            found = await _on_disk(_older_names, self._directory / f"{number:02x}", until)
            if found:
                yield found

    def _path(self, name: str) -> Path:
        return Path(self._place(name))

    def _place(self, name: str) -> str:
        """Raises KeyError for what is no name."""
        path = blob_path(self._directory, name)
        if path is None:
            raise KeyError(name)
        return path

    def _move(self, incoming: "_Incoming", name: str) -> None:
        path = self._path(name)
        for changed in make_directories(str(path.parent)):
            sync(changed)
        incoming.move(path)


class _Incoming:
    """A blob that is not yet whole, written by one thread after another. Its file is locked, so that nobody takes it
    for what a dead process left.
    """

    def __init__(self, directory: Path, spare_bytes: int) -> None:
        self._directory = directory
        self._spare_bytes = spare_bytes
        self._hash = hashlib.sha256()
        self._busy = threading.Lock()
        self._path = self._new_path()
        self._file: BinaryIO | None = None
        self._discarded = False

    def write(self, content: bytes) -> None:
        with self._busy:
            file = self._opened()
            check_room(file.fileno(), self._spare_bytes, len(content))
            self._hash.update(content)
            file.write(content)

    def complete(self, rest: bytes) -> str:
        """All of it is on the disk; its name, which it does not have yet."""
        self.write(rest)
        with self._busy:
            file = self._opened()
            file.flush()
            os.fsync(file.fileno())
        return self._hash.hexdigest()

    def move(self, path: Path) -> None:
        """There by name; equal content that is there already is replaced."""
        with self._busy:
            file = self._opened()
            self._path.rename(path)
            sync(str(path.parent))
            file.close()

    def discard(self) -> None:
        """For whoever was cancelled, too, while a thread still writes: that is waited for."""
        with self._busy:
            self._discarded = True
            self._path.unlink(missing_ok=True)
            if self._file is not None:
                with suppress(OSError):  # what could not be written cannot be flushed either
                    self._file.close()

    def _opened(self) -> BinaryIO:
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


class _Reading:
    """A blob that is being read, from `start` up to `end`, by one thread after another. Whoever is cancelled closes it
    while a thread may still read: then that one does, since the descriptor could be somebody else's file by then.
    """

    def __init__(self, path: Path, name: str, start: int, end: int | None) -> None:
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            raise KeyError(name) from None
        self._file.seek(start)
        self._left = sys.maxsize if end is None else max(end - start, 0)
        self._busy = threading.Lock()
        self._over = False

    def next(self) -> bytes:
        with self._busy:
            piece = b"" if self._over else self._file.read(min(_PIECE, self._left))
        self._left -= len(piece)
        if self._over:
            self._file.close()
        return piece

    def close(self) -> None:
        self._over = True
        if self._busy.acquire(blocking=False):
            self._file.close()
            self._busy.release()


async def _discarded(arriving: _Incoming | Batch, error: BaseException) -> None:
    discarding = asyncio.get_running_loop().run_in_executor(None, arriving.discard)
    if isinstance(error, Exception):  # whoever is cancelled does not wait for a thread that still writes
        with suppress(OSError):  # what went wrong first is told
            await discarding


async def _write(incoming: _Incoming, content: AsyncIterable[bytes]) -> bytes:
    """All but what is too little to be written alone."""
    waiting = bytearray()
    async for piece in content:
        waiting += piece
        if len(waiting) >= _WRITE_AT_ONCE:
            await _on_disk(incoming.write, bytes(waiting))
            waiting.clear()
    return bytes(waiting)


def _size(path: Path, name: str) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise KeyError(name) from None


def _older_names(directory: Path, until: float) -> list[str]:
    """Those two levels below that were put before that time; blobs may come and go meanwhile."""
    found: list[str] = []
    for path in directory.glob("*/*"):
        with suppress(FileNotFoundError):
            if _NAME.fullmatch(path.name) and path.stat().st_mtime < until:
                found.append(path.name)
    return found


def _claim(path: Path, owner: str) -> None:
    """Raises StoreRefused."""
    if not path.exists():
        whole = path.with_suffix(".new")
        whole.write_text(owner)
        whole.rename(path)
    if path.read_text() != owner:
        raise StoreRefused(
            f"The directory {path.parent} holds the files of another database. Give this one a directory of its own "
            f"(storage.blobs), or delete {path} to let it have this one, with all that it does not know deleted."
        )


def _sweep(directory: Path) -> None:
    """Remove what processes left that are no more."""
    for path in directory.iterdir():
        with suppress(FileNotFoundError, BlockingIOError), locked(path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


async def _on_disk[**P, T](work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread; only what the disk says becomes Unavailable, not what the source of the bytes does."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise Unavailable(f"The gateway's disk cannot be used now: {reason}. Try again later.") from error


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Whoever is cancelled meanwhile leaves when it is done: else nobody could tell whether the blob is there."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
