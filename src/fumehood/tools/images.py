"""Recognises images that code displays or writes, by their content."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from fumehood.protocol.attachments import encode_data_url
from fumehood.protocol.file_types import detect_image_type

_SUFFIXES = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/svg+xml": ".svg",
}
_FILE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".svg"})
_SVG = "image/svg+xml"
_SNIFFED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class DecodedImage:
    mime: str
    content: bytes

    @property
    def suffix(self) -> str:
        return _SUFFIXES[self.mime]

    @property
    def is_viewable_by_models(self) -> bool:
        """Models accept raster images, not SVG."""
        return self.mime != _SVG

    def to_data_url(self) -> str:
        return encode_data_url(self.mime, self.content)


def decode_display(data: Mapping[str, str], max_bytes: int) -> DecodedImage | None:
    """Decode the best image of a display; None if there is none of at most `max_bytes`."""
    for mime in _SUFFIXES:
        text = data.get(mime)
        if text is None or len(text) > 2 * max_bytes:
            continue
        content = text.encode() if mime == _SVG else _decode_base64(text)
        if content is not None and len(content) <= max_bytes and detect_media_type(content) == mime:
            return DecodedImage(mime, content)
    return None


def has_image_suffix(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in _FILE_SUFFIXES


def detect_media_type(content: bytes) -> str | None:
    """The MIME type of an image, including SVG; None if it is none."""
    return detect_image_type(content) or (_SVG if b"<svg" in content[:_SNIFFED_BYTES].lower() else None)


def _decode_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError):
        return None
