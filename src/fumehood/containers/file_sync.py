"""File sync: records what code wrote in a sandbox, stores it as blobs, restores it into the next sandbox.

Names and sizes come from the sandbox and are not trusted: names are checked, bytes are counted as they arrive.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

import msgspec

from fumehood.containers.file_transfer import (
    NO_FINGERPRINT,
    DownloadedFile,
    FileFingerprint,
    FileTransfer,
    FileUpload,
)
from fumehood.cpu_worker import ITEM_COST_BYTES, run_in_worker
from fumehood.interfaces import BlobRef, Clock, ContainerFileRecordStore, GarbageCollectedBlobStore, Sandbox
from fumehood.protocol.name_sanitizing import find_free_name, join_names, sanitize_name
from fumehood.protocol.openai.api_errors import ServiceUnavailable
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerFileSource
from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxError,
    SandboxFileNotFound,
    SandboxGone,
    SandboxPayloadTooLarge,
)
from fumehood.protocol.sandbox.sandbox_messages import FileEntry, FileListing

logger = logging.getLogger(__name__)

_MAX_PATH_LENGTH = 4096
_MAX_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFileLimits:
    """Limits on the files of one container.

    file_bytes: largest file that is stored; a larger one ends with its sandbox.
    container_bytes: total of all stored files.
    files: maximum of recorded files.
    sync_timeout: seconds that fetching the files of one call may take; the next call fetches the rest.
    """

    file_bytes: int = 64 << 20
    container_bytes: int = 2 << 30
    files: int = 10_000
    sync_timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class FileChanges:
    """What changed in a sandbox since a snapshot token.

    mark: the token of the new state. notices: for the model, about files that were not stored.
    missing: changed files that could not be fetched. failure: the sandbox's error, if there was one.
    """

    mark: str
    changed: Sequence[ContainerFileRecord] = ()
    notices: Sequence[str] = ()
    missing: Sequence[FileEntry] = ()
    failure: SandboxError | None = None


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What was restored into a new sandbox, the paths whose blobs are gone, and those that it rejected."""

    mark: str
    files: dict[str, ContainerFileRecord]
    missing_blobs: Collection[str]
    rejected: Collection[str]

    def notices(self) -> list[str]:
        sentences = (
            ("These files are gone", self.missing_blobs),
            ("These files could not be restored in this sandbox", self.rejected),
        )
        return [f"{words}: {format_file_names(sorted(paths))}." for words, paths in sentences if paths]


def is_output_file(path: str) -> bool:
    """Whether a file counts as output of code: no cache, no temporary file. docs/containers.md states the rule."""
    is_cache = "__pycache__" in path.split("/") or path.endswith(("~", ".pyc", ".swp", ".tmp"))
    return _is_valid_path(path) and not is_cache


def _is_valid_path(path: str) -> bool:
    is_plain = all(part not in ("", ".", "..") for part in path.split("/"))
    return is_plain and len(path) <= _MAX_PATH_LENGTH and "\0" not in path


def make_file_record(
    container_id: str,
    file: FileUpload,
    fingerprint: FileFingerprint,
    created_at: float,
    source: ContainerFileSource = "assistant",
) -> ContainerFileRecord:
    """Make the record of a file. Its id is that of the path, and cannot be guessed without the container's id."""
    digest = hashlib.sha256(f"{container_id}\0{file.path}".encode()).hexdigest()
    return ContainerFileRecord(
        id=f"cfile_{digest[:48]}",
        container_id=container_id,
        path=file.path,
        bytes=file.blob.bytes,
        created_at=created_at,
        modified_ns=fingerprint.modified_ns,
        changed_ns=fingerprint.changed_ns,
        inode=fingerprint.inode,
        source=source,
        executable=file.executable,
        blob=file.blob.name,
    )


class FileSync:
    """Syncs files of all containers of one process: records in a store, content in blobs."""

    def __init__(
        self,
        store: ContainerFileRecordStore,
        blobs: GarbageCollectedBlobStore,
        clock: Clock,
        limits: ContainerFileLimits,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._transfer = FileTransfer(blobs)
        self._clock = clock
        self._limits = limits

    # ---- out of a sandbox ---------------------------------------------------------------------------------------

    async def capture_changes(
        self,
        container_id: str,
        sandbox: Sandbox,
        mark: str,
        initial_files: Mapping[str, ContainerFileRecord] | None = None,
    ) -> FileChanges:
        """Record and store what changed since the snapshot token `mark`. Raises SandboxError; then nothing is recorded.

        initial_files: what was restored into an ephemeral sandbox, since other calls may have changed the records
            meanwhile. What this sandbox wrote wins; what it deleted is deleted unless another call changed it.
        """
        listing = await sandbox.list_files(mark or None)
        if not (listing.complete or listing.files or listing.deleted):
            return FileChanges(listing.mark)
        known = await self._store.list_container_files(container_id)
        size = ITEM_COST_BYTES * (len(known) + len(listing.files)) // 4
        diff = await run_in_worker(size, _diff_listing, known, listing, initial_files)
        recorder = _ChangeRecorder(
            container_id, diff.known, {file.path for file in diff.changed}, self._limits
        )
        async with AsyncExitStack() as blob_stack:
            await self._download_changed(sandbox, diff.changed, recorder, blob_stack)
            records = [
                record for file in diff.changed if (record := recorder.records.get(file.path)) is not None
            ]
            recorded = await self._store.put_container_files(records, [record.id for record in diff.deleted])
        if not recorded:  # the container has ended
            await self.drop_blobs(records)
            return FileChanges(mark)
        replaced = [diff.known[record.path] for record in records if record.path in diff.known]
        await self.drop_blobs((*diff.deleted, *replaced))
        changed = [
            record
            for record in records
            if is_output_file(record.path) or record.source == "user"
            if not _is_unwritten(record, diff.previous.get(record.path))
        ]
        mark = mark if recorder.missing else listing.mark
        return FileChanges(mark, changed, recorder.notices(), recorder.missing, recorder.failure)

    async def _download_changed(
        self,
        sandbox: Sandbox,
        files: Iterable[FileEntry],
        recorder: "_ChangeRecorder",
        blob_stack: AsyncExitStack,
    ) -> None:
        now = self._clock.now()
        admitted = [file for file in files if recorder.try_admit(file, now)]
        try:
            async with (
                asyncio.timeout(self._limits.sync_timeout),
                aclosing(
                    self._transfer.download(sandbox, admitted, recorder.reserve_bytes, blob_stack)
                ) as batches,
            ):
                async for batch in batches:
                    await run_in_worker(ITEM_COST_BYTES * len(batch) // 4, recorder.record_batch, batch, now)
        except (SandboxError, TimeoutError) as error:
            recorder.missing = [file for file in admitted if file.path not in recorder.answered_paths]
            recorder.failure = error if isinstance(error, SandboxError) else None
            reason = str(error) or "timeout"
            logger.warning("Could not store all files of %s: %s", recorder.container_id, reason)

    # ---- into a sandbox -----------------------------------------------------------------------------------------

    async def restore(self, container_id: str, sandbox: Sandbox) -> RestoreResult:
        """Write the container's stored files into a new sandbox. Raises SandboxError."""
        records = await self._store.list_container_files(container_id)
        uploads = [
            FileUpload(record.path, BlobRef(record.blob, record.bytes), record.executable)
            for record in records
            if record.blob
        ]
        report = await self._transfer.upload(sandbox, uploads)
        for error in report.errors:
            logger.warning("Could not restore a file of %s: %s", container_id, error)
        restored = {
            record.path: _with_fingerprint(record, fingerprint)
            for record in records
            if (fingerprint := report.fingerprints.get(record.path)) is not None
        }
        mark = report.mark or (await sandbox.list_files()).mark if restored else ""
        missing_blobs = report.missing_blobs.union(record.path for record in records if not record.blob)
        return RestoreResult(mark, restored, missing_blobs, report.rejected)

    async def record_restored(self, container_id: str, restored: RestoreResult) -> None:
        """Update the records to the files of the container's new sandbox."""
        updated: list[ContainerFileRecord] = []
        deleted: list[ContainerFileRecord] = []
        for record in await self._store.list_container_files(container_id):
            if (file := restored.files.get(record.path)) is not None:
                updated.append(
                    _with_fingerprint(record, FileFingerprint(file.modified_ns, file.changed_ns, file.inode))
                )
            elif record.path in restored.missing_blobs:
                deleted.append(record)
            elif record.path in restored.rejected:
                updated.append(_with_fingerprint(record, NO_FINGERPRINT))
        if updated or deleted:
            await self._store.put_container_files(updated, [record.id for record in deleted])

    # ---- single files ------------------------------------------------------------------------------------------------

    async def add_assistant_file(
        self, container_id: str, path: str, content: bytes, sandbox: Sandbox | None
    ) -> ContainerFileRecord:
        """Store a file of the assistant under a free name, also in the sandbox if there is one.

        Raises SandboxPayloadTooLarge, and SandboxGone if the container has ended.
        """
        known = {record.path: record for record in await self._store.list_container_files(container_id)}
        available = min(
            self._limits.file_bytes, self._limits.container_bytes - total_blob_bytes(known.values())
        )
        if len(content) > available or len(known) >= self._limits.files:
            raise SandboxPayloadTooLarge("The container has no room for another file.")
        name = find_free_name(path, known)
        fingerprint = NO_FINGERPRINT
        if sandbox is not None:
            try:
                fingerprint = FileFingerprint.from_entry(await sandbox.write_file(name, content))
            except SandboxError as error:  # the blob is what counts
                logger.warning("Could not write a file into the sandbox of %s: %s", container_id, error)
        async with self._blobs.put_pinned(content) as blob:
            record = make_file_record(container_id, FileUpload(name, blob), fingerprint, self._clock.now())
            if not await self._store.put_container_files([record]):
                raise SandboxGone("The container has ended.")
        return record

    async def read(
        self,
        record: ContainerFileRecord,
        find_sandbox: Callable[[], Awaitable[Sandbox | None]],
        start: int = 0,
        end: int | None = None,
    ) -> AsyncGenerator[bytes]:
        """Yield the file's blob, or the sandbox's content if there is none. Raises KeyError before the first chunk."""
        try:
            if record.blob:
                async with aclosing(self._blobs.read(record.blob, start, end)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
        except KeyError:
            logger.warning("The blob of %s is missing.", record.id)
        sandbox = await find_sandbox()
        if sandbox is None:
            raise KeyError(record.id)
        try:
            async with aclosing(_slice_stream(sandbox.read_file(record.path), start, end)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (SandboxFileNotFound, FileRefused) as error:
            raise KeyError(record.id) from error

    async def drop_blobs(self, records: Iterable[ContainerFileRecord]) -> None:
        """Delete the blobs of these records unless another record refers to them."""
        await self._blobs.delete_unreferenced(record.blob for record in records)


@dataclass(slots=True)
class _ChangeRecorder:
    """Builds the records of changed files, within the container's limits.

    known: existing records by path. changing: paths that are about to be replaced.
    records: the new records by path. without_blob: paths recorded without content. omitted: how many are not recorded.
    answered_paths: paths for which the sandbox has answered. missing: the others, if it failed.
    bytes_left, slots_left: what is still available. reserved_bytes: by path.
    """

    container_id: str
    known: Mapping[str, ContainerFileRecord]
    changing: set[str]
    limits: ContainerFileLimits
    records: dict[str, ContainerFileRecord] = field(default_factory=dict[str, ContainerFileRecord])
    without_blob: list[str] = field(default_factory=list[str])
    omitted: int = 0
    answered_paths: set[str] = field(default_factory=set[str])
    missing: Sequence[FileEntry] = ()
    failure: SandboxError | None = None
    bytes_left: int = field(init=False)
    slots_left: int = field(init=False)
    reserved_bytes: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        unchanged = [record for path, record in self.known.items() if path not in self.changing]
        self.bytes_left = self.limits.container_bytes - total_blob_bytes(unchanged)
        self.slots_left = self.limits.files - len(self.known)

    def try_admit(self, file: FileEntry, now: float) -> bool:
        """Reserve room for the file; False if it cannot be stored."""
        if file.path not in self.known:
            self.slots_left -= 1
            if self.slots_left < 0:
                self.omitted += 1
                return False
        try:
            self.reserve_bytes(file, max(file.size, 0))
        except SandboxPayloadTooLarge:
            self._record_without_blob(file, now)
            return False
        return True

    def reserve_bytes(self, file: FileEntry, size: int) -> None:
        """Change the bytes reserved for a file to `size`. Raises SandboxPayloadTooLarge."""
        more = size - self.reserved_bytes.get(file.path, 0)
        if size > self.limits.file_bytes or more > self.bytes_left:
            raise SandboxPayloadTooLarge("There is no room for this file.")
        self.bytes_left -= more
        self.reserved_bytes[file.path] = size

    def record_batch(self, batch: Iterable[DownloadedFile], now: float) -> None:
        for file, result in batch:
            self.answered_paths.add(file.path)
            if isinstance(result, BlobRef):
                self._record_file(file, result.bytes, result.name, now)
                continue
            self.bytes_left += self.reserved_bytes.pop(file.path, 0)
            # The container or the disk is full; other errors mean that the file is gone.
            if isinstance(result, SandboxPayloadTooLarge | ServiceUnavailable):
                self._record_without_blob(file, now)

    def _record_without_blob(self, file: FileEntry, now: float) -> None:
        self.without_blob.append(file.path)
        self._record_file(file, max(file.size, 0), "", now)

    def _record_file(self, file: FileEntry, size: int, blob: str, now: float) -> None:
        old = self.known.get(file.path)
        self.records[file.path] = make_file_record(
            self.container_id,
            FileUpload(file.path, BlobRef(blob, size), file.executable),
            FileFingerprint.from_entry(file),
            now if old is None else old.created_at,
            source="assistant" if old is None else old.source,
        )

    def notices(self) -> list[str]:
        notices: list[str] = []
        if self.without_blob:
            names = format_file_names(self.without_blob)
            notices.append(f"There is no room to keep these when the sandbox ends: {names}.")
        if self.omitted:
            notices.append(
                f"{self.omitted} files are not listed: a container has at most {self.limits.files}."
            )
        return notices


@dataclass(frozen=True, slots=True)
class _ListingDiff:
    """A listing compared with what was known.

    previous: the files before, by path. known: records of files that still exist, by path.
    deleted: records of files that are gone. changed: files to store.
    """

    previous: Mapping[str, ContainerFileRecord]
    known: dict[str, ContainerFileRecord]
    deleted: list[ContainerFileRecord]
    changed: list[FileEntry]


def _diff_listing(
    records: Iterable[ContainerFileRecord],
    listing: FileListing,
    initial_files: Mapping[str, ContainerFileRecord] | None,
) -> _ListingDiff:
    known = {record.path: record for record in records}
    previous: Mapping[str, ContainerFileRecord] = (
        _present_in_sandbox(known) if initial_files is None else initial_files
    )
    deleted = [
        known.pop(path)
        for path in _deleted_paths(listing, previous)
        if (record := known.get(path)) is not None and record.blob == previous[path].blob
    ]
    changed = [
        file
        for file in listing.files
        if _has_changed(file, previous.get(file.path)) and (file.path in known or _is_valid_path(file.path))
    ]
    changed.sort(
        key=lambda file: not is_output_file(file.path)
    )  # if there is no room for all, caches are left out
    return _ListingDiff(previous, known, deleted, changed)


async def _slice_stream(chunks: AsyncGenerator[bytes], start: int, end: int | None) -> AsyncGenerator[bytes]:
    """Yield the bytes from `start` up to `end` of a stream that can only be read from its beginning."""
    position = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            wanted = chunk[max(0, start - position) : None if end is None else max(0, end - position)]
            position += len(chunk)
            if wanted:
                yield wanted
            if end is not None and position >= end:
                return


def _present_in_sandbox(known: Mapping[str, ContainerFileRecord]) -> dict[str, ContainerFileRecord]:
    """Return the records of files that the container's sandbox has."""
    return {path: record for path, record in known.items() if record.modified_ns or record.changed_ns}


def _with_fingerprint(record: ContainerFileRecord, fingerprint: FileFingerprint) -> ContainerFileRecord:
    return msgspec.structs.replace(
        record,
        modified_ns=fingerprint.modified_ns,
        changed_ns=fingerprint.changed_ns,
        inode=fingerprint.inode,
    )


def _has_changed(file: FileEntry, old: ContainerFileRecord | None) -> bool:
    return (
        old is None
        or old.changed_ns != file.changed_ns
        or old.modified_ns != file.modified_ns
        or old.bytes != file.size
        or old.inode != file.inode
    )


def _is_unwritten(record: ContainerFileRecord, old: ContainerFileRecord | None) -> bool:
    """Whether only the mode, owner or link count has changed: then no call has written the file."""
    if old is None or not record.blob:
        return False
    return (old.blob, old.modified_ns) == (record.blob, record.modified_ns)


def _deleted_paths(listing: FileListing, previous: Mapping[str, ContainerFileRecord]) -> list[str]:
    if not listing.complete:
        return [path for path in listing.deleted if path in previous]
    present = {file.path for file in listing.files}
    return [] if listing.truncated else [path for path in previous if path not in present]


def total_blob_bytes(records: Iterable[ContainerFileRecord]) -> int:
    return sum(record.bytes for record in records if record.blob)


def format_file_names(names: Sequence[str]) -> str:
    """Join the first few names for a sentence."""
    return join_names([sanitize_name(name) for name in names], _MAX_NAMES_SHOWN)
