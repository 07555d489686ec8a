"""Blobs as files, named by the hash of their content; imports the standard library.

A blob is written under a name of its own, flushed, and moved into place, so that whatever has its right name is whole.
What a process that died left unfinished is swept at the next start.
"""

import asyncio
import contextlib
import hashlib
import io
import os
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from pathlib import Path

_NAME = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = "unfinished"
_PIECE = 1 << 18
_PRIVATE = 0o600


class DirectoryBlobs:
    """A `BlobStore` in a directory that is this process's alone; made if it is not there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._unfinished = directory / _UNFINISHED
        self._unfinished.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._unfinished.iterdir():
            left.unlink()

    async def put(self, content: bytes | AsyncIterable[bytes]) -> str:
        file = self._unfinished / secrets.token_hex(16)
        digest = hashlib.sha256()
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _PRIVATE)
        try:
            with io.FileIO(descriptor, "wb") as target:
                if isinstance(content, bytes):
                    await asyncio.to_thread(_append, target, digest.update, content)
                else:
                    async for piece in content:
                        await asyncio.to_thread(_append, target, digest.update, piece)
                await asyncio.to_thread(os.fsync, target.fileno())
            name = digest.hexdigest()
            await asyncio.to_thread(self._into_place, file, name)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return name

    def _into_place(self, file: Path, name: str) -> None:
        place = self._place(name)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        file.replace(place)
        for directory in (place.parent, self._directory):
            _flush(directory)

    async def read(self, name: str) -> AsyncGenerator[bytes]:
        try:
            source = await asyncio.to_thread(self._place(name).open, "rb", buffering=0)
        except FileNotFoundError:
            raise KeyError(name) from None
        with source:
            while piece := await asyncio.to_thread(source.read, _PIECE):
                yield piece

    async def delete(self, name: str) -> None:
        with contextlib.suppress(KeyError, FileNotFoundError):
            await asyncio.to_thread(self._place(name).unlink)

    def _place(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise KeyError(name)
        return self._directory / name[:2] / name


def _append(target: io.FileIO, note: Callable[[bytes], None], piece: bytes) -> None:
    note(piece)
    view = memoryview(piece)
    while view:
        view = view[target.write(view) :]


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
