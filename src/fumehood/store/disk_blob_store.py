"""Blobs on a disk, named by the SHA-256 of their content.

A blob is written to a temporary directory, synced, and renamed, so that every named blob is complete.
"""

import asyncio
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fumehood.interfaces import BeforeCommit
from fumehood.protocol.openai.api_errors import StorageUnavailable
from fumehood.store.migrations import StoreOpenError
from fumehood.store.temporary_blob_files import TemporaryBlobFiles, try_lock

_NAME = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 256 << 10
_WRITE_BUFFER_BYTES = 1 << 20
_RETRY_SECONDS = 5.0


def blob_path(directory: Path, name: str) -> str | None:
    """Return the path of a blob; None for an invalid name."""
    return f"{directory}/{name[:2]}/{name[2:4]}/{name}" if _NAME.fullmatch(name) else None


class DiskBlobStore:
    """A `BlobStore` in a directory, which is created if missing.

    owner: id of the database that refers to these blobs. Another database would delete them as unreferenced.
    min_free_bytes: of the disk, that writes leave free; checked before each chunk.

    Raises StoreOpenError if the directory belongs to another database, OSError.
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
        self, content: bytes | AsyncIterable[bytes], before_commit: BeforeCommit | None = None
    ) -> str:
        async def stage(staged: TemporaryBlobFiles) -> list[str]:
            rest = content if isinstance(content, bytes) else await _append_chunks(staged, content)
            return await _run_in_thread(staged.finish_stream, rest)

        (name,) = await self._put_staged(stage, before_commit)
        return name

    async def put_many(
        self, contents: Sequence[bytes], before_commit: BeforeCommit | None = None
    ) -> Sequence[str]:
        return await self._put_staged(lambda staged: _run_in_thread(staged.write, contents), before_commit)

    async def _put_staged(
        self, stage: Callable[[TemporaryBlobFiles], Awaitable[list[str]]], before_commit: BeforeCommit | None
    ) -> list[str]:
        """Publish what `stage` has written, unless it or `before_commit` raises."""
        staged = TemporaryBlobFiles(self._incoming, self._locate, self._min_free_bytes)
        try:
            names = await stage(staged)
            if before_commit is not None:
                await before_commit(names)
            await _finish_despite_cancellation(_run_in_thread(staged.publish))
        except BaseException as error:
            await _discard_in_thread(staged, error)
            raise
        return names

    async def get_size(self, name: str) -> int:
        return await _run_in_thread(_stat_size, self._locate_path(name), name)

    async def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        reader = await _run_in_thread(_BlobReader, self._locate_path(name), name, start, end)
        try:
            while chunk := await _run_in_thread(reader.read_chunk):
                yield chunk
        finally:
            reader.close()

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
        """Raises KeyError for an invalid name."""
        path = blob_path(self._directory, name)
        if path is None:
            raise KeyError(name)
        return path


class _BlobReader:
    """A blob that is being read from `start` up to `end`, by one thread at a time.

    A cancelled reader may close it while a thread still reads. Then the thread closes the file, since its descriptor
    must not be reused before.
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
            chunk = b"" if self._closed else self._file.read(min(_CHUNK_BYTES, self._remaining))
        self._remaining -= len(chunk)
        if self._closed:
            self._file.close()
        return chunk

    def close(self) -> None:
        self._closed = True
        if self._busy.acquire(blocking=False):
            self._file.close()
            self._busy.release()


async def _discard_in_thread(staged: TemporaryBlobFiles, error: BaseException) -> None:
    discarding = asyncio.get_running_loop().run_in_executor(None, staged.discard)
    if isinstance(error, Exception):  # a cancelled task does not wait for a thread that still writes
        with suppress(OSError):  # the first error is raised
            await discarding


async def _append_chunks(staged: TemporaryBlobFiles, content: AsyncIterable[bytes]) -> bytes:
    """Append full buffers, and return the rest."""
    buffer = bytearray()
    async for chunk in content:
        buffer += chunk
        if len(buffer) >= _WRITE_BUFFER_BYTES:
            await _run_in_thread(staged.append, bytes(buffer))
            buffer.clear()
    return bytes(buffer)


def _stat_size(path: Path, name: str) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise KeyError(name) from None


def _list_older_names(directory: Path, until: float) -> list[str]:
    """Return the blobs in `*/` that were put before that time. Blobs may come and go meanwhile."""
    found: list[str] = []
    for path in directory.glob("*/*"):
        with suppress(FileNotFoundError):
            if _NAME.fullmatch(path.name) and path.stat().st_mtime < until:
                found.append(path.name)
    return found


def _claim_directory(path: Path, owner: str) -> None:
    """Record the owner of a directory. Raises StoreOpenError if it has another one."""
    if not path.exists():
        draft = path.with_suffix(".new")
        draft.write_text(owner)
        draft.rename(path)
    if path.read_text() != owner:
        raise StoreOpenError(
            f"The directory {path.parent} holds the files of another database. Configure another directory "
            f"(storage.blobs), or delete {path}: then this database takes over and deletes what it does not refer to."
        )


def _delete_abandoned(directory: Path) -> None:
    """Delete what dead processes have left."""
    for path in directory.iterdir():
        with suppress(FileNotFoundError, BlockingIOError), try_lock(path):
            shutil.rmtree(path)


async def _run_in_thread[**P, T](work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread. Raises StorageUnavailable for errors of the disk, not for those of the source of the bytes."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StorageUnavailable(
            f"The gateway's disk cannot be used now: {reason}. Try again later.", retry_after=_RETRY_SECONDS
        ) from error


async def _finish_despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Wait for the work before a cancellation takes effect, so that the outcome is known."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
