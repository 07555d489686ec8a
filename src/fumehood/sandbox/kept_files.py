"""The files of containers: what changed, what is kept of it, how it comes back; imports `interfaces`, siblings.

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

from fumehood.aside import ITEM, aside
from fumehood.interfaces import Blobs, Clock, Kept, Sandbox, Store
from fumehood.protocol.containers import ContainerFileRecord
from fumehood.protocol.errors import Unavailable
from fumehood.protocol.names import clean_name, free_name, in_words
from fumehood.protocol.sandbox import FileEntry, FileListing
from fumehood.protocol.sandbox_errors import FileNotFound, FileRefused, SandboxError, SandboxGone, TooLarge
from fumehood.sandbox.transfers import NOT_IN_A_SANDBOX, Given, Stamp, Taken, Transfers

logger = logging.getLogger(__name__)

_LONGEST_PATH = 4096
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
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
class Placed:
    """A file as a sandbox had it at the last look."""

    bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    blob: str


class _There(Protocol):
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
class Look:
    """What one look found: `mark` names the state that was seen, `notes` tell what could not be kept.

    missing: what changed and could not be fetched. failure: why, if the sandbox said so.
    """

    mark: str
    changed: Sequence[ContainerFileRecord] = ()
    notes: Sequence[str] = ()
    missing: Sequence[FileEntry] = ()
    failure: SandboxError | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """What a fresh sandbox was given, and the paths of what is gone for good, and of what it did not take."""

    mark: str
    placed: dict[str, Placed]
    gone: Collection[str]
    refused: Collection[str]

    def notes(self) -> list[str]:
        notes = [f"Not to be had any more: {name_files(sorted(self.gone))}."] if self.gone else []
        return [
            *notes,
            *(
                [f"Not to be had in this sandbox: {name_files(sorted(self.refused))}."]
                if self.refused
                else []
            ),
        ]


def is_produced(path: str) -> bool:
    """Whether a file counts as something that code made: neither cached nor somebody's temporary file.

    docs/containers.md tells users the rule.
    """
    parts = path.split("/")
    if len(path) > _LONGEST_PATH or "\0" in path or any(part in ("", ".", "..") for part in parts):
        return False
    return "__pycache__" not in parts and not path.endswith(("~", ".pyc", ".swp", ".tmp"))


def file_id(container_id: str, path: str) -> str:
    """The same for the same path of the same container; nobody can guess it who does not know the container's id."""
    return f"cfile_{hashlib.sha256(f'{container_id}\0{path}'.encode()).hexdigest()[:48]}"


class KeptFiles:
    """Records in a store and content in blobs, for all containers of one process."""

    def __init__(self, store: Store, blobs: Blobs, clock: Clock, limits: FileLimits) -> None:
        self._store = store
        self._blobs = blobs
        self._transfers = Transfers(blobs)
        self._clock = clock
        self._limits = limits

    # ---- out of a sandbox -----------------------------------------------------------------------------------------

    async def look(
        self, container_id: str, sandbox: Sandbox, mark: str, began: Mapping[str, Placed] | None = None
    ) -> Look:
        """Record and keep what changed since the mark. Raises SandboxError, and then nothing was recorded.

        began: what this sandbox began with, where others may have changed the records meanwhile. What it wrote wins;
            what it deleted goes, unless somebody else has changed it.
        """
        listing = await sandbox.list(mark or None)
        if not (listing.complete or listing.files or listing.deleted):
            return Look(listing.mark)
        records = await self._store.files(container_id)
        size = ITEM * (len(records) + len(listing.files)) // 4
        seen = await aside(size, _seen, records, listing, began)
        harvest = _Harvest(container_id, seen.known, {file.path for file in seen.fresh}, self._limits)
        async with AsyncExitStack() as arrivals:
            await self._take_all(sandbox, seen.fresh, harvest, arrivals)
            taken = [record for file in seen.fresh if (record := harvest.taken.get(file.path)) is not None]
            recorded = await self._store.put_files(taken, [record.id for record in seen.gone])
        if not recorded:  # there is no such container any more
            await self.drop(taken)
            return Look(mark)
        replaced = [seen.known[record.path] for record in taken if record.path in seen.known]
        await self.drop((*seen.gone, *replaced))
        changed = [record for record in taken if not _is_the_same(record, seen.before.get(record.path))]
        mark = mark if harvest.missing else listing.mark
        return Look(mark, changed, harvest.notes(), harvest.missing, harvest.failure)

    async def _take_all(
        self, sandbox: Sandbox, files: Iterable[FileEntry], harvest: "_Harvest", arrivals: AsyncExitStack
    ) -> None:
        now = self._clock.now()
        admitted = [file for file in files if harvest.admits(file, now)]
        try:
            async with (
                asyncio.timeout(self._limits.seconds),
                aclosing(self._transfers.take(sandbox, admitted, harvest.grow, arrivals)) as batches,
            ):
                async for batch in batches:
                    await aside(ITEM * len(batch) // 4, harvest.add_all, batch, now)
        except (SandboxError, TimeoutError) as error:
            harvest.missing = [file for file in admitted if file.path not in harvest.answered]
            harvest.failure = error if isinstance(error, SandboxError) else None
            reason = str(error) or "out of time"
            logger.warning("Files of %s could not all be kept: %s", harvest.container_id, reason)

    # ---- into a sandbox -------------------------------------------------------------------------------------------

    async def restore(self, container_id: str, sandbox: Sandbox) -> Restored:
        """Put into a fresh sandbox what is kept of the container; raises SandboxError."""
        records = await self._store.files(container_id)
        kept = [
            Given(record.path, Kept(record.blob, record.bytes), record.executable)
            for record in records
            if record.blob
        ]
        handed = await self._transfers.give(sandbox, kept)
        for error in handed.errors:
            logger.warning("A file of %s cannot be put back: %s", container_id, error)
        placed = {
            record.path: Placed(record.bytes, *stamp, record.blob)
            for record in records
            if (stamp := handed.stamps.get(record.path)) is not None
        }
        mark = handed.mark or (await sandbox.list()).mark if placed else ""
        gone = handed.gone.union(record.path for record in records if not record.blob)
        return Restored(mark, placed, gone, handed.refused)

    async def settle(self, container_id: str, restored: Restored) -> None:
        """Let the records say what the container's one sandbox has now."""
        moved: list[ContainerFileRecord] = []
        lost: list[ContainerFileRecord] = []
        for record in await self._store.files(container_id):
            placed = restored.placed.get(record.path)
            if placed is not None:
                moved.append(_stamped(record, Stamp(placed.modified_ns, placed.changed_ns, placed.inode)))
            elif record.path in restored.gone:
                lost.append(record)
            elif record.path in restored.refused:
                moved.append(_stamped(record, NOT_IN_A_SANDBOX))
        if moved or lost:
            await self._store.put_files(moved, [record.id for record in lost])

    # ---- besides --------------------------------------------------------------------------------------------------

    async def add(
        self, container_id: str, path: str, content: bytes, sandbox: Sandbox | None
    ) -> ContainerFileRecord:
        """A file of the assistant's under a name that is free, in the sandbox too if it lives. Raises TooLarge."""
        known = {record.path: record for record in await self._store.files(container_id)}
        room = min(self._limits.file_bytes, self._limits.container_bytes - kept_bytes(known.values()))
        if len(content) > room or len(known) >= self._limits.files:
            raise TooLarge("The container has as many files as it may keep.")
        free = free_name(path, known)
        stamp = NOT_IN_A_SANDBOX
        if sandbox is not None:
            try:
                stamp = Stamp.of(await sandbox.write(free, content))
            except SandboxError as error:  # the copy is what counts
                logger.warning("A file could not be put into the sandbox of %s: %s", container_id, error)
        async with self._blobs.keep(content) as kept:
            record = ContainerFileRecord(
                id=file_id(container_id, free),
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
            if not await self._store.put_files([record]):
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
            async with aclosing(_part(sandbox.read(record.path), start, end)) as pieces:
                async for piece in pieces:
                    yield piece
        except (FileNotFound, FileRefused) as error:
            raise KeyError(record.id) from error

    async def drop(self, records: Iterable[ContainerFileRecord]) -> None:
        """Let go of the copies of files that are no longer recorded."""
        await self._blobs.drop(record.blob for record in records)


@dataclass(slots=True)
class _Harvest:
    """One look in the making.

    taken: by path. unkept: what is recorded without a copy; left_out: how many are not even that.
    answered: the paths of which the sandbox has said something. missing: those that it has not, when it failed.
    room: bytes that nobody has taken or asked for.
    """

    container_id: str
    known: Mapping[str, ContainerFileRecord]
    changing: set[str]
    limits: FileLimits
    taken: dict[str, ContainerFileRecord] = field(default_factory=dict[str, ContainerFileRecord])
    unkept: list[str] = field(default_factory=list[str])
    left_out: int = 0
    answered: set[str] = field(default_factory=set[str])
    missing: Sequence[FileEntry] = ()
    failure: SandboxError | None = None
    room: int = field(init=False)
    places: int = field(init=False)
    reserved: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        staying = [record for path, record in self.known.items() if path not in self.changing]
        self.room = self.limits.container_bytes - kept_bytes(staying)
        self.places = self.limits.files - len(self.known)

    def admits(self, file: FileEntry, now: float) -> bool:
        """Whether it is to be kept; those that come later have to do with the room that is left then."""
        if file.path not in self.known:
            self.places -= 1
            if self.places < 0:
                self.left_out += 1
                return False
        try:
            self.grow(file, max(file.size, 0))
        except TooLarge:
            self._add_unkept(file, now)
            return False
        return True

    def grow(self, file: FileEntry, size: int) -> None:
        """Reserve so many bytes for a file, in place of those that it was said to have; raises TooLarge."""
        more = size - self.reserved.get(file.path, 0)
        if size > self.limits.file_bytes or more > self.room:
            raise TooLarge("There is no room for this file.")
        self.room -= more
        self.reserved[file.path] = size

    def add_all(self, batch: Iterable[Taken], now: float) -> None:
        for file, kept in batch:
            self.answered.add(file.path)
            if isinstance(kept, Kept):
                self._add(file, kept.bytes, kept.name, now)
                continue
            self.room += self.reserved.pop(file.path, 0)
            if isinstance(kept, TooLarge | Unavailable):  # for the container, or for the disk
                self._add_unkept(file, now)
            # Else it is not there any more, or not a file any more.

    def _add_unkept(self, file: FileEntry, now: float) -> None:
        self.unkept.append(file.path)
        self._add(file, max(file.size, 0), "", now)

    def _add(self, file: FileEntry, size: int, blob: str, now: float) -> None:
        old = self.known.get(file.path)
        self.taken[file.path] = ContainerFileRecord(
            id=file_id(self.container_id, file.path),
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

    def notes(self) -> list[str]:
        notes: list[str] = []
        if self.unkept:
            names = name_files(self.unkept)
            notes.append(f"There is no room to keep these when the sandbox ends: {names}.")
        if self.left_out:
            notes.append(
                f"{self.left_out} files are not listed: a container has at most {self.limits.files}."
            )
        return notes


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a listing tells: what was there before, by path; the records of what is still there, by path; those of what
    is gone; what is to be kept.
    """

    before: Mapping[str, _There]
    known: dict[str, ContainerFileRecord]
    gone: list[ContainerFileRecord]
    fresh: list[FileEntry]


def _seen(
    records: Iterable[ContainerFileRecord], listing: FileListing, began: Mapping[str, Placed] | None
) -> _Seen:
    known = {record.path: record for record in records}
    before: Mapping[str, _There] = _in_a_sandbox(known) if began is None else began
    gone = [known.pop(path) for path in _deleted(listing, before) if _same(known.get(path), before[path])]
    fresh = [
        file
        for file in listing.files
        if _differs(file, before) and (file.path in known or is_produced(file.path))
    ]
    return _Seen(before, known, gone, fresh)


async def _part(pieces: AsyncGenerator[bytes], start: int, end: int | None) -> AsyncGenerator[bytes]:
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


def _in_a_sandbox(known: Mapping[str, ContainerFileRecord]) -> dict[str, ContainerFileRecord]:
    """Those that their sandbox has."""
    return {path: record for path, record in known.items() if record.modified_ns or record.changed_ns}


def _stamped(record: ContainerFileRecord, stamp: Stamp) -> ContainerFileRecord:
    return msgspec.structs.replace(
        record, modified_ns=stamp.modified_ns, changed_ns=stamp.changed_ns, inode=stamp.inode
    )


def _differs(file: FileEntry, before: Mapping[str, _There]) -> bool:
    old = before.get(file.path)
    return (
        old is None
        or old.changed_ns != file.changed_ns
        or old.modified_ns != file.modified_ns
        or old.bytes != file.size
        or old.inode != file.inode
    )


def _is_the_same(taken: ContainerFileRecord, before: _There | None) -> bool:
    """Whether nothing but its mode, its owner or its names were changed: then no call has written it."""
    if before is None or not taken.blob:
        return False
    return (before.blob, before.modified_ns) == (taken.blob, taken.modified_ns)


def _deleted(listing: FileListing, before: Mapping[str, _There]) -> list[str]:
    if not listing.complete:
        return [path for path in listing.deleted if path in before]
    there = {file.path for file in listing.files}
    return [] if listing.truncated else [path for path in before if path not in there]


def _same(record: ContainerFileRecord | None, placed: _There) -> bool:
    return record is not None and record.blob == placed.blob


def kept_bytes(records: Iterable[ContainerFileRecord]) -> int:
    return sum(record.bytes for record in records if record.blob)


def name_files(names: Sequence[str]) -> str:
    """The first of them, fit for a sentence."""
    return in_words([clean_name(name) for name in names], _NAMED)
