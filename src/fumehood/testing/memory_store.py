"""A store that forgets everything at the end; imports msgspec, `interfaces`, `protocol`, the clock beside."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec

from fumehood.interfaces import Amount, Clock, Fenced, IdempotencyClaim, Lease
from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord
from fumehood.protocol.conversation import Entry, Segment
from fumehood.protocol.errors import InvalidRequest, Unavailable
from fumehood.protocol.files import FileRecord
from fumehood.protocol.items import OutputItem
from fumehood.protocol.keys import ApiKey
from fumehood.protocol.listing import Window
from fumehood.protocol.responses import INTERRUPTED, Response
from fumehood.testing.clock import FakeClock

_decoder = msgspec.json.Decoder(Response)
_ENDS = ("running", "expired", "deleted")  # what is further on never goes back


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """What a response added, and what it stands on; it lives as long as somebody stands on it."""

    before: "_Turn | None"
    segment: Segment

    def path(self) -> list[Segment]:
        turn: _Turn | None = self
        found: list[Segment] = []
        while turn is not None:
            found.append(turn.segment)
            turn = turn.before
        return found[::-1]


@dataclass(slots=True)
class _Row:
    """A response; `head` is all of it but its output. `expires` is None once it has ended."""

    tenant: str
    head: bytes
    epoch: int
    expires: float | None
    before: _Turn | None
    turn: _Turn | None = None
    output: list[OutputItem] = field(default_factory=list[OutputItem])

    @property
    def tip(self) -> _Turn | None:
        return self.turn or self.before

    def end(self, response: Response) -> None:
        self.head, self.output, self.expires = _head(response), list(response.output), None


def _head(response: Response) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(response, output=[]))


@dataclass(slots=True)
class _Data:
    responses: dict[str, _Row] = field(default_factory=dict[str, _Row])
    containers: dict[str, ContainerRecord] = field(default_factory=dict[str, ContainerRecord])
    files: dict[str, ContainerFileRecord] = field(default_factory=dict[str, ContainerFileRecord])
    uploads: dict[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    claims: dict[tuple[str, str], tuple[IdempotencyClaim, float]] = field(
        default_factory=dict[tuple[str, str], tuple[IdempotencyClaim, float]]
    )
    keys: dict[str, ApiKey] = field(default_factory=dict[str, ApiKey])


class MemoryStore:
    """A `Store` without a disk. Leases expire by its clock.

    commits: how often something was committed, for tests that nothing was.
    """

    def __init__(self, clock: Clock | None = None, *, lease_seconds: float = 30) -> None:
        self._clock = clock or FakeClock()
        self._lease_seconds = lease_seconds
        self._data = _Data()
        self._closed = False
        self.commits = 0

    def another(self) -> Self:
        """The store as another process sees it."""
        other = type(self)(self._clock, lease_seconds=self._lease_seconds)
        other._data = self._data
        return other

    # --- responses ------------------------------------------------------------------------------------

    async def check_writable(self) -> None:
        self._open()

    async def begin(self, tenant: str, response: Response) -> Lease:
        before = self._row(tenant, response.previous_response_id)
        self._open().responses[response.id] = _Row(
            tenant,
            _head(response),
            epoch=1,
            expires=self._clock.now() + self._lease_seconds,
            before=before.tip if before and before.expires is None else None,
        )
        return Lease(response.id, 1)

    async def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        rows = self._open().responses
        ours = [lease for lease in leases if _holds(lease, rows.get(lease.response_id))]
        for lease in ours:
            rows[lease.response_id].expires = self._clock.now() + self._lease_seconds
        return ours

    async def commit(
        self, lease: Lease | None, tenant: str, response: Response, entries: Sequence[Entry]
    ) -> None:
        if lease is None and response.id in self._open().responses:
            raise Fenced(response.id)
        lease = lease or await self.begin(tenant, response)
        row = self._row(tenant, lease.response_id)
        if row is None or not _holds(lease, row):
            raise Fenced(lease.response_id)
        row.end(response)
        row.turn = _Turn(row.before, Segment(tuple(entries))) if entries else None
        self.commits += 1

    async def recover(self) -> int:
        lost = [
            row
            for row in self._open().responses.values()
            if row.expires is not None and row.expires <= self._clock.now()
        ]
        for row in lost:
            response = _decoder.decode(row.head)
            response.status, response.error = "failed", INTERRUPTED
            row.end(response)
            row.epoch += 1
        return len(lost)

    async def response(self, tenant: str, response_id: str) -> Response | None:
        if (row := self._row(tenant, response_id)) is None:
            return None
        response = _decoder.decode(row.head)
        response.output = list(row.output)
        return response

    async def conversation(self, tenant: str, response_id: str) -> Sequence[Segment] | None:
        row = self._row(tenant, response_id)
        if row is None or row.expires is not None:
            return None
        return row.tip.path() if row.tip else []

    async def input_entries(self, tenant: str, response_id: str) -> Sequence[Entry] | None:
        if (row := self._row(tenant, response_id)) is None:
            return None
        before = [entry for segment in (row.before.path() if row.before else ()) for entry in segment.entries]
        own = row.turn.segment.entries if row.turn else ()
        return before + [entry for entry in own if entry.turn == 0]

    async def entries(self, tenant: str, item_ids: Sequence[str]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for entry in self._kept(tenant):
            if entry.id is None or entry.id not in item_ids:
                continue
            # What a model made comes before what a client gave back.
            if entry.id not in found or (entry.turn and not found[entry.id].turn):
                found[entry.id] = entry
        return found

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        if self._row(tenant, response_id) is None:
            return False
        del self._data.responses[response_id]
        return True

    # --- containers -----------------------------------------------------------------------------------

    async def put_container(self, record: ContainerRecord, *, beside: Collection[str] | None = None) -> bool:
        containers = self._open().containers
        running = (one.id for one in containers.values() if one.tenant == record.tenant and _runs(one))
        if beside is not None and not {record.id, *beside}.issuperset(running):
            return False
        containers[record.id] = record
        return True

    async def change_container(
        self,
        record: ContainerRecord,
        deleted_files: Sequence[str] = (),
        *,
        seen: ContainerRecord | None = None,
    ) -> bool:
        known = self._open().containers.get(record.id)
        if known is None or _ENDS.index(record.status) < _ENDS.index(known.status):
            return False
        if seen is not None and known != seen:
            return False
        self._data.containers[record.id] = record
        return await self.put_files((), deleted_files)

    async def container(self, container_id: str) -> ContainerRecord | None:
        return self._open().containers.get(container_id)

    async def containers(
        self, tenant: str | None = None, *, running: bool = False
    ) -> Sequence[ContainerRecord]:
        found = [
            one
            for one in self._open().containers.values()
            if (tenant is None or one.tenant == tenant) and (_runs(one) or not running)
        ]
        return sorted(found, key=lambda record: (record.created_at, record.id))

    async def list_containers(
        self, tenant: str, window: Window, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        found = [
            one
            for one in await self.containers(tenant)
            if one.status != "deleted" and name in (None, one.spec.name)
        ]
        return windowed(found[::-1] if window.newest_first else found, window)

    async def retaining_containers(self, tenant: str) -> Sequence[ContainerRecord]:
        found = [one for one in await self.containers(tenant) if one.retained]
        return sorted(found, key=lambda record: (record.ended_at, record.id))

    async def ended_containers(
        self, *, expired_before: float, deleted_before: float
    ) -> Sequence[ContainerRecord]:
        before = {"running": -math.inf, "expired": expired_before, "deleted": deleted_before}
        found = [one for one in self._open().containers.values() if one.ended_at <= before[one.status]]
        return sorted(found, key=lambda record: record.ended_at)

    async def delete_container(self, container_id: str) -> None:
        self._open().containers.pop(container_id, None)
        await self.put_files((), [record.id for record in await self.files(container_id)])

    async def put_files(self, changed: Sequence[ContainerFileRecord], deleted: Sequence[str] = ()) -> bool:
        running = {record.id for record in await self.containers(running=True)}
        if not running.issuperset(record.container_id for record in changed):
            return False
        files = self._open().files
        files.update((record.id, record) for record in changed)
        for file_id in deleted:
            files.pop(file_id, None)
        return True

    async def file(self, container_id: str, file_id: str) -> ContainerFileRecord | None:
        record = self._open().files.get(file_id)
        return record if record is not None and record.container_id == container_id else None

    async def files(self, container_id: str, window: Window | None = None) -> Sequence[ContainerFileRecord]:
        found = [record for record in self._open().files.values() if record.container_id == container_id]
        found.sort(key=lambda record: (record.created_at, record.id))
        if window is None:
            return found
        return windowed(found[::-1] if window.newest_first else found, window)

    async def unused_blobs(self, names: Sequence[str]) -> Sequence[str]:
        data = self._open()
        used = {record.blob for record in (*data.files.values(), *data.uploads.values())}
        return [name for name in names if name not in used]

    # --- uploads --------------------------------------------------------------------------------------

    async def add_upload(self, record: FileRecord, most: Amount | None = None) -> bool:
        has = await self.uploaded(record.tenant)
        if most is not None and (has.files >= most.files or has.bytes + record.bytes > most.bytes):
            return False
        self._data.uploads[record.id] = record
        return True

    async def upload(self, tenant: str, file_id: str) -> FileRecord | None:
        record = self._open().uploads.get(file_id)
        return record if record is not None and record.tenant == tenant else None

    async def uploads(
        self, tenant: str, window: Window, *, purpose: str | None = None, now: float
    ) -> Sequence[FileRecord]:
        found = [
            record
            for record in self._open().uploads.values()
            if record.tenant == tenant
            and purpose in (None, record.purpose)
            and (record.expires_at is None or record.expires_at > now)
        ]
        found.sort(key=lambda record: (record.created_at, record.id), reverse=window.newest_first)
        return windowed(found, window)

    async def uploaded(self, tenant: str) -> Amount:
        sizes = [record.bytes for record in self._open().uploads.values() if record.tenant == tenant]
        return Amount(len(sizes), sum(sizes))

    async def delete_upload(self, tenant: str, file_id: str) -> FileRecord | None:
        record = await self.upload(tenant, file_id)
        return self._data.uploads.pop(record.id) if record is not None else None

    async def expired_uploads(self, now: float, limit: int) -> Sequence[FileRecord]:
        over = [
            (record.expires_at, record.id, record)
            for record in self._open().uploads.values()
            if record.expires_at is not None and record.expires_at <= now
        ]
        return [record for _, _, record in sorted(over, key=lambda one: one[:2])[:limit]]

    # --- claims ---------------------------------------------------------------------------------------

    async def claim(
        self, tenant: str, key: str, claim: IdempotencyClaim, seconds: float
    ) -> IdempotencyClaim | None:
        found = await self.claimed(tenant, key)
        if found is None:
            self._data.claims[tenant, key] = (claim, self._clock.now() + seconds)
        return found

    async def claimed(self, tenant: str, key: str) -> IdempotencyClaim | None:
        found = self._open().claims.get((tenant, key))
        return None if found is None or found[1] <= self._clock.now() else found[0]

    async def release(self, tenant: str, key: str, response_id: str) -> None:
        found = self._open().claims.get((tenant, key))
        if found is not None and found[0].response_id == response_id:
            del self._data.claims[tenant, key]

    # --- keys -----------------------------------------------------------------------------------------

    async def put_key(self, key: ApiKey) -> None:
        self._open().keys[key.id] = key

    async def revoke_key(self, key_id: str, now: float) -> bool:
        key = self._open().keys.get(key_id)
        if key is None or key.revoked_at is not None:
            return False
        self._data.keys[key_id] = msgspec.structs.replace(key, revoked_at=now)
        return True

    async def keys(self) -> Sequence[ApiKey]:
        return sorted(self._open().keys.values(), key=lambda key: (key.created_at, key.id))

    async def keys_revision(self) -> int:
        keys = self._open().keys.values()
        return len(keys) + sum(key.revoked_at is not None for key in keys)

    async def close(self) -> None:
        self._closed = True

    # --- inside ---------------------------------------------------------------------------------------

    def _open(self) -> _Data:
        if self._closed:
            raise Unavailable("The store is closed.")
        return self._data

    def _row(self, tenant: str, response_id: str | None) -> _Row | None:
        row = self._open().responses.get(response_id) if response_id is not None else None
        return row if row is not None and row.tenant == tenant else None

    def _kept(self, tenant: str) -> Iterator[Entry]:
        for row in self._open().responses.values():
            if row.tenant == tenant and row.tip:
                for segment in row.tip.path():
                    yield from segment.entries


def _holds(lease: Lease, row: _Row | None) -> bool:
    return row is not None and row.expires is not None and row.epoch == lease.epoch


def _runs(record: ContainerRecord) -> bool:
    return record.status == "running"


def windowed[T: (FileRecord, ContainerRecord, ContainerFileRecord)](
    ordered: Sequence[T], window: Window
) -> Sequence[T]:
    """The window of a list that is in its order; raises InvalidRequest."""
    ids = [record.id for record in ordered]
    for param, cursor in (("after", window.after), ("before", window.before)):
        if cursor and cursor not in ids:
            raise InvalidRequest(f"'{param}' names nothing in this list.", param=param, code="invalid_value")
    first = ids.index(window.after) + 1 if window.after else 0
    end = ids.index(window.before) if window.before else None
    return ordered[first:end][: window.limit + 1]
