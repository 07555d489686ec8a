"""JSON Schemas (2020-12) of the views, made from the types; imports its siblings.

What is published is in `published/`, one file for each view; `python -m tools.build_parts` writes them anew.
"""

from importlib import resources
from typing import Any, cast

import msgspec

from fumehood.parts.canonical import JsonObject
from fumehood.parts.forms import FORMS, PLAIN, RESERVED_TYPES, VIEWS, Form
from fumehood.parts.payloads import KINDS, RESERVED_NAMES, Kind, forbidden_in

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REF = "#/$defs/{name}"
_NULLABLE: JsonObject = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_NAMED = sorted(kind.name for kind in KINDS.values() if kind.named)
_TITLES = {
    "tool_call": "ToolCallRequestPart",
    "tool_call_response": "ToolCallResponsePart",
    "server_tool_call": "ServerToolCallPart",
    "server_tool_call_response": "ServerToolCallResponsePart",
    "server_tool": "ServerToolPart",
    "server_tool_execution": "ServerToolExecutionPart",
}


def published(view: str) -> bytes:
    """The schema as it is shipped."""
    return resources.files("fumehood.parts").joinpath("published", f"{view}.json").read_bytes()


def schema(view: str) -> JsonObject:
    """The schema of one part of this view."""
    types = VIEWS[view]
    definitions = _payloads()
    branches: list[str] = []
    for kind in types:
        title = _TITLES[kind]
        definitions[title] = _form(FORMS[kind])
        if view == "option1-compat":
            before = f"{title}BeforeTypes"
            definitions[before] = _current(FORMS[kind])
            definitions[f"Any{title}"] = {"anyOf": [_ref(title), _ref(before)]}
            title = f"Any{title}"
        branches.append(title)
    for kind in PLAIN:
        title = f"{kind.capitalize()}Part"
        definitions[title] = _plain(kind)
        branches.append(title)
    definitions["GenericPart"] = _generic(RESERVED_TYPES)
    return {
        "$schema": _DIALECT,
        "$id": f"urn:fumehood:parts:{view}",
        "title": f"A message part, {view}",
        "oneOf": [_ref(title) for title in [*branches, "GenericPart"]],
        "$defs": dict(sorted(definitions.items())),
    }


def _ref(title: str) -> JsonObject:
    return {"$ref": _REF.format(name=title)}


# --- payloads -----------------------------------------------------------------------------------------


def _payloads() -> dict[str, JsonObject]:
    types: list[type[msgspec.Struct]] = []
    for kind in KINDS.values():
        types += [kind.call, kind.response]
    _, found = msgspec.json.schema_components(types, ref_template=_REF)
    definitions = {name: _opened(cast(dict[str, Any], made)) for name, made in found.items()}
    for kind in KINDS.values():
        for call in (True, False):
            made = definitions[kind.type_of(call=call).__name__]
            properties = cast(JsonObject, made["properties"])
            properties["type"] = {"const": kind.name, "type": "string"}
            properties.update(dict.fromkeys(sorted(forbidden_in(kind, call=call)), False))
    for title in ("GenericToolCall", "GenericToolCallResponse"):
        definitions[title] = _generic(frozenset(KINDS))
    return definitions


def _opened(made: dict[str, Any]) -> JsonObject:
    """As msgspec describes it; a field that may be left out has no default, it is just not there."""
    properties = cast(dict[str, JsonObject], made["properties"])
    plain: JsonObject = {
        name: {key: value for key, value in inner.items() if key != "default"}
        for name, inner in properties.items()
    }
    return {**made, "properties": plain, "additionalProperties": True}


def _generic(reserved: frozenset[str]) -> JsonObject:
    return {
        "type": "object",
        "description": "Whatever has a type that is not described here.",
        "properties": {"type": {"type": "string", "not": {"enum": [*sorted(reserved)]}}},
        "required": ["type"],
        "additionalProperties": True,
    }


def _any_of(side: str) -> JsonObject:
    titles = [_type_of(kind, side).__name__ for kind in KINDS.values()]
    generic = "GenericToolCall" if side == "call" else "GenericToolCallResponse"
    return {"oneOf": [_ref(title) for title in [*titles, generic]]}


def _type_of(kind: Kind, side: str) -> type[msgspec.Struct]:
    return kind.type_of(call=side == "call")


# --- parts --------------------------------------------------------------------------------------------


def _form(form: Form) -> JsonObject:
    properties: JsonObject = {"type": {"const": form.type, "type": "string"}, "id": _NULLABLE}
    required = ["type"]
    rules: list[JsonObject] = []
    if form.call:
        properties |= {"name": {"type": "string"}, form.call: _any_of("call")}
        required.append("name")
    if form.response:
        properties[form.response] = _any_of("response")
    made: JsonObject = {"type": "object", "properties": properties}
    if form.together:
        made["anyOf"] = [{"required": [form.call]}, {"required": [form.response]}]
        rules += [_same_kind(form.call, form.response, name) for name in KINDS]
        rules += [_same_kind(form.response, form.call, name) for name in KINDS]
    else:
        required.append(form.call or form.response)
    if form.call:
        rules += [_believed(form, name) for name in sorted(RESERVED_NAMES)]
    properties |= dict.fromkeys(sorted(form.forbidden), False)
    made |= {"required": [*required], "additionalProperties": True}
    return {**made, "allOf": [*rules]} if rules else made


def _believed(form: Form, name: str) -> JsonObject:
    """A tool with the name of a kind is of that kind, unless it is somebody's function or MCP tool."""
    kinds: JsonObject = {"properties": {"type": {"enum": [name, *_NAMED]}}}
    return {
        "if": {"properties": {"name": {"const": name}}},
        "then": {"properties": {key: kinds for key in (form.call, form.response) if key}},
    }


def _same_kind(one: str, other: str, name: str) -> JsonObject:
    def of_kind(key: str) -> JsonObject:
        return {"properties": {key: {"properties": {"type": {"const": name}}}}}

    return {"if": {**of_kind(one), "required": [one]}, "then": of_kind(other)}


def _current(form: Form) -> JsonObject:
    """Specification 002 calls it the current schema: arguments and responses of any shape."""
    properties: JsonObject = {"type": {"const": form.type, "type": "string"}, "id": _NULLABLE}
    if form.call:
        properties |= {"name": {"type": "string"}, "arguments": {}}
    else:
        properties["response"] = {}
    required = ["type", "name" if form.call else "response"]
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": True}


def _plain(kind: str) -> JsonObject:
    properties: JsonObject = {"type": {"const": kind, "type": "string"}}
    properties |= {key: {"type": "string"} for key in PLAIN[kind]}
    if "modality" in PLAIN[kind]:
        properties["mime_type"] = _NULLABLE
    required = ["type", *PLAIN[kind]]
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": True}
