"""The files of containers: what changed, what is kept of it, how it comes back.

Names and sizes are told by a sandbox and trusted by nobody: names are checked, bytes are counted on their way.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fumehood.containers.file_transfer import (
    NO_FINGERPRINT,
    DownloadedFile,
    FileFingerprint,
    FileTransfer,
    FileUpload,
)
from fumehood.interfaces import BlobRef, Clock, ContainerFileStore, ReferencedBlobs, Sandbox
from fumehood.protocol.openai.api_errors import ServiceUnavailable
from fumehood.protocol.openai.container_objects import ContainerFileRecord
from fumehood.protocol.safe_names import find_free_name, join_names, sanitize_name
from fumehood.protocol.sandbox.sandbox_errors import (
    FileNotFound,
    FileRefused,
    SandboxError,
    SandboxGone,
    SandboxLimitExceeded,
)
from fumehood.protocol.sandbox.sandbox_messages import FileEntry, FileListing
from fumehood.worker_threads import ITEM_COST_BYTES, run_in_worker

logger = logging.getLogger(__name__)

_MAX_PATH_LENGTH = 4096
_MAX_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFileLimits:
    """How much is kept of a container's files.

    file_bytes: the largest file that outlives its sandbox.
    container_bytes: all of them together, of one container.
    files: how many files of one container are recorded.
    seconds: how long one look may copy; what is not done by then, the next one finds.
    """

    file_bytes: int = 64 << 20
    container_bytes: int = 2 << 30
    files: int = 10_000
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class FileSnapshot:
    """A file as a sandbox had it at the last look."""

    bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    blob: str


class _KnownFile(Protocol):
    """What `Placed` and a record have in common: there can be ten thousand, so none is made into the other."""

    @property
    def bytes(self) -> int: ...
    @property
    def modified_ns(self) -> int: ...
    @property
    def changed_ns(self) -> int: ...
    @property
    def inode(self) -> int: ...
    @property
    def blob(self) -> str: ...


@dataclass(frozen=True, slots=True)
class FileChanges:
    """What one look found: `mark` names the state that was seen, `notices` tell what could not be kept.

    missing: what changed and could not be fetched. failure: why, if the sandbox said so.
    """

    mark: str
    changed: Sequence[ContainerFileRecord] = ()
    notices: Sequence[str] = ()
    missing: Sequence[FileEntry] = ()
    failure: SandboxError | None = None


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What a fresh sandbox was given, and the paths of what is gone for good, and of what it did not take."""

    mark: str
    files: dict[str, FileSnapshot]
    missing_blobs: Collection[str]
    rejected: Collection[str]

    def notices(self) -> list[str]:
        notes = (
            [f"Not to be had any more: {format_file_names(sorted(self.missing_blobs))}."]
            if self.missing_blobs
            else []
        )
        return [
            *notes,
            *(
                [f"Not to be had in this sandbox: {format_file_names(sorted(self.rejected))}."]
                if self.rejected
                else []
            ),
        ]


def is_output_file(path: str) -> bool:
    """Whether a file counts as something that code made: neither cached nor somebody's temporary file.

    docs/containers.md tells users the rule.
    """
    parts = path.split("/")
    if len(path) > _MAX_PATH_LENGTH or "\0" in path or any(part in ("", ".", "..") for part in parts):
        return False
    return "__pycache__" not in parts and not path.endswith(("~", ".pyc", ".swp", ".tmp"))


def container_file_id(container_id: str, path: str) -> str:
    """The same for the same path of the same container; nobody can guess it who does not know the container's id."""
    return f"cfile_{hashlib.sha256(f'{container_id}\0{path}'.encode()).hexdigest()[:48]}"


class FileSync:
    """Records in a store and content in blobs, for all containers of one process."""

    def __init__(
        self, store: ContainerFileStore, blobs: ReferencedBlobs, clock: Clock, limits: ContainerFileLimits
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
        initial_files: Mapping[str, FileSnapshot] | None = None,
    ) -> FileChanges:
        """Record and keep what changed since the mark. Raises SandboxError, and then nothing was recorded.

        began: what this sandbox began with, where others may have changed the records meanwhile. What it wrote wins;
            what it deleted goes, unless somebody else has changed it.
        """
        listing = await sandbox.list_files(mark or None)
        if not (listing.complete or listing.files or listing.deleted):
            return FileChanges(listing.mark)
        records = await self._store.list_container_files(container_id)
        size = ITEM_COST_BYTES * (len(records) + len(listing.files)) // 4
        seen = await run_in_worker(size, _diff_listing, records, listing, initial_files)
        harvest = _ChangeRecorder(
            container_id, seen.known, {file.path for file in seen.changed}, self._limits
        )
        async with AsyncExitStack() as arrivals:
            await self._download_changed(sandbox, seen.changed, harvest, arrivals)
            taken = [
                record for file in seen.changed if (record := harvest.records.get(file.path)) is not None
            ]
            recorded = await self._store.put_container_files(taken, [record.id for record in seen.deleted])
        if not recorded:  # there is no such container any more
            await self.drop_blobs(taken)
            return FileChanges(mark)
        replaced = [seen.known[record.path] for record in taken if record.path in seen.known]
        await self.drop_blobs((*seen.deleted, *replaced))
        changed = [record for record in taken if not _is_unwritten(record, seen.previous.get(record.path))]
        mark = mark if harvest.missing else listing.mark
        return FileChanges(mark, changed, harvest.notices(), harvest.missing, harvest.failure)

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
                asyncio.timeout(self._limits.seconds),
                aclosing(
                    self._transfer.download(sandbox, admitted, recorder.reserve_bytes, blob_stack)
                ) as batches,
            ):
                async for batch in batches:
                    await run_in_worker(ITEM_COST_BYTES * len(batch) // 4, recorder.record_batch, batch, now)
        except (SandboxError, TimeoutError) as error:
            recorder.missing = [file for file in admitted if file.path not in recorder.answered_paths]
            recorder.failure = error if isinstance(error, SandboxError) else None
            reason = str(error) or "out of time"
            logger.warning("Files of %s could not all be kept: %s", recorder.container_id, reason)

    # ---- into a sandbox -----------------------------------------------------------------------------------------

    async def restore(self, container_id: str, sandbox: Sandbox) -> RestoreResult:
        """Put into a fresh sandbox what is kept of the container; raises SandboxError."""
        records = await self._store.list_container_files(container_id)
        kept = [
            FileUpload(record.path, BlobRef(record.blob, record.bytes), record.executable)
            for record in records
            if record.blob
        ]
        handed = await self._transfer.upload(sandbox, kept)
        for error in handed.errors:
            logger.warning("A file of %s cannot be put back: %s", container_id, error)
        placed = {
            record.path: FileSnapshot(record.bytes, *stamp, record.blob)
            for record in records
            if (stamp := handed.fingerprints.get(record.path)) is not None
        }
        mark = handed.mark or (await sandbox.list_files()).mark if placed else ""
        gone = handed.missing_blobs.union(record.path for record in records if not record.blob)
        return RestoreResult(mark, placed, gone, handed.rejected)

    async def record_restored(self, container_id: str, restored: RestoreResult) -> None:
        """Let the records say what the container's one sandbox has now."""
        moved: list[ContainerFileRecord] = []
        lost: list[ContainerFileRecord] = []
        for record in await self._store.list_container_files(container_id):
            placed = restored.files.get(record.path)
            if placed is not None:
                moved.append(
                    _with_fingerprint(
                        record, FileFingerprint(placed.modified_ns, placed.changed_ns, placed.inode)
                    )
                )
            elif record.path in restored.missing_blobs:
                lost.append(record)
            elif record.path in restored.rejected:
                moved.append(_with_fingerprint(record, NO_FINGERPRINT))
        if moved or lost:
            await self._store.put_container_files(moved, [record.id for record in lost])

    # ---- besides ------------------------------------------------------------------------------------------------

    async def add_assistant_file(
        self, container_id: str, path: str, content: bytes, sandbox: Sandbox | None
    ) -> ContainerFileRecord:
        """A file of the assistant's under a name that is free, in the sandbox too if it lives. Raises TooLarge."""
        known = {record.path: record for record in await self._store.list_container_files(container_id)}
        room = min(self._limits.file_bytes, self._limits.container_bytes - total_blob_bytes(known.values()))
        if len(content) > room or len(known) >= self._limits.files:
            raise SandboxLimitExceeded("The container has as many files as it may keep.")
        free = find_free_name(path, known)
        stamp = NO_FINGERPRINT
        if sandbox is not None:
            try:
                stamp = FileFingerprint.from_entry(await sandbox.write_file(free, content))
            except SandboxError as error:  # the copy is what counts
                logger.warning("A file could not be put into the sandbox of %s: %s", container_id, error)
        async with self._blobs.put_pinned(content) as kept:
            record = ContainerFileRecord(
                id=container_file_id(container_id, free),
                container_id=container_id,
                path=free,
                bytes=len(content),
                created_at=self._clock.now(),
                modified_ns=stamp.modified_ns,
                changed_ns=stamp.changed_ns,
                inode=stamp.inode,
                source="assistant",
                blob=kept.name,
            )
            if not await self._store.put_container_files([record]):
                raise SandboxGone("There is no such container any more.")
        return record

    async def read(
        self,
        record: ContainerFileRecord,
        find_sandbox: Callable[[], Awaitable[Sandbox | None]],
        start: int = 0,
        end: int | None = None,
    ) -> AsyncGenerator[bytes]:
        """The copy, or else what the sandbox has; raises KeyError before the first piece."""
        try:
            if record.blob:
                async with aclosing(self._blobs.read(record.blob, start, end)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
        except KeyError:
            logger.warning("The copy of %s is not there.", record.id)
        sandbox = await find_sandbox()
        if sandbox is None:
            raise KeyError(record.id)
        try:
            async with aclosing(_slice_stream(sandbox.read_file(record.path), start, end)) as pieces:
                async for piece in pieces:
                    yield piece
        except (FileNotFound, FileRefused) as error:
            raise KeyError(record.id) from error

    async def drop_blobs(self, records: Iterable[ContainerFileRecord]) -> None:
        """Let go of the copies of files that are no longer recorded."""
        await self._blobs.delete_unreferenced(record.blob for record in records)


@dataclass(slots=True)
class _ChangeRecorder:
    """One look in the making.

    taken: by path. unkept: what is recorded without a copy; left_out: how many are not even that.
    answered: the paths of which the sandbox has said something. missing: those that it has not, when it failed.
    room: bytes that nobody has taken or asked for.
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
        staying = [record for path, record in self.known.items() if path not in self.changing]
        self.bytes_left = self.limits.container_bytes - total_blob_bytes(staying)
        self.slots_left = self.limits.files - len(self.known)

    def try_admit(self, file: FileEntry, now: float) -> bool:
        """Whether it is to be kept; those that come later have to do with the room that is left then."""
        if file.path not in self.known:
            self.slots_left -= 1
            if self.slots_left < 0:
                self.omitted += 1
                return False
        try:
            self.reserve_bytes(file, max(file.size, 0))
        except SandboxLimitExceeded:
            self._record_without_blob(file, now)
            return False
        return True

    def reserve_bytes(self, file: FileEntry, size: int) -> None:
        """Reserve so many bytes for a file, in place of those that it was said to have; raises TooLarge."""
        more = size - self.reserved_bytes.get(file.path, 0)
        if size > self.limits.file_bytes or more > self.bytes_left:
            raise SandboxLimitExceeded("There is no room for this file.")
        self.bytes_left -= more
        self.reserved_bytes[file.path] = size

    def record_batch(self, batch: Iterable[DownloadedFile], now: float) -> None:
        for file, kept in batch:
            self.answered_paths.add(file.path)
            if isinstance(kept, BlobRef):
                self._record_file(file, kept.bytes, kept.name, now)
                continue
            self.bytes_left += self.reserved_bytes.pop(file.path, 0)
            if isinstance(
                kept, SandboxLimitExceeded | ServiceUnavailable
            ):  # for the container, or for the disk
                self._record_without_blob(file, now)
            # Else it is not there any more, or not a file any more.

    def _record_without_blob(self, file: FileEntry, now: float) -> None:
        self.without_blob.append(file.path)
        self._record_file(file, max(file.size, 0), "", now)

    def _record_file(self, file: FileEntry, size: int, blob: str, now: float) -> None:
        old = self.known.get(file.path)
        self.records[file.path] = ContainerFileRecord(
            id=container_file_id(self.container_id, file.path),
            container_id=self.container_id,
            path=file.path,
            bytes=size,
            created_at=now if old is None else old.created_at,
            modified_ns=file.modified_ns,
            changed_ns=file.changed_ns,
            inode=file.inode,
            source="assistant" if old is None else old.source,
            executable=file.executable,
            blob=blob,
        )

    def notices(self) -> list[str]:
        notes: list[str] = []
        if self.without_blob:
            names = format_file_names(self.without_blob)
            notes.append(f"There is no room to keep these when the sandbox ends: {names}.")
        if self.omitted:
            notes.append(f"{self.omitted} files are not listed: a container has at most {self.limits.files}.")
        return notes


@dataclass(frozen=True, slots=True)
class _ListingDiff:
    """What a listing tells: what was there before, by path; the records of what is still there, by path; those of what
    is gone; what is to be kept.
    """

    previous: Mapping[str, _KnownFile]
    known: dict[str, ContainerFileRecord]
    deleted: list[ContainerFileRecord]
    changed: list[FileEntry]


def _diff_listing(
    records: Iterable[ContainerFileRecord],
    listing: FileListing,
    initial_files: Mapping[str, FileSnapshot] | None,
) -> _ListingDiff:
    known = {record.path: record for record in records}
    before: Mapping[str, _KnownFile] = _present_in_sandbox(known) if initial_files is None else initial_files
    gone = [
        known.pop(path)
        for path in _deleted_paths(listing, before)
        if _has_same_blob(known.get(path), before[path])
    ]
    fresh = [
        file
        for file in listing.files
        if _has_changed(file, before) and (file.path in known or is_output_file(file.path))
    ]
    return _ListingDiff(before, known, gone, fresh)


async def _slice_stream(pieces: AsyncGenerator[bytes], start: int, end: int | None) -> AsyncGenerator[bytes]:
    """The bytes from `start` up to `end`, of something that can only be read from its beginning."""
    at = 0
    async with aclosing(pieces):
        async for piece in pieces:
            wanted = piece[max(0, start - at) : None if end is None else max(0, end - at)]
            at += len(piece)
            if wanted:
                yield wanted
            if end is not None and at >= end:
                return


def _present_in_sandbox(known: Mapping[str, ContainerFileRecord]) -> dict[str, ContainerFileRecord]:
    """Those that their sandbox has."""
    return {path: record for path, record in known.items() if record.modified_ns or record.changed_ns}


def _with_fingerprint(record: ContainerFileRecord, fingerprint: FileFingerprint) -> ContainerFileRecord:
    return msgspec.structs.replace(
        record,
        modified_ns=fingerprint.modified_ns,
        changed_ns=fingerprint.changed_ns,
        inode=fingerprint.inode,
    )


def _has_changed(file: FileEntry, before: Mapping[str, _KnownFile]) -> bool:
    old = before.get(file.path)
    return (
        old is None
        or old.changed_ns != file.changed_ns
        or old.modified_ns != file.modified_ns
        or old.bytes != file.size
        or old.inode != file.inode
    )


def _is_unwritten(record: ContainerFileRecord, before: _KnownFile | None) -> bool:
    """Whether nothing but its mode, its owner or its names were changed: then no call has written it."""
    if before is None or not record.blob:
        return False
    return (before.blob, before.modified_ns) == (record.blob, record.modified_ns)


def _deleted_paths(listing: FileListing, before: Mapping[str, _KnownFile]) -> list[str]:
    if not listing.complete:
        return [path for path in listing.deleted if path in before]
    there = {file.path for file in listing.files}
    return [] if listing.truncated else [path for path in before if path not in there]


def _has_same_blob(record: ContainerFileRecord | None, placed: _KnownFile) -> bool:
    return record is not None and record.blob == placed.blob


def total_blob_bytes(records: Iterable[ContainerFileRecord]) -> int:
    return sum(record.bytes for record in records if record.blob)


def format_file_names(names: Sequence[str]) -> str:
    """The first of them, fit for a sentence."""
    return join_names([sanitize_name(name) for name in names], _MAX_NAMES_SHOWN)
