"""Files and pictures that come with a conversation, and what they are; imports msgspec, siblings, standard library."""

import base64
import binascii
import mimetypes
from pathlib import PurePosixPath
from typing import Literal, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Raw

from fumehood.protocol.names import clean_name

LONGEST_TEXT = 100_000
"""Characters of a file that a model is shown."""

BYTES_OF_LONGEST_TEXT = 4 * LONGEST_TEXT

_TYPES = frozenset({"input_file", "input_image"})
_MARKS = (b"input_file", b"input_image")
_HOLDERS = {"message": "content", "function_call_output": "output", "custom_tool_call_output": "output"}
_LONGEST_NAME = 200  # bytes, of the 255 that a file system takes
_LONGEST_SUFFIX = 32
_TEXTUAL = frozenset(
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
_UNKNOWN = "application/octet-stream"
_types = mimetypes.MimeTypes()  # the same on every machine
_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp"}

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
    def hidden(self) -> bool:
        """Whether a model is told of it, and cannot look at it."""
        return self.kind == "binary" and bool(self.name) and not (self.given or self.gone)

    @property
    def size(self) -> int:
        return len(self.text or "") + len(self.data or "")


# --- parts of a content -------------------------------------------------------------------------------


class ImageAddress(msgspec.Struct):
    """As chat completions wrap it, and some clients with them."""

    url: str
    detail: str | None = None


class FilePart(msgspec.Struct):
    """An `input_file` or `input_image` as a client wrote it."""

    type: str = ""
    file_id: str | None = None
    file_url: str | None = None
    file_data: str | None = None
    filename: str | None = None
    image_url: str | ImageAddress | None = None

    @property
    def address(self) -> str | None:
        """Where a picture is: a data: URL holds it, another one leads to it."""
        return self.image_url.url if isinstance(self.image_url, ImageAddress) else self.image_url

    @property
    def inline(self) -> str | None:
        """The content, if the part holds it: a data: URL, or base64."""
        if self.type == "input_file":
            return self.file_data
        return self.address if (self.address or "").startswith("data:") else None


class Placed(NamedTuple):
    """A part and where it stands in its item: `content[1]`."""

    where: str
    part: FilePart


_lists = msgspec.json.Decoder(list[Raw])
_objects = msgspec.json.Decoder(dict[str, Raw])
_parts = msgspec.json.Decoder(FilePart)


def may_hold_files(kind: str, raw: bytes) -> bool:
    """Whether it is worth looking; takes no decoding."""
    return kind in _HOLDERS and any(mark in raw for mark in _MARKS)


def is_file(kind: str) -> bool:
    """Whether parts of this type are files or pictures."""
    return kind in _TYPES


def file_parts(kind: str, raw: bytes) -> list[Placed]:
    """All that an item holds, in order; what cannot be read is none."""
    try:
        field = _HOLDERS[kind]
        found = [
            (place, _read(part)) for place, part in enumerate(_lists.decode(_objects.decode(raw)[field]))
        ]
    except (KeyError, msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    return [Placed(f"{field}[{place}]", part) for place, part in found if part.type in _TYPES]


def _read(raw: Raw) -> FilePart:
    try:
        return _parts.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return FilePart()


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
    return clean_name(media_type.strip().lower(), 100), content


def data_url(media_type: str, content: bytes) -> str:
    return f"data:{media_type or _UNKNOWN};base64,{base64.b64encode(content).decode()}"


def media_type_of(filename: str, told: str = "") -> str:
    """What it is called: by whoever gave it, or else by its name."""
    if told and told != _UNKNOWN:
        return told
    return _types.guess_type(filename, strict=False)[0] or ""


def is_text_by_name(media_type: str) -> bool:
    return media_type.startswith("text/") or media_type in _TEXTUAL


def as_text(media_type: str, content: bytes, *, whole: bool = True) -> str | None:
    """The content as text; None if it is none. A part of a file may end within a character."""
    named_so = is_text_by_name(media_type)
    if not named_so and (media_type not in ("", _UNKNOWN) or content.startswith(b"%PDF")):
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if whole or error.start < len(content) - 3:
            return content.decode("utf-8", "replace") if named_so else None
        text = content[: error.start].decode("utf-8-sig")
    return None if "\0" in text else text


def shown_text(name: str, text: str, left_out: int = 0) -> str:
    """What a model reads of a file; of a long one the beginning.

    left_out: bytes after this text that nobody has read.
    """
    shown = text[:LONGEST_TEXT]
    left_out += len(text) - len(shown)
    rest = (
        f"\n[About {left_out:,} more characters are left out here. {found_by_code(name)}]" if left_out else ""
    )
    return f"The file {name}:\n{shown}{rest}"


def note(attachment: Attachment) -> str:
    """What stands for a file that a model cannot be shown."""
    what = "picture" if attachment.kind == "picture" else "file"
    if attachment.gone:
        return f"The {what} {attachment.name} is not there any more."
    kind = attachment.media_type or "of unknown type"
    return (
        f"The {what} {attachment.name} ({kind}, {attachment.bytes:,} bytes) cannot be shown here. "
        f"{found_by_code(attachment.name)}"
    )


def found_by_code(name: str) -> str:
    return f"If there is a code interpreter, it finds it as /mnt/data/{name}."


# --- names --------------------------------------------------------------------------------------------


def file_name(wanted: str, media_type: str = "") -> str:
    """A name for a file that somebody else has named: one component, visible, neither hidden nor too long."""
    name = clean_name(wanted.replace("\\", "/").rpartition("/")[2], _LONGEST_NAME)
    name = name.replace("\N{REPLACEMENT CHARACTER}", "_").strip(" ").lstrip(".").rstrip(" .~")
    path = PurePosixPath(name or f"file{_SUFFIXES.get(media_type, '')}")
    suffix = path.suffix if len(path.suffix.encode()) <= _LONGEST_SUFFIX else ""
    stem = path.name.removesuffix(suffix).encode()[: _LONGEST_NAME - len(suffix.encode())]
    return stem.decode(errors="ignore") + suffix


def picture_name(media_type: str) -> str:
    """A name for a picture that has none."""
    return f"image{_SUFFIXES.get(media_type, '')}"
