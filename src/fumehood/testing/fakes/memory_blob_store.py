"""A `BlobStore` in memory."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, Sequence

from fumehood.interfaces import BeforeCommit, Clock
from fumehood.testing.fakes.fake_clock import FakeClock


class MemoryBlobStore:
    """A `BlobStore` in memory. The age of its blobs follows its clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.contents: dict[str, bytes] = {}
        self._put_at: dict[str, float] = {}
        self._clock = clock or FakeClock()

    async def put(
        self,
        content: bytes | AsyncIterable[bytes],
        before_commit: BeforeCommit | None = None,
    ) -> str:
        data = content if isinstance(content, bytes) else b"".join([chunk async for chunk in content])
        name = hashlib.sha256(data).hexdigest()
        if before_commit is not None:
            await before_commit([name])
        self.contents[name] = data
        self._put_at[name] = self._clock.now()
        return name

    async def put_many(
        self,
        contents: Sequence[bytes],
        before_commit: BeforeCommit | None = None,
    ) -> Sequence[str]:
        names = [hashlib.sha256(content).hexdigest() for content in contents]
        if before_commit is not None:
            await before_commit(names)
        for content in contents:
            await self.put(content)
        return names

    async def get_size(self, name: str) -> int:
        return len(self.contents[name])

    async def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        yield self.contents[name][start:end]

    async def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        return [self.contents.get(name) for name in names]

    async def delete(self, *names: str) -> None:
        for name in names:
            self.contents.pop(name, None)

    async def list_names(self, older_than: float) -> AsyncGenerator[Sequence[str]]:
        until = self._clock.now() - older_than
        yield [name for name in self.contents if self._put_at[name] < until]
