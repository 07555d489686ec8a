"""Contents of messages and results, in the words of chat completions; imports msgspec, a sibling and `protocol`."""

import base64
from collections.abc import Sequence
from typing import ClassVar
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import UNSET, UnsetType

from fumehood.models.item_content import Content, ImageAddress, Part, text_of
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.names import clean_name

_MIME_TYPES_OF_TEXT = frozenset(
    {
        "application/json",
        "application/xml",
        "application/yaml",
        "application/x-yaml",
        "application/toml",
        "application/javascript",
        "application/sql",
        "application/x-ndjson",
        "image/svg+xml",
    }
)
_UNKNOWN_MIME_TYPES = frozenset({"", "application/octet-stream"})


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ImageUrl(msgspec.Struct):
    url: str
    detail: str | UnsetType = UNSET


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class FileContent(msgspec.Struct):
    filename: str
    file_data: str


class FilePart(msgspec.Struct, tag_field="type", tag="file"):
    file: FileContent


type ChatPart = TextPart | ImagePart | FilePart


class Results:
    """Sentences that stand for what cannot be in the result of a call."""

    ELSEWHERE: ClassVar[str] = "(in the message after the results)"
    PICTURES: ClassVar[str] = "What the calls above showed:"


def render(content: Content) -> str | list[ChatPart]:
    """A message's content: text alone is a string, which every server takes; raises InvalidRequest."""
    parts = _rendered(content)
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def split(content: Content) -> tuple[str, list[ChatPart]]:
    """A result's text, and what only a message of the user's can hold; raises InvalidRequest."""
    parts = _rendered(content)
    others: list[ChatPart] = [part for part in parts if not isinstance(part, TextPart)]
    text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
    return (text or Results.ELSEWHERE if others else text), others


def pictures(urls: Sequence[str]) -> list[ChatPart]:
    return [ImagePart(ImageUrl(url)) for url in urls]


def _rendered(content: Content) -> list[ChatPart]:
    if content is None or isinstance(content, str):
        return [TextPart(content or "")]
    return [_render_part(part) for part in content]


def _render_part(part: Part) -> ChatPart:
    match part.type:
        case "input_image":
            return _image(part)
        case "input_file":
            return _file(part)
        case _:
            return TextPart(text_of(part))


def _image(part: Part) -> ImagePart:
    address = part.image_url
    url = address.url if isinstance(address, ImageAddress) else address
    detail = part.detail or (address.detail if isinstance(address, ImageAddress) else None)
    if not url or not url.startswith(("data:image/", "https://", "http://")):
        raise InvalidRequest(
            "An input_image needs an image_url, which is the image as a data: URL or its http(s) address.",
            param="input",
        )
    return ImagePart(ImageUrl(url, detail or UNSET))


def _file(part: Part) -> ChatPart:
    """Text is given as text, since that is what every model reads."""
    name = clean_name(part.filename or "file")
    if part.file_data is None:
        raise InvalidRequest(
            f"The input_file {name!r} has no file_data: this model's server takes files inline only.",
            param="input",
        )
    mime, content = _inline(part.file_data, name)
    text = _as_text(mime, content)
    if text is not None:
        return TextPart(f"The file {name}:\n{text}")
    encoded = base64.b64encode(content).decode()
    return FilePart(FileContent(name, f"data:{mime or 'application/octet-stream'};base64,{encoded}"))


def _inline(data: str, name: str) -> tuple[str, bytes]:
    """The type and the bytes of a data: URL, or of plain base64."""
    header, _, payload = data.partition(",") if data.startswith("data:") else ("", "", data)
    mime, *parameters = header.removeprefix("data:").split(";")
    try:
        if header and "base64" not in parameters:
            content = unquote_to_bytes(payload)
        else:
            content = base64.b64decode(payload, validate=True)
    except ValueError:
        raise InvalidRequest(
            f"The file_data of the input_file {name!r} is not base64.", param="input"
        ) from None
    return clean_name(mime.lower(), 100), content


def _as_text(mime: str, content: bytes) -> str | None:
    named_so = mime.startswith("text/") or mime in _MIME_TYPES_OF_TEXT
    if not named_so and (mime not in _UNKNOWN_MIME_TYPES or content.startswith(b"%PDF")):
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("utf-8", "replace") if named_so else None
    return None if "\0" in text else text
