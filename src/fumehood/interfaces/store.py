"""Durable storage of responses, containers, uploads and keys."""

from collections.abc import (
    Collection,
    Sequence,
)
from dataclasses import dataclass
from typing import Protocol

from fumehood.protocol.api_keys import ApiKeyRecord
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.protocol.openai.page_query import PageQuery
from fumehood.protocol.openai.responses import Response

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
class FileTotals:
    """So many files, and how many bytes they are together."""

    files: int
    bytes: int


class LeaseLost(Exception):
    """Somebody else has taken over this response, or ended it."""


class Store(Protocol):
    """Responses, conversations, containers, uploads. What a method has returned from is durable, `begin` excepted.

    Made for several processes: a running response has a lease, and what its owner writes after it was lost raises
    Fenced. Raises Unavailable where the database cannot be reached.
    """

    async def check_writable(self) -> None:
        """Before work begins whose end has to be written; raises StorageUnavailable where that would be in vain."""
        ...

    async def begin_response(self, tenant: str, response: Response) -> Lease:
        """A response that runs now; readable soon, and `failed` after the next `recover` if nothing more comes."""
        ...

    async def renew_leases(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Those that are still ours, for a while longer."""
        ...

    async def commit_response(
        self, lease: Lease | None, tenant: str, response: Response, entries: Sequence[ConversationEntry]
    ) -> None:
        """The end of a response: it with all its entries, input and output, or nothing. They continue the
        conversation of `response.previous_response_id`. Without a lease it is one that was never begun.
        Raises Fenced.
        """
        ...

    async def fail_orphaned_responses(self) -> int:
        """Mark as failed every response that runs under nobody's lease; how many."""
        ...

    async def get_response(self, tenant: str, response_id: str) -> Response | None: ...

    async def get_conversation(self, tenant: str, response_id: str) -> Sequence[ConversationSegment] | None:
        """Everything up to the end of that response; None if there is none, or it still runs."""
        ...

    async def list_input_items(self, tenant: str, response_id: str) -> Sequence[ConversationEntry] | None:
        """What stood before the output of that response, oldest first: the conversation and its own input."""
        ...

    async def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, ConversationEntry]:
        """Those items of the tenant's that are kept, by id."""
        ...

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        """False if there is none. Its items go as soon as no living response stands on them."""
        ...

    async def put_container(
        self, record: ContainerRecord, *, known_running: Collection[str] | None = None
    ) -> bool:
        """beside: the containers of its tenant that run, as far as the caller knows; False if another one does, also
        one that another process puts at this very moment. Then nothing was written.
        """
        ...

    async def update_container(
        self,
        record: ContainerRecord,
        deleted_files: Sequence[str] = (),
        *,
        expected: ContainerRecord | None = None,
    ) -> bool:
        """Both or nothing: False if there is no such container, if it has expired and the record says that it runs, or
        if it is deleted and the record says anything else.

        seen: how it was found; False also if it is not so any more, because another process has changed it since.
        """
        ...

    async def get_container(self, container_id: str) -> ContainerRecord | None: ...

    async def find_containers(
        self, tenant: str | None = None, *, running: bool = False
    ) -> Sequence[ContainerRecord]:
        """The containers of one tenant or of all, or of these the running ones; oldest first."""
        ...

    async def list_containers(
        self, tenant: str, query: PageQuery, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        """The tenant's containers that are not deleted, all or those of that name. Raises InvalidRequest."""
        ...

    async def list_retaining_containers(self, tenant: str) -> Sequence[ContainerRecord]:
        """Those whose files outlive them, the one first that ended first."""
        ...

    async def list_ended_containers(
        self, *, expired_before: float, deleted_before: float
    ) -> Sequence[ContainerRecord]:
        """Some of those of all tenants that ended before, the one first that ended first."""
        ...

    async def delete_container(self, container_id: str) -> None:
        """Its record, and those of its files."""
        ...

    async def put_container_files(
        self, changed: Sequence[ContainerFileRecord], deleted: Sequence[str] = ()
    ) -> bool:
        """All or nothing: False if a container of those that changed is not running any more."""
        ...

    async def get_container_file(self, container_id: str, file_id: str) -> ContainerFileRecord | None: ...

    async def list_container_files(
        self, container_id: str, query: PageQuery | None = None
    ) -> Sequence[ContainerFileRecord]:
        """All of them, oldest first, or a window. Raises InvalidRequest."""
        ...

    async def find_unreferenced_blobs(self, names: Sequence[str]) -> Sequence[str]:
        """Those of these blobs that neither a file of any container nor an upload refers to, once everything is done
        that was asked for before, also by those who wait no more.
        """
        ...

    async def add_upload(self, record: UploadedFileRecord, quota: FileTotals | None = None) -> bool:
        """False if its tenant would then have more uploads than that; then nothing was added."""
        ...

    async def get_upload(self, tenant: str, file_id: str) -> UploadedFileRecord | None: ...

    async def list_uploads(
        self, tenant: str, query: PageQuery, *, purpose: str | None = None, now: float
    ) -> Sequence[UploadedFileRecord]:
        """The tenant's uploads that have not expired by then. Raises InvalidRequest."""
        ...

    async def get_upload_totals(self, tenant: str) -> FileTotals:
        """What the tenant has, with what has expired and is still there."""
        ...

    async def delete_upload(self, tenant: str, file_id: str) -> UploadedFileRecord | None:
        """What was deleted; None if there was nothing."""
        ...

    async def list_expired_uploads(self, now: float, limit: int) -> Sequence[UploadedFileRecord]:
        """Uploads of all tenants that have expired, those first whose time was over first."""
        ...

    async def claim_idempotency_key(
        self, tenant: str, key: str, claim: IdempotencyClaim, seconds: float
    ) -> IdempotencyClaim | None:
        """Let the tenant's idempotency key stand for this request, for so many seconds; None. If it stands for one
        already, gives that one and changes nothing.
        """
        ...

    async def get_idempotency_claim(self, tenant: str, key: str) -> IdempotencyClaim | None:
        """What the key stands for; nothing is changed."""
        ...

    async def release_idempotency_key(self, tenant: str, key: str, response_id: str) -> None:
        """The key stands for nothing any more, if it stood for this response."""
        ...

    async def add_api_key(self, key: ApiKeyRecord) -> None: ...

    async def revoke_api_key(self, key_id: str, now: float) -> bool:
        """False if there is none, or it was revoked already."""
        ...

    async def list_api_keys(self) -> Sequence[ApiKeyRecord]:
        """All that ever were, revoked ones too, oldest first."""
        ...

    async def get_api_keys_revision(self) -> int:
        """Another number as soon as anybody, in another process too, has put or revoked a key; 0 before the first."""
        ...

    async def close(self) -> None: ...
