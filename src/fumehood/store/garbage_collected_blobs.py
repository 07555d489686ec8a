"""Blobs that live as long as a record refers to them.

Between the arrival of a blob and its record there is a moment when nothing refers to it, and between the look for
records and a deletion there is one in which a record may come. So whoever brings a blob holds its name meanwhile, and
whoever deletes lets nobody take hold of that name until it is done.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import batched
from typing import Self

from fumehood.interfaces import BlobRef, BlobReferences, BlobStore, Clock
from fumehood.protocol.openai.api_errors import ServiceUnavailable

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 3600.0
_BATCH_SIZE = 1000


class GarbageCollectedBlobs:
    """`Blobs` over a store of blobs and one of records, for one process.

    grace_seconds: how old a blob must be to be swept.
    """

    def __init__(
        self, blobs: BlobStore, references: BlobReferences, *, grace_seconds: float = _GRACE_SECONDS
    ) -> None:
        self._blobs = blobs
        self._references = references
        self._grace_seconds = grace_seconds
        self._pins: Counter[str] = Counter()
        self._deleting: dict[str, asyncio.Event] = {}
        self._delete_when_unpinned: set[str] = set()  # somebody has dropped it while another held it
        self._delete_lock = asyncio.Lock()

    @asynccontextmanager
    async def put_pinned(self, content: bytes | AsyncIterable[bytes]) -> AsyncGenerator[BlobRef]:
        held: list[str] = []

        async def pin_name(name: str) -> None:
            await self._pin(name)
            held.append(name)

        try:
            name = await self._blobs.put(content, pin_name)
            yield BlobRef(name, await self._blobs.get_size(name))
        except BaseException:
            self._delete_when_unpinned.update(held)
            raise
        finally:
            await self._unpin(held)

    @asynccontextmanager
    async def put_many_pinned(self, contents: Sequence[bytes]) -> AsyncGenerator[Sequence[BlobRef]]:
        held: list[str] = []

        async def pin_names(names: Sequence[str]) -> None:
            for name in names:
                await self._pin(name)
                held.append(name)

        try:
            names = await self._blobs.put_many(contents, pin_names)
            yield [BlobRef(name, len(content)) for name, content in zip(names, contents, strict=True)]
        except BaseException:
            self._delete_when_unpinned.update(held)
            raise
        finally:
            await self._unpin(held)

    @asynccontextmanager
    async def pin(self, name: str) -> AsyncGenerator[None]:
        await self._pin(name)
        try:
            await self._blobs.get_size(name)
            yield
        finally:
            await self._unpin([name])

    async def delete_unreferenced(self, names: Iterable[str]) -> None:
        await self._delete_unreferenced(names)

    def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        return self._blobs.read(name, start, end)

    async def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        return await self._blobs.read_many(names)

    async def collect_garbage(self) -> int:
        return await self._collect_garbage(self._grace_seconds)

    @asynccontextmanager
    async def run_garbage_collector(self, clock: Clock) -> AsyncGenerator[Self]:
        """Sweep now, for whoever is the only one to use them, and then every so often until the block is left."""
        sweeper = asyncio.create_task(self._collect_garbage_forever(clock), name="blobs: sweeper")
        try:
            yield self
        finally:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)

    async def _collect_garbage_forever(self, clock: Clock) -> None:
        grace = 0.0  # what was there before us is no longer on its way to a record
        while True:
            try:
                if number := await self._collect_garbage(grace):
                    logger.warning("blobs_garbage_collected", extra={"fields": {"number": number}})
            except ServiceUnavailable as error:
                logger.warning("Blobs could not be swept: %s", error.message)
            except Exception:
                logger.exception("Blobs could not be swept.")
            grace = self._grace_seconds
            await clock.sleep(self._grace_seconds)

    async def _collect_garbage(self, grace_seconds: float) -> int:
        number = 0
        async with aclosing(self._blobs.list_names(grace_seconds)) as found:
            async for names in found:
                number += await self._delete_unreferenced(names)
        return number

    async def _pin(self, name: str) -> None:
        while (going := self._deleting.get(name)) is not None:
            await going.wait()
        self._pins[name] += 1

    async def _unpin(self, names: Sequence[str]) -> None:
        self._pins.subtract(names)
        free = {name for name in names if not self._pins[name]}
        for name in free:
            del self._pins[name]
        unwanted = free & self._delete_when_unpinned
        self._delete_when_unpinned -= unwanted
        if unwanted:
            await self._delete_unreferenced(unwanted)

    async def _delete_unreferenced(self, names: Iterable[str]) -> int:
        number = 0
        for some in batched(sorted({name for name in names if name}), _BATCH_SIZE):
            try:
                async with self._delete_lock:
                    number += await self._delete_batch(some)
            except ServiceUnavailable as error:
                logger.warning("Blobs could not be deleted, and are left to the next sweep: %s", error)
        return number

    async def _delete_batch(self, names: Iterable[str]) -> int:
        free = [name for name in names if name not in self._pins]
        self._delete_when_unpinned.update(name for name in names if name in self._pins)
        gone = asyncio.Event()
        self._deleting.update((name, gone) for name in free)
        try:
            unused = await self._references.find_unreferenced_blobs(free)
            await self._blobs.delete(*unused)
            return len(unused)
        finally:
            for name in free:
                del self._deleting[name]
            gone.set()
