"""Files that users put into containers, with or without a sandbox yet; imports `interfaces`, `protocol`, siblings.

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

from fumehood.aside import ITEM, aside
from fumehood.interfaces import Blobs, Kept, Sandbox
from fumehood.protocol.containers import ContainerFileRecord
from fumehood.protocol.errors import (
    ApiError,
    BodyTooLarge,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from fumehood.protocol.names import clean_name, names_like
from fumehood.protocol.sandbox import ArchiveFormat, FileEntry
from fumehood.protocol.sandbox_errors import (
    FileRefused,
    RequestRefused,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    TooLarge,
    TryLater,
)
from fumehood.sandbox.container import House, Living, attached, fresh_sandbox
from fumehood.sandbox.kept_files import file_id, kept_bytes
from fumehood.sandbox.transfers import NOT_IN_A_SANDBOX, Admit, Given, Stamp, Taken, Transfers

# Puts files into a sandbox; how each of them is there, as the sandbox tells it.
type Writing = Callable[[Sandbox], Awaitable[Mapping[str, Stamp]]]


class GivenFiles:
    """For all containers of one process. Every method raises InvalidRequest, BodyTooLarge, NotFound, Unavailable."""

    def __init__(self, house: House, blobs: Blobs) -> None:
        self._house = house
        self._blobs = blobs
        self._transfers = Transfers(blobs)
        self._limits = house.settings.files
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()

    async def put(
        self, living: Living, path: str, content: bytes | AsyncIterable[bytes]
    ) -> ContainerFileRecord:
        room = await self._room(living, [path])
        async with (
            self._turn(living.record.tenant),
            self._blobs.keep(self._bounded(content, room)) as kept,
            living.filing,
        ):
            given = [Given(path, kept)]
            (record,) = await self._record(living, given, lambda sandbox: self._write(sandbox, given))
        return record

    def _turn(self, tenant: str) -> asyncio.Semaphore:
        """For `async with`, while a file of the tenant's arrives: until it is recorded it counts for no container, and
        a disk has an end. Who comes too early waits.
        """
        turn = self._turns.get(tenant)
        if turn is None:
            turn = self._turns[tenant] = asyncio.Semaphore(self._house.settings.uploads_at_once)
        return turn

    async def place(self, living: Living, wanted: Sequence[Given]) -> list[ContainerFileRecord]:
        """Files whose blobs are there, under their names as far as these are free."""
        async with AsyncExitStack() as holding, living.filing:
            for given in wanted:
                try:
                    await holding.enter_async_context(self._blobs.hold(given.kept.name))
                except KeyError:
                    raise NotFound(f"The content of '{clean_name(given.path)}' is gone.") from None
            known = {record.path: record for record in await self._house.store.files(living.record.id)}
            there, missing = _settled(wanted, known)
            placed = await self._record(living, missing, lambda sandbox: self._write(sandbox, missing))
        records = {record.path: record for record in (*there, *placed)}
        return list(records.values())

    async def unpack(
        self, living: Living, content: bytes | AsyncIterable[bytes], kind: ArchiveFormat, into: str
    ) -> Sequence[ContainerFileRecord]:
        """Nothing is unpacked in this process: a sandbox of its own shows what is in the archive, and whether that is
        more than the container may have; only then is it unpacked in the one where the code runs.
        """
        room = self._limits.container_bytes
        async with (
            self._turn(living.record.tenant),
            self._blobs.keep(self._bounded(content, room)) as archive,
            AsyncExitStack() as keeping,
        ):
            given = await self._unpacked(living, archive, kind, into, keeping)
            async with living.filing:
                records = await self._record(
                    living, given, lambda sandbox: self._unpack(sandbox, archive, kind, into)
                )
        await self._blobs.drop([archive.name])
        return records

    async def _unpacked(
        self, living: Living, archive: Kept, kind: ArchiveFormat, into: str, keeping: AsyncExitStack
    ) -> list[Given]:
        """What is in an archive, kept until the stack is left."""
        try:
            async with fresh_sandbox(self._house, living) as sandbox:
                unpacked = await sandbox.unpack(self._blobs.read(archive.name), kind=kind, into=into)
                listing = await sandbox.list()
                room = await self._room(living, {file.path for file in listing.files})
                if listing.truncated or unpacked.files > self._limits.files or unpacked.bytes > room:
                    raise self._too_large()
                taking = self._transfers.take(sandbox, listing.files, self._within(room), keeping)
                async with aclosing(taking) as batches:
                    given = [_kept(one) async for batch in batches for one in batch]
                return sorted(given, key=lambda one: one.path)
        except SandboxError as error:
            raise self._refusal(error) from error

    def _within(self, room: int) -> Admit:
        sizes = Counter[str]()

        def admit(file: FileEntry, size: int) -> None:
            nonlocal room
            room -= size - sizes[file.path]
            sizes[file.path] = size
            if room < 0:
                raise self._too_large()

        return admit

    # ---- into the sandbox -----------------------------------------------------------------------------------------

    async def _write(self, sandbox: Sandbox, given: Sequence[Given]) -> dict[str, Stamp]:
        """All of them, or it raises, and takes back what is there."""
        handed = await self._transfers.give(sandbox, given)
        if not (handed.refused or handed.gone):
            return handed.stamps
        for path in handed.stamps:
            with suppress(SandboxError):
                await sandbox.delete(path)
        raise handed.errors[0] if handed.errors else FileRefused("What is kept of it is gone.")

    async def _unpack(
        self, sandbox: Sandbox, archive: Kept, kind: ArchiveFormat, into: str
    ) -> dict[str, Stamp]:
        unpacked = await sandbox.unpack(self._blobs.read(archive.name), kind=kind, into=into)
        return {file.path: Stamp.when(unpacked, file) for file in (await sandbox.list()).files}

    async def delete(self, living: Living, wanted: str) -> bool:
        """False if there is none."""
        async with living.filing:
            record = await self._house.store.file(living.record.id, wanted)
            if record is None:
                return False
            try:
                sandbox = await attached(self._house.provider, living.record)
                if sandbox is not None:
                    await sandbox.delete(record.path)
            except SandboxError as error:
                # What is not there, or is no file any more, is deleted.
                if error.status not in (400, 404, 410):
                    raise self._refusal(error) from error
            await self._house.store.put_files([], [record.id])
            await self._house.files.drop([record])
        return True

    # ---- the records ----------------------------------------------------------------------------------------------

    async def _record(
        self, living: Living, given: Sequence[Given], write: Writing
    ) -> list[ContainerFileRecord]:
        """Put what is kept into the sandbox, if there is one, and write it down; for whoever has `filing`."""
        if not given:
            return []
        container_id = living.record.id
        there = await self._house.store.files(container_id)
        known = {record.path: record for record in there}
        size = ITEM * (len(there) + len(given)) // 4
        await aside(size, self._check_room, known, given)
        stamps = await self._written(living, write)
        now = self._house.clock.now()
        records = await aside(size, _records, container_id, given, known, stamps, now)
        if not await self._house.store.put_files(records):
            raise NotFound(f"Container with id '{container_id}' not found.")
        await self._house.files.drop([known[one.path] for one in given if one.path in known])
        return records

    async def _written(self, living: Living, write: Writing) -> Mapping[str, Stamp]:
        try:
            sandbox = await attached(self._house.provider, living.record)
            return {} if sandbox is None else await write(sandbox)
        except (SandboxGone, SandboxNotFound):  # the next one is given what is recorded
            return {}
        except SandboxError as error:
            raise self._refusal(error) from error

    def _bounded(self, content: bytes | AsyncIterable[bytes], most: int) -> bytes | AsyncGenerator[bytes]:
        """Raises BodyTooLarge, as soon as it is known."""
        if not isinstance(content, bytes):
            return self._counted(content, most)
        if len(content) > most:
            raise self._too_large()
        return content

    async def _counted(self, content: AsyncIterable[bytes], most: int) -> AsyncGenerator[bytes]:
        async for piece in content:
            most -= len(piece)
            if most < 0:
                raise self._too_large()
            yield piece

    async def _room(self, living: Living, replaced: Collection[str]) -> int:
        known = await self._house.store.files(living.record.id)
        return self._limits.container_bytes - kept_bytes(one for one in known if one.path not in replaced)

    def _check_room(self, known: Mapping[str, ContainerFileRecord], given: Sequence[Given]) -> None:
        paths = {one.path for one in given}
        staying = [record for path, record in known.items() if path not in paths]
        size = kept_bytes(staying) + sum(one.kept.bytes for one in given)
        if len(staying) + len(paths) > self._limits.files or size > self._limits.container_bytes:
            raise self._too_large()
        obstacle = _obstacle(paths, [*paths, *(record.path for record in staying)])
        if obstacle is not None:
            raise InvalidRequest(
                f"'{clean_name(obstacle)}' cannot be a file and a directory at once.", param="file"
            )

    def _too_large(self) -> BodyTooLarge:
        limits = self._limits
        return BodyTooLarge(
            f"There is no room for this: a container has at most {limits.files} files of {limits.container_bytes:,} "
            "bytes together. Delete some, or use another container."
        )

    def _refusal(self, error: SandboxError) -> ApiError:
        """What a client is told of what a sandbox said."""
        if isinstance(error, TooLarge):
            return BodyTooLarge(f"The container has no room for this: {error.message}")
        if isinstance(error, RequestRefused):
            return InvalidRequest(f"The container refused the file: {error.message}", param="file")
        if isinstance(error, TryLater):
            return Unavailable("No sandbox is free at the moment; try again later.", retry_after=1.0)
        return Unavailable("The container's sandbox cannot be reached; try again later.")


def _records(
    container_id: str,
    given: Iterable[Given],
    known: Mapping[str, ContainerFileRecord],
    stamps: Mapping[str, Stamp],
    now: float,
) -> list[ContainerFileRecord]:
    return [
        ContainerFileRecord(
            id=file_id(container_id, one.path),
            container_id=container_id,
            path=one.path,
            bytes=one.kept.bytes,
            created_at=known[one.path].created_at if one.path in known else now,
            modified_ns=(stamp := stamps.get(one.path, NOT_IN_A_SANDBOX)).modified_ns,
            changed_ns=stamp.changed_ns,
            inode=stamp.inode,
            source="user",
            executable=one.executable,
            blob=one.kept.name,
        )
        for one in given
    ]


def _kept(taken: Taken) -> Given:
    """Raises what was in the way."""
    file, kept = taken
    if isinstance(kept, Kept):
        return Given(file.path, kept, file.executable)
    raise kept


def _settled(
    wanted: Sequence[Given], known: Mapping[str, ContainerFileRecord]
) -> tuple[list[ContainerFileRecord], list[Given]]:
    """Those that are there already, of the same name and content, and the others under names that are free."""
    there: list[ContainerFileRecord] = []
    missing: list[Given] = []
    taken = {path: record.blob for path, record in known.items()}
    tried: dict[str, _Tried] = {}
    for given in wanted:
        blob = given.kept.name
        path = tried.setdefault(given.path, _Tried(given.path)).name_of(blob, taken)
        if path in known:
            there.append(known[path])
        elif path not in taken:
            missing.append(Given(path, given.kept, given.executable))
        taken[path] = blob
    return there, missing


class _Tried:
    """Names like one, tried once each, however many files are called so; found: those that were taken, by blob."""

    def __init__(self, path: str) -> None:
        self._names = names_like(path)
        self._found: dict[str, str] = {}

    def name_of(self, blob: str, taken: Mapping[str, str]) -> str:
        """The first that is free, or has this very content."""
        while blob not in self._found:
            name = next(self._names)
            self._found.setdefault(taken.get(name, blob), name)
        return self._found[blob]


def _obstacle(given: Collection[str], files: Collection[str]) -> str | None:
    """A path that would have to be a file and a directory, because of what is given now."""
    there = frozenset(files)
    for path in files:
        parts = path.split("/")
        for end in range(1, len(parts)):
            above = "/".join(parts[:end])
            if above in there and (above in given or path in given):
                return above
    return None
