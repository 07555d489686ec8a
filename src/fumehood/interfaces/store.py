"""Durable records: responses, conversations, containers, uploads, idempotency keys and API keys."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fumehood.protocol.api_keys import ApiKeyRecord
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.openai.responses import Response


@dataclass(frozen=True, slots=True)
class ResponseLease:
    """The right to write to a running response. `epoch` is the fencing token."""

    response_id: str
    epoch: int


class ResponseLeaseLost(Exception):
    """Another process has taken over this response, or the response has ended."""


@dataclass(frozen=True, slots=True)
class IdempotencyClaim:
    """The response that an idempotency key stands for, and the digest of the request body."""

    digest: bytes
    response_id: str


@dataclass(frozen=True, slots=True)
class FileTotals:
    """A number of files and their total size in bytes."""

    files: int
    bytes: int


class ResponseStore(Protocol):
    """Responses and their leases.

    A write is durable when its method returns, except `begin_response`. Another tenant's responses are treated as
    absent. Every method raises StorageUnavailable if the database cannot be reached or written, and StorageCorrupted if
    it reads a damaged row.
    """

    async def check_writable(self) -> None:
        """Check that a response could be committed now. Raises StorageUnavailable if not."""
        ...

    async def begin_response(self, tenant: str, response: Response) -> ResponseLease:
        """Record a running response and lease it to the caller.

        It becomes readable soon, not at once. If its lease expires, `fail_orphaned_responses` marks it failed.

        tenant: its owner.
        response: as it stands, without output.
        """
        ...

    async def renew_leases(self, leases: Sequence[ResponseLease]) -> Sequence[ResponseLease]:
        """Extend leases, and return those that are still valid.

        leases: of responses that run in this process.
        """
        ...

    async def commit_response(
        self,
        lease: ResponseLease | None,
        tenant: str,
        response: Response,
        entries: Sequence[ConversationEntry],
    ) -> None:
        """Write a finished response and all its entries in one transaction.

        The entries continue the conversation of `response.previous_response_id`.

        lease: from `begin_response`; None for a response that was never begun.
        tenant: its owner.
        response: as it ended, with output.
        entries: its input and output items, in order.

        Raises ResponseLeaseLost, and writes nothing, if the lease is not valid any more or the response exists already.
        """
        ...

    async def fail_orphaned_responses(self) -> int:
        """Mark every running response without a valid lease as failed, and return their number."""
        ...

    async def get_response(self, tenant: str, response_id: str) -> Response | None:
        """Return a response with its output; None if there is none.

        tenant: its owner.
        response_id: running or finished.
        """
        ...

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        """Delete a response; False if there is none.

        Its items are deleted once no other response continues them.

        tenant: its owner.
        response_id: running or finished.
        """
        ...


class ConversationStore(Protocol):
    """Conversations, as `ResponseStore.commit_response` has written them.

    Another tenant's items are treated as absent. Every method raises StorageUnavailable if the database cannot be
    reached, and StorageCorrupted if it reads a damaged row.
    """

    async def get_conversation(self, tenant: str, response_id: str) -> Sequence[ConversationSegment] | None:
        """Return everything up to the end of a response; None if there is none, or it still runs.

        tenant: its owner.
        response_id: the last response of the conversation.
        """
        ...

    async def list_input_items(self, tenant: str, response_id: str) -> Sequence[ConversationEntry] | None:
        """Return what precedes the output of a response, oldest first: the earlier conversation and its own input.

        None if there is no such response.

        tenant: its owner.
        response_id: its id.
        """
        ...

    async def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, ConversationEntry]:
        """Return the stored items with these ids, by id. Unknown ids are left out.

        tenant: their owner.
        item_ids: of items in any conversation.
        """
        ...


class ContainerStore(Protocol):
    """Containers of all tenants.

    A write is durable when its method returns. Every method raises StorageUnavailable if the database cannot be reached
    or written, and StorageCorrupted if it reads a damaged row.
    """

    @property
    def is_shared(self) -> bool:
        """Whether other processes may use the same containers at the same time."""
        ...

    async def put_container(
        self, record: ContainerRecord, *, known_running: Collection[str] | None = None
    ) -> bool:
        """Add a container; False if `known_running` is out of date, and then nothing is written.

        record: the new container.
        known_running: ids of all running containers of the tenant; None to skip the check. It protects a quota from
            two processes that add containers at the same time.
        """
        ...

    async def update_container(
        self,
        record: ContainerRecord,
        deleted_files: Sequence[str] = (),
        *,
        expected: ContainerRecord | None = None,
    ) -> bool:
        """Replace a container's record and delete some of its files, in one transaction; False if neither is done.

        That is so if there is no such container, if the record would revive an expired or a deleted one, or if the
        stored record is not `expected`.

        record: the new record.
        deleted_files: ids of files to delete with it.
        expected: the record as the caller last read it (compare-and-set); None to skip the check.
        """
        ...

    async def get_container(self, container_id: str) -> ContainerRecord | None:
        """Return a container of any tenant and status; None if there is none.

        container_id: its id.
        """
        ...

    async def find_containers(
        self, tenant: str | None = None, *, running: bool = False
    ) -> Sequence[ContainerRecord]:
        """Return containers, oldest first.

        tenant: of this tenant only; None for all.
        running: running ones only.
        """
        ...

    async def list_containers(
        self, tenant: str, query: PageQuery, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        """Return a page of a tenant's containers that are not deleted.

        tenant: their owner.
        query: order, cursor and limit.
        name: containers of this name only.

        Raises InvalidRequest if the cursor is unknown.
        """
        ...

    async def list_retaining_containers(self, tenant: str) -> Sequence[ContainerRecord]:
        """Return a tenant's ended containers whose files are still kept, the first that ended first.

        tenant: their owner.
        """
        ...

    async def list_ended_containers(
        self, *, expired_before: float, deleted_before: float
    ) -> Sequence[ContainerRecord]:
        """Return a batch of containers of all tenants that ended long ago, the first that ended first.

        expired_before, deleted_before: Unix times for expired and for deleted containers.
        """
        ...

    async def delete_container(self, container_id: str) -> None:
        """Delete the record of a container and those of its files. A missing one is no error.

        container_id: its id.
        """
        ...


class ContainerFileRecordStore(Protocol):
    """Records of the files in containers; the contents are blobs.

    A write is durable when its method returns. Every method raises StorageUnavailable if the database cannot be reached
    or written, and StorageCorrupted if it reads a damaged row.
    """

    async def put_container_files(
        self, changed: Sequence[ContainerFileRecord], deleted: Sequence[str] = ()
    ) -> bool:
        """Add, replace and delete files in one transaction; False if nothing is done, because a container of a
        changed file does not run any more.

        changed: records to add or replace.
        deleted: ids of files to delete.
        """
        ...

    async def get_container_file(self, container_id: str, file_id: str) -> ContainerFileRecord | None:
        """Return a file's record; None if there is none.

        container_id: the container that has it.
        file_id: its id.
        """
        ...

    async def list_container_files(
        self, container_id: str, query: PageQuery | None = None
    ) -> Sequence[ContainerFileRecord]:
        """Return the files of a container.

        container_id: its id.
        query: order, cursor and limit; None for all, oldest first.

        Raises InvalidRequest if the cursor is unknown.
        """
        ...


class UploadedFileRecordStore(Protocol):
    """Records of uploaded files; the contents are blobs.

    A write is durable when its method returns. Another tenant's uploads are treated as absent. Every method raises
    StorageUnavailable if the database cannot be reached or written, and StorageCorrupted if it reads a damaged row.
    """

    async def add_upload(self, record: UploadedFileRecord, quota: FileTotals | None = None) -> bool:
        """Add an upload; False if its tenant would exceed the quota, and then nothing is written.

        record: the new upload.
        quota: what the tenant may have in all; None for no limit.
        """
        ...

    async def get_upload(self, tenant: str, file_id: str) -> UploadedFileRecord | None:
        """Return an upload, expired or not; None if there is none.

        tenant: its owner.
        file_id: its id.
        """
        ...

    async def list_uploads(
        self, tenant: str, query: PageQuery, *, purpose: str | None = None, now: float
    ) -> Sequence[UploadedFileRecord]:
        """Return a page of a tenant's uploads that have not expired.

        tenant: their owner.
        query: order, cursor and limit.
        purpose: uploads of this purpose only.
        now: Unix time for expiry.

        Raises InvalidRequest if the cursor is unknown.
        """
        ...

    async def get_upload_totals(self, tenant: str) -> FileTotals:
        """Return what a tenant has stored, expired uploads included.

        tenant: their owner.
        """
        ...

    async def delete_upload(self, tenant: str, file_id: str) -> UploadedFileRecord | None:
        """Delete an upload and return its record; None if there is none.

        tenant: its owner.
        file_id: its id.
        """
        ...

    async def list_expired_uploads(self, now: float, limit: int) -> Sequence[UploadedFileRecord]:
        """Return expired uploads of all tenants, the first that expired first.

        now: Unix time for expiry.
        limit: how many at most.
        """
        ...


class IdempotencyStore(Protocol):
    """Idempotency keys and the responses that they stand for.

    A write is durable when its method returns. Every method raises StorageUnavailable if the database cannot be reached
    or written.
    """

    async def claim_idempotency_key(
        self, tenant: str, key: str, claim: IdempotencyClaim, seconds: float
    ) -> IdempotencyClaim | None:
        """Claim a key for a request and return None; or return the existing claim and change nothing.

        tenant: whose key it is.
        key: as the client sent it.
        claim: digest of the request and id of its response.
        seconds: until the claim expires.
        """
        ...

    async def get_idempotency_claim(self, tenant: str, key: str) -> IdempotencyClaim | None:
        """Return the claim of a key; None if there is none.

        tenant: whose key it is.
        key: as the client sent it.
        """
        ...

    async def release_idempotency_key(self, tenant: str, key: str, response_id: str) -> None:
        """Delete the claim of a key, if it stands for this response.

        tenant: whose key it is.
        key: as the client sent it.
        response_id: from the claim.
        """
        ...


class ApiKeyStore(Protocol):
    """API keys of all tenants.

    A write is durable when its method returns. Every method raises StorageUnavailable if the database cannot be reached
    or written, and StorageCorrupted if it reads a damaged row.
    """

    async def add_api_key(self, key: ApiKeyRecord) -> None:
        """Add a key.

        key: the hash of its secret, its tenant, scopes and limits.
        """
        ...

    async def revoke_api_key(self, key_id: str, now: float) -> bool:
        """Revoke a key; False if there is none, or it is revoked already.

        key_id: its id.
        now: Unix time to record.
        """
        ...

    async def list_api_keys(self) -> Sequence[ApiKeyRecord]:
        """Return all keys, revoked ones too, oldest first."""
        ...

    async def get_api_keys_revision(self) -> int:
        """Return a number that changes whenever any process adds or revokes a key; 0 before the first."""
        ...


class UnreferencedBlobFinder(Protocol):
    """Which blobs the records refer to. Raises StorageUnavailable if the database cannot be reached."""

    async def find_unreferenced_blobs(self, names: Sequence[str]) -> Sequence[str]:
        """Return those blobs that no container file and no upload refers to.

        Every write that was requested before counts, cancelled ones too.

        names: of the blobs to look up.
        """
        ...


class Store(
    ResponseStore,
    ConversationStore,
    ContainerStore,
    ContainerFileRecordStore,
    UploadedFileRecordStore,
    IdempotencyStore,
    ApiKeyStore,
    UnreferencedBlobFinder,
    Protocol,
):
    """One database with all records. Several processes may share it, if the implementation says so."""

    async def close(self) -> None:
        """Finish pending writes and close the database. Closing it twice is no error."""
        ...
