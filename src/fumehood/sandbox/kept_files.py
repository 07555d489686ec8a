"""The files of containers: what changed, what is kept of it, how it comes back; imports `interfaces`, `protocol`.

Names and sizes are told by a sandbox and trusted by nobody: names are checked, bytes are counted on their way.
"""

import asyncio
import hashlib
import itertools
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import msgspec

from fumehood.interfaces import Blobs, Clock, Sandbox, Store
from fumehood.protocol.containers import ContainerFileRecord
from fumehood.protocol.errors import Unavailable
from fumehood.protocol.names import clean_name
from fumehood.protocol.sandbox import FileEntry, FileListing
from fumehood.protocol.sandbox_errors import FileNotFound, FileRefused, SandboxError, SandboxGone, TooLarge

logger = logging.getLogger(__name__)

_LONGEST_PATH = 4096
_IN_ONE_PIECE = 1 << 20  # a request with these bytes can be repeated
_NAMED = 5
NOT_IN_A_SANDBOX = 0  # in place of the time when it was written there
_AT_ONCE = 8  # files on their way; each waits for a disk


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """
    file_bytes: the largest file that outlives its sandbox.
    container_bytes: all of them together, of one container.
    files: how many files of one container are recorded.
    seconds: how long one look may copy; what is not done by then, the next one finds.
    """

    file_bytes: int = 64 << 20
    container_bytes: int = 2 << 30
    files: int = 1000
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A file as a sandbox had it at the last look."""

    bytes: int
    modified_ns: int
    blob: str


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found: `mark` names the state that was seen, `notes` tell what could not be kept."""

    mark: str
    changed: Sequence[ContainerFileRecord] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """What a fresh sandbox was given, and the paths of what is gone for good, and of what it did not take."""

    mark: str
    placed: dict[str, Placed]
    gone: list[str]
    refused: list[str]

    def notes(self) -> list[str]:
        notes = [f"Not to be had any more: {in_words(self.gone)}."] if self.gone else []
        return [
            *notes,
            *([f"Not to be had in this sandbox: {in_words(self.refused)}."] if self.refused else []),
        ]


def is_produced(path: str) -> bool:
    """Whether a file counts as something that code made: neither hidden, nor cached, nor somebody's temporary file.

    docs/containers.md tells users the rule.
    """
    parts = path.split("/")
    if len(path) > _LONGEST_PATH or "\0" in path or any(not part or part.startswith(".") for part in parts):
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
        known = {record.path: record for record in await self._store.files(container_id)}
        before = _as_placed(known.values()) if began is None else began
        gone = [known.pop(path) for path in _deleted(listing, before) if _same(known.get(path), before[path])]
        fresh = [
            file
            for file in listing.files
            if (file.path in known or is_produced(file.path)) and _differs(file, before)
        ]
        harvest = _Harvest(container_id, known, {file.path for file in fresh}, self._limits)
        async with AsyncExitStack() as arrivals:
            await self._take_all(sandbox, fresh, harvest, arrivals)
            changed = [record for file in fresh if (record := harvest.taken.get(file.path)) is not None]
            recorded = await self._store.put_files(changed, [record.id for record in gone])
        if not recorded:  # there is no such container any more
            await self.drop(changed)
            return Look(mark)
        replaced = [known[record.path] for record in changed if record.path in known]
        await self.drop((*gone, *replaced))
        return Look(mark if harvest.cut_short else listing.mark, changed, harvest.notes())

    async def _take_all(
        self, sandbox: Sandbox, files: Iterable[FileEntry], harvest: "_Harvest", arrivals: AsyncExitStack
    ) -> None:
        waiting = iter(files)

        async def take_some() -> None:
            for file in waiting:
                if harvest.has_place_for(file.path):
                    await self._take(sandbox, file, harvest, arrivals)

        try:
            async with asyncio.timeout(self._limits.seconds), asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(take_some())
        except* (SandboxError, TimeoutError) as errors:
            harvest.cut_short = True
            reason = str(errors.exceptions[0]) or "out of time"
            logger.warning("Files of %s could not all be kept: %s", harvest.container_id, reason)

    async def _take(
        self, sandbox: Sandbox, file: FileEntry, harvest: "_Harvest", arrivals: AsyncExitStack
    ) -> None:
        counted = _Counted(sandbox.read(file.path), harvest, max(file.size, 0))
        try:
            counted.reserve()
            kept = await arrivals.enter_async_context(self._blobs.keep(counted))
        except (FileNotFound, FileRefused):  # not there any more, or not a file any more
            counted.give_back()
        except (TooLarge, Unavailable):  # too much for one file, for the container, or for the disk
            counted.give_back()
            harvest.unkept.append(file.path)
            harvest.add(file, max(file.size, 0), "", self._clock.now())
        else:
            harvest.add(file, kept.bytes, kept.name, self._clock.now())

    # ---- into a sandbox -------------------------------------------------------------------------------------------

    async def restore(self, container_id: str, sandbox: Sandbox) -> Restored:
        """Put into a fresh sandbox what is kept of the container; raises SandboxError."""
        placed: dict[str, Placed] = {}
        gone: list[str] = []
        refused: list[str] = []
        for record in await self._store.files(container_id):
            try:
                if not record.blob:
                    raise KeyError(record.path)
                entry = await sandbox.write(record.path, await self._content(record))
            except (KeyError, FileRefused, TooLarge) as error:
                logger.warning("%s of %s cannot be put back: %s", record.id, container_id, error)
                (gone if isinstance(error, KeyError) else refused).append(record.path)
                continue
            placed[record.path] = Placed(record.bytes, entry.modified_ns, record.blob)
        return Restored((await sandbox.list()).mark if placed else "", placed, gone, refused)

    async def settle(self, container_id: str, restored: Restored) -> None:
        """Let the records say what the container's one sandbox has now."""
        moved: list[ContainerFileRecord] = []
        lost: list[ContainerFileRecord] = []
        for record in await self._store.files(container_id):
            placed = restored.placed.get(record.path)
            if placed is not None:
                moved.append(msgspec.structs.replace(record, modified_ns=placed.modified_ns))
            elif record.path in restored.gone:
                lost.append(record)
            elif record.path in restored.refused:
                moved.append(msgspec.structs.replace(record, modified_ns=NOT_IN_A_SANDBOX))
        if moved or lost:
            await self._store.put_files(moved, [record.id for record in lost])

    async def _content(self, record: ContainerFileRecord) -> bytes | AsyncGenerator[bytes]:
        """Raises KeyError if it is not there, before anybody waits for the rest."""
        pieces = self._blobs.read(record.blob)
        if record.bytes <= _IN_ONE_PIECE:
            async with aclosing(pieces):
                return b"".join([piece async for piece in pieces])
        return _chained(await anext(pieces, b""), pieces)

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
        modified_ns = NOT_IN_A_SANDBOX
        if sandbox is not None:
            try:
                modified_ns = (await sandbox.write(free, content)).modified_ns
            except SandboxError as error:  # the copy is what counts
                logger.warning("A file could not be put into the sandbox of %s: %s", container_id, error)
        async with self._blobs.keep(content) as kept:
            record = ContainerFileRecord(
                id=file_id(container_id, free),
                container_id=container_id,
                path=free,
                bytes=len(content),
                created_at=self._clock.now(),
                modified_ns=modified_ns,
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
    room: bytes that nobody has taken or asked for.
    """

    container_id: str
    known: Mapping[str, ContainerFileRecord]
    changing: set[str]
    limits: FileLimits
    taken: dict[str, ContainerFileRecord] = field(default_factory=dict[str, ContainerFileRecord])
    unkept: list[str] = field(default_factory=list[str])
    left_out: int = 0
    cut_short: bool = False
    room: int = field(init=False)
    places: int = field(init=False)

    def __post_init__(self) -> None:
        staying = [record for path, record in self.known.items() if path not in self.changing]
        self.room = self.limits.container_bytes - kept_bytes(staying)
        self.places = self.limits.files - len(self.known)

    def has_place_for(self, path: str) -> bool:
        if path in self.known:
            return True
        self.places -= 1
        self.left_out += self.places < 0
        return self.places >= 0

    def add(self, file: FileEntry, size: int, blob: str, now: float) -> None:
        old = self.known.get(file.path)
        self.taken[file.path] = ContainerFileRecord(
            id=file_id(self.container_id, file.path),
            container_id=self.container_id,
            path=file.path,
            bytes=size,
            created_at=now if old is None else old.created_at,
            modified_ns=file.modified_ns,
            source="assistant" if old is None else old.source,
            blob=blob,
        )

    def notes(self) -> list[str]:
        notes: list[str] = []
        if self.unkept:
            names = in_words(self.unkept)
            notes.append(f"There is no room to keep these when the sandbox ends: {names}.")
        if self.left_out:
            notes.append(
                f"{self.left_out} files are not listed: a container has at most {self.limits.files}."
            )
        return notes


class _Counted:
    """Bytes on their way, which take their room as they come: TooLarge where there is none."""

    def __init__(self, pieces: AsyncGenerator[bytes], harvest: _Harvest, announced: int) -> None:
        self.bytes = 0
        self._pieces = pieces
        self._harvest = harvest
        self._announced = announced
        self._reserved = 0

    def reserve(self) -> None:
        """What is announced; those who come later have to do with the rest."""
        self._grow(self._announced)

    def give_back(self) -> None:
        self._harvest.room += self._reserved
        self._reserved = 0

    def _grow(self, size: int) -> None:
        if size > self._harvest.limits.file_bytes or size - self._reserved > self._harvest.room:
            raise TooLarge("There is no room for this file.")
        self._harvest.room -= size - self._reserved
        self._reserved = size

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                self.bytes += len(piece)
                if self.bytes > self._reserved:
                    self._grow(self.bytes)
                yield piece
        self._grow(self.bytes)  # less than was announced, perhaps


async def _chained(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece


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


def _as_placed(records: Iterable[ContainerFileRecord]) -> dict[str, Placed]:
    """Those that their sandbox has."""
    return {
        record.path: Placed(record.bytes, record.modified_ns, record.blob)
        for record in records
        if record.modified_ns != NOT_IN_A_SANDBOX
    }


def _differs(file: FileEntry, before: Mapping[str, Placed]) -> bool:
    old = before.get(file.path)
    return old is None or (old.bytes, old.modified_ns) != (file.size, file.modified_ns)


def _deleted(listing: FileListing, before: Mapping[str, Placed]) -> list[str]:
    if not listing.complete:
        return [path for path in listing.deleted if path in before]
    there = {file.path for file in listing.files}
    return [] if listing.truncated else [path for path in before if path not in there]


def _same(record: ContainerFileRecord | None, placed: Placed) -> bool:
    return record is not None and record.blob == placed.blob


def kept_bytes(records: Iterable[ContainerFileRecord]) -> int:
    return sum(record.bytes for record in records if record.blob)


def free_name(path: str, taken: Collection[str]) -> str:
    """The path itself, or one like it that nothing has."""
    return next(name for name in names_like(path) if name not in taken)


def names_like(path: str) -> Iterator[str]:
    """The path, and what is tried in its place, without end: a.txt, a-2.txt, a-3.txt, …"""
    suffix = PurePosixPath(path).suffix
    yield path
    for number in itertools.count(2):
        yield f"{path.removesuffix(suffix)}-{number}{suffix}"


def in_words(names: Sequence[str]) -> str:
    """A few names, fit to be read, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(clean_name(name) for name in names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
