"""Uploaded files, and the files and images of inputs."""

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Sequence,
)
from typing import Protocol

from fumehood.interfaces.callers import Caller
from fumehood.interfaces.response_runs import ReserveMemory
from fumehood.protocol.attachments import Attachment, InputFilePart
from fumehood.protocol.openai.file_objects import FileUploadMetadata, UploadedFileRecord
from fumehood.protocol.openai.pagination import PageQuery


class FileService(Protocol):
    """The Files API. Files of other tenants and expired files are treated as absent.

    Every method raises StorageUnavailable if the storage fails.
    """

    async def create_file(
        self,
        caller: Caller,
        metadata: FileUploadMetadata | Callable[[], FileUploadMetadata | None],
        content: AsyncIterable[bytes],
    ) -> UploadedFileRecord:
        """Store an upload; it is durable on return.

        caller: its owner.
        metadata: name, purpose and expiry; or a function that returns them, or None while they are incomplete. It is
            called before the content is read, and again after.
        content: chunks.

        Raises InvalidRequest for bad metadata, BodyTooLarge, RateLimited for a quota, and whatever `content` raises;
        then nothing is stored.
        """
        ...

    async def get_file(self, caller: Caller, file_id: str) -> UploadedFileRecord:
        """Return the record of a file.

        caller: its owner.
        file_id: its id.

        Raises NotFound.
        """
        ...

    async def list_files(
        self, caller: Caller, query: PageQuery, purpose: str | None = None
    ) -> Sequence[UploadedFileRecord]:
        """Return a page of the caller's files.

        caller: their owner.
        query: order, cursor and limit.
        purpose: files of this purpose only.

        Raises InvalidRequest if the cursor is unknown.
        """
        ...

    def read_file(
        self, caller: Caller, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        """Yield the content in chunks.

        caller: its owner.
        file_id: its id.
        start, end: the range, as of a slice.

        Raises NotFound before the first chunk.
        """
        ...

    async def delete_file(self, caller: Caller, file_id: str) -> None:
        """Delete a file. Copies in containers stay: they have records of their own.

        caller: its owner.
        file_id: its id.

        Raises NotFound.
        """
        ...


class AttachmentLoader(Protocol):
    """Resolves the files and images that inputs contain or refer to."""

    async def load_attachment(
        self,
        caller: Caller,
        part: InputFilePart,
        *,
        with_content: bool,
        reserve_memory: ReserveMemory | None = None,
    ) -> Attachment:
        """Return what a part of an input contains or refers to. Names are not unique.

        caller: who sent the input.
        part: an `input_file` or `input_image`.
        with_content: read the content of files that are not text, too.
        reserve_memory: called before a content is read.

        Raises NotFound if the caller has no such file, InvalidRequest if it is not usable; `param` names the field of
        the part.
        """
        ...
