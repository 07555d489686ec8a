"""Files that clients upload: whose they are, how many, how large, how long.

What comes is counted as it comes, and nothing is told of before it is on the disk. docs/files.md tells what users may
expect of it.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Self

from fumehood.interfaces import BlobRef, Caller, Clock, FileTotals, ReferencedBlobs, UploadStore
from fumehood.protocol.file_types import HEAD_BYTES, AcceptedFileTypes
from fumehood.protocol.openai.api_errors import ApiError, BodyTooLarge, InvalidRequest, NotFound, RateLimited
from fumehood.protocol.openai.file_objects import FileUploadMetadata, UploadedFileRecord
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.page_query import PageQuery
from fumehood.protocol.safe_names import sanitize_name

logger = logging.getLogger(__name__)

MIN_LIFETIME_SECONDS = 3600
MAX_LIFETIME_SECONDS = 30 * 86_400
_BATCH_LIFETIME_SECONDS = MAX_LIFETIME_SECONDS  # of those for which nothing was said
_DEFAULT_FILENAME = "upload"
_SWEEP_BATCH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSettings:
    """What clients may upload.

    file_bytes: the largest file.
    tenant: how many files a tenant may have, and how many bytes they may be together.
    at_once: how many a tenant may upload at the same time.
    types: what may be in them.
    sweep_seconds: how often those are deleted whose time is over.
    """

    file_bytes: int = 2 << 30
    tenant_quota: FileTotals = field(default_factory=lambda: FileTotals(10_000, 64 << 30))
    concurrent_uploads: int = 16
    accepted_types: AcceptedFileTypes = field(default_factory=AcceptedFileTypes)
    sweep_seconds: float = 60.0


class UploadedFiles:
    """`Files` in a store and blobs. `async with` deletes meanwhile what has expired."""

    def __init__(
        self, store: UploadStore, blobs: ReferencedBlobs, clock: Clock, settings: UploadSettings | None = None
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._settings = settings or UploadSettings()
        self._incoming: dict[str, list[_IncomingUpload]] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="files: sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    @property
    def incoming_count(self) -> int:
        """How many files are being uploaded now."""
        return sum(map(len, self._incoming.values()))

    # ---- upload ---------------------------------------------------------------------------------------------------

    async def create_file(
        self,
        caller: Caller,
        metadata: FileUploadMetadata | Callable[[], FileUploadMetadata | None],
        content: AsyncIterable[bytes],
    ) -> UploadedFileRecord:
        known = metadata if isinstance(metadata, FileUploadMetadata) else metadata()
        if known is not None:
            _check_lifetime(known)
        with self._track_incoming(caller.tenant) as arrival:
            async with (
                aclosing(self._check_content(known, content, arrival)) as pieces,
                self._blobs.put_pinned(pieces) as kept,
            ):
                described = metadata if isinstance(metadata, FileUploadMetadata) else metadata()
                if described is None:
                    raise InvalidRequest("A file needs a name and a purpose.", param="file")
                _check_lifetime(described)
                self._settings.accepted_types.check(_clean_filename(described), bytes(arrival.head))
                record = self._make_record(caller.tenant, described, kept)
                self._untrack_incoming(arrival)  # or whoever looks while it is written would count it twice
                if not await self._store.add_upload(record, self._settings.tenant_quota):
                    raise _quota_exceeded(self._settings.tenant_quota)
                return record

    @contextmanager
    def _track_incoming(self, tenant: str) -> "Generator[_IncomingUpload]":
        """While something of the tenant's arrives; raises RateLimited."""
        others = self._incoming.get(tenant, [])
        if len(others) >= self._settings.concurrent_uploads:
            raise RateLimited(
                f"{self._settings.concurrent_uploads} files are being uploaded, as many as may be at once; try again soon.",
                retry_after=1.0,
            )
        arrival = _IncomingUpload(tenant)
        self._incoming[tenant] = [*others, arrival]
        try:
            yield arrival
        finally:
            self._untrack_incoming(arrival)

    def _untrack_incoming(self, incoming: "_IncomingUpload") -> None:
        """It has arrived, or never will; so what the others know of their tenant is not true any more."""
        others = [other for other in self._incoming.pop(incoming.tenant, ()) if other is not incoming]
        for other in others:
            other.tenant_usage = None
        if others:
            self._incoming[incoming.tenant] = others

    async def _check_content(
        self, known: FileUploadMetadata | None, content: AsyncIterable[bytes], incoming: "_IncomingUpload"
    ) -> AsyncGenerator[bytes]:
        """The content, as long as there is room for it and it is what it may be; else raises ApiError."""
        await self._check_quota(incoming)
        async for piece in content:
            incoming.bytes += len(piece)
            if incoming.bytes > self._settings.file_bytes:
                raise BodyTooLarge(
                    f"The file is larger than {self._settings.file_bytes} bytes.", param="file"
                )
            await self._check_quota(incoming)
            if len(incoming.head) < HEAD_BYTES:
                incoming.head += piece[: HEAD_BYTES - len(incoming.head)]
                if known is not None and len(incoming.head) == HEAD_BYTES:
                    self._settings.accepted_types.check(_clean_filename(known), bytes(incoming.head))
            yield piece

    async def _check_quota(self, incoming: "_IncomingUpload") -> None:
        """Raises InvalidRequest if there is none for all that the tenant has and is uploading."""
        if self._is_within_quota(incoming):
            return
        incoming.tenant_usage = await self._store.get_upload_totals(incoming.tenant)  # it may be less by now
        if not self._is_within_quota(incoming):
            raise _quota_exceeded(self._settings.tenant_quota)

    def _is_within_quota(self, incoming: "_IncomingUpload") -> bool:
        if incoming.tenant_usage is None:
            return False
        others, most = self._incoming[incoming.tenant], self._settings.tenant_quota
        coming = sum(other.bytes for other in others)
        return (
            incoming.tenant_usage.files + len(others) <= most.files
            and incoming.tenant_usage.bytes + coming <= most.bytes
        )

    def _make_record(self, tenant: str, new: FileUploadMetadata, kept: BlobRef) -> UploadedFileRecord:
        now = self._clock.now()
        life = new.expires_after
        if life is None and new.purpose == "batch":
            life = _BATCH_LIFETIME_SECONDS
        return UploadedFileRecord(
            id=new_id("file", "-"),
            tenant=tenant,
            filename=_clean_filename(new),
            bytes=kept.bytes,
            purpose=new.purpose,
            created_at=now,
            expires_at=None if life is None else now + life,
            blob=kept.name,
        )

    # ---- afterwards -----------------------------------------------------------------------------------------------

    async def get_file(self, caller: Caller, file_id: str) -> UploadedFileRecord:
        record = await self._store.get_upload(caller.tenant, file_id)
        if record is None or (record.expires_at or math.inf) <= self._clock.now():
            raise _not_found(file_id)
        return record

    async def list_files(
        self, caller: Caller, query: PageQuery, purpose: str | None = None
    ) -> Sequence[UploadedFileRecord]:
        return await self._store.list_uploads(caller.tenant, query, purpose=purpose, now=self._clock.now())

    async def read_file(
        self, caller: Caller, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        record = await self.get_file(caller, file_id)
        try:
            async with aclosing(self._blobs.read(record.blob, start, end)) as pieces:
                async for piece in pieces:
                    yield piece
        except KeyError:
            if await self._store.get_upload(caller.tenant, file_id) is not None:
                logger.error("The content of %s is not there.", record.id)
            raise _not_found(file_id) from None

    async def delete_file(self, caller: Caller, file_id: str) -> None:
        await self.get_file(caller, file_id)
        deleted = await self._store.delete_upload(caller.tenant, file_id)
        if deleted is None:  # somebody else was faster
            raise _not_found(file_id)
        await self._blobs.delete_unreferenced([deleted.blob])

    # ---- the end of their time ------------------------------------------------------------------------------------

    async def sweep(self) -> int:
        """Delete what has expired; how many there were."""
        number = 0
        while expired := await self._store.list_expired_uploads(self._clock.now(), _SWEEP_BATCH):
            for record in expired:
                await self._store.delete_upload(record.tenant, record.id)
            await self._blobs.delete_unreferenced(record.blob for record in expired)
            number += len(expired)
        return number

    async def _sweep_forever(self) -> None:
        while True:
            try:
                await self.sweep()
            except ApiError as error:
                logger.warning("Expired files could not be deleted: %s", error.message)
            except Exception:
                logger.exception("Expired files could not be deleted.")
            await self._clock.sleep(self._settings.sweep_seconds)


@dataclass(slots=True, eq=False)
class _IncomingUpload:
    """A file that is being uploaded.

    bytes, head: how much of it there is, and its beginning.
    kept: what its tenant has besides, as far as is known.
    """

    tenant: str
    bytes: int = 0
    head: bytearray = field(default_factory=bytearray)
    tenant_usage: FileTotals | None = None


def _clean_filename(new: FileUploadMetadata) -> str:
    """The last part of what the client called it, whatever its system writes between parts."""
    name = sanitize_name(new.filename.replace("\\", "/").rpartition("/")[2].strip())
    return name if name.strip(".") else _DEFAULT_FILENAME


def _check_lifetime(new: FileUploadMetadata) -> None:
    if (
        new.expires_after is not None
        and not MIN_LIFETIME_SECONDS <= new.expires_after <= MAX_LIFETIME_SECONDS
    ):
        raise InvalidRequest(
            f"'expires_after.seconds' is a number from {MIN_LIFETIME_SECONDS} to {MAX_LIFETIME_SECONDS}.",
            param="expires_after.seconds",
            code="invalid_value",
        )


def _quota_exceeded(most: FileTotals) -> InvalidRequest:
    return InvalidRequest(
        f"There is no room for this file: at most {most.files} files of together {most.bytes} bytes are kept. "
        "Delete some, or let them expire.",
        param="file",
        code="storage_quota_exceeded",
    )


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {sanitize_name(file_id, 80)}", param="id")
