"""Bytes on a disk, by the hash of their content; imports `protocol` and the standard library.

A blob is written under a passing name, synced, and renamed: what has its name is whole. Equal contents are one blob,
so whoever deletes one must know that nobody else needs it.
"""

import asyncio
import fcntl
import hashlib
import os
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fumehood.protocol.errors import Unavailable

_NAME = re.compile(r"[0-9a-f]{64}")
_PIECE = 256 << 10
_WRITE_AT_ONCE = 1 << 20


class DiskBlobs:
    """A `BlobStore` in a directory, which it makes if it is not there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._incoming = directory / "incoming"
        self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(self._incoming)

    async def put(self, content: bytes | AsyncIterable[bytes]) -> str:
        """Raises Unavailable where the disk does not take it; then nothing of it is left."""
        if isinstance(content, bytes):
            return await _on_disk(self._put, content)
        incoming = await _on_disk(_Incoming, self._incoming)
        try:
            waiting = bytearray()
            async for piece in content:
                waiting += piece
                if len(waiting) >= _WRITE_AT_ONCE:
                    await _on_disk(incoming.write, bytes(waiting))
                    waiting.clear()
            return await _on_disk(self._finish, incoming, bytes(waiting))
        except BaseException:
            # Not here: a thread may still be writing, and this waits for it.
            asyncio.get_running_loop().run_in_executor(None, incoming.discard)
            raise

    async def read(self, name: str) -> AsyncGenerator[bytes]:
        if not _NAME.fullmatch(name):
            raise KeyError(name)
        file, piece = await _on_disk(_open, self._path(name), name)
        try:
            while piece:
                yield piece
                piece = await _on_disk(file.read, _PIECE)
        finally:
            file.close()

    async def delete(self, name: str) -> None:
        if _NAME.fullmatch(name):
            await _on_disk(self._path(name).unlink, missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._directory / name[:2] / name[2:4] / name

    def _put(self, content: bytes) -> str:
        incoming = _Incoming(self._incoming)
        try:
            return self._finish(incoming, content)
        except BaseException:
            incoming.discard()
            raise

    def _finish(self, incoming: "_Incoming", rest: bytes) -> str:
        incoming.write(rest)
        name = incoming.name()
        path = self._path(name)
        _make_directory(path.parent.parent)
        _make_directory(path.parent)
        incoming.move(path)
        return name


class _Incoming:
    """A blob that is not yet whole. Its file is locked, so that nobody takes it for what a dead process left."""

    def __init__(self, directory: Path) -> None:
        self._hash = hashlib.sha256()
        while True:
            self._path = directory / os.urandom(16).hex()
            self._file = open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")  # noqa: SIM115
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if os.fstat(self._file.fileno()).st_nlink:
                return
            self._file.close()  # swept between its making and its locking

    def write(self, content: bytes) -> None:
        self._hash.update(content)
        self._file.write(content)

    def name(self) -> str:
        return self._hash.hexdigest()

    def move(self, path: Path) -> None:
        """Whole, on the disk, and there by name; equal content that is there already is replaced."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._path.rename(path)
        _sync_directory(path.parent)
        self._file.close()

    def discard(self) -> None:
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # what could not be written cannot be flushed either
            self._file.close()


def _open(path: Path, name: str) -> tuple[BinaryIO, bytes]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise KeyError(name) from None
    return file, file.read(_PIECE)


def _make_directory(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _sweep(directory: Path) -> None:
    """Remove what processes left that are no more."""
    for path in directory.iterdir():
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


async def _on_disk[**P, T](work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread; only what the disk says becomes Unavailable, not what the source of the bytes does."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise Unavailable(f"The gateway's disk cannot be used now: {reason}. Try again later.") from error
