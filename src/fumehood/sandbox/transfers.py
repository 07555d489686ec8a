"""Files on their way between blobs and sandboxes, small ones by the batch; imports `interfaces`, `protocol`, siblings.

A request, a thread and a wait for the disk cost as much as the bytes of a hundred small files. So these travel in one
stream, and are written and read by the batch; a large one has a request of its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from itertools import batched
from typing import Any, NamedTuple, Self

from fumehood.interfaces import Blobs, Kept, Sandbox
from fumehood.protocol.errors import Unavailable
from fumehood.protocol.sandbox import FileEntry, Unpacked, Written
from fumehood.protocol.sandbox_bundles import SMALL, WholeFile
from fumehood.protocol.sandbox_errors import FileNotFound, FileRefused, SandboxError, TooLarge
from fumehood.sandbox.http import Interrupted

_KEPT_BYTES = 8 << 20  # of small files that wait for the disk together,
_KEPT_FILES = 2000  # and how many of them
_GIVEN_BYTES = 512 << 10  # of small files that are read from it together,
_GIVEN_FILES = 500  # and how many of them
_LARGE_AT_ONCE = 8  # each waits for a disk

# A file that was kept, or why it was not.
type Taken = tuple[FileEntry, Kept | SandboxError | Unavailable]
type _Content = tuple[FileEntry, bytes | SandboxError]
# Is told how many bytes of a file are to be kept, and again when it is known better; raises where that is too much.
type Admit = Callable[[FileEntry, int], None]


class Stamp(NamedTuple):
    """What tells whether a file of the same size is still the same. Code may set the first back, not the others."""

    modified_ns: int
    changed_ns: int = 0
    inode: int = 0

    @classmethod
    def of(cls, file: FileEntry) -> Self:
        return cls(file.modified_ns, file.changed_ns, file.inode)

    @classmethod
    def when(cls, written: Written | Unpacked, file: FileEntry) -> Self:
        """Of a file as it was written, with others. What is newer, somebody has changed already: then it must not look
        as if it were ours.
        """
        modified_ns = min(file.modified_ns, written.modified_ns)
        return cls(modified_ns, min(file.changed_ns, written.changed_ns), file.inode)


NOT_IN_A_SANDBOX = Stamp(0)
_SOMEHOW = Stamp(1)  # of a file that is there and no listing shows


@dataclass(frozen=True, slots=True)
class Given:
    """A file that is kept, and where it is to be."""

    path: str
    kept: Kept
    executable: bool = False


@dataclass(slots=True)
class Handed:
    """What was put into a sandbox.

    mark: of the listing after that, if there was one.
    stamps: of each, by its path.
    gone: paths of what is not kept any more. refused: of what the sandbox did not take; errors: why, of some.
    """

    mark: str = ""
    stamps: dict[str, Stamp] = field(default_factory=dict[str, Stamp])
    gone: set[str] = field(default_factory=set[str])
    refused: set[str] = field(default_factory=set[str])
    errors: list[SandboxError] = field(default_factory=list[SandboxError])


class Transfers:
    """For all containers of one process."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    # ---- out of a sandbox -----------------------------------------------------------------------------------------

    async def take(
        self, sandbox: Sandbox, files: Sequence[FileEntry], admit: Admit, keeping: AsyncExitStack
    ) -> AsyncGenerator[Sequence[Taken]]:
        """Keep what is in these files until the stack is left, some at a time. Raises SandboxError where the sandbox
        fails, and what `admit` raises unless that is TooLarge.
        """
        small = [file for file in files if file.size <= SMALL]
        large = [file for file in files if file.size > SMALL]
        async with aclosing(self._contents(sandbox, small, large, admit)) as batches:
            async for batch in batches:
                yield await self._kept(batch, keeping)
        for some in batched(large, _LARGE_AT_ONCE):
            yield await _together(self._kept_alone(sandbox, file, admit, keeping) for file in some)

    async def _contents(
        self, sandbox: Sandbox, small: Sequence[FileEntry], large: list[FileEntry], admit: Admit
    ) -> AsyncGenerator[Sequence[_Content]]:
        """As much at a time as is worth a wait for the disk; what has grown meanwhile joins the large ones. Where the
        sandbox fails, what has come before is given first.
        """
        if not small:
            return
        waiting = iter(small)
        batch: list[_Content] = []
        size = 0
        failure: SandboxError | None = None
        try:
            async with aclosing(sandbox.read_all([file.path for file in small])) as pieces:
                async for contents in pieces:
                    for content, file in zip(contents, waiting, strict=False):
                        if isinstance(content, TooLarge):
                            large.append(file)
                            continue
                        batch.append((file, _admitted(file, content, admit)))
                        size += len(content) if isinstance(content, bytes) else 0
                    if size > _KEPT_BYTES or len(batch) > _KEPT_FILES:
                        yield batch
                        batch, size = [], 0
        except SandboxError as error:
            failure = error
        if batch:
            yield batch
        if failure is not None:
            raise failure

    async def _kept(self, batch: Sequence[_Content], keeping: AsyncExitStack) -> Sequence[Taken]:
        whole = [(file, content) for file, content in batch if isinstance(content, bytes)]
        taken: list[Taken] = [(file, error) for file, error in batch if not isinstance(error, bytes)]
        if not whole:
            return taken
        try:
            kept = await keeping.enter_async_context(self._blobs.keep_all([content for _, content in whole]))
        except Unavailable as error:
            return [*taken, *((file, error) for file, _ in whole)]
        return [*taken, *((file, one) for (file, _), one in zip(whole, kept, strict=True))]

    async def _kept_alone(
        self, sandbox: Sandbox, file: FileEntry, admit: Admit, keeping: AsyncExitStack
    ) -> Taken:
        try:
            content = _counted(file, sandbox.read(file.path), admit)
            return file, await keeping.enter_async_context(self._blobs.keep(content))
        except (FileNotFound, FileRefused, TooLarge, Unavailable) as error:
            return file, error

    # ---- into a sandbox -------------------------------------------------------------------------------------------

    async def give(self, sandbox: Sandbox, wanted: Sequence[Given]) -> Handed:
        """Put files there that are kept, as far as it takes them; raises SandboxError, Unavailable."""
        handed = Handed()
        small = [one for one in wanted if one.kept.bytes <= SMALL]
        if len(small) < 2:  # then it is as well off with a request of its own
            small = []
        else:
            await self._give_small(sandbox, small, handed)
        together = {one.path for one in small}
        for one in wanted:
            if one.path not in together:
                await self._give_alone(sandbox, one, handed)
        return handed

    async def _give_small(self, sandbox: Sandbox, small: Sequence[Given], handed: Handed) -> None:
        try:
            written = await self._written(sandbox, small, handed)
        except (FileRefused, TooLarge) as error:  # none of them
            handed.errors.append(error)
            written = Written(files=0, bytes=0, refused=len(small))
        handed.errors += [FileRefused(reason) for reason in written.reasons]
        listing = await sandbox.list()
        handed.mark = listing.mark
        there = {file.path: file for file in listing.files}
        # A listing that was cut does not show all; but where none was refused, all are there.
        unseen = _SOMEHOW if listing.truncated and not written.refused else None
        for one in small:
            if one.path in handed.gone:
                continue
            file = there.get(one.path)
            stamp = unseen if file is None else Stamp.when(written, file)
            if stamp is None:
                handed.refused.add(one.path)
            else:
                handed.stamps[one.path] = stamp

    async def _written(self, sandbox: Sandbox, small: Sequence[Given], handed: Handed) -> Written:
        try:
            return await sandbox.write_all(self._read(small, handed))
        except Interrupted:  # to write the same again does no harm
            return await sandbox.write_all(self._read(small, handed))

    async def _read(self, small: Sequence[Given], handed: Handed) -> AsyncGenerator[Sequence[WholeFile]]:
        for some in _batches(small):
            contents = await self._blobs.read_all([one.kept.name for one in some])
            found = list(zip(some, contents, strict=True))
            handed.gone.update(one.path for one, content in found if content is None)
            yield [(one.path, content, one.executable) for one, content in found if content is not None]

    async def _give_alone(self, sandbox: Sandbox, one: Given, handed: Handed) -> None:
        try:
            content = await self._content(one.kept)
            entry = await sandbox.write(one.path, content, executable=one.executable)
        except KeyError:
            handed.gone.add(one.path)
        except (FileRefused, TooLarge) as error:
            handed.refused.add(one.path)
            handed.errors.append(error)
        else:
            handed.stamps[one.path] = Stamp.of(entry)

    async def _content(self, kept: Kept) -> bytes | AsyncGenerator[bytes]:
        """Raises KeyError if it is not there, before anybody waits for the rest."""
        pieces = self._blobs.read(kept.name)
        if kept.bytes <= SMALL:  # a request with these bytes can be repeated
            async with aclosing(pieces):
                return b"".join([piece async for piece in pieces])
        return _chained(await anext(pieces, b""), pieces)


def _admitted(file: FileEntry, content: bytes | SandboxError, admit: Admit) -> bytes | SandboxError:
    try:
        if isinstance(content, bytes):
            admit(file, len(content))
    except TooLarge as error:
        return error
    return content


async def _counted(file: FileEntry, pieces: AsyncGenerator[bytes], admit: Admit) -> AsyncGenerator[bytes]:
    size = 0
    async with aclosing(pieces):
        async for piece in pieces:
            size += len(piece)
            admit(file, max(size, file.size))
            yield piece
    admit(file, size)  # less than was announced, perhaps


async def _together[T](work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once; the first of what they raise ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _batches(files: Iterable[Given]) -> Generator[list[Given]]:
    batch: list[Given] = []
    size = 0
    for file in files:
        if batch and (size + file.kept.bytes > _GIVEN_BYTES or len(batch) >= _GIVEN_FILES):
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.kept.bytes
    if batch:
        yield batch


async def _chained(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece
