"""Uploaded files and attachments."""

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Sequence,
)
from typing import Protocol

from fumehood.interfaces.callers import Caller
from fumehood.interfaces.runs import ReserveMemory
from fumehood.protocol.attachments import Attachment, InputFilePart
from fumehood.protocol.openai.file_objects import FileUploadMetadata, UploadedFileRecord
from fumehood.protocol.openai.page_query import PageQuery

# --- files --------------------------------------------------------------------------------------------


class FileService(Protocol):
    """What clients have uploaded. Another tenant's files, and those whose time is over, are not there."""

    async def create_file(
        self,
        caller: Caller,
        metadata: FileUploadMetadata | Callable[[], FileUploadMetadata | None],
        content: AsyncIterable[bytes],
    ) -> UploadedFileRecord:
        """Keep it; it is durable then. Raises InvalidRequest, BodyTooLarge, RateLimited, Unavailable, and whatever
        the content raises; then nothing is left of it.

        new: or a function that tells what is known of it, None for too little; it is asked at the beginning, and
            again when all of the content has come.
        """
        ...

    async def get_file(self, caller: Caller, file_id: str) -> UploadedFileRecord:
        """Raises NotFound."""
        ...

    async def list_files(
        self, caller: Caller, query: PageQuery, purpose: str | None = None
    ) -> Sequence[UploadedFileRecord]:
        """Raises InvalidRequest."""
        ...

    def read_file(
        self, caller: Caller, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        """The content in pieces, or those bytes of it; raises NotFound before the first."""
        ...

    async def delete_file(self, caller: Caller, file_id: str) -> None:
        """Copies that containers hold stay: they have records of their own. Raises NotFound."""
        ...


class AttachmentLoader(Protocol):
    """Finds the files and pictures that inputs hold or name."""

    async def load_attachment(
        self,
        caller: Caller,
        part: InputFilePart,
        *,
        with_content: bool,
        reserve_memory: ReserveMemory | None = None,
    ) -> Attachment:
        """What a part of an input holds or names, under a name that other files may have too. Raises NotFound for what
        the caller cannot have, InvalidRequest for what cannot be taken; `param` names the field of the part.

        whole: with the content of files that are no text.
        take: told of what is read, before it is.
        """
        ...
