"""Uploads in memory, for whoever reads them."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field

from fumehood.interfaces import Caller
from fumehood.protocol.openai.api_errors import NotFound
from fumehood.protocol.openai.file_objects import FileUploadMetadata, UploadedFileRecord
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.testing import MemoryBlobStore

_PIECE = 1000


@dataclass
class InMemoryUploads:
    """The `Files` that a test put there; `reads` are the bytes that were asked for, by id.

    blobs: where their contents are for others, who find them by their records.
    """

    blobs: MemoryBlobStore = field(default_factory=MemoryBlobStore)
    contents: dict[str, bytes] = field(default_factory=dict[str, bytes])
    records: dict[str, UploadedFileRecord] = field(default_factory=dict[str, UploadedFileRecord])
    reads: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def add(self, filename: str, content: bytes, tenant: str = "") -> str:
        file_id = f"file-{len(self.records) + 1}"
        blob = hashlib.sha256(content).hexdigest()
        self.contents[file_id] = self.blobs.contents[blob] = content
        self.records[file_id] = UploadedFileRecord(
            id=file_id,
            tenant=tenant,
            filename=filename,
            bytes=len(content),
            purpose="user_data",
            created_at=0,
            blob=blob,
        )
        return file_id

    async def create_file(
        self,
        caller: Caller,
        metadata: FileUploadMetadata | Callable[[], FileUploadMetadata | None],
        content: AsyncIterable[bytes],
    ) -> UploadedFileRecord:
        whole = b"".join([piece async for piece in content])
        told = metadata() if callable(metadata) else metadata
        assert told is not None
        return self.records[self.add(told.filename, whole, caller.tenant)]

    async def get_file(self, caller: Caller, file_id: str) -> UploadedFileRecord:
        record = self.records.get(file_id)
        if record is None or record.tenant != caller.tenant:
            raise NotFound(f"No such File object: {file_id}")
        return record

    async def list_files(
        self, caller: Caller, query: PageQuery, purpose: str | None = None
    ) -> Sequence[UploadedFileRecord]:
        return [record for record in self.records.values() if record.tenant == caller.tenant]

    async def read_file(
        self, caller: Caller, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        await self.get_file(caller, file_id)
        content = self.contents[file_id][start:end]
        self.reads.append((file_id, len(content)))
        for place in range(0, len(content), _PIECE):
            yield content[place : place + _PIECE]

    async def delete_file(self, caller: Caller, file_id: str) -> None:
        await self.get_file(caller, file_id)
        del self.records[file_id]
