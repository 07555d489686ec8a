"""Transfers files between blobs and sandboxes, small ones in batches.

A request, a thread and an fsync cost as much as the bytes of a hundred small files, so these travel in one bundle and
are read and written in batches. A large file has its own request.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from itertools import batched
from typing import Any, NamedTuple, Self

from fumehood.interfaces import BlobRef, GarbageCollectedBlobStore, Sandbox
from fumehood.protocol.openai.api_errors import ServiceUnavailable
from fumehood.protocol.sandbox.bundle_encoding import MAX_BUNDLED_FILE_BYTES, BundledFile
from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxError,
    SandboxFileNotFound,
    SandboxPayloadTooLarge,
)
from fumehood.protocol.sandbox.sandbox_messages import FileEntry, UnpackSummary, WriteFilesSummary

# Small files stored with one fsync:
_BLOB_BATCH_BYTES = 8 << 20
_BLOB_BATCH_FILES = 2000
# Small files read from disk together:
_UPLOAD_BATCH_BYTES = 512 << 10
_UPLOAD_BATCH_FILES = 500
_CONCURRENT_LARGE_FILES = 8

# A file with its blob, or with why it was not stored.
type DownloadedFile = tuple[FileEntry, BlobRef | SandboxError | ServiceUnavailable]
type _ReadFile = tuple[FileEntry, bytes | SandboxError]
# Reserves the bytes of a file, again when its size turns out to differ; raises SandboxPayloadTooLarge.
type ReserveBytes = Callable[[FileEntry, int], None]


class FileFingerprint(NamedTuple):
    """Times and inode by which a change is noticed. Code can set `modified_ns` back, not the others."""

    modified_ns: int
    changed_ns: int = 0
    inode: int = 0

    @classmethod
    def from_entry(cls, file: FileEntry) -> Self:
        return cls(file.modified_ns, file.changed_ns, file.inode)

    @classmethod
    def at_write(cls, written: WriteFilesSummary | UnpackSummary, file: FileEntry) -> Self:
        """Return the fingerprint of a file written in a batch.

        A file that is newer than the batch was changed meanwhile, and must not match.
        """
        modified_ns = min(file.modified_ns, written.modified_ns)
        return cls(modified_ns, min(file.changed_ns, written.changed_ns), file.inode)


NO_FINGERPRINT = FileFingerprint(0)
_UNLISTED_FINGERPRINT = FileFingerprint(1)  # of a file that exists and no listing shows


@dataclass(frozen=True, slots=True)
class FileUpload:
    """A blob and the path in a container to write it to."""

    path: str
    blob: BlobRef
    executable: bool = False


@dataclass(slots=True)
class UploadReport:
    """The result of an upload into a sandbox.

    mark: snapshot token of the listing after it, if there was one.
    fingerprints: by path, of what was written.
    missing_blobs: paths whose blobs are gone. rejected: paths that the sandbox refused. errors: why, for some of them.
    """

    mark: str = ""
    fingerprints: dict[str, FileFingerprint] = field(default_factory=dict[str, FileFingerprint])
    missing_blobs: set[str] = field(default_factory=set[str])
    rejected: set[str] = field(default_factory=set[str])
    errors: list[SandboxError] = field(default_factory=list[SandboxError])


class FileTransfer:
    """Copies files between one blob store and any sandbox."""

    def __init__(self, blobs: GarbageCollectedBlobStore) -> None:
        self._blobs = blobs

    # ---- out of a sandbox ---------------------------------------------------------------------------------------

    async def download(
        self, sandbox: Sandbox, files: Sequence[FileEntry], reserve: ReserveBytes, blob_stack: AsyncExitStack
    ) -> AsyncGenerator[Sequence[DownloadedFile]]:
        """Store the files as blobs, pinned until the stack is closed; yield the results in batches.

        Raises SandboxError if the sandbox fails, and what `reserve` raises except SandboxPayloadTooLarge.
        """
        small = [file for file in files if file.size <= MAX_BUNDLED_FILE_BYTES]
        large = [file for file in files if file.size > MAX_BUNDLED_FILE_BYTES]
        async with aclosing(self._read_small_files(sandbox, small, large, reserve)) as batches:
            async for batch in batches:
                yield await self._store_batch(batch, blob_stack)
        for group in batched(large, _CONCURRENT_LARGE_FILES):
            yield await _run_parallel(
                self._store_large_file(sandbox, file, reserve, blob_stack) for file in group
            )

    async def _read_small_files(
        self, sandbox: Sandbox, small: Sequence[FileEntry], large: list[FileEntry], reserve: ReserveBytes
    ) -> AsyncGenerator[Sequence[_ReadFile]]:
        """Yield batches that are worth an fsync. A file that has grown too large is appended to `large`.

        If the sandbox fails, the files received so far are yielded first.
        """
        if not small:
            return
        waiting = iter(small)
        batch: list[_ReadFile] = []
        size = 0
        failure: SandboxError | None = None
        try:
            async with aclosing(sandbox.read_files([file.path for file in small])) as answers:
                async for contents in answers:
                    for content, file in zip(contents, waiting, strict=False):
                        if isinstance(content, SandboxPayloadTooLarge):
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
        received = [(file, content) for file, content in batch if isinstance(content, bytes)]
        failed: list[DownloadedFile] = [
            (file, error) for file, error in batch if not isinstance(error, bytes)
        ]
        if not received:
            return failed
        try:
            blobs = await blob_stack.enter_async_context(
                self._blobs.put_many_pinned([content for _, content in received])
            )
        except ServiceUnavailable as error:
            return [*failed, *((file, error) for file, _ in received)]
        return [*failed, *((file, blob) for (file, _), blob in zip(received, blobs, strict=True))]

    async def _store_large_file(
        self, sandbox: Sandbox, file: FileEntry, reserve: ReserveBytes, blob_stack: AsyncExitStack
    ) -> DownloadedFile:
        try:
            content = _count_stream(file, sandbox.read_file(file.path), reserve)
            return file, await blob_stack.enter_async_context(self._blobs.put_pinned(content))
        except (SandboxFileNotFound, FileRefused, SandboxPayloadTooLarge, ServiceUnavailable) as error:
            return file, error

    # ---- into a sandbox -----------------------------------------------------------------------------------------

    async def upload(self, sandbox: Sandbox, uploads: Sequence[FileUpload]) -> UploadReport:
        """Write the files that the sandbox accepts. Raises SandboxError, ServiceUnavailable."""
        report = UploadReport()
        small = [upload for upload in uploads if upload.blob.bytes <= MAX_BUNDLED_FILE_BYTES]
        if len(small) < 2:  # a bundle of one has no advantage
            small = []
        else:
            await self._upload_bundle(sandbox, small, report)
        bundled = {upload.path for upload in small}
        for upload in uploads:
            if upload.path not in bundled:
                await self._upload_single(sandbox, upload, report)
        return report

    async def _upload_bundle(
        self, sandbox: Sandbox, small: Sequence[FileUpload], report: UploadReport
    ) -> None:
        try:
            written = await sandbox.write_files(lambda: self._read_blobs(small, report))
        except (FileRefused, SandboxPayloadTooLarge) as error:  # of the bundle as a whole
            report.errors.append(error)
            written = WriteFilesSummary(files=0, bytes=0, refused=len(small))
        report.errors += [FileRefused(reason) for reason in written.reasons]
        listing = await sandbox.list_files()
        report.mark = listing.mark
        present = {file.path: file for file in listing.files}
        # A truncated listing does not show all files; but if none was refused, all of them exist.
        unlisted = _UNLISTED_FINGERPRINT if listing.truncated and not written.refused else None
        for upload in small:
            if upload.path in report.missing_blobs:
                continue
            file = present.get(upload.path)
            fingerprint = unlisted if file is None else FileFingerprint.at_write(written, file)
            if fingerprint is None:
                report.rejected.add(upload.path)
            else:
                report.fingerprints[upload.path] = fingerprint

    async def _read_blobs(
        self, small: Sequence[FileUpload], report: UploadReport
    ) -> AsyncGenerator[Sequence[BundledFile]]:
        for batch in _batch_uploads(small):
            contents = await self._blobs.read_many([upload.blob.name for upload in batch])
            pairs = list(zip(batch, contents, strict=True))
            report.missing_blobs.update(upload.path for upload, content in pairs if content is None)
            yield [
                (upload.path, content, upload.executable) for upload, content in pairs if content is not None
            ]

    async def _upload_single(self, sandbox: Sandbox, upload: FileUpload, report: UploadReport) -> None:
        try:
            content = await self._open_blob(upload.blob)
            entry = await sandbox.write_file(upload.path, content, executable=upload.executable)
        except KeyError:
            report.missing_blobs.add(upload.path)
        except (FileRefused, SandboxPayloadTooLarge) as error:
            report.rejected.add(upload.path)
            report.errors.append(error)
        else:
            report.fingerprints[upload.path] = FileFingerprint.from_entry(entry)

    async def _open_blob(self, blob: BlobRef) -> bytes | AsyncGenerator[bytes]:
        """Raise KeyError here, and not in the middle of a request, if the blob is missing."""
        chunks = self._blobs.read(blob.name)
        if blob.bytes <= MAX_BUNDLED_FILE_BYTES:  # a request with bytes can be retried
            async with aclosing(chunks):
                return b"".join([chunk async for chunk in chunks])
        return _prepend_chunk(await anext(chunks, b""), chunks)


def _check_reserved(
    file: FileEntry, content: bytes | SandboxError, reserve: ReserveBytes
) -> bytes | SandboxError:
    try:
        if isinstance(content, bytes):
            reserve(file, len(content))
    except SandboxPayloadTooLarge as error:
        return error
    return content


async def _count_stream(
    file: FileEntry, chunks: AsyncGenerator[bytes], reserve: ReserveBytes
) -> AsyncGenerator[bytes]:
    size = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            size += len(chunk)
            reserve(file, max(size, file.size))
            yield chunk
    reserve(file, size)  # it may be smaller than listed


async def _run_parallel[T](coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them at the same time; the first exception cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
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
        async for chunk in rest:
            yield chunk
