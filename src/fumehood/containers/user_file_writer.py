"""Files that users put into containers, whether or not a sandbox runs.

A file is stored as a blob, then written into the sandbox if there is one, then recorded.
"""

import asyncio
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing, suppress
from weakref import WeakValueDictionary

from fumehood.containers.container_runtime_state import ContainerContext, ContainerRuntimeState
from fumehood.containers.file_sync import make_file_record, total_blob_bytes
from fumehood.containers.file_transfer import (
    NO_FINGERPRINT,
    DownloadedFile,
    FileFingerprint,
    FileTransfer,
    FileUpload,
    ReserveBytes,
)
from fumehood.containers.sandbox_acquisition import attach_sandbox, ephemeral_sandbox
from fumehood.cpu_worker import ITEM_COST_BYTES, run_in_worker
from fumehood.interfaces import BlobRef, GarbageCollectedBlobStore, Sandbox
from fumehood.protocol.name_sanitizing import candidate_names, sanitize_name
from fumehood.protocol.openai.api_errors import (
    ApiError,
    BodyTooLarge,
    InvalidRequest,
    NotFound,
    ServiceUnavailable,
)
from fumehood.protocol.openai.container_objects import ContainerFileRecord
from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    InvalidSandboxRequest,
    RetryLater,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxPayloadTooLarge,
)
from fumehood.protocol.sandbox.sandbox_messages import ArchiveFormat, FileEntry

# Writes files into a sandbox and returns their fingerprints by path.
type WriteFiles = Callable[[Sandbox], Awaitable[Mapping[str, FileFingerprint]]]


class UserFileWriter:
    """Writes and deletes user files. Every method raises InvalidRequest, BodyTooLarge, NotFound, ServiceUnavailable."""

    def __init__(self, context: ContainerContext, blobs: GarbageCollectedBlobStore) -> None:
        self._context = context
        self._blobs = blobs
        self._transfer = FileTransfer(blobs)
        self._limits = context.settings.file_limits
        self._upload_semaphores = WeakValueDictionary[str, asyncio.Semaphore]()

    async def write_file(
        self, state: ContainerRuntimeState, path: str, content: bytes | AsyncIterable[bytes]
    ) -> ContainerFileRecord:
        available = await self._available_bytes(state, [path])
        async with (
            self._upload_semaphore(state.record.tenant),
            self._blobs.put_pinned(self._limit_size(content, available)) as blob,
            state.files_lock,
        ):
            uploads = [FileUpload(path, blob)]
            (record,) = await self._write_and_record(
                state, uploads, lambda sandbox: self._write_to_sandbox(sandbox, uploads)
            )
        return record

    def _upload_semaphore(self, tenant: str) -> asyncio.Semaphore:
        """Return the tenant's semaphore: an upload fills the disk before it counts for a container."""
        semaphore = self._upload_semaphores.get(tenant)
        if semaphore is None:
            semaphore = self._upload_semaphores[tenant] = asyncio.Semaphore(
                self._context.settings.concurrent_uploads
            )
        return semaphore

    async def add_uploads(
        self, state: ContainerRuntimeState, uploads: Sequence[FileUpload]
    ) -> list[ContainerFileRecord]:
        """Add files whose blobs exist; a name that is taken gets a number."""
        async with AsyncExitStack() as pins, state.files_lock:
            for upload in uploads:
                try:
                    await pins.enter_async_context(self._blobs.pin(upload.blob.name))
                except KeyError:
                    raise NotFound(f"The content of '{sanitize_name(upload.path)}' is gone.") from None
            known = {
                record.path: record
                for record in await self._context.store.list_container_files(state.record.id)
            }
            existing, missing = _resolve_names(uploads, known)
            added = await self._write_and_record(
                state, missing, lambda sandbox: self._write_to_sandbox(sandbox, missing)
            )
        records = {record.path: record for record in (*existing, *added)}
        return list(records.values())

    async def unpack(
        self,
        state: ContainerRuntimeState,
        content: bytes | AsyncIterable[bytes],
        kind: ArchiveFormat,
        into: str,
    ) -> Sequence[ContainerFileRecord]:
        """Unpack an archive, never in this process.

        A scratch sandbox shows what it holds and whether that fits; then the container's sandbox unpacks it.
        """
        async with (
            self._upload_semaphore(state.record.tenant),
            self._blobs.put_pinned(self._limit_size(content, self._limits.container_bytes)) as archive,
            AsyncExitStack() as blob_stack,
        ):
            uploads = await self._extract_in_scratch_sandbox(state, archive, kind, into, blob_stack)
            async with state.files_lock:
                records = await self._write_and_record(
                    state, uploads, lambda sandbox: self._unpack_in_sandbox(sandbox, archive, kind, into)
                )
        await self._blobs.delete_unreferenced([archive.name])
        return records

    async def _extract_in_scratch_sandbox(
        self,
        state: ContainerRuntimeState,
        archive: BlobRef,
        kind: ArchiveFormat,
        into: str,
        blob_stack: AsyncExitStack,
    ) -> list[FileUpload]:
        """Store the files of an archive as blobs, pinned until the stack is closed."""
        try:
            async with ephemeral_sandbox(self._context, state) as sandbox:
                summary = await sandbox.unpack_archive(self._blobs.read(archive.name), kind=kind, into=into)
                listing = await sandbox.list_files()
                available = await self._available_bytes(state, {file.path for file in listing.files})
                if listing.truncated or summary.files > self._limits.files or summary.bytes > available:
                    raise self._too_large_error()
                downloads = self._transfer.download(
                    sandbox, listing.files, self._limit_total_bytes(available), blob_stack
                )
                async with aclosing(downloads) as batches:
                    uploads = [_to_upload(download) async for batch in batches for download in batch]
                return sorted(uploads, key=lambda upload: upload.path)
        except SandboxError as error:
            raise self._to_api_error(error) from error

    def _limit_total_bytes(self, available: int) -> ReserveBytes:
        sizes = Counter[str]()

        def reserve(file: FileEntry, size: int) -> None:
            nonlocal available
            available -= size - sizes[file.path]
            sizes[file.path] = size
            if available < 0:
                raise self._too_large_error()

        return reserve

    # ---- sandbox ---------------------------------------------------------------------------------------

    async def _write_to_sandbox(
        self, sandbox: Sandbox, uploads: Sequence[FileUpload]
    ) -> dict[str, FileFingerprint]:
        """Write all files; if one fails, delete the others and raise SandboxError."""
        report = await self._transfer.upload(sandbox, uploads)
        if not (report.rejected or report.missing_blobs):
            return report.fingerprints
        for path in report.fingerprints:
            with suppress(SandboxError):
                await sandbox.delete_file(path)
        raise report.errors[0] if report.errors else FileRefused("Its content is gone.")

    async def _unpack_in_sandbox(
        self, sandbox: Sandbox, archive: BlobRef, kind: ArchiveFormat, into: str
    ) -> dict[str, FileFingerprint]:
        summary = await sandbox.unpack_archive(self._blobs.read(archive.name), kind=kind, into=into)
        return {
            file.path: FileFingerprint.at_write(summary, file) for file in (await sandbox.list_files()).files
        }

    async def delete(self, state: ContainerRuntimeState, file_id: str) -> bool:
        """Delete a file; False if there is none."""
        async with state.files_lock:
            record = await self._context.store.get_container_file(state.record.id, file_id)
            if record is None:
                return False
            try:
                sandbox = await attach_sandbox(self._context.provider, state.record)
                if sandbox is not None:
                    await sandbox.delete_file(record.path)
            except SandboxError as error:
                # Already gone, or no longer a file.
                if error.status not in (400, 404, 410):
                    raise self._to_api_error(error) from error
            await self._context.store.put_container_files([], [record.id])
            await self._context.files.drop_blobs([record])
        return True

    # ---- records --------------------------------------------------------------------------------------------

    async def _write_and_record(
        self, state: ContainerRuntimeState, uploads: Sequence[FileUpload], write: WriteFiles
    ) -> list[ContainerFileRecord]:
        """Write uploads into the sandbox, if there is one, and record them. The caller holds `files_lock`."""
        if not uploads:
            return []
        container_id = state.record.id
        known = {
            record.path: record for record in await self._context.store.list_container_files(container_id)
        }
        size = ITEM_COST_BYTES * (len(known) + len(uploads)) // 4
        await run_in_worker(size, self._check_capacity, known, uploads)
        fingerprints = await self._write_if_running(state, write)
        now = self._context.clock.now()
        records = await run_in_worker(size, _build_records, container_id, uploads, known, fingerprints, now)
        if not await self._context.store.put_container_files(records):
            raise NotFound(f"Container with id '{container_id}' not found.")
        await self._context.files.drop_blobs(
            [known[upload.path] for upload in uploads if upload.path in known]
        )
        return records

    async def _write_if_running(
        self, state: ContainerRuntimeState, write: WriteFiles
    ) -> Mapping[str, FileFingerprint]:
        try:
            sandbox = await attach_sandbox(self._context.provider, state.record)
            return {} if sandbox is None else await write(sandbox)
        except (SandboxGone, SandboxNotFound):  # the next sandbox gets what is recorded
            return {}
        except SandboxError as error:
            raise self._to_api_error(error) from error

    def _limit_size(self, content: bytes | AsyncIterable[bytes], limit: int) -> bytes | AsyncGenerator[bytes]:
        """Raise BodyTooLarge as soon as the content exceeds the limit."""
        if not isinstance(content, bytes):
            return self._count_bytes(content, limit)
        if len(content) > limit:
            raise self._too_large_error()
        return content

    async def _count_bytes(self, content: AsyncIterable[bytes], limit: int) -> AsyncGenerator[bytes]:
        async for chunk in content:
            limit -= len(chunk)
            if limit < 0:
                raise self._too_large_error()
            yield chunk

    async def _available_bytes(self, state: ContainerRuntimeState, replaced: Collection[str]) -> int:
        known = await self._context.store.list_container_files(state.record.id)
        return self._limits.container_bytes - total_blob_bytes(
            record for record in known if record.path not in replaced
        )

    def _check_capacity(
        self, known: Mapping[str, ContainerFileRecord], uploads: Sequence[FileUpload]
    ) -> None:
        paths = {upload.path for upload in uploads}
        unchanged = [record for path, record in known.items() if path not in paths]
        size = total_blob_bytes(unchanged) + sum(upload.blob.bytes for upload in uploads)
        if len(unchanged) + len(paths) > self._limits.files or size > self._limits.container_bytes:
            raise self._too_large_error()
        conflict = _find_path_conflict(paths, [*paths, *(record.path for record in unchanged)])
        if conflict is not None:
            raise InvalidRequest(
                f"'{sanitize_name(conflict)}' cannot be a file and a directory at once.", param="file"
            )

    def _too_large_error(self) -> BodyTooLarge:
        limits = self._limits
        return BodyTooLarge(
            f"There is no room for this: a container has at most {limits.files} files of {limits.container_bytes:,} "
            "bytes together. Delete some, or use another container."
        )

    def _to_api_error(self, error: SandboxError) -> ApiError:
        """Translate a sandbox's error for the API client."""
        if isinstance(error, SandboxPayloadTooLarge):
            return BodyTooLarge(f"The container has no room for this: {error.message}")
        if isinstance(error, InvalidSandboxRequest):
            return InvalidRequest(f"The container refused the file: {error.message}", param="file")
        if isinstance(error, RetryLater):
            return ServiceUnavailable("No sandbox is free at the moment; try again later.", retry_after=1.0)
        return ServiceUnavailable("The container's sandbox cannot be reached; try again later.")


def _build_records(
    container_id: str,
    uploads: Iterable[FileUpload],
    known: Mapping[str, ContainerFileRecord],
    fingerprints: Mapping[str, FileFingerprint],
    now: float,
) -> list[ContainerFileRecord]:
    return [
        make_file_record(
            container_id,
            upload,
            fingerprints.get(upload.path, NO_FINGERPRINT),
            known[upload.path].created_at if upload.path in known else now,
            source="user",
        )
        for upload in uploads
    ]


def _to_upload(download: DownloadedFile) -> FileUpload:
    """Raise the error of a failed download."""
    file, result = download
    if isinstance(result, BlobRef):
        return FileUpload(file.path, result, file.executable)
    raise result


def _resolve_names(
    uploads: Sequence[FileUpload], known: Mapping[str, ContainerFileRecord]
) -> tuple[list[ContainerFileRecord], list[FileUpload]]:
    """Return the records of uploads that exist with the same name and content, and the others with free names."""
    existing: list[ContainerFileRecord] = []
    missing: list[FileUpload] = []
    blob_by_path = {path: record.blob for path, record in known.items()}
    candidates: dict[str, _NameCandidates] = {}
    for upload in uploads:
        blob = upload.blob.name
        names = candidates.setdefault(upload.path, _NameCandidates(upload.path))
        path = names.find_free(blob, blob_by_path)
        if path in known:
            existing.append(known[path])
        elif path not in blob_by_path:
            missing.append(FileUpload(path, upload.blob, upload.executable))
        blob_by_path[path] = blob
    return existing, missing


class _NameCandidates:
    """Candidate names of one path, each tried once however many files have that name."""

    def __init__(self, path: str) -> None:
        self._names = candidate_names(path)
        self._name_by_blob: dict[str, str] = {}

    def find_free(self, blob: str, blob_by_path: Mapping[str, str]) -> str:
        """Return the first name that is free or has this content."""
        while blob not in self._name_by_blob:
            name = next(self._names)
            self._name_by_blob.setdefault(blob_by_path.get(name, blob), name)
        return self._name_by_blob[blob]


def _find_path_conflict(new_paths: Collection[str], files: Collection[str]) -> str | None:
    """Return a path that new files would make both a file and a directory, or None."""
    present = frozenset(files)
    for path in files:
        parts = path.split("/")
        for end in range(1, len(parts)):
            parent = "/".join(parts[:end])
            if parent in present and (parent in new_paths or path in new_paths):
                return parent
    return None
