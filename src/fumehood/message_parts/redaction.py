"""Redaction of texts, and removal of vendor items.

Both apply to the vendor's item in `source` as well: what is removed from a part is not left there.
"""

import json
from collections.abc import Callable
from typing import cast

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
    ToolPart,
    UriPart,
    VendorRoundTripData,
)
from fumehood.message_parts.json_path_access import is_same_json

NESTED_TOO_DEEPLY = "[nested too deeply]"

# Fields of an item that identify it. Only at the top level: deeper, such names may hold content.
_STRUCTURAL_FIELDS = frozenset(
    {"type", "id", "call_id", "tool_use_id", "tool_call_id", "status", "role", "object"}
)

type JsonTransform = Callable[[Json], Json]


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

    return [transform_part(part, change) for part in parts]


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
            part, source=None if part.source is None else VendorRoundTripData(vendor=part.source.vendor)
        )
        for part in parts
    ]


# --- all content of a part ----------------------------------------------------------------------------


def transform_part(part: Part, transform: JsonTransform) -> Part:
    """Transform all content of the part and of its source."""
    made = msgspec.structs.replace(
        part, source=transform_source(part.source, transform), extra=cast(JsonObject, transform(part.extra))
    )
    match made:
        case ToolPart():
            made.payload = cast(JsonObject, transform(made.payload))
        case TextPart() | ReasoningPart() | BlobPart():
            made.content = cast(str, transform(made.content))
        case UriPart():
            made.uri = cast(str, transform(made.uri))
        case FilePart() | GenericPart():
            pass
    return made


def transform_source(
    source: VendorRoundTripData | None, transform: JsonTransform
) -> VendorRoundTripData | None:
    if source is None:
        return None
    item = source.item
    if isinstance(item, dict):
        remaining = {
            key: value for key, value in item.items() if key in _STRUCTURAL_FIELDS and isinstance(value, str)
        }
        item = {**cast(JsonObject, transform(item)), **remaining}
    elif item is not msgspec.UNSET:
        item = transform(item)
    envelope = source.envelope
    if envelope is not None:
        envelope = ResponseEnvelope(
            document=transform(envelope.document), item_list_paths=envelope.item_list_paths
        )
    return msgspec.structs.replace(source, item=item, envelope=envelope)
