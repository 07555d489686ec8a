"""Truncation of written parts to a number of bytes."""

import json
from collections.abc import Sequence

from fumehood.message_parts.canonical_parts import Json, JsonObject
from fumehood.message_parts.otel_parts import SOURCE_FIELD
from fumehood.message_parts.part_schema import TOOL_PART_TYPES

TRUNCATED_FIELD = "fumehood.cut"
TRUNCATED_PART_TYPE = "fumehood:cut"

_HEAD_FIELDS = frozenset({"type", "id", "name"})
_STRING_LIMITS = (1 << 16, 1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6)


def truncate_parts(parts: list[JsonObject], max_bytes: int) -> list[JsonObject]:
    """Truncate parts of a representation to `max_bytes` of JSON.

    Drops vendor items first, then the ends of long texts, then the last parts. The result is valid, and `fumehood.cut`
    says how many characters are missing where.
    """
    if json_size(parts) <= max_bytes:
        return parts
    bare = [_drop_source(part) for part in parts]
    if json_size(bare) <= max_bytes:
        return bare
    for limit in _STRING_LIMITS:
        bare = [_truncate_strings(part, limit) for part in bare]
        if json_size(bare) <= max_bytes:
            return bare
    return _drop_last_parts(bare, max_bytes)


def json_size(value: Json | Sequence[JsonObject]) -> int:
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
    sizes = [json_size(part) + 1 for part in parts]
    total = sum(sizes)
    for count in range(len(parts) - 1, -1, -1):
        total -= sizes[count]
        cut: JsonObject = {"type": TRUNCATED_PART_TYPE, "parts": len(parts) - count}
        if total + json_size([cut]) <= max_bytes:
            return [*parts[:count], cut]
    return []
