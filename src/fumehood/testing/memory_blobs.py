"""Blobs that are forgotten at the end; imports `interfaces` and the standard library."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence

from fumehood.interfaces import Clock
from fumehood.testing.clock import FakeClock


class MemoryBlobs:
    """A `BlobStore` without a disk; its blobs grow older by its clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.blobs: dict[str, bytes] = {}
        self._put_at: dict[str, float] = {}
        self._clock = clock or FakeClock()

    async def put(
        self,
        content: bytes | AsyncIterable[bytes],
        named: Callable[[str], Awaitable[None]] | None = None,
    ) -> str:
        whole = content if isinstance(content, bytes) else b"".join([piece async for piece in content])
        name = hashlib.sha256(whole).hexdigest()
        if named is not None:
            await named(name)
        self.blobs[name] = whole
        self._put_at[name] = self._clock.now()
        return name

    async def put_all(
        self,
        contents: Sequence[bytes],
        named: Callable[[Sequence[str]], Awaitable[None]] | None = None,
    ) -> Sequence[str]:
        names = [hashlib.sha256(content).hexdigest() for content in contents]
        if named is not None:
            await named(names)
        for content in contents:
            await self.put(content)
        return names

    async def size(self, name: str) -> int:
        return len(self.blobs[name])

    async def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        yield self.blobs[name][start:end]

    async def read_all(self, names: Sequence[str]) -> Sequence[bytes | None]:
        return [self.blobs.get(name) for name in names]

    async def delete(self, *names: str) -> None:
        for name in names:
            self.blobs.pop(name, None)

    async def names(self, older_than: float) -> AsyncGenerator[Sequence[str]]:
        until = self._clock.now() - older_than
        yield [name for name in self.blobs if self._put_at[name] < until]
