"""The Files API: stores uploads within quotas, and deletes them when they expire. See docs/files.md.

Quotas are checked while the content arrives; a file is listed only when it is on the disk.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Self

from fumehood.files.file_settings import UploadSettings
from fumehood.interfaces import (
    BlobRef,
    Caller,
    Clock,
    FileTotals,
    GarbageCollectedBlobStore,
    UploadedFileRecordStore,
)
from fumehood.protocol.file_types import HEAD_BYTES, UploadFileTypes
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import ApiError, BodyTooLarge, InvalidRequest, NotFound, RateLimited
from fumehood.protocol.openai.file_objects import FileUploadMetadata, UploadedFileRecord
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.pagination import PageQuery

logger = logging.getLogger(__name__)

MIN_LIFETIME_SECONDS = 3600
MAX_LIFETIME_SECONDS = 30 * 86_400
_BATCH_LIFETIME_SECONDS = MAX_LIFETIME_SECONDS  # the default for purpose `batch`
_DEFAULT_FILENAME = "upload"
_SWEEP_BATCH = 100
_SWEEP_SECONDS = 60.0


class UploadFileService:
    """A `FileService` on a store and blobs. `async with` runs the sweeper that deletes expired files."""

    def __init__(
        self,
        store: UploadedFileRecordStore,
        blobs: GarbageCollectedBlobStore,
        clock: Clock,
        settings: UploadSettings | None = None,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._settings = settings or UploadSettings()
        self._accepted_types = UploadFileTypes(self._settings.extra_types)
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
        """The number of uploads in progress."""
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
        with self._track_incoming(caller.tenant) as incoming:
            async with (
                aclosing(self._check_content(known, content, incoming)) as chunks,
                self._blobs.put_pinned(chunks) as blob,
            ):
                described = metadata if isinstance(metadata, FileUploadMetadata) else metadata()
                if described is None:
                    raise InvalidRequest("A file needs a name and a purpose.", param="file")
                _check_lifetime(described)
                self._accepted_types.check(_clean_filename(described), bytes(incoming.head))
                record = self._make_record(caller.tenant, described, blob)
                self._untrack_incoming(incoming)  # first, or it would count twice while it is written
                if not await self._store.add_upload(record, self._settings.tenant_quota):
                    raise _quota_exceeded(self._settings.tenant_quota)
                return record

    @contextmanager
    def _track_incoming(self, tenant: str) -> "Generator[_IncomingUpload]":
        """Track an upload while it arrives. Raises RateLimited."""
        others = self._incoming.get(tenant, [])
        if len(others) >= self._settings.concurrent_uploads:
            raise RateLimited(
                f"Upload limit reached ({self._settings.concurrent_uploads} at once). Try again soon.",
                retry_after=1.0,
            )
        incoming = _IncomingUpload(tenant)
        self._incoming[tenant] = [*others, incoming]
        try:
            yield incoming
        finally:
            self._untrack_incoming(incoming)

    def _untrack_incoming(self, incoming: "_IncomingUpload") -> None:
        """Forget an upload that ended. The tenant's other uploads have to read its usage again."""
        others = [other for other in self._incoming.pop(incoming.tenant, ()) if other is not incoming]
        for other in others:
            other.tenant_usage = None
        if others:
            self._incoming[incoming.tenant] = others

    async def _check_content(
        self, known: FileUploadMetadata | None, content: AsyncIterable[bytes], incoming: "_IncomingUpload"
    ) -> AsyncGenerator[bytes]:
        """Pass the content through while it fits the limits and types. Raises ApiError."""
        await self._check_quota(incoming)
        async for chunk in content:
            incoming.bytes += len(chunk)
            if incoming.bytes > self._settings.file_bytes:
                raise BodyTooLarge(
                    f"The file is larger than {self._settings.file_bytes} bytes.", param="file"
                )
            await self._check_quota(incoming)
            if len(incoming.head) < HEAD_BYTES:
                incoming.head += chunk[: HEAD_BYTES - len(incoming.head)]
                if known is not None and len(incoming.head) == HEAD_BYTES:
                    self._accepted_types.check(_clean_filename(known), bytes(incoming.head))
            yield chunk

    async def _check_quota(self, incoming: "_IncomingUpload") -> None:
        """Raises InvalidRequest if the tenant's files and uploads exceed its quota."""
        if self._is_within_quota(incoming):
            return
        incoming.tenant_usage = await self._store.get_upload_totals(
            incoming.tenant
        )  # some may be deleted by now
        if not self._is_within_quota(incoming):
            raise _quota_exceeded(self._settings.tenant_quota)

    def _is_within_quota(self, incoming: "_IncomingUpload") -> bool:
        if incoming.tenant_usage is None:
            return False
        uploads, quota = self._incoming[incoming.tenant], self._settings.tenant_quota
        incoming_bytes = sum(upload.bytes for upload in uploads)
        return (
            incoming.tenant_usage.files + len(uploads) <= quota.files
            and incoming.tenant_usage.bytes + incoming_bytes <= quota.bytes
        )

    def _make_record(self, tenant: str, new: FileUploadMetadata, blob: BlobRef) -> UploadedFileRecord:
        now = self._clock.now()
        lifetime = new.expires_after
        if lifetime is None and new.purpose == "batch":
            lifetime = _BATCH_LIFETIME_SECONDS
        return UploadedFileRecord(
            id=new_id("file", "-"),
            tenant=tenant,
            filename=_clean_filename(new),
            bytes=blob.bytes,
            purpose=new.purpose,
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
            blob=blob.name,
        )

    # ---- access -----------------------------------------------------------------------------------------------

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
            async with aclosing(self._blobs.read(record.blob, start, end)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except KeyError:
            if await self._store.get_upload(caller.tenant, file_id) is not None:
                logger.error("The blob of file %s is missing.", record.id)
            raise _not_found(file_id) from None

    async def delete_file(self, caller: Caller, file_id: str) -> None:
        await self.get_file(caller, file_id)
        deleted = await self._store.delete_upload(caller.tenant, file_id)
        if deleted is None:  # another request deleted it first
            raise _not_found(file_id)
        await self._blobs.delete_unreferenced([deleted.blob])

    # ---- expiry ------------------------------------------------------------------------------------

    async def sweep(self) -> int:
        """Delete expired files; return their number."""
        count = 0
        while expired := await self._store.list_expired_uploads(self._clock.now(), _SWEEP_BATCH):
            for record in expired:
                await self._store.delete_upload(record.tenant, record.id)
            await self._blobs.delete_unreferenced(record.blob for record in expired)
            count += len(expired)
        return count

    async def _sweep_forever(self) -> None:
        while True:
            try:
                await self.sweep()
            except ApiError as error:
                logger.warning("Expired files could not be deleted: %s", error.message)
            except Exception:
                logger.exception("Expired files could not be deleted.")
            await self._clock.sleep(_SWEEP_SECONDS)


@dataclass(slots=True, eq=False)
class _IncomingUpload:
    """An upload in progress.

    bytes, head: the size so far, and the first bytes.
    tenant_usage: the stored files of its tenant; None if it has to be read again.
    """

    tenant: str
    bytes: int = 0
    head: bytearray = field(default_factory=bytearray)
    tenant_usage: FileTotals | None = None


def _clean_filename(new: FileUploadMetadata) -> str:
    """The last path component of the client's name, with / or \\ as separator."""
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


def _quota_exceeded(quota: FileTotals) -> InvalidRequest:
    return InvalidRequest(
        f"There is no room for this file: the quota is {quota.files} files and {quota.bytes} bytes in total. "
        "Delete some, or let them expire.",
        param="file",
        code="storage_quota_exceeded",
    )


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {sanitize_name(file_id, 80)}", param="id")
