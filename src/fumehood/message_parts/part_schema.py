"""The part types of each representation, and what makes a part malformed.

The published JSON Schemas are built from the same tables, by `tools/message_part_schemas.py`.
"""

import msgspec

from fumehood.message_parts import tool_payloads
from fumehood.message_parts.canonical_parts import Json, JsonObject


class ToolPartType(msgspec.Struct, frozen=True, kw_only=True):
    """A part type that holds a call, a response or both, each under its own key.

    holds_both: it may hold both, and needs one. forbidden_fields: keys that belong to another type.
    """

    type: str
    call: str = ""
    response: str = ""
    forbidden_fields: frozenset[str] = frozenset()

    @property
    def holds_both(self) -> bool:
        return bool(self.call and self.response)


_CALL_FIELDS = frozenset({"tool_call", "server_tool_call", "request"})
_RESPONSE_FIELDS = frozenset({"response", "tool_response", "server_tool_call_response"})


def _part_type(kind: str, *, call: str = "", response: str = "") -> ToolPartType:
    others = _CALL_FIELDS | _RESPONSE_FIELDS | (frozenset[str]() if call else {"arguments"})
    return ToolPartType(type=kind, call=call, response=response, forbidden_fields=others - {call, response})


TOOL_PART_TYPES = {
    form.type: form
    for form in (
        _part_type("tool_call", call="tool_call"),
        _part_type("tool_call_response", response="response"),
        _part_type("server_tool_call", call="server_tool_call"),
        _part_type("server_tool_call_response", response="server_tool_call_response"),
        _part_type("server_tool", call="tool_call", response="tool_response"),
        _part_type("server_tool_execution", call="request", response="response"),
    )
}

# Required fields of the other part types, as in OpenTelemetry's schema.
PLAIN_PART_FIELDS = {
    "text": ("content",),
    "reasoning": ("content",),
    "blob": ("modality", "content"),
    "file": ("modality", "file_id"),
    "uri": ("modality", "uri"),
}
RESERVED_TYPES = frozenset(TOOL_PART_TYPES) | frozenset(PLAIN_PART_FIELDS)

REPRESENTATIONS = {
    "option1": ("tool_call", "tool_call_response"),
    "option1-compat": ("tool_call", "tool_call_response"),
    "option2": ("server_tool_call", "server_tool_call_response", "tool_call", "tool_call_response"),
    "option3": ("server_tool", "tool_call", "tool_call_response"),
    "option3-alternative": ("server_tool_execution", "tool_call", "tool_call_response"),
}


class MalformedPartError(Exception):
    """A malformed part. The message says why."""


def find_part_error(part: Json, *, compat: bool = False) -> str:
    """Return why the part is malformed, or an empty string. compat: accept calls without typed payloads."""
    if not isinstance(part, dict):
        return "a part is an object"
    kind = part.get("type")
    if not isinstance(kind, str):
        return "`type` is missing" if kind is None else "`type` is not a string"
    if kind in PLAIN_PART_FIELDS:
        return _find_plain_part_error(part, kind)
    part_type = TOOL_PART_TYPES.get(kind)
    if part_type is None:
        return ""
    if error := _find_header_error(part, part_type):
        return error
    if compat and kind in REPRESENTATIONS["option1-compat"]:
        return "" if part_type.call or "response" in part else "`response` is missing"
    return _find_field_error(part, part_type) or _find_payload_error(part, part_type)


def _find_plain_part_error(part: JsonObject, kind: str) -> str:
    for key in PLAIN_PART_FIELDS[kind]:
        if not isinstance(part.get(key), str):
            return f"a {kind} part needs `{key}`, a string"
    if "modality" in PLAIN_PART_FIELDS[kind] and not isinstance(part.get("mime_type"), str | None):
        return "`mime_type` is neither a string nor null"
    return ""


def _find_header_error(part: JsonObject, part_type: ToolPartType) -> str:
    if not isinstance(part.get("id"), str | None):
        return "`id` is neither a string nor null"
    if part_type.call and not isinstance(part.get("name"), str):
        return "`name` is missing or not a string"
    return ""


def _find_field_error(part: JsonObject, part_type: ToolPartType) -> str:
    if mixed := sorted(part_type.forbidden_fields & part.keys()):
        return f"`{mixed[0]}` does not belong in a {part_type.type} part"
    if part_type.holds_both and part_type.call not in part and part_type.response not in part:
        return f"neither `{part_type.call}` nor `{part_type.response}` is there"
    return ""


def _find_payload_error(part: JsonObject, part_type: ToolPartType) -> str:
    kinds: list[str] = []
    for key in filter(None, (part_type.call, part_type.response)):
        if part_type.holds_both and key not in part:
            continue
        payload = part.get(key)
        if not isinstance(payload, dict):
            return f"`{key}` is missing or not an object"
        kind = payload.get("type")
        if not isinstance(kind, str):
            return f"`{key}.type` is missing or not a string"
        if problem := tool_payloads.find_payload_error(kind, payload, call=key == part_type.call):
            return f"`{key}`: {problem}"
        kinds.append(kind)
        if part_type.call and (problem := find_name_error(str(part["name"]), kind)):
            return problem
    if len(kinds) > 1 and kinds[0] != kinds[1]:
        return f"a {kinds[0]} call cannot have a {kinds[1]} response"
    return ""


def find_name_error(name: str, kind: str) -> str:
    """A tool with the name of a kind must be of that kind; functions and MCP tools may have any name."""
    known = tool_payloads.TOOL_KINDS.get(kind)
    if name in tool_payloads.RESERVED_NAMES and kind != name and (known is None or not known.has_named_tools):
        return f"a tool with the name {name} cannot have a payload of the type {kind}"
    return ""
