"""Renders the content of messages and tool results as Chat Completions parts."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from fumehood.models.rendering.item_content import ItemContent, ItemContentPart, get_part_text
from fumehood.protocol.attachments import (
    Attachment,
    InputImageUrl,
    decode_inline,
    decode_text,
    describe_unshown_file,
    encode_data_url,
    is_file_part,
    render_file_text,
)
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.untrusted_names import sanitize_name

type Attachments = Sequence[Attachment]
"""One for each file and image part of a content, in order; empty if they were not resolved."""

_UNKNOWN_ATTACHMENT = Attachment()


class ChatTextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ChatImageUrl(msgspec.Struct):
    url: str
    detail: str | UnsetType = UNSET


class ChatImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: ChatImageUrl


class ChatFileContent(msgspec.Struct):
    filename: str
    file_data: str


class ChatFilePart(msgspec.Struct, tag_field="type", tag="file"):
    file: ChatFileContent


type ChatContentPart = ChatTextPart | ChatImagePart | ChatFilePart


class ToolResultPlaceholders:
    """Text for media, which tool messages cannot contain."""

    SEE_NEXT_MESSAGE: ClassVar[str] = "(in the message after the results)"
    MEDIA_HEADING: ClassVar[str] = "What the calls above showed:"


def render_content(
    content: ItemContent, attachments: Attachments = (), *, takes_files: bool = False
) -> str | list[ChatContentPart]:
    """Render the content of a message; text alone as a string, which every server accepts. Raises InvalidRequest."""
    parts = _render_parts(content, attachments, takes_files)
    texts = [part.text for part in parts if isinstance(part, ChatTextPart)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def split_text_and_media(
    content: ItemContent, attachments: Attachments = (), *, takes_files: bool = False
) -> tuple[str, list[ChatContentPart]]:
    """The text of a tool result, and its media, which go into a user message. Raises InvalidRequest."""
    parts = _render_parts(content, attachments, takes_files)
    media: list[ChatContentPart] = [part for part in parts if not isinstance(part, ChatTextPart)]
    text = "\n".join(part.text for part in parts if isinstance(part, ChatTextPart))
    return (text or ToolResultPlaceholders.SEE_NEXT_MESSAGE if media else text), media


def make_image_parts(urls: Sequence[str]) -> list[ChatContentPart]:
    return [ChatImagePart(ChatImageUrl(url)) for url in urls]


def _render_parts(content: ItemContent, attachments: Attachments, takes_files: bool) -> list[ChatContentPart]:
    if content is None or isinstance(content, str):
        return [ChatTextPart(content or "")]
    files = iter(attachments)
    return [_render_part(part, files, takes_files) for part in content]


def _render_part(
    part: ItemContentPart, attachments: Iterator[Attachment], takes_files: bool
) -> ChatContentPart:
    if not is_file_part(part.type):
        return ChatTextPart(get_part_text(part))
    attachment = next(attachments, _UNKNOWN_ATTACHMENT)
    if attachment.gone:
        return ChatTextPart(describe_unshown_file(attachment))
    if part.type == "input_image":
        return _render_image(part, attachment)
    return render_file(part, attachment, takes_files=takes_files or attachment.sent_to_model)


def _render_image(part: ItemContentPart, attachment: Attachment) -> ChatImagePart:
    image_url = part.image_url
    url = attachment.data or (image_url.url if isinstance(image_url, InputImageUrl) else image_url)
    detail = part.detail or (image_url.detail if isinstance(image_url, InputImageUrl) else None)
    if not url or not url.startswith(("data:image/", "https://", "http://")):
        raise InvalidRequest(
            "An input_image needs an image_url: a data: URL of the image, or an http(s) URL.",
            param="input",
        )
    return ChatImagePart(ChatImageUrl(url, detail or UNSET))


def render_file(part: ItemContentPart, attachment: Attachment, *, takes_files: bool) -> ChatContentPart:
    """Render a file: as text if it is text, as a file part if the server takes files, else as a description."""
    name = attachment.name or sanitize_name(part.filename or "file")
    if attachment.text is not None:
        return ChatTextPart(render_file_text(name, attachment.text, attachment.omitted_bytes))
    inline = attachment.data or part.file_data
    if attachment.too_large or (inline is None and attachment.name):
        return ChatTextPart(describe_unshown_file(attachment))
    if inline is None:
        raise InvalidRequest(
            f"The input_file {name!r} has no file_data: this model's server takes files inline only.",
            param="input",
        )
    media_type, content = _decode_file_data(inline, name)
    text = decode_text(media_type, content)
    if text is not None:
        return ChatTextPart(render_file_text(name, text))
    if not takes_files:
        size = len(content)
        return ChatTextPart(
            describe_unshown_file(
                Attachment(name=name, media_type=attachment.media_type or media_type, bytes=size)
            )
        )
    return ChatFilePart(ChatFileContent(name, encode_data_url(attachment.media_type or media_type, content)))


def _decode_file_data(data: str, name: str) -> tuple[str, bytes]:
    """Raises InvalidRequest."""
    try:
        return decode_inline(data)
    except ValueError as error:
        raise InvalidRequest(f"The file_data of the input_file {name!r} {error}.", param="input") from None
