"""Content parts of conversation items, as every renderer reads them."""

import msgspec

from fumehood.protocol.attachments import InputImageUrl
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.untrusted_names import sanitize_name

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
