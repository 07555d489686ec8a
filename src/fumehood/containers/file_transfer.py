"""Files on their way between blobs and sandboxes, small ones by the batch.

A request, a thread and a wait for the disk cost as much as the bytes of a hundred small files. So these travel in one
stream, and are written and read by the batch; a large one has a request of its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from itertools import batched
from typing import Any, NamedTuple, Self

from fumehood.interfaces import BlobRef, ReferencedBlobs, Sandbox
from fumehood.protocol.openai.api_errors import ServiceUnavailable
from fumehood.protocol.sandbox.bundle_encoding import MAX_BUNDLED_FILE_BYTES, BundledFile
from fumehood.protocol.sandbox.sandbox_errors import (
    FileNotFound,
    FileRefused,
    SandboxError,
    SandboxLimitExceeded,
)
from fumehood.protocol.sandbox.sandbox_messages import FileEntry, UnpackSummary, WriteSummary
from fumehood.sandbox_client import SandboxConnectionLost

_BLOB_BATCH_BYTES = 8 << 20  # of small files that wait for the disk together,
_BLOB_BATCH_FILES = 2000  # and how many of them
_UPLOAD_BATCH_BYTES = 512 << 10  # of small files that are read from it together,
_UPLOAD_BATCH_FILES = 500  # and how many of them
_CONCURRENT_LARGE_FILES = 8  # each waits for a disk

# A file that was kept, or why it was not.
type DownloadedFile = tuple[FileEntry, BlobRef | SandboxError | ServiceUnavailable]
type _ReadFile = tuple[FileEntry, bytes | SandboxError]
# Is told how many bytes of a file are to be kept, and again when it is known better; raises where that is too much.
type ReserveBytes = Callable[[FileEntry, int], None]


class FileFingerprint(NamedTuple):
    """What tells whether a file of the same size is still the same. Code may set the first back, not the others."""

    modified_ns: int
    changed_ns: int = 0
    inode: int = 0

    @classmethod
    def from_entry(cls, file: FileEntry) -> Self:
        return cls(file.modified_ns, file.changed_ns, file.inode)

    @classmethod
    def at_write(cls, written: WriteSummary | UnpackSummary, file: FileEntry) -> Self:
        """Of a file as it was written, with others. What is newer, somebody has changed already: then it must not look
        as if it were ours.
        """
        modified_ns = min(file.modified_ns, written.modified_ns)
        return cls(modified_ns, min(file.changed_ns, written.changed_ns), file.inode)


NO_FINGERPRINT = FileFingerprint(0)
_UNLISTED_FINGERPRINT = FileFingerprint(1)  # of a file that is there and no listing shows


@dataclass(frozen=True, slots=True)
class FileUpload:
    """A file that is kept, and where it is to be."""

    path: str
    blob: BlobRef
    executable: bool = False


@dataclass(slots=True)
class UploadReport:
    """What was put into a sandbox.

    mark: of the listing after that, if there was one.
    stamps: of each, by its path.
    gone: paths of what is not kept any more. refused: of what the sandbox did not take; errors: why, of some.
    """

    mark: str = ""
    fingerprints: dict[str, FileFingerprint] = field(default_factory=dict[str, FileFingerprint])
    missing_blobs: set[str] = field(default_factory=set[str])
    rejected: set[str] = field(default_factory=set[str])
    errors: list[SandboxError] = field(default_factory=list[SandboxError])


class FileTransfer:
    """For all containers of one process."""

    def __init__(self, blobs: ReferencedBlobs) -> None:
        self._blobs = blobs

    # ---- out of a sandbox ---------------------------------------------------------------------------------------

    async def download(
        self, sandbox: Sandbox, files: Sequence[FileEntry], reserve: ReserveBytes, blob_stack: AsyncExitStack
    ) -> AsyncGenerator[Sequence[DownloadedFile]]:
        """Keep what is in these files until the stack is left, some at a time. Raises SandboxError where the sandbox
        fails, and what `admit` raises unless that is TooLarge.
        """
        small = [file for file in files if file.size <= MAX_BUNDLED_FILE_BYTES]
        large = [file for file in files if file.size > MAX_BUNDLED_FILE_BYTES]
        async with aclosing(self._read_small_files(sandbox, small, large, reserve)) as batches:
            async for batch in batches:
                yield await self._store_batch(batch, blob_stack)
        for some in batched(large, _CONCURRENT_LARGE_FILES):
            yield await _run_parallel(
                self._store_large_file(sandbox, file, reserve, blob_stack) for file in some
            )

    async def _read_small_files(
        self, sandbox: Sandbox, small: Sequence[FileEntry], large: list[FileEntry], reserve: ReserveBytes
    ) -> AsyncGenerator[Sequence[_ReadFile]]:
        """As much at a time as is worth a wait for the disk; what has grown meanwhile joins the large ones. Where the
        sandbox fails, what has come before is given first.
        """
        if not small:
            return
        waiting = iter(small)
        batch: list[_ReadFile] = []
        size = 0
        failure: SandboxError | None = None
        try:
            async with aclosing(sandbox.read_files([file.path for file in small])) as pieces:
                async for contents in pieces:
                    for content, file in zip(contents, waiting, strict=False):
                        if isinstance(content, SandboxLimitExceeded):
                            large.append(file)
                            continue
                        batch.append((file, _check_reserved(file, content, reserve)))
                        size += len(content) if isinstance(content, bytes) else 0
                    if size > _BLOB_BATCH_BYTES or len(batch) > _BLOB_BATCH_FILES:
                        yield batch
                        batch, size = [], 0
        except SandboxError as error:
            failure = error
        if batch:
            yield batch
        if failure is not None:
            raise failure

    async def _store_batch(
        self, batch: Sequence[_ReadFile], blob_stack: AsyncExitStack
    ) -> Sequence[DownloadedFile]:
        whole = [(file, content) for file, content in batch if isinstance(content, bytes)]
        taken: list[DownloadedFile] = [(file, error) for file, error in batch if not isinstance(error, bytes)]
        if not whole:
            return taken
        try:
            kept = await blob_stack.enter_async_context(
                self._blobs.put_many_pinned([content for _, content in whole])
            )
        except ServiceUnavailable as error:
            return [*taken, *((file, error) for file, _ in whole)]
        return [*taken, *((file, one) for (file, _), one in zip(whole, kept, strict=True))]

    async def _store_large_file(
        self, sandbox: Sandbox, file: FileEntry, reserve: ReserveBytes, blob_stack: AsyncExitStack
    ) -> DownloadedFile:
        try:
            content = _count_stream(file, sandbox.read_file(file.path), reserve)
            return file, await blob_stack.enter_async_context(self._blobs.put_pinned(content))
        except (FileNotFound, FileRefused, SandboxLimitExceeded, ServiceUnavailable) as error:
            return file, error

    # ---- into a sandbox -----------------------------------------------------------------------------------------

    async def upload(self, sandbox: Sandbox, uploads: Sequence[FileUpload]) -> UploadReport:
        """Put files there that are kept, as far as it takes them; raises SandboxError, Unavailable."""
        handed = UploadReport()
        small = [one for one in uploads if one.blob.bytes <= MAX_BUNDLED_FILE_BYTES]
        if len(small) < 2:  # then it is as well off with a request of its own
            small = []
        else:
            await self._upload_bundle(sandbox, small, handed)
        together = {one.path for one in small}
        for one in uploads:
            if one.path not in together:
                await self._upload_single(sandbox, one, handed)
        return handed

    async def _upload_bundle(
        self, sandbox: Sandbox, small: Sequence[FileUpload], report: UploadReport
    ) -> None:
        try:
            written = await self._write_bundle(sandbox, small, report)
        except (FileRefused, SandboxLimitExceeded) as error:  # none of them
            report.errors.append(error)
            written = WriteSummary(files=0, bytes=0, refused=len(small))
        report.errors += [FileRefused(reason) for reason in written.reasons]
        listing = await sandbox.list_files()
        report.mark = listing.mark
        there = {file.path: file for file in listing.files}
        # A listing that was cut does not show all; but where none was refused, all are there.
        unseen = _UNLISTED_FINGERPRINT if listing.truncated and not written.refused else None
        for one in small:
            if one.path in report.missing_blobs:
                continue
            file = there.get(one.path)
            stamp = unseen if file is None else FileFingerprint.at_write(written, file)
            if stamp is None:
                report.rejected.add(one.path)
            else:
                report.fingerprints[one.path] = stamp

    async def _write_bundle(
        self, sandbox: Sandbox, small: Sequence[FileUpload], report: UploadReport
    ) -> WriteSummary:
        try:
            return await sandbox.write_files(self._read_blobs(small, report))
        except SandboxConnectionLost:  # to write the same again does no harm
            return await sandbox.write_files(self._read_blobs(small, report))

    async def _read_blobs(
        self, small: Sequence[FileUpload], report: UploadReport
    ) -> AsyncGenerator[Sequence[BundledFile]]:
        for some in _batch_uploads(small):
            contents = await self._blobs.read_many([one.blob.name for one in some])
            found = list(zip(some, contents, strict=True))
            report.missing_blobs.update(one.path for one, content in found if content is None)
            yield [(one.path, content, one.executable) for one, content in found if content is not None]

    async def _upload_single(self, sandbox: Sandbox, one: FileUpload, report: UploadReport) -> None:
        try:
            content = await self._open_blob(one.blob)
            entry = await sandbox.write_file(one.path, content, executable=one.executable)
        except KeyError:
            report.missing_blobs.add(one.path)
        except (FileRefused, SandboxLimitExceeded) as error:
            report.rejected.add(one.path)
            report.errors.append(error)
        else:
            report.fingerprints[one.path] = FileFingerprint.from_entry(entry)

    async def _open_blob(self, blob: BlobRef) -> bytes | AsyncGenerator[bytes]:
        """Raises KeyError if it is not there, before anybody waits for the rest."""
        pieces = self._blobs.read(blob.name)
        if blob.bytes <= MAX_BUNDLED_FILE_BYTES:  # a request with these bytes can be repeated
            async with aclosing(pieces):
                return b"".join([piece async for piece in pieces])
        return _prepend_chunk(await anext(pieces, b""), pieces)


def _check_reserved(
    file: FileEntry, content: bytes | SandboxError, reserve: ReserveBytes
) -> bytes | SandboxError:
    try:
        if isinstance(content, bytes):
            reserve(file, len(content))
    except SandboxLimitExceeded as error:
        return error
    return content


async def _count_stream(
    file: FileEntry, pieces: AsyncGenerator[bytes], reserve: ReserveBytes
) -> AsyncGenerator[bytes]:
    size = 0
    async with aclosing(pieces):
        async for piece in pieces:
            size += len(piece)
            reserve(file, max(size, file.size))
            yield piece
    reserve(file, size)  # less than was announced, perhaps


async def _run_parallel[T](coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once; the first of what they raise ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in coroutines]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _batch_uploads(files: Iterable[FileUpload]) -> Generator[list[FileUpload]]:
    batch: list[FileUpload] = []
    size = 0
    for file in files:
        if batch and (size + file.blob.bytes > _UPLOAD_BATCH_BYTES or len(batch) >= _UPLOAD_BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.blob.bytes
    if batch:
        yield batch


async def _prepend_chunk(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece
