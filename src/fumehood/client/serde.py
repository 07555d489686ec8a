"""Dataclasses to and from JSON, and their JSON schemas for models.

A strict schema requires every property and allows no others. A property with a default may be null, and null is read
as the default where the type does not allow it.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Union, cast

import msgspec

from fumehood.client.errors import PromptValidationError

type JsonObject = dict[str, Any]

DecodeError = msgspec.ValidationError

_UNION = (Union, types.UnionType)

# The keywords that OpenAI allows in a strict schema.
_SCHEMA_WORDS = (
    "type",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "properties",
    "required",
    "additionalProperties",
    "items",
)
_BOUND_WORDS = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minItems",
    "maxItems",
)
_STRICT_WORDS = {*_SCHEMA_WORDS, *_BOUND_WORDS, "title", "description", "pattern", "format"}
_STRICT_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def encode(value: object) -> str:
    """Encode as JSON in one line; objects that msgspec does not support become their `str`."""
    return msgspec.json.encode(value, enc_hook=str).decode()


def to_builtins(value: object) -> Any:
    """Convert to dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value, enc_hook=str)


def decode[T](text: str | bytes, kind: type[T]) -> T:
    """Decode JSON. Raises DecodeError, with the path of the mismatch, also for malformed JSON."""
    try:
        return convert(msgspec.json.decode(text), kind)
    except DecodeError:
        raise
    except msgspec.DecodeError as error:
        raise DecodeError(str(error)) from None


def convert[T](value: object, kind: type[T]) -> T:
    """As `decode`, from dicts and lists."""
    return msgspec.convert(_drop_default_nulls(value, kind), kind)


# --- schemas ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class JsonSchema:
    """A JSON schema. strict: whether providers can enforce it."""

    body: JsonObject
    strict: bool


def build_schema(kind: Any) -> JsonSchema:
    """Build the schema of a dataclass or a list of them, without a reference at the root.

    Raises PromptValidationError for a type that has no schema.
    """
    try:
        whole: JsonObject = msgspec.json.schema(kind, schema_hook=_reject_unknown_type)
        described = {found.__name__: found for found in find_dataclasses(kind)}
    except (TypeError, NameError) as error:
        raise PromptValidationError(f"{kind} cannot be described to a model: {error}") from error
    definitions: dict[str, JsonObject] = whole.pop("$defs", {})
    strict = True
    for name, definition in definitions.items():
        if found := described.get(name):
            _add_descriptions(definition, found)
    for node in _iter_nodes([whole, *definitions.values()]):
        strict = _make_strict(node) and strict
    root = whole
    if reference := whole.get("$ref"):
        root = definitions[reference.rpartition("/")[2]]
    used = _find_used_definitions(root, definitions)
    body = {**root, "$defs": {name: definitions[name] for name in definitions if name in used}}
    if not used:
        del body["$defs"]
    return JsonSchema(body, strict)


def find_dataclasses(kind: Any, seen: set[Any] | None = None) -> Iterator[type[Any]]:
    """Yield the dataclasses that a type refers to, each once."""
    seen = set() if seen is None else seen
    if kind in seen:
        return
    seen.add(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
        for hint in typing.get_type_hints(kind, include_extras=True).values():
            yield from find_dataclasses(hint, seen)
    for argument in typing.get_args(kind):
        if isinstance(argument, type) or typing.get_args(argument):
            yield from find_dataclasses(argument, seen)


def _reject_unknown_type(kind: type[Any]) -> JsonObject:
    raise TypeError(f"{kind.__name__} is no dataclass of plain types")


def _add_descriptions(definition: JsonObject, kind: type[Any]) -> None:
    """Add descriptions from `field(metadata={"description": …})`, as msgspec does from `Meta`."""
    for field in dataclasses.fields(kind):
        words = field.metadata.get("description")
        if words and field.name in definition.get("properties", {}):
            definition["properties"][field.name]["description"] = str(words)


def _iter_nodes(schemas: list[JsonObject]) -> Iterator[JsonObject]:
    pending = [*schemas]
    while pending:
        node = pending.pop()
        yield node
        below: list[Any] = [
            *node.get("properties", {}).values(),
            node.get("items"),
            node.get("additionalProperties"),
        ]
        below += [*node.get("anyOf", ()), *node.get("prefixItems", ())]
        pending += [one for one in below if isinstance(one, dict)]


def _make_strict(node: JsonObject) -> bool:
    """Make one node strict in place; return False if it cannot be: any value, a mapping, a tuple, or other keywords."""
    node.pop("default", None)
    if "$ref" in node and len(node) > 1:  # a reference must stand alone
        node["anyOf"] = [{"$ref": node.pop("$ref")}]
    if "enum" in node:
        kinds = sorted({_JSON_TYPES[type(value)] for value in node["enum"]})
        node["type"] = kinds[0] if len(kinds) == 1 else kinds
    if not node.keys() & {"type", "anyOf", "$ref"} or not node.keys() <= _STRICT_WORDS:
        return False
    if node.get("format", "date") not in _STRICT_FORMATS:
        return False
    if node.get("type") != "object":
        return True
    properties: dict[str, JsonObject] | None = node.get("properties")
    if properties is None:
        return False
    required = set(node.get("required", ()))
    for name, below in properties.items():
        if name not in required:
            properties[name] = _make_nullable(below)
    node["required"] = [*properties]
    node["additionalProperties"] = False
    return True


def _make_nullable(node: JsonObject) -> JsonObject:
    choices = node.get("anyOf", [])
    if any(choice == {"type": "null"} for choice in choices) or node.get("type") == "null":
        return node
    described = {"description": node["description"]} if "description" in node else {}
    plain = {key: value for key, value in node.items() if key not in ("description", "default")}
    return {"anyOf": [*(choices or [plain]), {"type": "null"}], **described}


def _find_used_definitions(root: JsonObject, definitions: Mapping[str, JsonObject]) -> set[str]:
    names: set[str] = set()
    pending = [root]
    while pending:
        for node in _iter_nodes([pending.pop()]):
            name = str(node.get("$ref", "")).rpartition("/")[2]
            if name and name not in names:
                names.add(name)
                pending.append(definitions[name])
    return names


# --- nulls that mean "the default" --------------------------------------------------------------------


def _drop_default_nulls(value: Any, kind: Any) -> Any:
    if isinstance(value, list):
        inner = next((inner[0] for origin, inner in _generic_arguments(kind) if origin is not dict), None)
        return [_drop_default_nulls(one, inner) for one in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    found = _find_dataclass(kind)
    if found is None:
        inner = next((inner[1] for origin, inner in _generic_arguments(kind) if origin is dict), None)
        return {name: _drop_default_nulls(below, inner) for name, below in cast(JsonObject, value).items()}
    hints = typing.get_type_hints(found)
    optional = {
        field.name
        for field in dataclasses.fields(found)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    result: JsonObject = {}
    for name, below in cast(JsonObject, value).items():
        if below is None and name in optional and not _accepts_none(hints.get(name)):
            continue
        result[name] = _drop_default_nulls(below, hints.get(name))
    return result


def _generic_arguments(kind: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return generic types with their arguments: this type, or the members of the union."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in _UNION else (kind,)
    return [(typing.get_origin(one), typing.get_args(one)) for one in kinds if typing.get_args(one)]


def _find_dataclass(kind: Any) -> type[Any] | None:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind
    if typing.get_origin(kind) in _UNION:
        found = [one for one in map(_find_dataclass, typing.get_args(kind)) if one is not None]
        return found[0] if len(found) == 1 else None
    return None


def _accepts_none(kind: Any) -> bool:
    if kind in (None, type(None), Any, object):
        return True
    return typing.get_origin(kind) in _UNION and type(None) in typing.get_args(kind)
