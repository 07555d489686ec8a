"""JSON values: comparison, copies, and values at a path."""

from typing import cast

import msgspec

from fumehood.message_parts.canonical_parts import Json, JsonObject, JsonPath

MISSING = msgspec.UNSET


def is_same_json(one: Json, other: Json) -> bool:
    """Compare as JSON text: 1, 1.0 and true differ, and so does the order of keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        theirs = cast(JsonObject, other)
        return list(one) == list(theirs) and all(
            is_same_json(value, theirs[key]) for key, value in one.items()
        )
    if isinstance(one, list):
        values = cast(list[Json], other)
        return len(one) == len(values) and all(map(is_same_json, one, values))
    return one == other or (one != one and other != other)


def copy_json(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: copy_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [copy_json(inner) for inner in value]
    return value


def get_at_path(value: Json, path: JsonPath) -> Json | msgspec.UnsetType:
    if not path:
        return value
    step = path[0]
    if isinstance(value, dict) and isinstance(step, str) and step in value:
        return get_at_path(value[step], path[1:])
    if isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value):
        return get_at_path(value[step], path[1:])
    return MISSING


def get_text_at_path(value: Json, path: JsonPath) -> str | None:
    found = get_at_path(value, path) if path else None
    return found if isinstance(found, str) else None


def set_at_path(value: Json, path: JsonPath, new: Json) -> Json:
    """Return `value` with `new` at `path`. Missing object members are created, missing list entries are not."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        if not isinstance(value, list) or not 0 <= step < len(value):
            raise ValueError(f"there is no list entry {step}")
        value[step] = set_at_path(value[step], rest, new)
        return value
    members = value if isinstance(value, dict) else {}
    members[step] = set_at_path(members.get(step), rest, new)
    return members
