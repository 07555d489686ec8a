"""Pictures that code shows or writes, recognised by what they are and not by what they claim; imports `protocol`."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from fumehood.protocol.attachments import data_url
from fumehood.protocol.file_types import picture_type

_SUFFIXES = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/svg+xml": ".svg",
}
_FILE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".svg"})
_VECTOR = "image/svg+xml"
_LOOKED_AT = 1024


@dataclass(frozen=True, slots=True)
class Picture:
    mime: str
    content: bytes

    @property
    def suffix(self) -> str:
        return _SUFFIXES[self.mime]

    @property
    def for_models(self) -> bool:
        """Models take pixels, no drawings."""
        return self.mime != _VECTOR

    def data_url(self) -> str:
        return data_url(self.mime, self.content)


def shown_picture(data: Mapping[str, str], most: int) -> Picture | None:
    """The best picture of a display, of at most so many bytes; None if there is none."""
    for mime in _SUFFIXES:
        text = data.get(mime)
        if text is None or len(text) > 2 * most:
            continue
        content = text.encode() if mime == _VECTOR else _decoded(text)
        if content is not None and len(content) <= most and kind_of(content) == mime:
            return Picture(mime, content)
    return None


def may_be_picture(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in _FILE_SUFFIXES


def kind_of(content: bytes) -> str | None:
    """The MIME type of a picture that begins so, drawings included."""
    return picture_type(content) or (_VECTOR if b"<svg" in content[:_LOOKED_AT].lower() else None)


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError):
        return None
