"""What of a conversation may be recorded: redaction, pictures by their digests, and bounds.

Whatever is done here is done to the way back as well: what was taken out of a part is not in its source either.
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
from fumehood.message_parts.part_types import TOOL_PART_TYPES
from fumehood.message_parts.representations import SOURCE_FIELD

TRUNCATED_FIELD = "fumehood.cut"
TRUNCATED_PART_TYPE = "fumehood:cut"
NESTED_TOO_DEEPLY = "[nested too deeply]"

# Members of an item that say what it is, or which one. Further inside, such names may be anybody's, and hold content.
_STRUCTURAL_FIELDS = frozenset(
    {"type", "id", "call_id", "tool_use_id", "tool_call_id", "status", "role", "object"}
)
_HEAD_FIELDS = frozenset({"type", "id", "name"})
_DATA_URL = r"data:[\w.+/-]*(?:;[\w.=+-]+)*;base64,"
_WHOLE_DATA_URL = re.compile(_DATA_URL + r"[\w+/=%\r\n-]*", re.ASCII | re.IGNORECASE)
_EMBEDDED_DATA_URL = re.compile(_DATA_URL + r"[\w+/%-]+={0,2}", re.ASCII | re.IGNORECASE)
# Members that hold data; what is called just `data` does where something beside it says of which sort.
_DATA_FIELDS = ("bytes", "file_data", "input_audio", "b64_json", "partial_image_b64")
_MEDIA_DATA_FIELDS = ("data", "blob", *_DATA_FIELDS)
_MEDIA_TYPE_FIELDS = frozenset({"mime_type", "mimeType", "media_type", "format"})
_MEDIA_ITEM_TYPES = frozenset({"image", "audio", "video", "document", "output_audio"})
# Shorter texts may look like base64 by chance, if one does not insist on how it is spelt.
_MIN_LOOSE_BASE64_LENGTH = 32
_STRING_LIMITS = (1 << 16, 1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6)

type JsonTransform = Callable[[Json], Json]


def _transform_part(part: Part, transform: JsonTransform) -> Part:
    """The part with all its content changed, and its source."""
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
        kept = {
            key: value for key, value in item.items() if key in _STRUCTURAL_FIELDS and isinstance(value, str)
        }
        item = {**_as_object(transform(item)), **kept}
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
    """The parts with every text of their content as `redact` gives it back; names of tools, types and ids stay.

    A text that is JSON is given to it as it is written, and then the texts in it: escapes may hide what it looks for.
    """

    def change(value: Json) -> Json:
        if isinstance(value, str):
            shown = redact(value)
            try:
                inner = _parse_escaped_json(shown)
                changed = change(inner)
                return shown if is_same_json(changed, inner) else json.dumps(changed)
            except RecursionError:  # what cannot be looked through is not shown
                return NESTED_TOO_DEEPLY
        if isinstance(value, list):
            return [change(inner) for inner in value]
        if isinstance(value, dict):
            return {key: change(inner) for key, inner in value.items()}
        return value

    return [_transform_part(part, change) for part in parts]


def _parse_escaped_json(text: str) -> Json:
    """What the text says if it is JSON with escapes in it; null if there is nothing to be found."""
    if "\\" not in text or text.lstrip()[:1] not in ("{", "[", '"'):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def drop_vendor_items(parts: list[Part]) -> list[Part]:
    """The parts without their vendor's items, which are content as a whole."""
    return [
        msgspec.structs.replace(
            part, source=None if part.source is None else VendorSource(vendor=part.source.vendor)
        )
        for part in parts
    ]


# --- pictures and other data --------------------------------------------------------------------------


class DataDigest(msgspec.Struct, frozen=True, kw_only=True):
    """Data that was in line."""

    digest: str
    bytes: int

    @property
    def uri(self) -> str:
        return f"urn:{self.digest}"


def replace_inline_data(parts: list[Part]) -> list[Part]:
    """The parts with data in base64 replaced by what identifies it: its digest, its size, its type."""
    return [_replace_part_data(part) for part in parts]


def _replace_part_data(part: Part) -> Part:
    if isinstance(part, BlobPart):
        medium = _digest_base64(part.content)
        source = _transform_source(part.source, _replace_data)
        if source is not None:
            # The address goes back to where the data was, as an address: its lens would take it for data.
            moved = [msgspec.structs.replace(move, field="uri", codec="") for move in source.extracted_fields]
            source = msgspec.structs.replace(source, extracted_fields=moved)
        extra: JsonObject = {**part.extra, "digest": medium.digest, "bytes": medium.bytes}
        return UriPart(
            uri=medium.uri, modality=part.modality, mime_type=part.mime_type, source=source, extra=extra
        )
    made = _transform_part(part, _replace_data)
    if (
        isinstance(part, ToolCallResponsePart)
        and isinstance(made, ToolCallResponsePart)
        and part.kind == "image_generation"
    ):
        picture = part.payload.get("result")
        medium = _digest_image(picture) if isinstance(picture, str) else None
        if medium is not None:
            made.payload["result"] = {
                "type": "uri",
                "modality": "image",
                "uri": medium.uri,
                **_digest_fields(medium),
            }
    return made


def _digest_image(image: str) -> DataDigest | None:
    """A picture in line; it may also be told by its address, or in words."""
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
    """Which member holds data in base64, by the words that vendors have for it; nothing where none does."""
    sort = value.get("type")
    if sort == "base64" and isinstance(value.get("data"), str):
        return "data"
    told = value.keys() & _MEDIA_TYPE_FIELDS or (isinstance(sort, str) and sort in _MEDIA_ITEM_TYPES)
    for name in _MEDIA_DATA_FIELDS if told else _DATA_FIELDS:
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
    """Of base64 in any spelling: with the letters of URLs, in lines, without the signs at its end."""
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
    """Parts of a view that take at most `limit` bytes as JSON, and say what was cut.

    First to go is the way back, then the ends of long texts, then the last parts. What is left is valid: a cut text is
    a text, and its part tells under `fumehood.cut` how many characters are missing where.
    """
    if _json_size(parts) <= max_bytes:
        return parts
    bare = [_drop_source(part) for part in parts]
    if _json_size(bare) <= max_bytes:
        return bare
    for longest in _STRING_LIMITS:
        bare = [_truncate_strings(part, longest) for part in bare]
        if _json_size(bare) <= max_bytes:
            return bare
    return _drop_last_parts(bare, max_bytes)


def _json_size(value: Json | list[JsonObject]) -> int:
    """With everything beyond ASCII escaped, which is never less than UTF-8 takes."""
    return len(json.dumps(value, separators=(",", ":")))


def _drop_source(part: JsonObject) -> JsonObject:
    if SOURCE_FIELD not in part:
        return part
    kept = {key: value for key, value in part.items() if key != SOURCE_FIELD}
    return {**kept, TRUNCATED_FIELD: {**_previous_truncations(part), SOURCE_FIELD: True}}


def _previous_truncations(part: JsonObject) -> JsonObject:
    known = part.get(TRUNCATED_FIELD)
    return known if isinstance(known, dict) else {}


def _truncate_strings(part: JsonObject, max_length: int) -> JsonObject:
    cuts: JsonObject = {}
    earlier = _previous_truncations(part)
    types = _payload_type_paths(part)

    def shorten(value: Json, place: str) -> Json:
        if isinstance(value, str):
            if len(value) <= max_length or place in types:
                return value
            before = earlier.get(place)
            cuts[place] = len(value) - max_length + (before if isinstance(before, int) else 0)
            return value[:max_length]
        if isinstance(value, list):
            return [shorten(inner, f"{place}[{number}]") for number, inner in enumerate(value)]
        if isinstance(value, dict):
            return {key: shorten(inner, f"{place}.{key}") for key, inner in value.items()}
        return value

    made: JsonObject = {}
    for key, value in part.items():
        if key != TRUNCATED_FIELD:
            made[key] = value if key in _HEAD_FIELDS else shorten(value, key)
    told: JsonObject = {**earlier, **cuts}
    return {**made, TRUNCATED_FIELD: told} if told else made


def _payload_type_paths(part: JsonObject) -> set[str]:
    """Where it is said what a payload is; without that, it would be none."""
    form = TOOL_PART_TYPES.get(str(part.get("type")))
    return set() if form is None else {f"{key}.type" for key in (form.call, form.response) if key}


def _drop_last_parts(parts: list[JsonObject], max_bytes: int) -> list[JsonObject]:
    sizes = [_json_size(part) + 1 for part in parts]
    total = sum(sizes)
    for count in range(len(parts) - 1, -1, -1):
        total -= sizes[count]
        cut: JsonObject = {"type": TRUNCATED_PART_TYPE, "parts": len(parts) - count}
        if total + _json_size([cut]) <= max_bytes:
            return [*parts[:count], cut]
    return []
