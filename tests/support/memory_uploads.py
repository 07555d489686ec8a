"""Uploads in memory, for whoever reads them; imports `interfaces`, `protocol`, `testing`."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field

from fumehood.interfaces import Caller
from fumehood.protocol.errors import NotFound
from fumehood.protocol.files import FileRecord, NewFile
from fumehood.protocol.listing import Window
from fumehood.testing import MemoryBlobs

_PIECE = 1000


@dataclass
class Uploads:
    """The `Files` that a test put there; `reads` are the bytes that were asked for, by id.

    blobs: where their contents are for others, who find them by their records.
    """

    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    contents: dict[str, bytes] = field(default_factory=dict[str, bytes])
    records: dict[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    reads: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def add(self, filename: str, content: bytes, tenant: str = "") -> str:
        file_id = f"file-{len(self.records) + 1}"
        blob = hashlib.sha256(content).hexdigest()
        self.contents[file_id] = self.blobs.blobs[blob] = content
        self.records[file_id] = FileRecord(
            id=file_id,
            tenant=tenant,
            filename=filename,
            bytes=len(content),
            purpose="user_data",
            created_at=0,
            blob=blob,
        )
        return file_id

    async def create(
        self, caller: Caller, new: NewFile | Callable[[], NewFile | None], content: AsyncIterable[bytes]
    ) -> FileRecord:
        whole = b"".join([piece async for piece in content])
        told = new() if callable(new) else new
        assert told is not None
        return self.records[self.add(told.filename, whole, caller.tenant)]

    async def file(self, caller: Caller, file_id: str) -> FileRecord:
        record = self.records.get(file_id)
        if record is None or record.tenant != caller.tenant:
            raise NotFound(f"No such File object: {file_id}")
        return record

    async def files(self, caller: Caller, window: Window, purpose: str | None = None) -> Sequence[FileRecord]:
        return [record for record in self.records.values() if record.tenant == caller.tenant]

    async def read(
        self, caller: Caller, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        await self.file(caller, file_id)
        content = self.contents[file_id][start:end]
        self.reads.append((file_id, len(content)))
        for place in range(0, len(content), _PIECE):
            yield content[place : place + _PIECE]

    async def delete(self, caller: Caller, file_id: str) -> None:
        await self.file(caller, file_id)
        del self.records[file_id]
