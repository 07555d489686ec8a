"""Reads and writes the files of one live sandbox.

The supervisor reads directly where it may, by descriptors opened beneath the data directory; otherwise a helper
process reads. Helpers always do the writing, unpacking and deleting, in the sandbox's cgroup and as its user.
"""

import asyncio
import contextlib
import errno
import json
import os
import secrets
import socket
import stat
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Sequence
from typing import Any, Self

import msgspec

from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxError,
    SandboxFileNotFound,
    SandboxPayloadTooLarge,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    FileEntry,
    FileListing,
    LinkEntry,
    UnpackSummary,
    WriteFilesSummary,
)
from fumehood.sandbox_server.inside.files import atomic_writes, file_bundles, untrusted_files
from fumehood.sandbox_server.inside.files.untrusted_files import FileStat
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.file_helper_processes import FileHelperSpawner, HelperProcess
from fumehood.sandbox_server.supervisor.sandbox_upload import SandboxUpload, UploadSourceFailed

MAX_SNAPSHOTS = 8
_ENTRY_BYTES = 250  # approximate memory of an entry, besides its name
_MAX_SNAPSHOT_BYTES = 16 << 20
_CONCURRENT_TASKS = 2  # short tasks, and as many transfers: they use the sandbox's CPU share
_TASK_TIMEOUT = 30.0
_CHUNK_BYTES = 256 * 1024
_MAX_REASON_CHARACTERS = 500
_MAX_DISCARDED_ENTRIES = untrusted_files.MAX_ENTRIES * 4

# Aliases, because `list` in annotations of the class below would be its method.
type _HelperAnswer = tuple[dict[str, Any], list[int]]


class FileSnapshots:
    """The last few file listings of a sandbox by token, bounded in number and size."""

    def __init__(self) -> None:
        self._snapshots: OrderedDict[str, dict[str, FileStat]] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._snapshots)

    def get(self, token: str) -> dict[str, FileStat] | None:
        return self._snapshots.get(token)

    def add(self, found: list[FileStat]) -> str:
        """Store a listing and return its token; an unchanged listing keeps its token."""
        state = {item.path: item for item in found}
        if self._snapshots:
            token, latest = next(reversed(self._snapshots.items()))
            if latest == state:
                return token
        token = secrets.token_hex(12)
        size = sum(_ENTRY_BYTES + len(item.path) for item in found)
        if size <= _MAX_SNAPSHOT_BYTES:
            self._snapshots[token], self._sizes[token] = state, size
        while len(self._snapshots) > MAX_SNAPSHOTS or sum(self._sizes.values()) > _MAX_SNAPSHOT_BYTES:
            oldest, _ = self._snapshots.popitem(last=False)
            del self._sizes[oldest]
        return token

    @staticmethod
    def diff(before: dict[str, FileStat], found: list[FileStat]) -> tuple[list[FileStat], list[str]]:
        """New and changed files, and the paths of deleted ones."""
        present = {item.path for item in found}
        return [item for item in found if before.get(item.path) != item], sorted(before.keys() - present)


class OpenFile:
    """A regular file: yields exactly `size` bytes, or raises FileRefused if it has become shorter.

    Bytes appended after opening are left out; bytes overwritten meanwhile are read.
    """

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._reading: asyncio.Future[bytes] | None = None
        self.bytes_read = 0
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):  # the descriptor may come from a helper, which is not trusted
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")
        self.size = status.st_size

    async def chunks(self) -> AsyncGenerator[bytes]:
        at = 0
        while at < self.size:
            chunk = await self._read(min(_CHUNK_BYTES, self.size - at), at)
            if not chunk:
                raise FileRefused(f"{to_printable(self._path)}: it became shorter while it was read")
            at += len(chunk)
            self.bytes_read += len(chunk)
            yield chunk

    async def _read(self, size: int, at: int) -> bytes:
        if self._fd < 0:
            raise ValueError("the file is closed")
        loop = asyncio.get_running_loop()
        self._reading = loop.run_in_executor(None, os.pread, self._fd, size, at)
        return await asyncio.shield(self._reading)

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    def close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        if self._reading is not None and not self._reading.done():
            # A worker thread still reads: the descriptor must not be reused yet.
            self._reading.add_done_callback(lambda _: os.close(fd))
        else:
            os.close(fd)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class SandboxFiles:
    """Every method raises SandboxGone once the sandbox has ended, and returns in bounded time.

    require_data_fd: returns the data directory, or raises SandboxGone.
    free_memory: returns how many bytes may be written before the kernel would kill a process; None without limit.
    reads_directly: whether the supervisor itself may read the files.
    """

    def __init__(
        self,
        helpers: FileHelperSpawner,
        settings: SandboxServerSettings,
        *,
        require_data_fd: Callable[[], int],
        free_memory: Callable[[], int | None],
        reads_directly: bool,
    ) -> None:
        self._helpers = helpers
        self._settings = settings
        self._require_data_fd = require_data_fd
        self._free_memory = free_memory
        self._reads_directly = reads_directly
        self._snapshots = FileSnapshots()
        self._tasks = asyncio.Semaphore(_CONCURRENT_TASKS)
        self._transfers = asyncio.Semaphore(_CONCURRENT_TASKS)

    # ---- reading ----------------------------------------------------------------------------------------------

    async def list(self, since: str | None = None) -> FileListing:
        """Regular files below the data directory; with a known snapshot token, what changed since. Links are always all
        of them.
        """
        found, cut, links = await self._walk()
        before = None if since is None or cut else self._snapshots.get(since)
        # A truncated listing is no base for a later comparison.
        token = secrets.token_hex(12) if cut else self._snapshots.add(found)
        deleted: list[str] = []
        if before is not None:
            found, deleted = FileSnapshots.diff(before, found)
        return FileListing(
            files=[_to_entry(item) for item in found],
            mark=token,
            deleted=deleted,
            complete=before is None,
            truncated=cut,
            links=[LinkEntry(path=path, target=target) for path, target in links],
        )

    async def _walk(self) -> untrusted_files.DirectoryListing:
        if not self._reads_directly:
            answer, opened = await self._run_helper({"op": "list"})
            files, links = await asyncio.to_thread(_read_listing, opened.pop())
            return untrusted_files.DirectoryListing(files, bool(answer["truncated"]), links)
        async with self._tasks:
            # A duplicate: if the sandbox ends meanwhile, the number may be reused for another sandbox.
            data = os.dup(self._require_data_fd())
            return await _with_timeout(asyncio.to_thread(_call_and_close, untrusted_files.list_files, data))

    async def open(self, path: str) -> OpenFile:
        """One regular file; raises SandboxFileNotFound, FileRefused, and SandboxPayloadTooLarge above `file_bytes`."""
        try:
            if self._reads_directly:
                fd = untrusted_files.open_regular_file(self._require_data_fd(), path)
            else:
                _, opened = await self._run_helper({"op": "open", "path": path})
                fd = opened.pop()
        except (OSError, untrusted_files.UnsafePath) as error:
            raise to_file_error(path, error) from error
        try:
            file = OpenFile(fd, path)
        except OSError as error:
            raise to_file_error(path, error) from error
        if file.size > self._settings.file_bytes:
            file.close()
            raise _too_large_error(path, self._settings.file_bytes)
        return file

    async def read(self, path: str, *, limit: int) -> bytes:
        """The whole content; raises SandboxPayloadTooLarge above `limit` bytes."""
        async with await self.open(path) as file:
            if file.size > limit:
                raise _too_large_error(path, limit)
            return await file.read()

    async def read_bundle(self, paths: Sequence[str]) -> AsyncGenerator[bytes]:
        """Many files as one stream in the encoding of `bundle_encoding`; each is opened when its turn comes."""
        chunks = (
            self._read_bundle_directly(paths) if self._reads_directly else self._read_bundle_by_helper(paths)
        )
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _read_bundle_directly(self, paths: Sequence[str]) -> AsyncGenerator[bytes]:
        loop = asyncio.get_running_loop()
        data = os.dup(self._require_data_fd())
        answers = file_bundles.stream_contents(data, paths)
        reading: asyncio.Future[bytes] = loop.create_future()
        reading.set_result(b"")
        try:
            while True:
                reading = loop.run_in_executor(None, next, answers, b"")
                if not (chunk := await asyncio.shield(reading)):
                    return
                yield chunk
        finally:
            # As in `OpenFile`: a worker thread may still read.
            reading.add_done_callback(lambda _: os.close(data))

    async def _read_bundle_by_helper(self, paths: Sequence[str]) -> AsyncGenerator[bytes]:
        if not paths:
            return
        loop = asyncio.get_running_loop()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        mine.setblocking(False)
        async with self._transfers:
            with self._translate_helper_errors("the sandbox's files"), mine, theirs:
                task = {"op": "send"}
                spawned = self._helpers.spawn(self._require_data_fd(), task, [theirs.fileno()])
                async with spawned as helper:
                    theirs.close()
                    with mine:  # closing it stops the helper
                        await _with_timeout(loop.sock_sendall(mine, json.dumps(paths).encode()))
                        mine.shutdown(socket.SHUT_WR)
                        while chunk := await _with_timeout(loop.sock_recv(mine, _CHUNK_BYTES)):
                            yield chunk
                    answer, _ = await _with_timeout(helper.receive())
        _raise_for_error(answer, "the sandbox's files")

    # ---- writing ----------------------------------------------------------------------------------------------

    async def write(
        self,
        path: str,
        content: bytes | AsyncIterable[bytes],
        *,
        executable: bool = False,
        limit: int | None = None,
    ) -> FileEntry:
        """Write a file atomically; its memory counts as the sandbox's.

        Raises FileRefused, and SandboxPayloadTooLarge above `limit` bytes (`file_bytes` by default).
        """
        task = {"op": "write", "path": path, "executable": executable}
        answer = await self._transfer(task, path, content, limit)
        return _convert_answer({**answer, "path": path}, FileEntry)

    async def unpack(
        self,
        content: bytes | AsyncIterable[bytes],
        *,
        kind: ArchiveFormat,
        into: str = "",
        limit: int | None = None,
    ) -> UnpackSummary:
        """Unpack an archive below `into`, all or nothing; existing files are replaced.

        Raises FileRefused, and SandboxPayloadTooLarge above `limit` bytes or the limits for its contents.
        """
        if into:
            _check_path(into, "into")
        task = {"op": "unpack", "kind": kind, "into": into, **self._unpack_limits()}
        answer = await self._transfer(task, "the archive", content, limit)
        return _convert_answer(answer, UnpackSummary)

    async def write_bundle(self, content: AsyncIterable[bytes]) -> WriteFilesSummary:
        """Write many files from one stream in the encoding of `bundle_encoding`.

        Raises FileRefused and SandboxPayloadTooLarge (limits as for archives), and then nothing is written.
        """
        answer = await self._transfer({"op": "receive", **self._unpack_limits()}, "the files", content, None)
        return _convert_answer(answer, WriteFilesSummary)

    def _unpack_limits(self) -> dict[str, int]:
        return {"members": self._settings.unpacked_members, "bytes": self._settings.unpacked_bytes}

    async def delete(self, path: str) -> None:
        """Delete one file; raises SandboxFileNotFound, FileRefused."""
        await self._run_helper({"op": "delete", "path": path})

    async def _transfer(
        self, task: dict[str, Any], subject: str, content: bytes | AsyncIterable[bytes], limit: int | None
    ) -> dict[str, Any]:
        _check_task(task)
        self._require_data_fd()
        max_bytes = self._settings.file_bytes if limit is None else min(limit, self._settings.file_bytes)
        if isinstance(content, bytes) and len(content) > max_bytes:
            raise _too_large_error(subject, max_bytes)
        token = secrets.token_hex(8)
        helper: HelperProcess | None = None
        async with self._transfers:
            try:
                with self._translate_helper_errors(subject, may_be_missing=False):
                    upload = SandboxUpload(
                        to_printable(subject), content, max_bytes, self._free_memory, self._settings
                    )
                    with contextlib.closing(upload):
                        spawned = self._helpers.spawn(
                            self._require_data_fd(),
                            {**task, "token": token},
                            [upload.helper_socket.fileno()],
                        )
                        async with spawned as helper:
                            answer = await upload.run(helper)
            except UploadSourceFailed as failed:
                raise failed.error from None
            finally:
                if helper is not None and not helper.has_answered:
                    await asyncio.shield(asyncio.ensure_future(self._discard(token)))
        return _raise_for_error(answer, subject, may_be_missing=False)

    async def _discard(self, token: str) -> None:
        """Remove the staged files of a helper that was killed, which carry its token."""
        with contextlib.suppress(SandboxError, OSError):
            if self._reads_directly:
                data = os.dup(self._require_data_fd())
                await asyncio.to_thread(
                    _call_and_close, atomic_writes.discard_staged, data, token, _MAX_DISCARDED_ENTRIES
                )
            else:
                await self._run_helper(
                    {"op": "discard", "token": token, "max_entries": _MAX_DISCARDED_ENTRIES}
                )

    # ---- helpers ----------------------------------------------------------------------------------------------

    async def _run_helper(self, task: dict[str, Any]) -> _HelperAnswer:
        """Run one short task in a helper; raises FileRefused, SandboxFileNotFound."""
        _check_task(task)
        subject: str = task.get("path", "the sandbox's files")
        async with self._tasks:
            with self._translate_helper_errors(subject):
                async with self._helpers.spawn(self._require_data_fd(), task) as helper:
                    answer, opened = await _with_timeout(helper.receive())
        return _raise_for_error(answer, subject), opened

    @contextlib.contextmanager
    def _translate_helper_errors(self, subject: str, *, may_be_missing: bool = True) -> Generator[None]:
        """Raise SandboxGone, FileRefused or SandboxFileNotFound for a helper that ended or could not be started."""
        try:
            yield
        except EOFError:
            self._require_data_fd()
            raise FileRefused(f"{to_printable(subject)}: {_HELPER_ENDED}") from None
        except OSError as error:
            raise to_file_error(subject, error, may_be_missing=may_be_missing) from error


_HELPER_ENDED = "the helper ended, probably for want of memory in the sandbox"


def _check_task(task: dict[str, Any]) -> None:
    if "path" in task:
        _check_path(task["path"], "path")


def _check_path(path: str, param: str) -> None:
    try:
        untrusted_files.check_path(path)
    except untrusted_files.UnsafePath as error:
        raise FileRefused(f"{to_printable(path)}: {error}", param=param) from error


async def _with_timeout[T](work: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(work, _TASK_TIMEOUT)
    except TimeoutError:
        raise FileRefused(f"the sandbox's files did not answer within {_TASK_TIMEOUT:g} s") from None


def _raise_for_error(answer: dict[str, Any], subject: str, *, may_be_missing: bool = True) -> dict[str, Any]:
    if "error" not in answer:
        return answer
    text = to_printable(str(answer["error"]), _MAX_REASON_CHARACTERS)
    if answer.get("kind") == "too_large":
        raise SandboxPayloadTooLarge(f"{to_printable(subject)}: {text}")
    raise to_file_error(subject, OSError(answer.get("errno"), text), may_be_missing=may_be_missing)


def _convert_answer[T](answer: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError:
        raise FileRefused("the helper sent an invalid answer") from None


def to_file_error(
    path: str, error: OSError | untrusted_files.UnsafePath, *, may_be_missing: bool = True
) -> FileRefused | SandboxFileNotFound:
    """The error for callers; a path that is written to cannot be missing."""
    if isinstance(error, untrusted_files.UnsafePath):
        return FileRefused(f"{to_printable(path)}: {error}", param="path")
    reason = (error.strerror or str(error)).removeprefix("openat2: ")
    text = f"{to_printable(path)}: {reason}"
    if may_be_missing and error.errno in (errno.ENOENT, errno.ENOTDIR):
        return SandboxFileNotFound(text)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += " (the sandbox's disk quota)"
    return FileRefused(text)


def _too_large_error(path: str, limit: int) -> SandboxPayloadTooLarge:
    return SandboxPayloadTooLarge(f"{to_printable(path)}: larger than {limit} bytes")


def _to_entry(item: untrusted_files.FileStat) -> FileEntry:
    return FileEntry(
        path=item.path,
        size=item.size,
        modified_ns=item.modified_ns,
        changed_ns=item.changed_ns,
        inode=item.inode,
        executable=item.executable,
    )


def _call_and_close[T](function: Callable[..., T], fd: int, *arguments: Any) -> T:
    try:
        return function(fd, *arguments)
    finally:
        os.close(fd)


def _read_listing(fd: int) -> tuple[list[untrusted_files.FileStat], list[tuple[str, str]]]:
    with os.fdopen(fd, "rb") as listing:
        listing.seek(0)
        files, links = json.load(listing)
        return [untrusted_files.FileStat(*row) for row in files], [(path, target) for path, target in links]


def to_printable(name: str, limit: int = 200) -> str:
    """Text from a sandbox made fit for messages and logs: bounded, control and bidirectional characters escaped."""
    text = "".join(char if char.isprintable() else _escape(char) for char in name[:limit])
    return text if len(name) <= limit else text + "…"


def _escape(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
