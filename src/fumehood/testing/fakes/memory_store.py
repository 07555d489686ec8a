"""A `Store` in memory."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec

from fumehood.interfaces import Clock, FileTotals, IdempotencyClaim, ResponseLease, ResponseLeaseLost
from fumehood.protocol.api_keys import ApiKeyRecord
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.api_errors import ServiceUnavailable
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.protocol.openai.items import OutputItem
from fumehood.protocol.openai.pagination import PageQuery, find_page
from fumehood.protocol.openai.responses import RUN_LOST_ERROR, Response
from fumehood.testing.fakes.fake_clock import FakeClock

_decoder = msgspec.json.Decoder(Response)
_STATUS_ORDER = ("running", "expired", "deleted")  # a status never moves back


@dataclass(frozen=True, slots=True, eq=False)
class _MemoryTurn:
    """What a response added, and the turn before. Garbage collection removes it with the last reference."""

    previous: "_MemoryTurn | None"
    segment: ConversationSegment

    def list_segments(self) -> list[ConversationSegment]:
        turn: _MemoryTurn | None = self
        found: list[ConversationSegment] = []
        while turn is not None:
            found.append(turn.segment)
            turn = turn.previous
        return found[::-1]


@dataclass(slots=True)
class _MemoryResponseRow:
    """A response. `body` is the response without its output; `expires_at` is None once it has ended."""

    tenant: str
    body: bytes
    epoch: int
    expires_at: float | None
    previous: _MemoryTurn | None
    turn: _MemoryTurn | None = None
    output: list[OutputItem] = field(default_factory=list[OutputItem])

    @property
    def tip(self) -> _MemoryTurn | None:
        return self.turn or self.previous

    def complete(self, response: Response) -> None:
        self.body, self.output, self.expires_at = (
            _encode_without_output(response),
            list(response.output),
            None,
        )


def _encode_without_output(response: Response) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(response, output=[]))


@dataclass(slots=True)
class _Tables:
    responses: dict[str, _MemoryResponseRow] = field(default_factory=dict[str, _MemoryResponseRow])
    containers: dict[str, ContainerRecord] = field(default_factory=dict[str, ContainerRecord])
    files: dict[str, ContainerFileRecord] = field(default_factory=dict[str, ContainerFileRecord])
    uploads: dict[str, UploadedFileRecord] = field(default_factory=dict[str, UploadedFileRecord])
    claims: dict[tuple[str, str], tuple[IdempotencyClaim, float]] = field(
        default_factory=dict[tuple[str, str], tuple[IdempotencyClaim, float]]
    )
    keys: dict[str, ApiKeyRecord] = field(default_factory=dict[str, ApiKeyRecord])


class MemoryStore:
    """A `Store` in memory. Leases expire by its clock.

    commit_count: number of committed responses. is_shared: whether other processes use it, for containers.
    """

    def __init__(self, clock: Clock | None = None, *, lease_seconds: float = 30) -> None:
        self._clock = clock or FakeClock()
        self._lease_seconds = lease_seconds
        self._data = _Tables()
        self._closed = False
        self.commit_count = 0
        self.is_shared = False

    def open_second(self) -> Self:
        """Return the store as a second process sees it."""
        other = type(self)(self._clock, lease_seconds=self._lease_seconds)
        other._data = self._data
        return other

    # --- responses ------------------------------------------------------------------------------------

    async def check_writable(self) -> None:
        self._check_open()

    async def begin_response(self, tenant: str, response: Response) -> ResponseLease:
        before = self._find_row(tenant, response.previous_response_id)
        self._check_open().responses[response.id] = _MemoryResponseRow(
            tenant,
            _encode_without_output(response),
            epoch=1,
            expires_at=self._clock.now() + self._lease_seconds,
            previous=before.tip if before and before.expires_at is None else None,
        )
        return ResponseLease(response.id, 1)

    async def renew_leases(self, leases: Sequence[ResponseLease]) -> Sequence[ResponseLease]:
        rows = self._check_open().responses
        held = [lease for lease in leases if _is_held(lease, rows.get(lease.response_id))]
        for lease in held:
            rows[lease.response_id].expires_at = self._clock.now() + self._lease_seconds
        return held

    async def commit_response(
        self,
        lease: ResponseLease | None,
        tenant: str,
        response: Response,
        entries: Sequence[ConversationEntry],
    ) -> None:
        if lease is None and response.id in self._check_open().responses:
            raise ResponseLeaseLost(response.id)
        lease = lease or await self.begin_response(tenant, response)
        row = self._find_row(tenant, lease.response_id)
        if row is None or not _is_held(lease, row):
            raise ResponseLeaseLost(lease.response_id)
        row.complete(response)
        row.turn = _MemoryTurn(row.previous, ConversationSegment(tuple(entries))) if entries else None
        self.commit_count += 1

    async def fail_orphaned_responses(self) -> int:
        lost = [
            row
            for row in self._check_open().responses.values()
            if row.expires_at is not None and row.expires_at <= self._clock.now()
        ]
        for row in lost:
            response = _decoder.decode(row.body)
            response.status, response.error = "failed", RUN_LOST_ERROR
            row.complete(response)
            row.epoch += 1
        return len(lost)

    async def get_response(self, tenant: str, response_id: str) -> Response | None:
        if (row := self._find_row(tenant, response_id)) is None:
            return None
        response = _decoder.decode(row.body)
        response.output = list(row.output)
        return response

    async def get_conversation(self, tenant: str, response_id: str) -> Sequence[ConversationSegment] | None:
        row = self._find_row(tenant, response_id)
        if row is None or row.expires_at is not None:
            return None
        return row.tip.list_segments() if row.tip else []

    async def list_input_items(self, tenant: str, response_id: str) -> Sequence[ConversationEntry] | None:
        if (row := self._find_row(tenant, response_id)) is None:
            return None
        before = [
            entry
            for segment in (row.previous.list_segments() if row.previous else ())
            for entry in segment.entries
        ]
        own = row.turn.segment.entries if row.turn else ()
        return before + [entry for entry in own if entry.turn == 0]

    async def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, ConversationEntry]:
        found: dict[str, ConversationEntry] = {}
        for entry in self._iter_items(tenant):
            if entry.id is None or entry.id not in item_ids:
                continue
            # An item that a model made precedes one that a client sent.
            if entry.id not in found or (entry.turn and not found[entry.id].turn):
                found[entry.id] = entry
        return found

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        if self._find_row(tenant, response_id) is None:
            return False
        del self._data.responses[response_id]
        return True

    # --- containers -----------------------------------------------------------------------------------

    async def put_container(
        self, record: ContainerRecord, *, known_running: Collection[str] | None = None
    ) -> bool:
        containers = self._check_open().containers
        running = (
            other.id for other in containers.values() if other.tenant == record.tenant and _is_running(other)
        )
        if known_running is not None and not {record.id, *known_running}.issuperset(running):
            return False
        containers[record.id] = record
        return True

    async def update_container(
        self,
        record: ContainerRecord,
        deleted_files: Sequence[str] = (),
        *,
        expected: ContainerRecord | None = None,
    ) -> bool:
        known = self._check_open().containers.get(record.id)
        if known is None or _STATUS_ORDER.index(record.status) < _STATUS_ORDER.index(known.status):
            return False
        if expected is not None and known != expected:
            return False
        self._data.containers[record.id] = record
        return await self.put_container_files((), deleted_files)

    async def get_container(self, container_id: str) -> ContainerRecord | None:
        return self._check_open().containers.get(container_id)

    async def find_containers(
        self, tenant: str | None = None, *, running: bool = False
    ) -> Sequence[ContainerRecord]:
        found = [
            record
            for record in self._check_open().containers.values()
            if (tenant is None or record.tenant == tenant) and (_is_running(record) or not running)
        ]
        return sorted(found, key=lambda record: (record.created_at, record.id))

    async def list_containers(
        self, tenant: str, query: PageQuery, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        found = [
            record
            for record in await self.find_containers(tenant)
            if record.status != "deleted" and name in (None, record.spec.name)
        ]
        return find_page(query, found)

    async def list_retaining_containers(self, tenant: str) -> Sequence[ContainerRecord]:
        found = [record for record in await self.find_containers(tenant) if record.retained]
        return sorted(found, key=lambda record: (record.ended_at, record.id))

    async def list_ended_containers(
        self, *, expired_before: float, deleted_before: float
    ) -> Sequence[ContainerRecord]:
        before = {"running": -math.inf, "expired": expired_before, "deleted": deleted_before}
        found = [
            record
            for record in self._check_open().containers.values()
            if record.ended_at <= before[record.status]
        ]
        return sorted(found, key=lambda record: record.ended_at)

    async def delete_container(self, container_id: str) -> None:
        self._check_open().containers.pop(container_id, None)
        await self.put_container_files(
            (), [record.id for record in await self.list_container_files(container_id)]
        )

    async def put_container_files(
        self, changed: Sequence[ContainerFileRecord], deleted: Sequence[str] = ()
    ) -> bool:
        running = {record.id for record in await self.find_containers(running=True)}
        if not running.issuperset(record.container_id for record in changed):
            return False
        files = self._check_open().files
        files.update((record.id, record) for record in changed)
        for file_id in deleted:
            files.pop(file_id, None)
        return True

    async def get_container_file(self, container_id: str, file_id: str) -> ContainerFileRecord | None:
        record = self._check_open().files.get(file_id)
        return record if record is not None and record.container_id == container_id else None

    async def list_container_files(
        self, container_id: str, query: PageQuery | None = None
    ) -> Sequence[ContainerFileRecord]:
        found = [
            record for record in self._check_open().files.values() if record.container_id == container_id
        ]
        found.sort(key=lambda record: (record.created_at, record.id))
        if query is None:
            return found
        return find_page(query, found)

    async def find_unreferenced_blobs(self, names: Sequence[str]) -> Sequence[str]:
        data = self._check_open()
        used = {record.blob for record in (*data.files.values(), *data.uploads.values())}
        return [name for name in names if name not in used]

    # --- uploads --------------------------------------------------------------------------------------

    async def add_upload(self, record: UploadedFileRecord, quota: FileTotals | None = None) -> bool:
        totals = await self.get_upload_totals(record.tenant)
        if quota is not None and (totals.files >= quota.files or totals.bytes + record.bytes > quota.bytes):
            return False
        self._data.uploads[record.id] = record
        return True

    async def get_upload(self, tenant: str, file_id: str) -> UploadedFileRecord | None:
        record = self._check_open().uploads.get(file_id)
        return record if record is not None and record.tenant == tenant else None

    async def list_uploads(
        self, tenant: str, query: PageQuery, *, purpose: str | None = None, now: float
    ) -> Sequence[UploadedFileRecord]:
        found = [
            record
            for record in self._check_open().uploads.values()
            if record.tenant == tenant
            and purpose in (None, record.purpose)
            and (record.expires_at is None or record.expires_at > now)
        ]
        found.sort(key=lambda record: (record.created_at, record.id))
        return find_page(query, found)

    async def get_upload_totals(self, tenant: str) -> FileTotals:
        sizes = [record.bytes for record in self._check_open().uploads.values() if record.tenant == tenant]
        return FileTotals(len(sizes), sum(sizes))

    async def delete_upload(self, tenant: str, file_id: str) -> UploadedFileRecord | None:
        record = await self.get_upload(tenant, file_id)
        return self._data.uploads.pop(record.id) if record is not None else None

    async def list_expired_uploads(self, now: float, limit: int) -> Sequence[UploadedFileRecord]:
        expired = [
            (record.expires_at, record.id, record)
            for record in self._check_open().uploads.values()
            if record.expires_at is not None and record.expires_at <= now
        ]
        return [record for _, _, record in sorted(expired, key=lambda row: row[:2])[:limit]]

    # --- idempotency keys ---------------------------------------------------------------------------------------

    async def claim_idempotency_key(
        self, tenant: str, key: str, claim: IdempotencyClaim, seconds: float
    ) -> IdempotencyClaim | None:
        found = await self.get_idempotency_claim(tenant, key)
        if found is None:
            self._data.claims[tenant, key] = (claim, self._clock.now() + seconds)
        return found

    async def get_idempotency_claim(self, tenant: str, key: str) -> IdempotencyClaim | None:
        found = self._check_open().claims.get((tenant, key))
        return None if found is None or found[1] <= self._clock.now() else found[0]

    async def release_idempotency_key(self, tenant: str, key: str, response_id: str) -> None:
        found = self._check_open().claims.get((tenant, key))
        if found is not None and found[0].response_id == response_id:
            del self._data.claims[tenant, key]

    # --- API keys -----------------------------------------------------------------------------------------

    async def add_api_key(self, key: ApiKeyRecord) -> None:
        self._check_open().keys[key.id] = key

    async def revoke_api_key(self, key_id: str, now: float) -> bool:
        key = self._check_open().keys.get(key_id)
        if key is None or key.revoked_at is not None:
            return False
        self._data.keys[key_id] = msgspec.structs.replace(key, revoked_at=now)
        return True

    async def list_api_keys(self) -> Sequence[ApiKeyRecord]:
        return sorted(self._check_open().keys.values(), key=lambda key: (key.created_at, key.id))

    async def get_api_keys_revision(self) -> int:
        keys = self._check_open().keys.values()
        return len(keys) + sum(key.revoked_at is not None for key in keys)

    async def close(self) -> None:
        self._closed = True

    # --- internals ---------------------------------------------------------------------------------------

    def _check_open(self) -> _Tables:
        if self._closed:
            raise ServiceUnavailable("The store is closed.")
        return self._data

    def _find_row(self, tenant: str, response_id: str | None) -> _MemoryResponseRow | None:
        row = self._check_open().responses.get(response_id) if response_id is not None else None
        return row if row is not None and row.tenant == tenant else None

    def _iter_items(self, tenant: str) -> Iterator[ConversationEntry]:
        for row in self._check_open().responses.values():
            if row.tenant == tenant and row.tip:
                for segment in row.tip.list_segments():
                    yield from segment.entries


def _is_held(lease: ResponseLease, row: _MemoryResponseRow | None) -> bool:
    return row is not None and row.expires_at is not None and row.epoch == lease.epoch


def _is_running(record: ContainerRecord) -> bool:
    return record.status == "running"
