"""Files that users put into containers, with or without a sandbox yet.

A file is kept first, then put into the sandbox if one lives, then recorded: what is recorded is there.
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

from fumehood.containers.container_state import ContainerContext, ContainerState
from fumehood.containers.file_sync import container_file_id, total_blob_bytes
from fumehood.containers.file_transfer import (
    NO_FINGERPRINT,
    DownloadedFile,
    FileFingerprint,
    FileTransfer,
    FileUpload,
    ReserveBytes,
)
from fumehood.containers.sandbox_claims import attach_sandbox, ephemeral_sandbox
from fumehood.interfaces import BlobRef, ReferencedBlobs, Sandbox
from fumehood.protocol.openai.api_errors import (
    ApiError,
    BodyTooLarge,
    InvalidRequest,
    NotFound,
    ServiceUnavailable,
)
from fumehood.protocol.openai.container_objects import ContainerFileRecord
from fumehood.protocol.safe_names import candidate_names, sanitize_name
from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    InvalidSandboxRequest,
    RetryLater,
    SandboxError,
    SandboxGone,
    SandboxLimitExceeded,
    SandboxNotFound,
)
from fumehood.protocol.sandbox.sandbox_messages import ArchiveFormat, FileEntry
from fumehood.worker_threads import ITEM_COST_BYTES, run_in_worker

# Puts files into a sandbox; how each of them is there, as the sandbox tells it.
type WriteFiles = Callable[[Sandbox], Awaitable[Mapping[str, FileFingerprint]]]


class UserFiles:
    """For all containers of one process. Every method raises InvalidRequest, BodyTooLarge, NotFound, Unavailable."""

    def __init__(self, context: ContainerContext, blobs: ReferencedBlobs) -> None:
        self._context = context
        self._blobs = blobs
        self._transfer = FileTransfer(blobs)
        self._limits = context.settings.file_limits
        self._upload_semaphores = WeakValueDictionary[str, asyncio.Semaphore]()

    async def put(
        self, state: ContainerState, path: str, content: bytes | AsyncIterable[bytes]
    ) -> ContainerFileRecord:
        room = await self._available_bytes(state, [path])
        async with (
            self._upload_semaphore(state.record.tenant),
            self._blobs.put_pinned(self._limit_size(content, room)) as kept,
            state.files_lock,
        ):
            given = [FileUpload(path, kept)]
            (record,) = await self._write_and_record(
                state, given, lambda sandbox: self._write_to_sandbox(sandbox, given)
            )
        return record

    def _upload_semaphore(self, tenant: str) -> asyncio.Semaphore:
        """For `async with`, while a file of the tenant's arrives: until it is recorded it counts for no container, and
        a disk has an end. Who comes too early waits.
        """
        turn = self._upload_semaphores.get(tenant)
        if turn is None:
            turn = self._upload_semaphores[tenant] = asyncio.Semaphore(
                self._context.settings.concurrent_uploads
            )
        return turn

    async def place(self, state: ContainerState, uploads: Sequence[FileUpload]) -> list[ContainerFileRecord]:
        """Files whose blobs are there, under their names as far as these are free."""
        async with AsyncExitStack() as holding, state.files_lock:
            for given in uploads:
                try:
                    await holding.enter_async_context(self._blobs.pin(given.blob.name))
                except KeyError:
                    raise NotFound(f"The content of '{sanitize_name(given.path)}' is gone.") from None
            known = {
                record.path: record
                for record in await self._context.store.list_container_files(state.record.id)
            }
            there, missing = _resolve_names(uploads, known)
            placed = await self._write_and_record(
                state, missing, lambda sandbox: self._write_to_sandbox(sandbox, missing)
            )
        records = {record.path: record for record in (*there, *placed)}
        return list(records.values())

    async def unpack(
        self, state: ContainerState, content: bytes | AsyncIterable[bytes], kind: ArchiveFormat, into: str
    ) -> Sequence[ContainerFileRecord]:
        """Nothing is unpacked in this process: a sandbox of its own shows what is in the archive, and whether that is
        more than the container may have; only then is it unpacked in the one where the code runs.
        """
        room = self._limits.container_bytes
        async with (
            self._upload_semaphore(state.record.tenant),
            self._blobs.put_pinned(self._limit_size(content, room)) as archive,
            AsyncExitStack() as keeping,
        ):
            given = await self._extract_in_scratch_sandbox(state, archive, kind, into, keeping)
            async with state.files_lock:
                records = await self._write_and_record(
                    state, given, lambda sandbox: self._unpack_in_sandbox(sandbox, archive, kind, into)
                )
        await self._blobs.delete_unreferenced([archive.name])
        return records

    async def _extract_in_scratch_sandbox(
        self,
        state: ContainerState,
        archive: BlobRef,
        kind: ArchiveFormat,
        into: str,
        blob_stack: AsyncExitStack,
    ) -> list[FileUpload]:
        """What is in an archive, kept until the stack is left."""
        try:
            async with ephemeral_sandbox(self._context, state) as sandbox:
                unpacked = await sandbox.unpack_archive(self._blobs.read(archive.name), kind=kind, into=into)
                listing = await sandbox.list_files()
                room = await self._available_bytes(state, {file.path for file in listing.files})
                if listing.truncated or unpacked.files > self._limits.files or unpacked.bytes > room:
                    raise self._too_large_error()
                taking = self._transfer.download(
                    sandbox, listing.files, self._limit_total_bytes(room), blob_stack
                )
                async with aclosing(taking) as batches:
                    given = [_to_upload(one) async for batch in batches for one in batch]
                return sorted(given, key=lambda one: one.path)
        except SandboxError as error:
            raise self._to_api_error(error) from error

    def _limit_total_bytes(self, available: int) -> ReserveBytes:
        sizes = Counter[str]()

        def admit(file: FileEntry, size: int) -> None:
            nonlocal available
            available -= size - sizes[file.path]
            sizes[file.path] = size
            if available < 0:
                raise self._too_large_error()

        return admit

    # ---- into the sandbox ---------------------------------------------------------------------------------------

    async def _write_to_sandbox(
        self, sandbox: Sandbox, uploads: Sequence[FileUpload]
    ) -> dict[str, FileFingerprint]:
        """All of them, or it raises, and takes back what is there."""
        handed = await self._transfer.upload(sandbox, uploads)
        if not (handed.rejected or handed.missing_blobs):
            return handed.fingerprints
        for path in handed.fingerprints:
            with suppress(SandboxError):
                await sandbox.delete_file(path)
        raise handed.errors[0] if handed.errors else FileRefused("What is kept of it is gone.")

    async def _unpack_in_sandbox(
        self, sandbox: Sandbox, archive: BlobRef, kind: ArchiveFormat, into: str
    ) -> dict[str, FileFingerprint]:
        unpacked = await sandbox.unpack_archive(self._blobs.read(archive.name), kind=kind, into=into)
        return {
            file.path: FileFingerprint.at_write(unpacked, file) for file in (await sandbox.list_files()).files
        }

    async def delete(self, state: ContainerState, file_id: str) -> bool:
        """False if there is none."""
        async with state.files_lock:
            record = await self._context.store.get_container_file(state.record.id, file_id)
            if record is None:
                return False
            try:
                sandbox = await attach_sandbox(self._context.provider, state.record)
                if sandbox is not None:
                    await sandbox.delete_file(record.path)
            except SandboxError as error:
                # What is not there, or is no file any more, is deleted.
                if error.status not in (400, 404, 410):
                    raise self._to_api_error(error) from error
            await self._context.store.put_container_files([], [record.id])
            await self._context.files.drop_blobs([record])
        return True

    # ---- the records --------------------------------------------------------------------------------------------

    async def _write_and_record(
        self, state: ContainerState, uploads: Sequence[FileUpload], write: WriteFiles
    ) -> list[ContainerFileRecord]:
        """Put what is kept into the sandbox, if there is one, and write it down; for whoever has `filing`."""
        if not uploads:
            return []
        container_id = state.record.id
        there = await self._context.store.list_container_files(container_id)
        known = {record.path: record for record in there}
        size = ITEM_COST_BYTES * (len(there) + len(uploads)) // 4
        await run_in_worker(size, self._check_capacity, known, uploads)
        stamps = await self._write_if_running(state, write)
        now = self._context.clock.now()
        records = await run_in_worker(size, _build_records, container_id, uploads, known, stamps, now)
        if not await self._context.store.put_container_files(records):
            raise NotFound(f"Container with id '{container_id}' not found.")
        await self._context.files.drop_blobs([known[one.path] for one in uploads if one.path in known])
        return records

    async def _write_if_running(
        self, state: ContainerState, write: WriteFiles
    ) -> Mapping[str, FileFingerprint]:
        try:
            sandbox = await attach_sandbox(self._context.provider, state.record)
            return {} if sandbox is None else await write(sandbox)
        except (SandboxGone, SandboxNotFound):  # the next one is given what is recorded
            return {}
        except SandboxError as error:
            raise self._to_api_error(error) from error

    def _limit_size(self, content: bytes | AsyncIterable[bytes], limit: int) -> bytes | AsyncGenerator[bytes]:
        """Raises BodyTooLarge, as soon as it is known."""
        if not isinstance(content, bytes):
            return self._count_bytes(content, limit)
        if len(content) > limit:
            raise self._too_large_error()
        return content

    async def _count_bytes(self, content: AsyncIterable[bytes], limit: int) -> AsyncGenerator[bytes]:
        async for piece in content:
            limit -= len(piece)
            if limit < 0:
                raise self._too_large_error()
            yield piece

    async def _available_bytes(self, state: ContainerState, replaced: Collection[str]) -> int:
        known = await self._context.store.list_container_files(state.record.id)
        return self._limits.container_bytes - total_blob_bytes(
            one for one in known if one.path not in replaced
        )

    def _check_capacity(
        self, known: Mapping[str, ContainerFileRecord], uploads: Sequence[FileUpload]
    ) -> None:
        paths = {one.path for one in uploads}
        staying = [record for path, record in known.items() if path not in paths]
        size = total_blob_bytes(staying) + sum(one.blob.bytes for one in uploads)
        if len(staying) + len(paths) > self._limits.files or size > self._limits.container_bytes:
            raise self._too_large_error()
        obstacle = _find_path_conflict(paths, [*paths, *(record.path for record in staying)])
        if obstacle is not None:
            raise InvalidRequest(
                f"'{sanitize_name(obstacle)}' cannot be a file and a directory at once.", param="file"
            )

    def _too_large_error(self) -> BodyTooLarge:
        limits = self._limits
        return BodyTooLarge(
            f"There is no room for this: a container has at most {limits.files} files of {limits.container_bytes:,} "
            "bytes together. Delete some, or use another container."
        )

    def _to_api_error(self, error: SandboxError) -> ApiError:
        """What a client is told of what a sandbox said."""
        if isinstance(error, SandboxLimitExceeded):
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
        ContainerFileRecord(
            id=container_file_id(container_id, one.path),
            container_id=container_id,
            path=one.path,
            bytes=one.blob.bytes,
            created_at=known[one.path].created_at if one.path in known else now,
            modified_ns=(stamp := fingerprints.get(one.path, NO_FINGERPRINT)).modified_ns,
            changed_ns=stamp.changed_ns,
            inode=stamp.inode,
            source="user",
            executable=one.executable,
            blob=one.blob.name,
        )
        for one in uploads
    ]


def _to_upload(download: DownloadedFile) -> FileUpload:
    """Raises what was in the way."""
    file, kept = download
    if isinstance(kept, BlobRef):
        return FileUpload(file.path, kept, file.executable)
    raise kept


def _resolve_names(
    uploads: Sequence[FileUpload], known: Mapping[str, ContainerFileRecord]
) -> tuple[list[ContainerFileRecord], list[FileUpload]]:
    """Those that are there already, of the same name and content, and the others under names that are free."""
    there: list[ContainerFileRecord] = []
    missing: list[FileUpload] = []
    taken = {path: record.blob for path, record in known.items()}
    tried: dict[str, _NameCandidates] = {}
    for given in uploads:
        blob = given.blob.name
        path = tried.setdefault(given.path, _NameCandidates(given.path)).find_free(blob, taken)
        if path in known:
            there.append(known[path])
        elif path not in taken:
            missing.append(FileUpload(path, given.blob, given.executable))
        taken[path] = blob
    return there, missing


class _NameCandidates:
    """Names like one, tried once each, however many files are called so; found: those that were taken, by blob."""

    def __init__(self, path: str) -> None:
        self._names = candidate_names(path)
        self._name_by_blob: dict[str, str] = {}

    def find_free(self, blob: str, taken: Mapping[str, str]) -> str:
        """The first that is free, or has this very content."""
        while blob not in self._name_by_blob:
            name = next(self._names)
            self._name_by_blob.setdefault(taken.get(name, blob), name)
        return self._name_by_blob[blob]


def _find_path_conflict(new_paths: Collection[str], files: Collection[str]) -> str | None:
    """A path that would have to be a file and a directory, because of what is given now."""
    there = frozenset(files)
    for path in files:
        parts = path.split("/")
        for end in range(1, len(parts)):
            above = "/".join(parts[:end])
            if above in there and (above in new_paths or path in new_paths):
                return above
    return None
