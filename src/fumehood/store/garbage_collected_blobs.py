"""Blobs that live as long as a record refers to them.

A new blob has no record for a moment, and a record may appear between the check for references and the deletion. So a
writer pins the name until its record is written, and the collector blocks pins of a name while it deletes it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import batched
from typing import Self

from fumehood.interfaces import BeforeCommit, BlobRef, BlobStore, Clock, UnreferencedBlobFinder
from fumehood.protocol.openai.api_errors import StorageUnavailable

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 3600.0
_BATCH_SIZE = 1000


class GarbageCollectedBlobs:
    """`GarbageCollectedBlobStore` over a blob store and the records that refer to it, for one process.

    grace_seconds: minimum age of a blob that a sweep deletes; also the interval of sweeps.
    """

    def __init__(
        self, blobs: BlobStore, references: UnreferencedBlobFinder, *, grace_seconds: float = _GRACE_SECONDS
    ) -> None:
        self._blobs = blobs
        self._references = references
        self._grace_seconds = grace_seconds
        self._pins: Counter[str] = Counter()
        self._deleting: dict[str, asyncio.Event] = {}
        self._delete_when_unpinned: set[str] = set()
        self._delete_lock = asyncio.Lock()

    @asynccontextmanager
    async def put_pinned(self, content: bytes | AsyncIterable[bytes]) -> AsyncGenerator[BlobRef]:
        async with self._pin_new() as pin_names:
            name = await self._blobs.put(content, pin_names)
            yield BlobRef(name, await self._blobs.get_size(name))

    @asynccontextmanager
    async def put_many_pinned(self, contents: Sequence[bytes]) -> AsyncGenerator[Sequence[BlobRef]]:
        async with self._pin_new() as pin_names:
            names = await self._blobs.put_many(contents, pin_names)
            yield [BlobRef(name, len(content)) for name, content in zip(names, contents, strict=True)]

    @asynccontextmanager
    async def _pin_new(self) -> AsyncGenerator[BeforeCommit]:
        """Yield a function that pins names within the block. If the block raises, delete those without a record."""
        pinned: list[str] = []

        async def pin_names(names: Sequence[str]) -> None:
            for name in names:
                await self._pin(name)
                pinned.append(name)

        try:
            yield pin_names
        except BaseException:
            self._delete_when_unpinned.update(pinned)
            raise
        finally:
            await self._unpin(pinned)

    @asynccontextmanager
    async def pin(self, name: str) -> AsyncGenerator[None]:
        await self._pin(name)
        try:
            await self._blobs.get_size(name)
            yield
        finally:
            await self._unpin([name])

    async def delete_unreferenced(self, names: Iterable[str]) -> int:
        number = 0
        for batch in batched(sorted({name for name in names if name}), _BATCH_SIZE):
            try:
                async with self._delete_lock:
                    number += await self._delete_batch(batch)
            except StorageUnavailable as error:
                logger.warning("Could not delete blobs; the next sweep retries: %s", error)
        return number

    def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        return self._blobs.read(name, start, end)

    async def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        return await self._blobs.read_many(names)

    async def collect_garbage(self) -> int:
        return await self._collect_garbage(self._grace_seconds)

    @asynccontextmanager
    async def run_garbage_collector(self, clock: Clock) -> AsyncGenerator[Self]:
        """Sweep now and then periodically, within the block. Only one process may do so."""
        sweeper = asyncio.create_task(self._collect_garbage_forever(clock), name="blobs: sweeper")
        try:
            yield self
        finally:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)

    async def _collect_garbage_forever(self, clock: Clock) -> None:
        grace = 0.0  # no blob from before this process is still waiting for its record
        while True:
            try:
                if number := await self._collect_garbage(grace):
                    logger.warning("blobs_garbage_collected", extra={"fields": {"number": number}})
            except StorageUnavailable as error:
                logger.warning("Garbage collection of blobs failed: %s", error.message)
            except Exception:
                logger.exception("Garbage collection of blobs failed.")
            grace = self._grace_seconds
            await clock.sleep(self._grace_seconds)

    async def _collect_garbage(self, grace_seconds: float) -> int:
        number = 0
        async with aclosing(self._blobs.list_names(grace_seconds)) as found:
            async for names in found:
                number += await self.delete_unreferenced(names)
        return number

    async def _pin(self, name: str) -> None:
        while (deletion := self._deleting.get(name)) is not None:
            await deletion.wait()
        self._pins[name] += 1

    async def _unpin(self, names: Sequence[str]) -> None:
        self._pins.subtract(names)
        free = {name for name in names if not self._pins[name]}
        for name in free:
            del self._pins[name]
        unwanted = free & self._delete_when_unpinned
        self._delete_when_unpinned -= unwanted
        if unwanted:
            await self.delete_unreferenced(unwanted)

    async def _delete_batch(self, names: Iterable[str]) -> int:
        free = [name for name in names if name not in self._pins]
        self._delete_when_unpinned.update(name for name in names if name in self._pins)
        done = asyncio.Event()
        self._deleting.update((name, done) for name in free)
        try:
            unused = await self._references.find_unreferenced_blobs(free)
            await self._blobs.delete(*unused)
            return len(unused)
        finally:
            for name in free:
                del self._deleting[name]
            done.set()
