"""Storage of large contents by their hash."""

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


class BlobStore(Protocol):
    """Bytes by the name of their content; equal contents are one blob. Raises Unavailable where the disk fails."""

    async def put(
        self,
        content: bytes | AsyncIterable[bytes],
        before_commit: Callable[[str], Awaitable[None]] | None = None,
    ) -> str:
        """Keep the content, whole or not at all; the name of the blob.

        named: told of the name when all is there, before the blob has it; if it raises, nothing is kept.
        """
        ...

    async def put_many(
        self,
        contents: Sequence[bytes],
        before_commit: Callable[[Sequence[str]], Awaitable[None]] | None = None,
    ) -> Sequence[str]:
        """As `put`, for many small blobs together: all of them or none, and sooner than one after another."""
        ...

    async def get_size(self, name: str) -> int:
        """How many bytes the blob has; raises KeyError."""
        ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        """The bytes from `start` up to `end`, or to the last, in pieces. Raises KeyError before the first."""
        ...

    async def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """The content of small blobs, in this order; None for one that is not there."""
        ...

    async def delete(self, *names: str) -> None:
        """Remove these blobs; one that is not there is no error."""
        ...

    def list_names(self, older_than: float) -> AsyncGenerator[Sequence[str]]:
        """The names of all blobs that were put more than so many seconds ago, some at a time."""
        ...


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob that is there."""

    name: str
    bytes: int


class ReferencedBlobs(Protocol):
    """Bytes that records refer to. Equal contents are one blob; what nothing refers to any more goes.

    Raises Unavailable where the disk fails.
    """

    def put_pinned(self, content: bytes | AsyncIterable[bytes]) -> AbstractAsyncContextManager[BlobRef]:
        """Put the content; within the block nobody takes it for unused, so that a record can be made that refers to it.
        If the block is left by an exception, nothing is kept for it.
        """
        ...

    def put_many_pinned(self, contents: Sequence[bytes]) -> AbstractAsyncContextManager[Sequence[BlobRef]]:
        """As `keep`, for many small ones together."""
        ...

    def pin(self, name: str) -> AbstractAsyncContextManager[None]:
        """As `keep`, for a blob that is there already; raises KeyError if it is not."""
        ...

    async def delete_unreferenced(self, names: Iterable[str]) -> None:
        """Delete those that no record refers to and nobody keeps; empty names are none. What cannot be deleted now,
        the next sweep finds.
        """
        ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        """As `BlobStore.read`."""
        ...

    async def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """As `BlobStore.read_all`."""
        ...

    async def collect_garbage(self) -> int:
        """Delete what no record refers to, unless it came a moment ago; how many there were."""
        ...
