"""Renders the content of messages and tool results as Chat Completions parts."""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fumehood.models.rendering.conversation_items import (
    InlineFile,
    ItemContent,
    ItemContentPart,
    get_part_text,
    render_file,
)
from fumehood.protocol.attachments import Attachment, InputImageUrl, describe_unshown_file, is_file_part
from fumehood.protocol.openai.api_errors import InvalidRequest

type Attachments = Sequence[Attachment]
"""One for each file and image part of a content, in order; empty if they were not resolved."""

# Tool messages cannot contain media; a user message after them does.
MEDIA_HEADING = "What the calls above showed:"
_SEE_NEXT_MESSAGE = "(in the message after the results)"
_UNKNOWN_ATTACHMENT = Attachment()


class ChatTextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ChatImageUrl(msgspec.Struct):
    url: str
    detail: str | UnsetType = UNSET


class ChatImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: ChatImageUrl


class ChatFilePart(msgspec.Struct, tag_field="type", tag="file"):
    file: InlineFile


type ChatContentPart = ChatTextPart | ChatImagePart | ChatFilePart


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
    return (text or _SEE_NEXT_MESSAGE if media else text), media


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
    rendered = render_file(part, attachment, takes_files=takes_files or attachment.sent_to_model)
    return ChatTextPart(rendered) if isinstance(rendered, str) else ChatFilePart(rendered)


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
