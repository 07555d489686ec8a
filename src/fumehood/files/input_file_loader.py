"""What the files and pictures of an input are: uploads, inline content, addresses."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from fumehood.files.url_fetcher import FetchedFile, UrlFetcher, UrlPassthrough, UrlRejected
from fumehood.interfaces import Caller, FileService, ReserveMemory
from fumehood.protocol.attachments import (
    MAX_TEXT_BYTES,
    MAX_TEXT_CHARACTERS,
    Attachment,
    InputFilePart,
    decode_inline,
    decode_text,
    default_picture_name,
    encode_data_url,
    guess_media_type,
    is_text_media_type,
    sanitize_file_name,
)
from fumehood.protocol.file_types import detect_image_type
from fumehood.protocol.openai.api_errors import InvalidRequest, NotFound
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.protocol.safe_names import sanitize_name
from fumehood.worker_threads import run_in_worker

_IMAGE_FORMATS = "PNG, JPEG, GIF or WebP"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLimits:
    """How much of an input's files a model is shown.

    image_bytes: the largest picture that is shown to a model. file_bytes: the largest other file; a larger one is
        there for code alone.
    """

    image_bytes: int = 20 << 20
    file_bytes: int = 32 << 20


class InputFileLoader:
    """`Attachments` over uploads.

    addresses: who fetches what they lead to, or lets them pass to the model's server; without anybody they are refused.
    """

    def __init__(
        self,
        uploads: FileService,
        url_handler: UrlFetcher | UrlPassthrough | None = None,
        limits: InputLimits | None = None,
    ) -> None:
        self._uploads = uploads
        self._url_handler = url_handler
        self._limits = limits or InputLimits()

    async def load_attachment(
        self,
        caller: Caller,
        part: InputFilePart,
        *,
        with_content: bool,
        reserve_memory: ReserveMemory | None = None,
    ) -> Attachment:
        reserve_memory = reserve_memory or _reserve_nothing
        is_picture = part.type == "input_image"
        if part.inline_data is not None:
            found = await run_in_worker(
                len(part.inline_data), _load_inline_image if is_picture else _load_inline_file, part
            )
            return self._check_size(found, "image_url")
        if part.file_id is not None:
            record = await self._find_upload(caller, part.file_id)
            if is_picture:
                return await self._load_uploaded_image(caller, record, reserve_memory)
            return await self._load_uploaded_file(caller, record, with_content, reserve_memory)
        address = part.picture_url if is_picture else part.file_url
        if not address:
            choices = "an image_url or a file_id" if is_picture else "a file_id, file_data or a file_url"
            raise InvalidRequest(
                f"An {part.type} needs {choices}.", param="file_id", code="missing_required_parameter"
            )
        return await self._load_url(part, address, reserve_memory)

    def _check_size(self, found: Attachment, param: str) -> Attachment:
        """What is there whole, if a model may be shown it; a file that is none for a model is there for code. Raises
        InvalidRequest.
        """
        if found.kind == "picture" and found.bytes > self._limits.image_bytes:
            raise InvalidRequest(
                f"The picture is larger than {self._limits.image_bytes:,} bytes, so it is none for a model.",
                param=param,
                code="invalid_value",
            )
        too_large = found.kind == "binary" and found.bytes > self._limits.file_bytes
        return replace(found, too_large=True) if too_large else found

    # ---- uploads ------------------------------------------------------------------------------------------------

    async def _find_upload(self, caller: Caller, file_id: str) -> UploadedFileRecord:
        try:
            return await self._uploads.get_file(caller, file_id)
        except NotFound:
            raise NotFound(
                f"No file with the id '{sanitize_name(file_id, 80)}' was found.",
                param="file_id",
                code="file_not_found",
            ) from None

    async def _load_uploaded_image(
        self, caller: Caller, record: UploadedFileRecord, reserve_memory: ReserveMemory
    ) -> Attachment:
        if record.bytes > self._limits.image_bytes:
            raise _not_an_image(record, f"is larger than {self._limits.image_bytes:,} bytes")
        reserve_memory(_compute_data_url_size(record.bytes))
        content = await self._read_upload(caller, record, record.bytes)
        media_type = detect_image_type(content)
        if media_type is None:
            raise _not_an_image(record, f"is no {_IMAGE_FORMATS}")
        return Attachment(
            name=sanitize_file_name(record.filename, media_type),
            kind="picture",
            media_type=media_type,
            bytes=record.bytes,
            file_id=record.id,
            data=await run_in_worker(len(content), encode_data_url, media_type, content),
        )

    async def _load_uploaded_file(
        self, caller: Caller, record: UploadedFileRecord, whole: bool, reserve_memory: ReserveMemory
    ) -> Attachment:
        start = await self._read_upload(caller, record, MAX_TEXT_BYTES)
        named = guess_media_type(record.filename)
        text, left_out = await run_in_worker(len(start), _decode_beginning, named, start, record.bytes)
        found = Attachment(
            name=sanitize_file_name(record.filename),
            kind="binary" if text is None else "text",
            media_type=detect_image_type(start) or named,
            bytes=record.bytes,
            file_id=record.id,
            text=text,
            left_out=left_out,
        )
        reserve_memory(found.size)
        if text is not None or not whole or record.bytes > self._limits.file_bytes:
            return found
        reserve_memory(_compute_data_url_size(record.bytes))
        content = await self._read_upload(caller, record, record.bytes)
        data = await run_in_worker(len(content), encode_data_url, found.media_type, content)
        return replace(found, data=data)

    async def _read_upload(self, caller: Caller, record: UploadedFileRecord, max_bytes: int) -> bytes:
        pieces: AsyncGenerator[bytes] = self._uploads.read_file(
            caller, record.id, 0, min(max_bytes, record.bytes)
        )
        async with aclosing(pieces):
            return b"".join([piece async for piece in pieces])

    # ---- addresses ----------------------------------------------------------------------------------------------

    async def _load_url(self, part: InputFilePart, address: str, reserve_memory: ReserveMemory) -> Attachment:
        param = "image_url" if part.type == "input_image" else "file_url"
        try:
            match self._url_handler:
                case None:
                    raise _urls_not_supported(param)
                case UrlPassthrough() as passing:
                    passing.check(address)
                    return Attachment()
                case UrlFetcher() as fetcher:
                    return await self._attach_fetched(
                        part, await fetcher.fetch(address, reserve_memory), param, reserve_memory
                    )
        except UrlRejected as error:
            raise NotFound(str(error), param=param, code="invalid_value") from None

    async def _attach_fetched(
        self, part: InputFilePart, fetched: FetchedFile, param: str, reserve_memory: ReserveMemory
    ) -> Attachment:
        """What was fetched, as if it had come inline: nobody is asked for it again."""
        if part.type != "input_image":
            name = sanitize_file_name(part.filename or fetched.name)
            found = _make_file_attachment(name, fetched.media_type, fetched.content)
        else:
            media_type = detect_image_type(fetched.content)
            if media_type is None:
                raise InvalidRequest(f"What the address leads to is no {_IMAGE_FORMATS}.", param=param)
            found = _make_image_attachment(
                sanitize_file_name(fetched.name or default_picture_name(media_type)),
                media_type,
                fetched.content,
            )
        found = self._check_size(found, param)
        reserve_memory(_compute_data_url_size(len(fetched.content)) - len(fetched.content))
        data = await run_in_worker(len(fetched.content), encode_data_url, found.media_type, fetched.content)
        return replace(found, data=data)


def _urls_not_supported(param: str) -> NotFound:
    kind = "picture" if param == "image_url" else "file"
    return NotFound(
        f"This server neither fetches what a {param} leads to nor passes it on to the model's server: send the {kind} "
        "inline, or upload it and send its file_id. Who runs the server may allow it with inputs.fetch_urls or "
        "inputs.pass_urls.",
        param=param,
        code="unsupported_parameter",
    )


def _reserve_nothing(_: int) -> None:
    pass


# --- contents -----------------------------------------------------------------------------------------


def _load_inline_image(part: InputFilePart) -> Attachment:
    told, content = _decode_content(part.inline_data or "", "image_url")
    media_type = detect_image_type(content) or told
    return _make_image_attachment(default_picture_name(media_type), media_type, content)


def _load_inline_file(part: InputFilePart) -> Attachment:
    told, content = _decode_content(part.inline_data or "", "file_data")
    return _make_file_attachment(sanitize_file_name(part.filename or "file"), told, content)


def _decode_content(data: str, param: str) -> tuple[str, bytes]:
    try:
        return decode_inline(data)
    except ValueError as error:
        raise InvalidRequest(f"The content of {param} {error}.", param=param) from None


def _make_image_attachment(name: str, media_type: str, content: bytes) -> Attachment:
    return Attachment(name=name, kind="picture", media_type=media_type, bytes=len(content))


def _make_file_attachment(name: str, told: str, content: bytes) -> Attachment:
    kind = "binary" if decode_text(told, content) is None else "text"
    return Attachment(name=name, kind=kind, media_type=guess_media_type(name, told), bytes=len(content))


def _compute_data_url_size(size: int) -> int:
    """How large so many bytes are as a data: URL."""
    return (size + 2) // 3 * 4


def _decode_beginning(named: str, start: bytes, size: int) -> tuple[str | None, int]:
    """As much of a text as is shown, and about how many bytes that leaves out; None for what is no text.

    A name can say that a file is text, but not that it is none: anybody can be wrong.
    """
    text = decode_text(named if is_text_media_type(named) else "", start, whole=len(start) == size)
    if text is None:
        return None, 0
    return text[:MAX_TEXT_CHARACTERS], len(text[MAX_TEXT_CHARACTERS:]) + size - len(start)


def _not_an_image(record: UploadedFileRecord, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The file '{record.id}' ({sanitize_name(record.filename)}) {why}, so it is no picture for a model.",
        param="file_id",
        code="invalid_value",
    )
