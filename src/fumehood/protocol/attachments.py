"""Files and pictures that come with a conversation, and what they are."""

import base64
import binascii
import mimetypes
from pathlib import PurePosixPath
from typing import Literal, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Raw

from fumehood.protocol.safe_names import sanitize_name

MAX_TEXT_CHARACTERS = 100_000
"""Characters of a file that a model is shown."""

MAX_TEXT_BYTES = 4 * MAX_TEXT_CHARACTERS

_FILE_PART_TYPES = frozenset({"input_file", "input_image"})
_FILE_PART_MARKERS = (b"input_file", b"input_image")
_CONTENT_FIELDS = {
    "message": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}
_MAX_NAME_BYTES = 200  # bytes, of the 255 that a file system takes
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
_media_types = mimetypes.MimeTypes()  # the same on every machine
_IMAGE_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp"}

type AttachmentKind = Literal["picture", "text", "binary"]


class Attachment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file or a picture of somebody's input, as it was when its response began.

    name: in a container; unlike those of the other files of the conversation. Empty for what nobody looked at: an
        address that is passed on as it is.
    media_type, bytes: of its content.
    file_id: of the upload that it is.
    text: what a model reads of it, where the item itself does not hold it; left_out: bytes that come after that.
    data: the content as a data: URL, where the item does not hold it and somebody needs it.
    given: the model is given it although it is no text.
    too_large: no model is given it, although it is there.
    gone: it was there once, and is not to be had any more.
    """

    name: str = ""
    kind: AttachmentKind = "binary"
    media_type: str = ""
    bytes: int = 0
    file_id: str = ""
    text: str | None = None
    left_out: int = 0
    data: str | None = None
    given: bool = False
    too_large: bool = False
    gone: bool = False

    @property
    def is_hidden(self) -> bool:
        """Whether a model is told of it, and cannot look at it."""
        return self.kind == "binary" and bool(self.name) and not (self.given or self.gone)

    @property
    def size(self) -> int:
        return len(self.text or "") + len(self.data or "")


# --- parts of a content -------------------------------------------------------------------------------


class InputImageUrl(msgspec.Struct):
    """As chat completions wrap it, and some clients with them."""

    url: str
    detail: str | None = None


class InputFilePart(msgspec.Struct):
    """An `input_file` or `input_image` as a client wrote it."""

    type: str = ""
    file_id: str | None = None
    file_url: str | None = None
    file_data: str | None = None
    filename: str | None = None
    image_url: str | InputImageUrl | None = None

    @property
    def picture_url(self) -> str | None:
        """Where a picture is: a data: URL holds it, another one leads to it."""
        return self.image_url.url if isinstance(self.image_url, InputImageUrl) else self.image_url

    @property
    def inline_data(self) -> str | None:
        """The content, if the part holds it: a data: URL, or base64."""
        if self.type == "input_file":
            return self.file_data
        return self.picture_url if (self.picture_url or "").startswith("data:") else None


class LocatedFilePart(NamedTuple):
    """A part and where it stands in its item: `content[1]`."""

    where: str
    part: InputFilePart


_lists = msgspec.json.Decoder(list[Raw])
_objects = msgspec.json.Decoder(dict[str, Raw])
_parts = msgspec.json.Decoder(InputFilePart)


def may_contain_files(kind: str, raw: bytes) -> bool:
    """Whether it is worth looking; takes no decoding."""
    return kind in _CONTENT_FIELDS and any(mark in raw for mark in _FILE_PART_MARKERS)


def is_file_part(kind: str) -> bool:
    """Whether parts of this type are files or pictures."""
    return kind in _FILE_PART_TYPES


def find_file_parts(kind: str, raw: bytes) -> list[LocatedFilePart]:
    """All that an item holds, in order; what cannot be read is none."""
    try:
        field = _CONTENT_FIELDS[kind]
        found = [
            (place, _read_part(part)) for place, part in enumerate(_lists.decode(_objects.decode(raw)[field]))
        ]
    except (KeyError, msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    return [
        LocatedFilePart(f"{field}[{place}]", part) for place, part in found if part.type in _FILE_PART_TYPES
    ]


def _read_part(raw: Raw) -> InputFilePart:
    try:
        return _parts.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return InputFilePart()


# --- contents -----------------------------------------------------------------------------------------


def decode_inline(data: str) -> tuple[str, bytes]:
    """The type, empty if it is not told, and the bytes of a data: URL or of base64; raises ValueError."""
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
    """What it is called: by whoever gave it, or else by its name."""
    if declared and declared != _OCTET_STREAM:
        return declared
    return _media_types.guess_type(filename, strict=False)[0] or ""


def is_text_media_type(media_type: str) -> bool:
    return media_type.startswith("text/") or media_type in _TEXT_MEDIA_TYPES


def decode_text(media_type: str, content: bytes, *, whole: bool = True) -> str | None:
    """The content as text; None if it is none. A part of a file may end within a character."""
    named_so = is_text_media_type(media_type)
    if not named_so and (media_type not in ("", _OCTET_STREAM) or content.startswith(b"%PDF")):
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if whole or error.start < len(content) - 3:
            return content.decode("utf-8", "replace") if named_so else None
        text = content[: error.start].decode("utf-8-sig")
    return None if "\0" in text else text


def render_file_text(name: str, text: str, left_out: int = 0) -> str:
    """What a model reads of a file; of a long one the beginning.

    left_out: bytes after this text that nobody has read.
    """
    shown = text[:MAX_TEXT_CHARACTERS]
    left_out += len(text) - len(shown)
    rest = (
        f"\n[About {left_out:,} more characters are left out here. {code_interpreter_hint(name)}]"
        if left_out
        else ""
    )
    return f"The file {name}:\n{shown}{rest}"


def describe_unshown_file(attachment: Attachment) -> str:
    """What stands for a file that a model cannot be shown."""
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
    """A name for a file that somebody else has named: one component, visible, neither hidden nor too long."""
    name = sanitize_name(wanted.replace("\\", "/").rpartition("/")[2], _MAX_NAME_BYTES)
    name = name.replace("\N{REPLACEMENT CHARACTER}", "_").strip(" ").lstrip(".").rstrip(" .~")
    path = PurePosixPath(name or f"file{_IMAGE_SUFFIXES.get(media_type, '')}")
    suffix = path.suffix if len(path.suffix.encode()) <= _MAX_SUFFIX_BYTES else ""
    stem = path.name.removesuffix(suffix).encode()[: _MAX_NAME_BYTES - len(suffix.encode())]
    return stem.decode(errors="ignore") + suffix


def default_picture_name(media_type: str) -> str:
    """A name for a picture that has none."""
    return f"image{_IMAGE_SUFFIXES.get(media_type, '')}"
