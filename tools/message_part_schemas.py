"""Builds the JSON Schemas (2020-12) of the representations from the tables and payload types of the package."""

from typing import Any, cast

import msgspec

from fumehood.message_parts.canonical_parts import JsonObject
from fumehood.message_parts.part_schema import (
    PLAIN_PART_FIELDS,
    REPRESENTATIONS,
    RESERVED_TYPES,
    TOOL_PART_TYPES,
    ToolPartType,
)
from fumehood.message_parts.tool_payloads import RESERVED_NAMES, TOOL_KINDS, forbidden_fields

_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REF = "#/$defs/{name}"
_NULLABLE_STRING: JsonObject = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_KINDS_WITH_NAMED_TOOLS = sorted(kind.name for kind in TOOL_KINDS.values() if kind.has_named_tools)
_PART_TITLES = {
    "tool_call": "ToolCallRequestPart",
    "tool_call_response": "ToolCallResponsePart",
    "server_tool_call": "ServerToolCallPart",
    "server_tool_call_response": "ServerToolCallResponsePart",
    "server_tool": "ServerToolPart",
    "server_tool_execution": "ServerToolExecutionPart",
}


def build_schema(representation: str) -> JsonObject:
    """Build the schema of one part."""
    types = REPRESENTATIONS[representation]
    definitions = _payload_schemas()
    branches: list[str] = []
    for kind in types:
        title = _PART_TITLES[kind]
        definitions[title] = _tool_part_schema(TOOL_PART_TYPES[kind])
        if representation == "option1-compat":
            before = f"{title}BeforeTypes"
            definitions[before] = _legacy_part_schema(TOOL_PART_TYPES[kind])
            definitions[f"Any{title}"] = {"anyOf": [_ref(title), _ref(before)]}
            title = f"Any{title}"
        branches.append(title)
    for kind in PLAIN_PART_FIELDS:
        title = f"{kind.capitalize()}Part"
        definitions[title] = _plain_part_schema(kind)
        branches.append(title)
    definitions["GenericPart"] = _generic_schema(RESERVED_TYPES)
    return {
        "$schema": _SCHEMA_DIALECT,
        "$id": f"urn:fumehood:parts:{representation}",
        "title": f"A message part, {representation}",
        "oneOf": [_ref(title) for title in [*branches, "GenericPart"]],
        "$defs": dict(sorted(definitions.items())),
    }


def _ref(title: str) -> JsonObject:
    return {"$ref": _REF.format(name=title)}


# --- payloads -----------------------------------------------------------------------------------------


def _payload_schemas() -> dict[str, JsonObject]:
    types: list[type[msgspec.Struct]] = []
    for kind in TOOL_KINDS.values():
        types += [kind.call, kind.response]
    _, found = msgspec.json.schema_components(types, ref_template=_REF)
    definitions = {name: _open_schema(cast(dict[str, Any], made)) for name, made in found.items()}
    for kind in TOOL_KINDS.values():
        for call in (True, False):
            made = definitions[kind.payload_type(call=call).__name__]
            properties = cast(JsonObject, made["properties"])
            properties["type"] = {"const": kind.name, "type": "string"}
            properties.update(dict.fromkeys(sorted(forbidden_fields(kind, call=call)), False))
    for title in ("GenericToolCall", "GenericToolCallResponse"):
        definitions[title] = _generic_schema(frozenset(TOOL_KINDS))
    return definitions


def _open_schema(made: dict[str, Any]) -> JsonObject:
    """Remove nulls and defaults that msgspec adds for optional fields: such a field is absent, not null."""
    properties = cast(dict[str, JsonObject], made["properties"])
    plain: JsonObject = {
        name: {key: value for key, value in inner.items() if key != "default"}
        for name, inner in properties.items()
    }
    return {**made, "properties": plain, "additionalProperties": True}


def _generic_schema(reserved: frozenset[str]) -> JsonObject:
    return {
        "type": "object",
        "description": "Whatever has a type that is not described here.",
        "properties": {"type": {"type": "string", "not": {"enum": [*sorted(reserved)]}}},
        "required": ["type"],
        "additionalProperties": True,
    }


def _one_of_payloads(*, call: bool) -> JsonObject:
    titles = [kind.payload_type(call=call).__name__ for kind in TOOL_KINDS.values()]
    generic = "GenericToolCall" if call else "GenericToolCallResponse"
    return {"oneOf": [_ref(title) for title in [*titles, generic]]}


# --- parts --------------------------------------------------------------------------------------------


def _tool_part_schema(part_type: ToolPartType) -> JsonObject:
    properties: JsonObject = {"type": {"const": part_type.type, "type": "string"}, "id": _NULLABLE_STRING}
    required = ["type"]
    rules: list[JsonObject] = []
    if part_type.call:
        properties |= {"name": {"type": "string"}, part_type.call: _one_of_payloads(call=True)}
        required.append("name")
    if part_type.response:
        properties[part_type.response] = _one_of_payloads(call=False)
    made: JsonObject = {"type": "object", "properties": properties}
    if part_type.holds_both:
        made["anyOf"] = [{"required": [part_type.call]}, {"required": [part_type.response]}]
        rules += [_same_kind_rule(part_type.call, part_type.response, name) for name in TOOL_KINDS]
        rules += [_same_kind_rule(part_type.response, part_type.call, name) for name in TOOL_KINDS]
    else:
        required.append(part_type.call or part_type.response)
    if part_type.call:
        rules += [_name_implies_kind(part_type, name) for name in sorted(RESERVED_NAMES)]
    properties |= dict.fromkeys(sorted(part_type.forbidden_fields), False)
    made |= {"required": [*required], "additionalProperties": True}
    return {**made, "allOf": [*rules]} if rules else made


def _name_implies_kind(part_type: ToolPartType, name: str) -> JsonObject:
    """A tool that has the name of a kind is of that kind, unless it is a function or an MCP tool."""
    kinds: JsonObject = {"properties": {"type": {"enum": [name, *_KINDS_WITH_NAMED_TOOLS]}}}
    return {
        "if": {"properties": {"name": {"const": name}}},
        "then": {"properties": {key: kinds for key in (part_type.call, part_type.response) if key}},
    }


def _same_kind_rule(one: str, other: str, name: str) -> JsonObject:
    def of_kind(key: str) -> JsonObject:
        return {"properties": {key: {"properties": {"type": {"const": name}}}}}

    return {"if": {**of_kind(one), "required": [one]}, "then": of_kind(other)}


def _legacy_part_schema(part_type: ToolPartType) -> JsonObject:
    """The schema before typed payloads, which specification 002 calls the current one: any arguments and responses."""
    properties: JsonObject = {"type": {"const": part_type.type, "type": "string"}, "id": _NULLABLE_STRING}
    if part_type.call:
        properties |= {"name": {"type": "string"}, "arguments": {}}
    else:
        properties["response"] = {}
    required = ["type", "name" if part_type.call else "response"]
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": True}


def _plain_part_schema(kind: str) -> JsonObject:
    properties: JsonObject = {"type": {"const": kind, "type": "string"}}
    properties |= {key: {"type": "string"} for key in PLAIN_PART_FIELDS[kind]}
    if "modality" in PLAIN_PART_FIELDS[kind]:
        properties["mime_type"] = _NULLABLE_STRING
    required = ["type", *PLAIN_PART_FIELDS[kind]]
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": True}
