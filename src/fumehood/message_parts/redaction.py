"""Redaction, replacement of inline data by digests, and truncation of parts.

All of it applies to the vendor's item in `source` as well: what is removed from a part is not left there.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

import msgspec

from fumehood.message_parts.canonical_parts import (
    BlobPart,
    FilePart,
    GenericPart,
    Json,
    JsonObject,
    Part,
    ReasoningPart,
    ResponseEnvelope,
    TextPart,
    ToolCallPart,
    ToolCallResponsePart,
    UriPart,
    VendorSource,
)
from fumehood.message_parts.field_codecs import is_same_json
from fumehood.message_parts.part_format import TOOL_PART_TYPES
from fumehood.message_parts.representations import SOURCE_FIELD

TRUNCATED_FIELD = "fumehood.cut"
TRUNCATED_PART_TYPE = "fumehood:cut"
NESTED_TOO_DEEPLY = "[nested too deeply]"

# Fields of an item that identify it. Only at the top level: deeper, such names may hold content.
_STRUCTURAL_FIELDS = frozenset(
    {"type", "id", "call_id", "tool_use_id", "tool_call_id", "status", "role", "object"}
)
_HEAD_FIELDS = frozenset({"type", "id", "name"})
_DATA_URL = r"data:[\w.+/-]*(?:;[\w.=+-]+)*;base64,"
_WHOLE_DATA_URL = re.compile(_DATA_URL + r"[\w+/=%\r\n-]*", re.ASCII | re.IGNORECASE)
_EMBEDDED_DATA_URL = re.compile(_DATA_URL + r"[\w+/%-]+={0,2}", re.ASCII | re.IGNORECASE)
# Fields that hold data. A field called just `data` does if a media type or item type beside it says so.
_DATA_FIELDS = ("bytes", "file_data", "input_audio", "b64_json", "partial_image_b64")
_MEDIA_DATA_FIELDS = ("data", "blob", *_DATA_FIELDS)
_MEDIA_TYPE_FIELDS = frozenset({"mime_type", "mimeType", "media_type", "format"})
_MEDIA_ITEM_TYPES = frozenset({"image", "audio", "video", "document", "output_audio"})
# Shorter strings may be base64 by chance.
_MIN_LOOSE_BASE64_LENGTH = 32
_STRING_LIMITS = (1 << 16, 1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6)

type JsonTransform = Callable[[Json], Json]


def _transform_part(part: Part, transform: JsonTransform) -> Part:
    """Transform all content of the part and of its source."""
    made = msgspec.structs.replace(
        part, source=_transform_source(part.source, transform), extra=_as_object(transform(part.extra))
    )
    match made:
        case ToolCallPart() | ToolCallResponsePart():
            made.payload = _as_object(transform(made.payload))
        case TextPart() | ReasoningPart() | BlobPart():
            made.content = _as_string(transform(made.content))
        case UriPart():
            made.uri = _as_string(transform(made.uri))
        case FilePart() | GenericPart():
            pass
    return made


def _transform_source(source: VendorSource | None, transform: JsonTransform) -> VendorSource | None:
    if source is None:
        return None
    item = source.item
    if isinstance(item, dict):
        remaining = {
            key: value for key, value in item.items() if key in _STRUCTURAL_FIELDS and isinstance(value, str)
        }
        item = {**_as_object(transform(item)), **remaining}
    elif item is not msgspec.UNSET:
        item = transform(item)
    envelope = source.envelope
    if envelope is not None:
        envelope = ResponseEnvelope(
            document=transform(envelope.document), item_list_paths=envelope.item_list_paths
        )
    return msgspec.structs.replace(source, item=item, envelope=envelope)


def _as_object(value: Json) -> JsonObject:
    return cast(JsonObject, value)


def _as_string(value: Json) -> str:
    return cast(str, value)


# --- redaction ----------------------------------------------------------------------------------------


def redact_parts(parts: list[Part], redact: Callable[[str], str]) -> list[Part]:
    """Return the parts with every text replaced by `redact(text)`; names of tools and fields, types and ids stay.

    A text that is JSON is passed as a whole and then again text by text, because escapes may hide what is looked for.
    """

    def change(value: Json) -> Json:
        if isinstance(value, str):
            text = redact(value)
            try:
                inner = _parse_escaped_json(text)
                changed = change(inner)
                return text if is_same_json(changed, inner) else json.dumps(changed)
            except RecursionError:  # what cannot be parsed is not recorded
                return NESTED_TOO_DEEPLY
        if isinstance(value, list):
            return [change(inner) for inner in value]
        if isinstance(value, dict):
            return {key: change(inner) for key, inner in value.items()}
        return value

    return [_transform_part(part, change) for part in parts]


def _parse_escaped_json(text: str) -> Json:
    """Return the value of JSON text that contains escapes; null for any other text."""
    if "\\" not in text or text.lstrip()[:1] not in ("{", "[", '"'):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def drop_vendor_items(parts: list[Part]) -> list[Part]:
    """Drop the vendor's items, which are content as a whole. The parts cannot be converted back exactly."""
    return [
        msgspec.structs.replace(
            part, source=None if part.source is None else VendorSource(vendor=part.source.vendor)
        )
        for part in parts
    ]


# --- pictures and other data --------------------------------------------------------------------------


class DataDigest(msgspec.Struct, frozen=True, kw_only=True):
    """Size, digest and media type of inline data."""

    digest: str
    bytes: int

    @property
    def uri(self) -> str:
        return f"urn:{self.digest}"


def replace_inline_data(parts: list[Part]) -> list[Part]:
    """Replace inline base64 data by its digest, size and media type."""
    return [_replace_part_data(part) for part in parts]


def _replace_part_data(part: Part) -> Part:
    if isinstance(part, BlobPart):
        digest = _digest_base64(part.content)
        source = _transform_source(part.source, _replace_data)
        if source is not None:
            # The digest is a URI, which the codec of the extracted data would encode as data: restore it as a URI.
            extracted = [
                msgspec.structs.replace(field, field="uri", codec="") for field in source.extracted_fields
            ]
            source = msgspec.structs.replace(source, extracted_fields=extracted)
        extra: JsonObject = {**part.extra, "digest": digest.digest, "bytes": digest.bytes}
        return UriPart(
            uri=digest.uri, modality=part.modality, mime_type=part.mime_type, source=source, extra=extra
        )
    made = _transform_part(part, _replace_data)
    if (
        isinstance(part, ToolCallResponsePart)
        and isinstance(made, ToolCallResponsePart)
        and part.kind == "image_generation"
    ):
        image = part.payload.get("result")
        digest = _digest_image(image) if isinstance(image, str) else None
        if digest is not None:
            made.payload["result"] = {
                "type": "uri",
                "modality": "image",
                "uri": digest.uri,
                **_digest_fields(digest),
            }
    return made


def _digest_image(image: str) -> DataDigest | None:
    """Digest an inline image; None for an image that is a URL or text."""
    if _is_data_url(image):
        return _digest_data_url(image)
    return None if _decode_base64(image) is None else _digest_base64(image)


def _replace_data(value: Json) -> Json:
    if isinstance(value, list):
        return [_replace_data(inner) for inner in value]
    if isinstance(value, str):
        return _replace_data_urls(value)
    if not isinstance(value, dict):
        return value
    made: JsonObject = {key: _replace_data(inner) for key, inner in value.items()}
    if name := _find_data_field(value):
        return {**made, name: None, **_digest_fields(_digest_base64(_as_string(value[name])))}
    found = [inner for inner in value.values() if _is_data_url(inner)]
    return {**made, **_digest_fields(_digest_data_url(found[0]))} if found else made


def _replace_data_urls(text: str) -> str:
    if _is_data_url(text):
        return _digest_data_url(text).uri
    return _EMBEDDED_DATA_URL.sub(lambda found: _digest_data_url(found.group()).uri, text)


def _find_data_field(value: JsonObject) -> str:
    """Return the field that holds base64 data, by the vendors' names for it; empty if there is none."""
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


def _digest_fields(digest: DataDigest) -> JsonObject:
    return {"digest": digest.digest, "bytes": digest.bytes}


def _is_data_url(value: Json) -> bool:
    return isinstance(value, str) and _WHOLE_DATA_URL.fullmatch(value) is not None


def _digest_data_url(value: Json) -> DataDigest:
    text = value if isinstance(value, str) else ""
    return _digest_base64(unquote(text[text.find(",") + 1 :]))


def _decode_base64(data: str, *, strict: bool = False) -> bytes | None:
    """Decode base64 in any spelling: URL-safe, with line breaks, without padding."""
    if not strict:
        data = data.translate(_URLSAFE_TO_STANDARD)
        data += "=" * (-len(data) % 4)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None


_URLSAFE_TO_STANDARD = str.maketrans({"-": "+", "_": "/", "\r": None, "\n": None})


def _digest_base64(data: str) -> DataDigest:
    content = _decode_base64(data)
    if content is None:
        content = data.encode("utf-8", "surrogatepass")
    return DataDigest(digest=f"sha256:{hashlib.sha256(content).hexdigest()}", bytes=len(content))


# --- bounds -------------------------------------------------------------------------------------------


def truncate_parts(parts: list[JsonObject], max_bytes: int) -> list[JsonObject]:
    """Truncate parts of a representation to `max_bytes` of JSON.

    Drops vendor items first, then the ends of long texts, then the last parts. The result is valid, and `fumehood.cut`
    says how many characters are missing where.
    """
    if _json_size(parts) <= max_bytes:
        return parts
    bare = [_drop_source(part) for part in parts]
    if _json_size(bare) <= max_bytes:
        return bare
    for limit in _STRING_LIMITS:
        bare = [_truncate_strings(part, limit) for part in bare]
        if _json_size(bare) <= max_bytes:
            return bare
    return _drop_last_parts(bare, max_bytes)


def _json_size(value: Json | list[JsonObject]) -> int:
    """Size with everything beyond ASCII escaped, which is at least the size in UTF-8."""
    return len(json.dumps(value, separators=(",", ":")))


def _drop_source(part: JsonObject) -> JsonObject:
    if SOURCE_FIELD not in part:
        return part
    remaining = {key: value for key, value in part.items() if key != SOURCE_FIELD}
    return {**remaining, TRUNCATED_FIELD: {**_previous_truncations(part), SOURCE_FIELD: True}}


def _previous_truncations(part: JsonObject) -> JsonObject:
    known = part.get(TRUNCATED_FIELD)
    return known if isinstance(known, dict) else {}


def _truncate_strings(part: JsonObject, max_length: int) -> JsonObject:
    cuts: JsonObject = {}
    earlier = _previous_truncations(part)
    types = _payload_type_paths(part)

    def shorten(value: Json, path: str) -> Json:
        if isinstance(value, str):
            if len(value) <= max_length or path in types:
                return value
            before = earlier.get(path)
            cuts[path] = len(value) - max_length + (before if isinstance(before, int) else 0)
            return value[:max_length]
        if isinstance(value, list):
            return [shorten(inner, f"{path}[{number}]") for number, inner in enumerate(value)]
        if isinstance(value, dict):
            return {key: shorten(inner, f"{path}.{key}") for key, inner in value.items()}
        return value

    made: JsonObject = {}
    for key, value in part.items():
        if key != TRUNCATED_FIELD:
            made[key] = value if key in _HEAD_FIELDS else shorten(value, key)
    truncations: JsonObject = {**earlier, **cuts}
    return {**made, TRUNCATED_FIELD: truncations} if truncations else made


def _payload_type_paths(part: JsonObject) -> set[str]:
    """Paths of payload types, which must not be truncated."""
    part_type = TOOL_PART_TYPES.get(str(part.get("type")))
    return (
        set() if part_type is None else {f"{key}.type" for key in (part_type.call, part_type.response) if key}
    )


def _drop_last_parts(parts: list[JsonObject], max_bytes: int) -> list[JsonObject]:
    sizes = [_json_size(part) + 1 for part in parts]
    total = sum(sizes)
    for count in range(len(parts) - 1, -1, -1):
        total -= sizes[count]
        cut: JsonObject = {"type": TRUNCATED_PART_TYPE, "parts": len(parts) - count}
        if total + _json_size([cut]) <= max_bytes:
            return [*parts[:count], cut]
    return []
