"""Blobs that live as long as a record refers to them; imports `interfaces`, `protocol` and the standard library.

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

from fumehood.interfaces import BlobStore, Clock, Kept, Store
from fumehood.protocol.errors import Unavailable

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 3600.0
_AT_ONCE = 1000


class ReferredBlobs:
    """`Blobs` over a store of blobs and one of records, for one process.

    grace_seconds: how old a blob must be to be swept.
    """

    def __init__(self, blobs: BlobStore, store: Store, *, grace_seconds: float = _GRACE_SECONDS) -> None:
        self._blobs = blobs
        self._store = store
        self._grace_seconds = grace_seconds
        self._held: Counter[str] = Counter()
        self._going: dict[str, asyncio.Event] = {}
        self._unwanted: set[str] = set()  # somebody has dropped it while another held it
        self._dropping = asyncio.Lock()

    @asynccontextmanager
    async def keep(self, content: bytes | AsyncIterable[bytes]) -> AsyncGenerator[Kept]:
        held: list[str] = []

        async def take_hold(name: str) -> None:
            await self._take_hold(name)
            held.append(name)

        try:
            name = await self._blobs.put(content, take_hold)
            yield Kept(name, await self._blobs.size(name))
        except BaseException:
            self._unwanted.update(held)
            raise
        finally:
            await self._let_go(held)

    @asynccontextmanager
    async def keep_all(self, contents: Sequence[bytes]) -> AsyncGenerator[Sequence[Kept]]:
        held: list[str] = []

        async def take_hold(names: Sequence[str]) -> None:
            for name in names:
                await self._take_hold(name)
                held.append(name)

        try:
            names = await self._blobs.put_all(contents, take_hold)
            yield [Kept(name, len(content)) for name, content in zip(names, contents, strict=True)]
        except BaseException:
            self._unwanted.update(held)
            raise
        finally:
            await self._let_go(held)

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncGenerator[None]:
        await self._take_hold(name)
        try:
            await self._blobs.size(name)
            yield
        finally:
            await self._let_go([name])

    async def drop(self, names: Iterable[str]) -> None:
        await self._drop(names)

    def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        return self._blobs.read(name, start, end)

    async def read_all(self, names: Sequence[str]) -> Sequence[bytes | None]:
        return await self._blobs.read_all(names)

    async def sweep(self) -> int:
        return await self._sweep(self._grace_seconds)

    @asynccontextmanager
    async def swept(self, clock: Clock) -> AsyncGenerator[Self]:
        """Sweep now, for whoever is the only one to use them, and then every so often until the block is left."""
        sweeper = asyncio.create_task(self._sweep_forever(clock), name="blobs: sweeper")
        try:
            yield self
        finally:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)

    async def _sweep_forever(self, clock: Clock) -> None:
        grace = 0.0  # what was there before us is no longer on its way to a record
        while True:
            try:
                if number := await self._sweep(grace):
                    logger.warning("blobs_swept", extra={"fields": {"number": number}})
            except Unavailable as error:
                logger.warning("Blobs could not be swept: %s", error.message)
            except Exception:
                logger.exception("Blobs could not be swept.")
            grace = self._grace_seconds
            await clock.sleep(self._grace_seconds)

    async def _sweep(self, grace_seconds: float) -> int:
        number = 0
        async with aclosing(self._blobs.names(grace_seconds)) as found:
            async for names in found:
                number += await self._drop(names)
        return number

    async def _take_hold(self, name: str) -> None:
        while (going := self._going.get(name)) is not None:
            await going.wait()
        self._held[name] += 1

    async def _let_go(self, names: Sequence[str]) -> None:
        self._held.subtract(names)
        free = {name for name in names if not self._held[name]}
        for name in free:
            del self._held[name]
        unwanted = free & self._unwanted
        self._unwanted -= unwanted
        if unwanted:
            await self._drop(unwanted)

    async def _drop(self, names: Iterable[str]) -> int:
        number = 0
        for some in batched(sorted({name for name in names if name}), _AT_ONCE):
            try:
                async with self._dropping:
                    number += await self._drop_some(some)
            except Unavailable as error:
                logger.warning("Blobs could not be deleted, and are left to the next sweep: %s", error)
        return number

    async def _drop_some(self, names: Iterable[str]) -> int:
        free = [name for name in names if name not in self._held]
        self._unwanted.update(name for name in names if name in self._held)
        gone = asyncio.Event()
        self._going.update((name, gone) for name in free)
        try:
            unused = await self._store.unused_blobs(free)
            await self._blobs.delete(*unused)
            return len(unused)
        finally:
            for name in free:
                del self._going[name]
            gone.set()
