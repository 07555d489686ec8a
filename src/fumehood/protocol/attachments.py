"""Attachments: files and pictures in the input of a conversation."""

import base64
import binascii
import mimetypes
from pathlib import PurePosixPath
from typing import Literal, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Raw

from fumehood.protocol.name_sanitizing import sanitize_name

MAX_TEXT_CHARACTERS = 100_000
"""Characters of a file that a model sees."""

MAX_TEXT_BYTES = 4 * MAX_TEXT_CHARACTERS

_FILE_PART_TYPES = frozenset({"input_file", "input_image"})
_FILE_PART_MARKERS = (b"input_file", b"input_image")
_CONTENT_FIELDS = {
    "message": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}
_MAX_NAME_BYTES = 200  # a file system allows 255
_MAX_SUFFIX_BYTES = 32
_TEXT_MEDIA_TYPES = frozenset(
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
_OCTET_STREAM = "application/octet-stream"
_media_types = mimetypes.MimeTypes()  # without the host's own tables, so the same everywhere
_IMAGE_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp"}

type AttachmentKind = Literal["picture", "text", "binary"]


class Attachment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file or picture of an input item, as it was when its response started.

    name: its name in a container, unique in the conversation. Empty for a URL that is forwarded unread.
    media_type, bytes: of its content.
    file_id: the id of the upload, if it is one.
    text: what a model reads of it, if the item does not contain it. omitted_bytes: after that text.
    data: the content as a data: URL, if the item does not contain it and it is needed.
    sent_to_model: whether the model gets it although it is not text.
    too_large: whether it exists but is too large for any model.
    gone: whether it existed once and was deleted.
    """

    name: str = ""
    kind: AttachmentKind = "binary"
    media_type: str = ""
    bytes: int = 0
    file_id: str = ""
    text: str | None = None
    omitted_bytes: int = 0
    data: str | None = None
    sent_to_model: bool = False
    too_large: bool = False
    gone: bool = False

    @property
    def is_hidden(self) -> bool:
        """Whether a model is told about it but cannot see it."""
        return self.kind == "binary" and bool(self.name) and not (self.sent_to_model or self.gone)

    @property
    def size(self) -> int:
        return len(self.text or "") + len(self.data or "")


# --- content parts -------------------------------------------------------------------------------


class InputImageUrl(msgspec.Struct):
    """The form of chat completions, which some clients send."""

    url: str
    detail: str | None = None


class InputFilePart(msgspec.Struct):
    """An `input_file` or `input_image` part."""

    type: str = ""
    file_id: str | None = None
    file_url: str | None = None
    file_data: str | None = None
    filename: str | None = None
    image_url: str | InputImageUrl | None = None

    @property
    def picture_url(self) -> str | None:
        """The URL of a picture; a data: URL contains it."""
        return self.image_url.url if isinstance(self.image_url, InputImageUrl) else self.image_url

    @property
    def inline_data(self) -> str | None:
        """The content, if the part contains it: a data: URL, or base64."""
        if self.type == "input_file":
            return self.file_data
        return self.picture_url if (self.picture_url or "").startswith("data:") else None


class LocatedFilePart(NamedTuple):
    """A part and its position in the item, such as `content[1]`."""

    where: str
    part: InputFilePart


_list_decoder = msgspec.json.Decoder(list[Raw])
_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_part_decoder = msgspec.json.Decoder(InputFilePart)


def may_contain_files(kind: str, raw: bytes) -> bool:
    """Whether an item may contain file parts; a quick check without decoding."""
    return kind in _CONTENT_FIELDS and any(mark in raw for mark in _FILE_PART_MARKERS)


def is_file_part(kind: str) -> bool:
    """Whether parts of this type are files or pictures."""
    return kind in _FILE_PART_TYPES


def find_file_parts(kind: str, raw: bytes) -> list[LocatedFilePart]:
    """Return the file parts of an item, in order; none if it cannot be decoded."""
    try:
        field = _CONTENT_FIELDS[kind]
        content = _list_decoder.decode(_object_decoder.decode(raw)[field])
    except (KeyError, msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    return [
        LocatedFilePart(f"{field}[{index}]", part)
        for index, part in enumerate(map(_read_part, content))
        if part.type in _FILE_PART_TYPES
    ]


def _read_part(raw: Raw) -> InputFilePart:
    try:
        return _part_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return InputFilePart()


# --- content -----------------------------------------------------------------------------------------


def decode_inline(data: str) -> tuple[str, bytes]:
    """Return the media type, empty if unknown, and the bytes of a data: URL or base64. Raises ValueError."""
    header, _, payload = data.partition(",") if data.startswith("data:") else ("", "", data)
    media_type, *parameters = header.removeprefix("data:").split(";")
    try:
        if header and "base64" not in parameters:
            content = unquote_to_bytes(payload)
        else:
            content = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("is not base64") from None
    return sanitize_name(media_type.strip().lower(), 100), content


def encode_data_url(media_type: str, content: bytes) -> str:
    return f"data:{media_type or _OCTET_STREAM};base64,{base64.b64encode(content).decode()}"


def guess_media_type(filename: str, declared: str = "") -> str:
    """Return the declared media type, or the one of the file name."""
    if declared and declared != _OCTET_STREAM:
        return declared
    return _media_types.guess_type(filename, strict=False)[0] or ""


def is_text_media_type(media_type: str) -> bool:
    return media_type.startswith("text/") or media_type in _TEXT_MEDIA_TYPES


def decode_text(media_type: str, content: bytes, *, whole: bool = True) -> str | None:
    """Return the content as text, None if it is not text.

    whole: False for the beginning of a file, which may end within a character.
    """
    is_declared_text = is_text_media_type(media_type)
    if not is_declared_text and (media_type not in ("", _OCTET_STREAM) or content.startswith(b"%PDF")):
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if whole or error.start < len(content) - 3:
            return content.decode("utf-8", "replace") if is_declared_text else None
        text = content[: error.start].decode("utf-8-sig")
    return None if "\0" in text else text


def render_file_text(name: str, text: str, omitted: int = 0) -> str:
    """Return the text that a model sees of a file; a long one is cut.

    omitted: bytes of the file after this text.
    """
    shown = text[:MAX_TEXT_CHARACTERS]
    omitted += len(text) - len(shown)
    rest = (
        f"\n[About {omitted:,} more characters are left out here. {code_interpreter_hint(name)}]"
        if omitted
        else ""
    )
    return f"The file {name}:\n{shown}{rest}"


def describe_unshown_file(attachment: Attachment) -> str:
    """Return the text in place of a file that the model cannot see."""
    what = "picture" if attachment.kind == "picture" else "file"
    if attachment.gone:
        return f"The {what} {attachment.name} is not there any more."
    kind = attachment.media_type or "of unknown type"
    return (
        f"The {what} {attachment.name} ({kind}, {attachment.bytes:,} bytes) cannot be shown here. "
        f"{code_interpreter_hint(attachment.name)}"
    )


def code_interpreter_hint(name: str) -> str:
    return f"If there is a code interpreter, it finds it as /mnt/data/{name}."


# --- names --------------------------------------------------------------------------------------------


def sanitize_file_name(wanted: str, media_type: str = "") -> str:
    """Return a safe name: one component, printable, not hidden, not too long."""
    name = sanitize_name(wanted.replace("\\", "/").rpartition("/")[2], _MAX_NAME_BYTES)
    name = name.replace("\N{REPLACEMENT CHARACTER}", "_").strip(" ").lstrip(".").rstrip(" .~")
    path = PurePosixPath(name or f"file{_IMAGE_SUFFIXES.get(media_type, '')}")
    suffix = path.suffix if len(path.suffix.encode()) <= _MAX_SUFFIX_BYTES else ""
    stem = path.name.removesuffix(suffix).encode()[: _MAX_NAME_BYTES - len(suffix.encode())]
    return stem.decode(errors="ignore") + suffix


def default_picture_name(media_type: str) -> str:
    """Return a name for a picture without one."""
    return f"image{_IMAGE_SUFFIXES.get(media_type, '')}"
