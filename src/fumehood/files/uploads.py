"""Files that clients upload: whose they are, how many, how large, how long; imports `interfaces` and `protocol`.

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

from fumehood.interfaces import Amount, Blobs, Caller, Clock, Kept, Store
from fumehood.protocol.errors import ApiError, BodyTooLarge, InvalidRequest, NotFound, RateLimited
from fumehood.protocol.file_types import HEAD_BYTES, AcceptedTypes
from fumehood.protocol.files import FileRecord, NewFile
from fumehood.protocol.ids import new_id
from fumehood.protocol.listing import Window
from fumehood.protocol.names import clean_name

logger = logging.getLogger(__name__)

SHORTEST_LIFE = 3600
LONGEST_LIFE = 30 * 86_400
_BATCH_LIFE = LONGEST_LIFE  # of those for which nothing was said
_NAMELESS = "upload"
_AT_ONCE = 100


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
    tenant: Amount = field(default_factory=lambda: Amount(10_000, 64 << 30))
    at_once: int = 16
    types: AcceptedTypes = field(default_factory=AcceptedTypes)
    sweep_seconds: float = 60.0


class UploadedFiles:
    """`Files` in a store and blobs. `async with` deletes meanwhile what has expired."""

    def __init__(
        self, store: Store, blobs: Blobs, clock: Clock, settings: UploadSettings | None = None
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._settings = settings or UploadSettings()
        self._arriving: dict[str, list[_Arrival]] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="files: sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    @property
    def arriving(self) -> int:
        """How many files are being uploaded now."""
        return sum(map(len, self._arriving.values()))

    # ---- upload ---------------------------------------------------------------------------------------------------

    async def create(
        self, caller: Caller, new: NewFile | Callable[[], NewFile | None], content: AsyncIterable[bytes]
    ) -> FileRecord:
        known = new if isinstance(new, NewFile) else new()
        if known is not None:
            _check_life(known)
        with self._arrival(caller.tenant) as arrival:
            async with (
                aclosing(self._admitted(known, content, arrival)) as pieces,
                self._blobs.keep(pieces) as kept,
            ):
                described = new if isinstance(new, NewFile) else new()
                if described is None:
                    raise InvalidRequest("A file needs a name and a purpose.", param="file")
                _check_life(described)
                self._settings.types.check(_name(described), bytes(arrival.head))
                record = self._record(caller.tenant, described, kept)
                self._forget(arrival)  # or whoever looks while it is written would count it twice
                if not await self._store.add_upload(record, self._settings.tenant):
                    raise _no_room(self._settings.tenant)
                return record

    @contextmanager
    def _arrival(self, tenant: str) -> "Generator[_Arrival]":
        """While something of the tenant's arrives; raises RateLimited."""
        others = self._arriving.get(tenant, [])
        if len(others) >= self._settings.at_once:
            raise RateLimited(
                f"{self._settings.at_once} files are being uploaded, as many as may be at once; try again soon.",
                retry_after=1.0,
            )
        arrival = _Arrival(tenant)
        self._arriving[tenant] = [*others, arrival]
        try:
            yield arrival
        finally:
            self._forget(arrival)

    def _forget(self, arrival: "_Arrival") -> None:
        """It has arrived, or never will; so what the others know of their tenant is not true any more."""
        others = [other for other in self._arriving.pop(arrival.tenant, ()) if other is not arrival]
        for other in others:
            other.kept = None
        if others:
            self._arriving[arrival.tenant] = others

    async def _admitted(
        self, known: NewFile | None, content: AsyncIterable[bytes], arrival: "_Arrival"
    ) -> AsyncGenerator[bytes]:
        """The content, as long as there is room for it and it is what it may be; else raises ApiError."""
        await self._check_room(arrival)
        async for piece in content:
            arrival.bytes += len(piece)
            if arrival.bytes > self._settings.file_bytes:
                raise BodyTooLarge(
                    f"The file is larger than {self._settings.file_bytes} bytes.", param="file"
                )
            await self._check_room(arrival)
            if len(arrival.head) < HEAD_BYTES:
                arrival.head += piece[: HEAD_BYTES - len(arrival.head)]
                if known is not None and len(arrival.head) == HEAD_BYTES:
                    self._settings.types.check(_name(known), bytes(arrival.head))
            yield piece

    async def _check_room(self, arrival: "_Arrival") -> None:
        """Raises InvalidRequest if there is none for all that the tenant has and is uploading."""
        if self._has_room(arrival):
            return
        arrival.kept = await self._store.uploaded(arrival.tenant)  # it may be less by now
        if not self._has_room(arrival):
            raise _no_room(self._settings.tenant)

    def _has_room(self, arrival: "_Arrival") -> bool:
        if arrival.kept is None:
            return False
        others, most = self._arriving[arrival.tenant], self._settings.tenant
        coming = sum(other.bytes for other in others)
        return arrival.kept.files + len(others) <= most.files and arrival.kept.bytes + coming <= most.bytes

    def _record(self, tenant: str, new: NewFile, kept: Kept) -> FileRecord:
        now = self._clock.now()
        life = new.expires_after
        if life is None and new.purpose == "batch":
            life = _BATCH_LIFE
        return FileRecord(
            id=new_id("file", "-"),
            tenant=tenant,
            filename=_name(new),
            bytes=kept.bytes,
            purpose=new.purpose,
            created_at=now,
            expires_at=None if life is None else now + life,
            blob=kept.name,
        )

    # ---- afterwards -----------------------------------------------------------------------------------------------

    async def file(self, caller: Caller, file_id: str) -> FileRecord:
        record = await self._store.upload(caller.tenant, file_id)
        if record is None or (record.expires_at or math.inf) <= self._clock.now():
            raise _not_found(file_id)
        return record

    async def files(self, caller: Caller, window: Window, purpose: str | None = None) -> Sequence[FileRecord]:
        return await self._store.uploads(caller.tenant, window, purpose=purpose, now=self._clock.now())

    async def read(
        self, caller: Caller, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        record = await self.file(caller, file_id)
        try:
            async with aclosing(self._blobs.read(record.blob, start, end)) as pieces:
                async for piece in pieces:
                    yield piece
        except KeyError:
            if await self._store.upload(caller.tenant, file_id) is not None:
                logger.error("The content of %s is not there.", record.id)
            raise _not_found(file_id) from None

    async def delete(self, caller: Caller, file_id: str) -> None:
        await self.file(caller, file_id)
        deleted = await self._store.delete_upload(caller.tenant, file_id)
        if deleted is None:  # somebody else was faster
            raise _not_found(file_id)
        await self._blobs.drop([deleted.blob])

    # ---- the end of their time ------------------------------------------------------------------------------------

    async def sweep(self) -> int:
        """Delete what has expired; how many there were."""
        number = 0
        while expired := await self._store.expired_uploads(self._clock.now(), _AT_ONCE):
            for record in expired:
                await self._store.delete_upload(record.tenant, record.id)
            await self._blobs.drop(record.blob for record in expired)
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
class _Arrival:
    """A file that is being uploaded.

    bytes, head: how much of it there is, and its beginning.
    kept: what its tenant has besides, as far as is known.
    """

    tenant: str
    bytes: int = 0
    head: bytearray = field(default_factory=bytearray)
    kept: Amount | None = None


def _name(new: NewFile) -> str:
    """The last part of what the client called it, whatever its system writes between parts."""
    name = clean_name(new.filename.replace("\\", "/").rpartition("/")[2].strip())
    return name if name.strip(".") else _NAMELESS


def _check_life(new: NewFile) -> None:
    if new.expires_after is not None and not SHORTEST_LIFE <= new.expires_after <= LONGEST_LIFE:
        raise InvalidRequest(
            f"'expires_after.seconds' is a number from {SHORTEST_LIFE} to {LONGEST_LIFE}.",
            param="expires_after.seconds",
            code="invalid_value",
        )


def _no_room(most: Amount) -> InvalidRequest:
    return InvalidRequest(
        f"There is no room for this file: at most {most.files} files of together {most.bytes} bytes are kept. "
        "Delete some, or let them expire.",
        param="file",
        code="storage_quota_exceeded",
    )


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {clean_name(file_id, 80)}", param="id")
