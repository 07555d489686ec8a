"""Contents of messages and results, in the words of chat completions; imports msgspec, a sibling and `protocol`."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from fumehood.models.item_content import Content, Part, text_of
from fumehood.protocol.attachments import (
    Attachment,
    ImageAddress,
    as_text,
    data_url,
    decode_inline,
    is_file,
    note,
    shown_text,
)
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.names import clean_name

type Attached = Sequence[Attachment]
"""What the files and pictures of a content are, one for each; nothing where nobody has looked."""

_UNKNOWN = Attachment()


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


def render(content: Content, attached: Attached = (), *, takes_files: bool = False) -> str | list[ChatPart]:
    """A message's content: text alone is a string, which every server takes; raises InvalidRequest."""
    parts = _rendered(content, attached, takes_files)
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def split(
    content: Content, attached: Attached = (), *, takes_files: bool = False
) -> tuple[str, list[ChatPart]]:
    """A result's text, and what only a message of the user's can hold; raises InvalidRequest."""
    parts = _rendered(content, attached, takes_files)
    others: list[ChatPart] = [part for part in parts if not isinstance(part, TextPart)]
    text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
    return (text or Results.ELSEWHERE if others else text), others


def pictures(urls: Sequence[str]) -> list[ChatPart]:
    return [ImagePart(ImageUrl(url)) for url in urls]


def _rendered(content: Content, attached: Attached, takes_files: bool) -> list[ChatPart]:
    if content is None or isinstance(content, str):
        return [TextPart(content or "")]
    files = iter(attached)
    return [_render_part(part, files, takes_files) for part in content]


def _render_part(part: Part, files: Iterator[Attachment], takes_files: bool) -> ChatPart:
    if not is_file(part.type):
        return TextPart(text_of(part))
    found = next(files, _UNKNOWN)
    if found.gone:
        return TextPart(note(found))
    if part.type == "input_image":
        return _image(part, found)
    return file_part(part, found, takes_files=takes_files or found.given)


def _image(part: Part, found: Attachment) -> ImagePart:
    address = part.image_url
    url = found.data or (address.url if isinstance(address, ImageAddress) else address)
    detail = part.detail or (address.detail if isinstance(address, ImageAddress) else None)
    if not url or not url.startswith(("data:image/", "https://", "http://")):
        raise InvalidRequest(
            "An input_image needs an image_url, which is the image as a data: URL or its http(s) address.",
            param="input",
        )
    return ImagePart(ImageUrl(url, detail or UNSET))


def file_part(part: Part, found: Attachment, *, takes_files: bool) -> ChatPart:
    """Text is given as text, since that is what every model reads."""
    name = found.name or clean_name(part.filename or "file")
    if found.text is not None:
        return TextPart(shown_text(name, found.text, found.left_out))
    inline = found.data or part.file_data
    if found.too_large or (inline is None and found.name):
        return TextPart(note(found))
    if inline is None:
        raise InvalidRequest(
            f"The input_file {name!r} has no file_data: this model's server takes files inline only.",
            param="input",
        )
    media_type, content = _read_inline(inline, name)
    text = as_text(media_type, content)
    if text is not None:
        return TextPart(shown_text(name, text))
    if not takes_files:
        size = len(content)
        return TextPart(note(Attachment(name=name, media_type=found.media_type or media_type, bytes=size)))
    return FilePart(FileContent(name, data_url(found.media_type or media_type, content)))


def _read_inline(data: str, name: str) -> tuple[str, bytes]:
    """Raises InvalidRequest."""
    try:
        return decode_inline(data)
    except ValueError as error:
        raise InvalidRequest(f"The file_data of the input_file {name!r} {error}.", param="input") from None
