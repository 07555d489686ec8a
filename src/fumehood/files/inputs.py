"""What the files and pictures of an input are: uploads, inline content, addresses; imports `interfaces`, siblings."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from fumehood.aside import aside
from fumehood.files.fetching import Fetched, Fetcher, FetchRefused, Passing
from fumehood.interfaces import Caller, Files, TakeRoom
from fumehood.protocol.attachments import (
    BYTES_OF_LONGEST_TEXT,
    LONGEST_TEXT,
    Attachment,
    FilePart,
    as_text,
    data_url,
    decode_inline,
    file_name,
    is_text_by_name,
    media_type_of,
    picture_name,
)
from fumehood.protocol.errors import InvalidRequest, NotFound
from fumehood.protocol.file_types import picture_type
from fumehood.protocol.files import FileRecord
from fumehood.protocol.names import clean_name

_PICTURES = "PNG, JPEG, GIF or WebP"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLimits:
    """How much of an input's files a model is shown.

    picture_bytes: the largest picture that is shown to a model. file_bytes: the largest other file; a larger one is
        there for code alone.
    """

    picture_bytes: int = 20 << 20
    file_bytes: int = 32 << 20


class InputFiles:
    """`Attachments` over uploads.

    addresses: who fetches what they lead to, or lets them pass to the model's server; without anybody they are refused.
    """

    def __init__(
        self, files: Files, addresses: Fetcher | Passing | None = None, limits: InputLimits | None = None
    ) -> None:
        self._files = files
        self._addresses = addresses
        self._limits = limits or InputLimits()

    async def find(
        self, caller: Caller, part: FilePart, *, whole: bool, take: TakeRoom | None = None
    ) -> Attachment:
        take = take or _take_nothing
        is_picture = part.type == "input_image"
        if part.inline is not None:
            found = await aside(len(part.inline), _inline_picture if is_picture else _inline_file, part)
            return self._bounded(found, "image_url")
        if part.file_id is not None:
            record = await self._record(caller, part.file_id)
            if is_picture:
                return await self._picture(caller, record, take)
            return await self._file(caller, record, whole, take)
        address = part.address if is_picture else part.file_url
        if not address:
            choices = "an image_url or a file_id" if is_picture else "a file_id, file_data or a file_url"
            raise InvalidRequest(
                f"An {part.type} needs {choices}.", param="file_id", code="missing_required_parameter"
            )
        return await self._addressed(part, address, take)

    def _bounded(self, found: Attachment, param: str) -> Attachment:
        """What is there whole, if a model may be shown it; a file that is none for a model is there for code. Raises
        InvalidRequest.
        """
        if found.kind == "picture" and found.bytes > self._limits.picture_bytes:
            raise InvalidRequest(
                f"The picture is larger than {self._limits.picture_bytes:,} bytes, so it is none for a model.",
                param=param,
                code="invalid_value",
            )
        too_large = found.kind == "binary" and found.bytes > self._limits.file_bytes
        return replace(found, too_large=True) if too_large else found

    # ---- uploads ------------------------------------------------------------------------------------------------

    async def _record(self, caller: Caller, file_id: str) -> FileRecord:
        try:
            return await self._files.file(caller, file_id)
        except NotFound:
            raise NotFound(
                f"No file with the id '{clean_name(file_id, 80)}' was found.",
                param="file_id",
                code="file_not_found",
            ) from None

    async def _picture(self, caller: Caller, record: FileRecord, take: TakeRoom) -> Attachment:
        if record.bytes > self._limits.picture_bytes:
            raise _no_picture(record, f"is larger than {self._limits.picture_bytes:,} bytes")
        take(_as_data(record.bytes))
        content = await self._read(caller, record, record.bytes)
        media_type = picture_type(content)
        if media_type is None:
            raise _no_picture(record, f"is no {_PICTURES}")
        return Attachment(
            name=file_name(record.filename, media_type),
            kind="picture",
            media_type=media_type,
            bytes=record.bytes,
            file_id=record.id,
            data=await aside(len(content), data_url, media_type, content),
        )

    async def _file(self, caller: Caller, record: FileRecord, whole: bool, take: TakeRoom) -> Attachment:
        start = await self._read(caller, record, BYTES_OF_LONGEST_TEXT)
        named = media_type_of(record.filename)
        text, left_out = await aside(len(start), _beginning, named, start, record.bytes)
        found = Attachment(
            name=file_name(record.filename),
            kind="binary" if text is None else "text",
            media_type=picture_type(start) or named,
            bytes=record.bytes,
            file_id=record.id,
            text=text,
            left_out=left_out,
        )
        take(found.size)
        if text is not None or not whole or record.bytes > self._limits.file_bytes:
            return found
        take(_as_data(record.bytes))
        content = await self._read(caller, record, record.bytes)
        data = await aside(len(content), data_url, found.media_type, content)
        return replace(found, data=data)

    async def _read(self, caller: Caller, record: FileRecord, most: int) -> bytes:
        pieces: AsyncGenerator[bytes] = self._files.read(caller, record.id, 0, min(most, record.bytes))
        async with aclosing(pieces):
            return b"".join([piece async for piece in pieces])

    # ---- addresses ----------------------------------------------------------------------------------------------

    async def _addressed(self, part: FilePart, address: str, take: TakeRoom) -> Attachment:
        param = "image_url" if part.type == "input_image" else "file_url"
        try:
            match self._addresses:
                case None:
                    raise _no_addresses(param)
                case Passing() as passing:
                    passing.check(address)
                    return Attachment()
                case Fetcher() as fetcher:
                    return await self._kept(part, await fetcher.fetch(address, take), param, take)
        except FetchRefused as error:
            raise NotFound(str(error), param=param, code="invalid_value") from None

    async def _kept(self, part: FilePart, fetched: Fetched, param: str, take: TakeRoom) -> Attachment:
        """What was fetched, as if it had come inline: nobody is asked for it again."""
        if part.type != "input_image":
            name = file_name(part.filename or fetched.name)
            found = _file(name, fetched.media_type, fetched.content)
        else:
            media_type = picture_type(fetched.content)
            if media_type is None:
                raise InvalidRequest(f"What the address leads to is no {_PICTURES}.", param=param)
            found = _picture(file_name(fetched.name or picture_name(media_type)), media_type, fetched.content)
        found = self._bounded(found, param)
        take(_as_data(len(fetched.content)) - len(fetched.content))
        data = await aside(len(fetched.content), data_url, found.media_type, fetched.content)
        return replace(found, data=data)


def _no_addresses(param: str) -> NotFound:
    kind = "picture" if param == "image_url" else "file"
    return NotFound(
        f"This server neither fetches what a {param} leads to nor passes it on to the model's server: send the {kind} "
        "inline, or upload it and send its file_id. Who runs the server may allow it with inputs.fetch_urls or "
        "inputs.pass_urls.",
        param=param,
        code="unsupported_parameter",
    )


def _take_nothing(_: int) -> None:
    pass


# --- contents -----------------------------------------------------------------------------------------


def _inline_picture(part: FilePart) -> Attachment:
    told, content = _decoded(part.inline or "", "image_url")
    media_type = picture_type(content) or told
    return _picture(picture_name(media_type), media_type, content)


def _inline_file(part: FilePart) -> Attachment:
    told, content = _decoded(part.inline or "", "file_data")
    return _file(file_name(part.filename or "file"), told, content)


def _decoded(data: str, param: str) -> tuple[str, bytes]:
    try:
        return decode_inline(data)
    except ValueError as error:
        raise InvalidRequest(f"The content of {param} {error}.", param=param) from None


def _picture(name: str, media_type: str, content: bytes) -> Attachment:
    return Attachment(name=name, kind="picture", media_type=media_type, bytes=len(content))


def _file(name: str, told: str, content: bytes) -> Attachment:
    kind = "binary" if as_text(told, content) is None else "text"
    return Attachment(name=name, kind=kind, media_type=media_type_of(name, told), bytes=len(content))


def _as_data(size: int) -> int:
    """How large so many bytes are as a data: URL."""
    return (size + 2) // 3 * 4


def _beginning(named: str, start: bytes, size: int) -> tuple[str | None, int]:
    """As much of a text as is shown, and about how many bytes that leaves out; None for what is no text.

    A name can say that a file is text, but not that it is none: anybody can be wrong.
    """
    text = as_text(named if is_text_by_name(named) else "", start, whole=len(start) == size)
    if text is None:
        return None, 0
    return text[:LONGEST_TEXT], len(text[LONGEST_TEXT:]) + size - len(start)


def _no_picture(record: FileRecord, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The file '{record.id}' ({clean_name(record.filename)}) {why}, so it is no picture for a model.",
        param="file_id",
        code="invalid_value",
    )
