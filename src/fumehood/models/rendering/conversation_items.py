"""Messages, calls and files of a conversation, as the renderers of all APIs read them."""

import msgspec

from fumehood.protocol.attachments import (
    Attachment,
    InputImageUrl,
    decode_inline,
    decode_text,
    describe_unshown_file,
    encode_data_url,
    render_file_text,
)
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest

UNFINISHED_STATUSES = ("in_progress", "incomplete")
_TEXT_TYPES = frozenset({"input_text", "output_text", "text"})


class ItemContentPart(msgspec.Struct):
    """A content part of any type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | InputImageUrl | None = None
    detail: str | None = None
    file_data: str | None = None
    filename: str | None = None


type ItemContent = str | list[ItemContentPart] | None


class MessageItem(msgspec.Struct):
    role: str = "user"
    content: ItemContent = None
    phase: str | None = None


class CallItem(msgspec.Struct):
    """A function call or a custom tool call. `namespace` and `caller` are set by tools of other servers."""

    call_id: str
    name: str
    arguments: str = ""
    input: str = ""
    status: str | None = None
    namespace: object = None
    caller: object = None


class InlineFile(msgspec.Struct):
    """A file that is sent as it is; `file_data` is a data URL."""

    filename: str
    file_data: str


def join_text(content: ItemContent) -> str:
    """The text of an assistant message. Raises InvalidRequest for other content."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(get_part_text(part) for part in content)


def get_part_text(part: ItemContentPart) -> str:
    """The text of a part. Raises InvalidRequest if it is not text."""
    if part.type in _TEXT_TYPES:
        return part.text or ""
    if part.type == "refusal":
        return part.refusal or ""
    raise InvalidRequest(
        f"Content of type {sanitize_name(part.type)!r} cannot be shown to this model: its server takes text, images "
        "and files.",
        param="input",
    )


def ensure_json_object(arguments: str) -> str:
    """Arguments of a past call as a JSON object, which servers require; invalid ones are wrapped as a string."""
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return arguments
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    return msgspec.json.encode({"invalid_json": arguments} if arguments.strip() else {}).decode()


def render_file(part: ItemContentPart, attachment: Attachment, *, takes_files: bool) -> str | InlineFile:
    """A file as text if it is text, as it is if the server takes files, else its description. Raises InvalidRequest."""
    name = attachment.name or sanitize_name(part.filename or "file")
    if attachment.text is not None:
        return render_file_text(name, attachment.text, attachment.omitted_bytes)
    inline = attachment.data or part.file_data
    if attachment.too_large or (inline is None and attachment.name):
        return describe_unshown_file(attachment)
    if inline is None:
        raise InvalidRequest(
            f"The input_file {name!r} has no file_data: this model's server takes files inline only.",
            param="input",
        )
    media_type, content = _decode_file_data(inline, name)
    text = decode_text(media_type, content)
    if text is not None:
        return render_file_text(name, text)
    if not takes_files:
        return describe_unshown_file(
            Attachment(name=name, media_type=attachment.media_type or media_type, bytes=len(content))
        )
    return InlineFile(name, encode_data_url(attachment.media_type or media_type, content))


def _decode_file_data(data: str, name: str) -> tuple[str, bytes]:
    """Raises InvalidRequest."""
    try:
        return decode_inline(data)
    except ValueError as error:
        raise InvalidRequest(f"The file_data of the input_file {name!r} {error}.", param="input") from None
