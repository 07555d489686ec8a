"""Loads the files and images of an input: uploads, inline content and URLs."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec.structs import replace

from fumehood.cpu_worker import run_in_worker
from fumehood.files.file_settings import InputSettings
from fumehood.files.url_fetcher import FetchedFile, PassthroughUrlChecker, UrlFetcher, UrlFetchError
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
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest, NotFound
from fumehood.protocol.openai.file_objects import UploadedFileRecord

_IMAGE_FORMATS = "PNG, JPEG, GIF or WebP"


class InputFileLoader:
    """An `AttachmentLoader` on uploads.

    url_handler: fetches URLs, or passes them on to the model server; None rejects them.
    """

    def __init__(
        self,
        uploads: FileService,
        url_handler: UrlFetcher | PassthroughUrlChecker | None = None,
        settings: InputSettings | None = None,
    ) -> None:
        self._uploads = uploads
        self._url_handler = url_handler
        self._settings = settings or InputSettings()

    async def load_attachment(
        self,
        caller: Caller,
        part: InputFilePart,
        *,
        with_content: bool,
        reserve_memory: ReserveMemory | None = None,
    ) -> Attachment:
        reserve_memory = reserve_memory or _reserve_nothing
        is_image = part.type == "input_image"
        if part.inline_data is not None:
            found = await run_in_worker(
                len(part.inline_data), _load_inline_image if is_image else _load_inline_file, part
            )
            return self._check_size(found, "image_url")
        if part.file_id is not None:
            record = await self._find_upload(caller, part.file_id)
            if is_image:
                return await self._load_uploaded_image(caller, record, reserve_memory)
            return await self._load_uploaded_file(caller, record, with_content, reserve_memory)
        url = part.picture_url if is_image else part.file_url
        if not url:
            choices = "an image_url or a file_id" if is_image else "a file_id, file_data or a file_url"
            raise InvalidRequest(
                f"An {part.type} needs {choices}.", param="file_id", code="missing_required_parameter"
            )
        return await self._load_url(part, url, reserve_memory)

    def _check_size(self, found: Attachment, param: str) -> Attachment:
        """Mark a file as too large for a model; it is left to code. Raises InvalidRequest for such an image."""
        if found.kind == "picture" and found.bytes > self._settings.image_bytes:
            raise InvalidRequest(
                f"The image is larger than {self._settings.image_bytes:,} bytes, so it cannot be sent to a model.",
                param=param,
                code="invalid_value",
            )
        too_large = found.kind == "binary" and found.bytes > self._settings.file_bytes
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
        if record.bytes > self._settings.image_bytes:
            raise _not_an_image(record, f"is larger than {self._settings.image_bytes:,} bytes")
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
        self, caller: Caller, record: UploadedFileRecord, with_content: bool, reserve_memory: ReserveMemory
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
            omitted_bytes=left_out,
        )
        reserve_memory(found.size)
        if text is not None or not with_content or record.bytes > self._settings.file_bytes:
            return found
        reserve_memory(_compute_data_url_size(record.bytes))
        content = await self._read_upload(caller, record, record.bytes)
        data = await run_in_worker(len(content), encode_data_url, found.media_type, content)
        return replace(found, data=data)

    async def _read_upload(self, caller: Caller, record: UploadedFileRecord, max_bytes: int) -> bytes:
        chunks: AsyncGenerator[bytes] = self._uploads.read_file(
            caller, record.id, 0, min(max_bytes, record.bytes)
        )
        async with aclosing(chunks):
            return b"".join([chunk async for chunk in chunks])

    # ---- URLs ---------------------------------------------------------------------------------------------------

    async def _load_url(self, part: InputFilePart, url: str, reserve_memory: ReserveMemory) -> Attachment:
        param = "image_url" if part.type == "input_image" else "file_url"
        try:
            match self._url_handler:
                case None:
                    raise _urls_not_supported(param)
                case PassthroughUrlChecker() as passthrough:
                    passthrough.check(url)
                    return Attachment()
                case UrlFetcher() as fetcher:
                    return await self._attach_fetched(
                        part, await fetcher.fetch(url, reserve_memory), param, reserve_memory
                    )
        except UrlFetchError as error:
            raise NotFound(str(error), param=param, code="invalid_value") from None

    async def _attach_fetched(
        self, part: InputFilePart, fetched: FetchedFile, param: str, reserve_memory: ReserveMemory
    ) -> Attachment:
        """Attach fetched content as if it had been inline, so that it is not fetched again."""
        if part.type != "input_image":
            name = sanitize_file_name(part.filename or fetched.name)
            found = _make_file_attachment(name, fetched.media_type, fetched.content)
        else:
            media_type = detect_image_type(fetched.content)
            if media_type is None:
                raise InvalidRequest(f"The URL leads to no {_IMAGE_FORMATS}.", param=param)
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
    kind = "image" if param == "image_url" else "file"
    return NotFound(
        f"This server neither fetches a {param} nor passes it on to the model server: send the {kind} inline, or "
        "upload it and send its file_id. The operator can allow URLs with inputs.fetch_urls or inputs.pass_urls.",
        param=param,
        code="unsupported_parameter",
    )


def _reserve_nothing(_: int) -> None:
    pass


# --- contents -----------------------------------------------------------------------------------------


def _load_inline_image(part: InputFilePart) -> Attachment:
    declared_type, content = _decode_content(part.inline_data or "", "image_url")
    media_type = detect_image_type(content) or declared_type
    return _make_image_attachment(default_picture_name(media_type), media_type, content)


def _load_inline_file(part: InputFilePart) -> Attachment:
    declared_type, content = _decode_content(part.inline_data or "", "file_data")
    return _make_file_attachment(sanitize_file_name(part.filename or "file"), declared_type, content)


def _decode_content(data: str, param: str) -> tuple[str, bytes]:
    try:
        return decode_inline(data)
    except ValueError as error:
        raise InvalidRequest(f"The content of {param} {error}.", param=param) from None


def _make_image_attachment(name: str, media_type: str, content: bytes) -> Attachment:
    return Attachment(name=name, kind="picture", media_type=media_type, bytes=len(content))


def _make_file_attachment(name: str, declared_type: str, content: bytes) -> Attachment:
    kind = "binary" if decode_text(declared_type, content) is None else "text"
    media_type = guess_media_type(name, declared_type)
    return Attachment(name=name, kind=kind, media_type=media_type, bytes=len(content))


def _compute_data_url_size(size: int) -> int:
    """The size of `size` bytes in base64."""
    return (size + 2) // 3 * 4


def _decode_beginning(media_type: str, start: bytes, size: int) -> tuple[str | None, int]:
    """The text that is sent to a model, and about how many bytes of it are left out; None for a binary file.

    A media type can say that a file is text, but not that it is none: names are often wrong.
    """
    text = decode_text(media_type if is_text_media_type(media_type) else "", start, whole=len(start) == size)
    if text is None:
        return None, 0
    return text[:MAX_TEXT_CHARACTERS], len(text[MAX_TEXT_CHARACTERS:]) + size - len(start)


def _not_an_image(record: UploadedFileRecord, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"The file '{record.id}' ({sanitize_name(record.filename)}) {reason}, so it cannot be sent to a model.",
        param="file_id",
        code="invalid_value",
    )
