"""Content-addressed storage of large contents."""

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

type BeforeCommit = Callable[[Sequence[str]], Awaitable[None]]
"""Called with the names of new blobs."""


class BlobStore(Protocol):
    """Blobs by the SHA-256 of their content; equal contents are one blob.

    Every method raises StorageUnavailable if the disk fails or is full.
    """

    async def put(
        self,
        content: bytes | AsyncIterable[bytes],
        before_commit: BeforeCommit | None = None,
    ) -> str:
        """Store a blob, whole or not at all, and return its name.

        content: all bytes, or chunks.
        before_commit: called with its name before the blob becomes visible; if it raises, nothing is stored.

        Raises whatever `content` and `before_commit` raise.
        """
        ...

    async def put_many(
        self,
        contents: Sequence[bytes],
        before_commit: BeforeCommit | None = None,
    ) -> Sequence[str]:
        """Store many small blobs, all or none, and return their names in order. Faster than `put` for each.

        contents: one for each blob.
        before_commit: called with all names before the blobs become visible; if it raises, nothing is stored.

        Raises whatever `before_commit` raises.
        """
        ...

    async def get_size(self, name: str) -> int:
        """Return the size of a blob in bytes.

        name: from `put`.

        Raises KeyError if there is none.
        """
        ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        """Yield the bytes of a blob in chunks.

        name: from `put`.
        start, end: the range, as of a slice.

        Raises KeyError before the first chunk if there is no such blob.
        """
        ...

    async def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """Return the contents of small blobs in order; None for a missing one.

        names: from `put`.
        """
        ...

    async def delete(self, *names: str) -> None:
        """Delete blobs. A missing one is no error.

        names: from `put`.
        """
        ...

    def list_names(self, older_than: float) -> AsyncGenerator[Sequence[str]]:
        """Yield the names of all blobs of some age, in batches.

        older_than: seconds since they were last put.
        """
        ...


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Name and size of a stored blob."""

    name: str
    bytes: int


class GarbageCollectedBlobStore(Protocol):
    """Blobs that live as long as a record refers to them.

    A pin protects a blob from garbage collection until the record that refers to it is written. Every method raises
    StorageUnavailable if the disk fails or is full.
    """

    def put_pinned(self, content: bytes | AsyncIterable[bytes]) -> AbstractAsyncContextManager[BlobRef]:
        """Store a blob and pin it within the block.

        If the block raises, the blob is deleted unless a record refers to it.

        content: all bytes, or chunks.

        Raises whatever `content` raises.
        """
        ...

    def put_many_pinned(self, contents: Sequence[bytes]) -> AbstractAsyncContextManager[Sequence[BlobRef]]:
        """As `put_pinned`, for many small blobs.

        contents: one for each blob.
        """
        ...

    def pin(self, name: str) -> AbstractAsyncContextManager[None]:
        """Pin an existing blob within the block.

        name: of the blob.

        Raises KeyError if there is none.
        """
        ...

    async def delete_unreferenced(self, names: Iterable[str]) -> int:
        """Delete those blobs that no record refers to and nobody pins, and return their number.

        The next sweep deletes what fails now.

        names: of the blobs; empty names are ignored.
        """
        ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        """As `BlobStore.read`.

        name: of the blob.
        start, end: the range, as of a slice.

        Raises KeyError before the first chunk if there is no such blob.
        """
        ...

    async def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """As `BlobStore.read_many`.

        names: of the blobs.
        """
        ...

    async def collect_garbage(self) -> int:
        """Delete all unreferenced blobs except recent ones, and return their number."""
        ...
