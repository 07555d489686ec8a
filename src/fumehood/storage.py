"""The seams of what is kept: `Store`, `BlobStore`, `Blobs`, `Sealer`; imports `fumehood.protocol`.

`fumehood.interfaces` gives them to whoever needs them, with all the others.
"""

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord
from fumehood.protocol.conversation import Entry, Segment
from fumehood.protocol.files import FileRecord
from fumehood.protocol.keys import ApiKey
from fumehood.protocol.listing import Window
from fumehood.protocol.responses import Response

# --- what clients carry for us ------------------------------------------------------------------------


class Unsealable(Exception):
    """What should have been sealed here for this tenant was not, or was changed since; says which, and no secret."""


class Sealer(Protocol):
    """Makes text that clients can carry and nobody else can read, change, or use for another tenant."""

    def seal(self, tenant: str, content: bytes) -> str: ...

    def open(self, tenant: str, sealed: str) -> bytes:
        """Raises Unsealable."""
        ...


# --- what is kept -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a running response; worth nothing once another epoch has begun."""

    response_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class IdempotencyClaim:
    """Which response a request has become; the digest is of its body."""

    digest: bytes
    response_id: str


@dataclass(frozen=True, slots=True)
class Amount:
    """So many files, and how many bytes they are together."""

    files: int
    bytes: int


class Fenced(Exception):
    """Somebody else has taken over this response, or ended it."""


class Store(Protocol):
    """Responses, conversations, containers, uploads. What a method has returned from is durable, `begin` excepted.

    Made for several processes: a running response has a lease, and what its owner writes after it was lost raises
    Fenced. Raises Unavailable where the database cannot be reached.
    """

    async def check_writable(self) -> None:
        """Before work begins whose end has to be written; raises StorageUnavailable where that would be in vain."""
        ...

    async def begin(self, tenant: str, response: Response) -> Lease:
        """A response that runs now; readable soon, and `failed` after the next `recover` if nothing more comes."""
        ...

    async def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Those that are still ours, for a while longer."""
        ...

    async def commit(
        self, lease: Lease | None, tenant: str, response: Response, entries: Sequence[Entry]
    ) -> None:
        """The end of a response: it with all its entries, input and output, or nothing. They continue the
        conversation of `response.previous_response_id`. Without a lease it is one that was never begun.
        Raises Fenced.
        """
        ...

    async def recover(self) -> int:
        """Mark as failed every response that runs under nobody's lease; how many."""
        ...

    async def response(self, tenant: str, response_id: str) -> Response | None: ...

    async def conversation(self, tenant: str, response_id: str) -> Sequence[Segment] | None:
        """Everything up to the end of that response; None if there is none, or it still runs."""
        ...

    async def input_entries(self, tenant: str, response_id: str) -> Sequence[Entry] | None:
        """What stood before the output of that response, oldest first: the conversation and its own input."""
        ...

    async def entries(self, tenant: str, item_ids: Sequence[str]) -> dict[str, Entry]:
        """Those items of the tenant's that are kept, by id."""
        ...

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        """False if there is none. Its items go as soon as no living response stands on them."""
        ...

    async def put_container(self, record: ContainerRecord, *, beside: Collection[str] | None = None) -> bool:
        """beside: the containers of its tenant that run, as far as the caller knows; False if another one does, also
        one that another process puts at this very moment. Then nothing was written.
        """
        ...

    async def change_container(
        self,
        record: ContainerRecord,
        deleted_files: Sequence[str] = (),
        *,
        seen: ContainerRecord | None = None,
    ) -> bool:
        """Both or nothing: False if there is no such container, if it has expired and the record says that it runs, or
        if it is deleted and the record says anything else.

        seen: how it was found; False also if it is not so any more, because another process has changed it since.
        """
        ...

    async def container(self, container_id: str) -> ContainerRecord | None: ...

    async def containers(
        self, tenant: str | None = None, *, running: bool = False
    ) -> Sequence[ContainerRecord]:
        """The containers of one tenant or of all, or of these the running ones; oldest first."""
        ...

    async def list_containers(
        self, tenant: str, window: Window, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        """The tenant's containers that are not deleted, all or those of that name. Raises InvalidRequest."""
        ...

    async def retaining_containers(self, tenant: str) -> Sequence[ContainerRecord]:
        """Those whose files outlive them, the one first that ended first."""
        ...

    async def ended_containers(
        self, *, expired_before: float, deleted_before: float
    ) -> Sequence[ContainerRecord]:
        """Some of those of all tenants that ended before, the one first that ended first."""
        ...

    async def delete_container(self, container_id: str) -> None:
        """Its record, and those of its files."""
        ...

    async def put_files(self, changed: Sequence[ContainerFileRecord], deleted: Sequence[str] = ()) -> bool:
        """All or nothing: False if a container of those that changed is not running any more."""
        ...

    async def file(self, container_id: str, file_id: str) -> ContainerFileRecord | None: ...

    async def files(self, container_id: str, window: Window | None = None) -> Sequence[ContainerFileRecord]:
        """All of them, oldest first, or a window. Raises InvalidRequest."""
        ...

    async def unused_blobs(self, names: Sequence[str]) -> Sequence[str]:
        """Those of these blobs that neither a file of any container nor an upload refers to, once everything is done
        that was asked for before, also by those who wait no more.
        """
        ...

    async def add_upload(self, record: FileRecord, most: Amount | None = None) -> bool:
        """False if its tenant would then have more uploads than that; then nothing was added."""
        ...

    async def upload(self, tenant: str, file_id: str) -> FileRecord | None: ...

    async def uploads(
        self, tenant: str, window: Window, *, purpose: str | None = None, now: float
    ) -> Sequence[FileRecord]:
        """The tenant's uploads that have not expired by then. Raises InvalidRequest."""
        ...

    async def uploaded(self, tenant: str) -> Amount:
        """What the tenant has, with what has expired and is still there."""
        ...

    async def delete_upload(self, tenant: str, file_id: str) -> FileRecord | None:
        """What was deleted; None if there was nothing."""
        ...

    async def expired_uploads(self, now: float, limit: int) -> Sequence[FileRecord]:
        """Uploads of all tenants that have expired, those first whose time was over first."""
        ...

    async def claim(
        self, tenant: str, key: str, claim: IdempotencyClaim, seconds: float
    ) -> IdempotencyClaim | None:
        """Let the tenant's idempotency key stand for this request, for so many seconds; None. If it stands for one
        already, gives that one and changes nothing.
        """
        ...

    async def claimed(self, tenant: str, key: str) -> IdempotencyClaim | None:
        """What the key stands for; nothing is changed."""
        ...

    async def release(self, tenant: str, key: str, response_id: str) -> None:
        """The key stands for nothing any more, if it stood for this response."""
        ...

    async def put_key(self, key: ApiKey) -> None: ...

    async def revoke_key(self, key_id: str, now: float) -> bool:
        """False if there is none, or it was revoked already."""
        ...

    async def keys(self) -> Sequence[ApiKey]:
        """All that ever were, revoked ones too, oldest first."""
        ...

    async def keys_revision(self) -> int:
        """Another number as soon as anybody, in another process too, has put or revoked a key; 0 before the first."""
        ...

    async def close(self) -> None: ...


class BlobStore(Protocol):
    """Bytes by the name of their content; equal contents are one blob. Raises Unavailable where the disk fails."""

    async def put(
        self,
        content: bytes | AsyncIterable[bytes],
        named: Callable[[str], Awaitable[None]] | None = None,
    ) -> str:
        """Keep the content, whole or not at all; the name of the blob.

        named: told of the name when all is there, before the blob has it; if it raises, nothing is kept.
        """
        ...

    async def put_all(
        self,
        contents: Sequence[bytes],
        named: Callable[[Sequence[str]], Awaitable[None]] | None = None,
    ) -> Sequence[str]:
        """As `put`, for many small blobs together: all of them or none, and sooner than one after another."""
        ...

    async def size(self, name: str) -> int:
        """How many bytes the blob has; raises KeyError."""
        ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        """The bytes from `start` up to `end`, or to the last, in pieces. Raises KeyError before the first."""
        ...

    async def read_all(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """The content of small blobs, in this order; None for one that is not there."""
        ...

    async def delete(self, *names: str) -> None:
        """Remove these blobs; one that is not there is no error."""
        ...

    def names(self, older_than: float) -> AsyncGenerator[Sequence[str]]:
        """The names of all blobs that were put more than so many seconds ago, some at a time."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """A blob that is there."""

    name: str
    bytes: int


class Blobs(Protocol):
    """Bytes that records refer to. Equal contents are one blob; what nothing refers to any more goes.

    Raises Unavailable where the disk fails.
    """

    def keep(self, content: bytes | AsyncIterable[bytes]) -> AbstractAsyncContextManager[Kept]:
        """Put the content; within the block nobody takes it for unused, so that a record can be made that refers to it.
        If the block is left by an exception, nothing is kept for it.
        """
        ...

    def keep_all(self, contents: Sequence[bytes]) -> AbstractAsyncContextManager[Sequence[Kept]]:
        """As `keep`, for many small ones together."""
        ...

    def hold(self, name: str) -> AbstractAsyncContextManager[None]:
        """As `keep`, for a blob that is there already; raises KeyError if it is not."""
        ...

    async def drop(self, names: Iterable[str]) -> None:
        """Delete those that no record refers to and nobody keeps; empty names are none. What cannot be deleted now,
        the next sweep finds.
        """
        ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        """As `BlobStore.read`."""
        ...

    async def read_all(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """As `BlobStore.read_all`."""
        ...

    async def sweep(self) -> int:
        """Delete what no record refers to, unless it came a moment ago; how many there were."""
        ...
