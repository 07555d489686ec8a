"""Replacement of inline data, such as images, and of sealed content by its digest and size."""

import base64
import binascii
import hashlib
import re
from typing import cast
from urllib.parse import unquote

import msgspec

from fumehood.message_parts.canonical_parts import (
    BlobPart,
    Json,
    JsonObject,
    Part,
    ToolCallResponsePart,
    UriPart,
)
from fumehood.message_parts.redaction import transform_part, transform_source

_DATA_URL = r"data:[\w.+/-]*(?:;[\w.=+-]+)*;base64,"
_WHOLE_DATA_URL = re.compile(_DATA_URL + r"[\w+/=%\r\n-]*", re.ASCII | re.IGNORECASE)
_EMBEDDED_DATA_URL = re.compile(_DATA_URL + r"[\w+/%-]+={0,2}", re.ASCII | re.IGNORECASE)
# Fields whose content only the vendor, or the gateway, can open.
_SEALED_FIELDS = ("encrypted_content", "encryptedContent")
# Fields that hold data. A field called just `data` does if a media type or item type beside it says so.
_DATA_FIELDS = ("bytes", "file_data", "input_audio", "b64_json", "partial_image_b64")
_MEDIA_DATA_FIELDS = ("data", "blob", *_DATA_FIELDS)
_MEDIA_TYPE_FIELDS = frozenset({"mime_type", "mimeType", "media_type", "format"})
_MEDIA_ITEM_TYPES = frozenset({"image", "audio", "video", "document", "output_audio"})
# Shorter strings may be base64 by chance.
_MIN_LOOSE_BASE64_LENGTH = 32
_URLSAFE_TO_STANDARD = str.maketrans({"-": "+", "_": "/", "\r": None, "\n": None})


def replace_inline_data(parts: list[Part]) -> list[Part]:
    """Replace inline base64 data and sealed content by digest, size and media type."""
    return [_replace_part_data(part) for part in parts]


def _replace_part_data(part: Part) -> Part:
    if isinstance(part, BlobPart):
        return _reference_blob(part)
    made = transform_part(part, _replace_data)
    if (
        isinstance(part, ToolCallResponsePart)
        and isinstance(made, ToolCallResponsePart)
        and part.kind == "image_generation"
    ):
        image = part.payload.get("result")
        digest = _digest_image(image) if isinstance(image, str) else None
        if digest is not None:
            made.payload["result"] = {"type": "uri", "modality": "image", "uri": _uri_of(digest), **digest}
    return made


def _reference_blob(part: BlobPart) -> UriPart:
    digest = _digest_base64(part.content)
    source = transform_source(part.source, _replace_data)
    if source is not None:
        # The digest is a URI, which the codec of the extracted data would encode as data: restore it as a URI.
        extracted = [
            msgspec.structs.replace(field, field="uri", codec="") if field.field == "content" else field
            for field in source.extracted_fields
        ]
        source = msgspec.structs.replace(source, extracted_fields=extracted)
    return UriPart(
        uri=_uri_of(digest),
        modality=part.modality,
        mime_type=part.mime_type,
        source=source,
        extra={**part.extra, **digest},
    )


def _replace_data(value: Json) -> Json:
    if isinstance(value, list):
        return [_replace_data(inner) for inner in value]
    if isinstance(value, str):
        return _replace_data_urls(value)
    if not isinstance(value, dict):
        return value
    made: JsonObject = {key: _replace_data(inner) for key, inner in value.items()}
    if name := _find_data_field(value):
        return {**made, name: None, **_digest_base64(cast(str, value[name]))}
    found = [inner for inner in value.values() if isinstance(inner, str) and _is_data_url(inner)]
    return {**made, **_digest_data_url(found[0])} if found else made


def _replace_data_urls(text: str) -> str:
    if _is_data_url(text):
        return _uri_of(_digest_data_url(text))
    return _EMBEDDED_DATA_URL.sub(lambda found: _uri_of(_digest_data_url(found.group())), text)


def _find_data_field(value: JsonObject) -> str:
    """Return the field that holds base64 or sealed data, by the vendors' names for it; empty if there is none."""
    for name in _SEALED_FIELDS:
        if isinstance(value.get(name), str):
            return name
    kind = value.get("type")
    if kind == "base64" and isinstance(value.get("data"), str):
        return "data"
    is_media = value.keys() & _MEDIA_TYPE_FIELDS or (isinstance(kind, str) and kind in _MEDIA_ITEM_TYPES)
    for name in _MEDIA_DATA_FIELDS if is_media else _DATA_FIELDS:
        data = value.get(name)
        if isinstance(data, str) and _is_base64(data):
            return name
    return ""


def _is_base64(text: str) -> bool:
    if not text or text.isdecimal():
        return False
    return _decode_base64(text, strict=len(text) < _MIN_LOOSE_BASE64_LENGTH) is not None


def _is_data_url(text: str) -> bool:
    return _WHOLE_DATA_URL.fullmatch(text) is not None


# --- digests ------------------------------------------------------------------------------------------


def _uri_of(digest: JsonObject) -> str:
    return f"urn:{digest['digest']}"


def _digest_image(image: str) -> JsonObject | None:
    """Digest an inline image; None for an image that is a URL or text."""
    if _is_data_url(image):
        return _digest_data_url(image)
    return None if _decode_base64(image) is None else _digest_base64(image)


def _digest_data_url(url: str) -> JsonObject:
    return _digest_base64(unquote(url[url.find(",") + 1 :]))


def _digest_base64(data: str) -> JsonObject:
    """Return digest and size of the data; what is not base64 is digested as text."""
    content = _decode_base64(data)
    if content is None:
        content = data.encode("utf-8", "surrogatepass")
    return {"digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "bytes": len(content)}


def _decode_base64(data: str, *, strict: bool = False) -> bytes | None:
    """Decode base64 in any spelling: URL-safe, with line breaks, without padding."""
    if not strict:
        data = data.translate(_URLSAFE_TO_STANDARD)
        data += "=" * (-len(data) % 4)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None
