"""What a model is shown of items that tools of other servers made.

Clients give back whatever they once got, from another server too: searches, shell commands, lists of tools, and types
that nobody here knows. A call is shown with what came of it, as far as items tell both; everything else is left out.
"""

import re

import msgspec

from fumehood.protocol.conversation import ConversationEntry, ToolExchange

_INVALID_NAME_CHARS = re.compile(r"[^\w-]", re.ASCII)
_MAX_NAME_LENGTH = 64
_MAX_RESULT_CHARS = 20_000
# What says nothing about a call but that there was one.
_METADATA_FIELDS = frozenset(
    {"id", "type", "call_id", "status", "name", "caller", "created_by", "server_label"}
)
# Where a call that needs no further item keeps its result; a picture, as `result`, is none that can be told.
_RESULT_FIELDS = ("output", "outputs", "results", "error")

type JsonValue = str | int | float | bool | list["JsonValue"] | dict[str, "JsonValue"] | None
type ItemFields = dict[str, JsonValue]


class ForeignCall(msgspec.Struct, frozen=True):
    """Worth showing once its result is there."""

    call_id: str
    name: str
    arguments: str


class ForeignResult(msgspec.Struct, frozen=True):
    call_id: str
    text: str


def read_foreign_item(entry: ConversationEntry) -> ForeignCall | ForeignResult | ToolExchange | None:
    """A call, a result, both in one, or nothing that a model could be told; raises msgspec.DecodeError."""
    fields: ItemFields = msgspec.json.decode(entry.raw)
    call_id = fields.get("call_id")
    if entry.type.endswith("_output"):
        call_id = call_id or fields.get("id")  # as local_shell_call_output has it
        return (
            ForeignResult(call_id, _encode_result(fields, ("output", "result", "tools")))
            if isinstance(call_id, str)
            else None
        )
    named = str(fields.get("name") or entry.type.removesuffix("_call") or "tool")
    name = _INVALID_NAME_CHARS.sub("_", named)[:_MAX_NAME_LENGTH]
    if isinstance(call_id, str):
        return ForeignCall(call_id, name, _encode_arguments(fields))
    if entry.type.endswith("_call") and any(fields.get(field) for field in _RESULT_FIELDS):
        output = _encode_result(fields, _RESULT_FIELDS)
        return ToolExchange(
            call_id=entry.id or name, name=name, arguments=_encode_arguments(fields), output=output
        )
    return None


def _encode_arguments(fields: ItemFields) -> str:
    given = fields.get("arguments")
    if isinstance(given, str):
        return given
    if isinstance(given, dict):
        return _encode(given)
    hidden = _METADATA_FIELDS.union(_RESULT_FIELDS)
    rest: ItemFields = {
        key: value for key, value in fields.items() if key not in hidden and value is not None
    }
    return _encode(rest)


def _encode_result(fields: ItemFields, field_names: tuple[str, ...]) -> str:
    found = next(
        (fields[field] for field in field_names if fields.get(field)), fields.get("status") or "(nothing)"
    )
    text = found if isinstance(found, str) else _encode(found)
    return text if len(text) <= _MAX_RESULT_CHARS else text[:_MAX_RESULT_CHARS] + "…"


def _encode(value: JsonValue) -> str:
    return msgspec.json.encode(_strip_data_urls(value)).decode()


def _strip_data_urls(value: JsonValue) -> JsonValue:
    """Pictures say nothing as text."""
    if isinstance(value, str):
        return "(data)" if value.startswith("data:") else value
    if isinstance(value, list):
        return [_strip_data_urls(element) for element in value]
    if isinstance(value, dict):
        return {key: _strip_data_urls(element) for key, element in value.items()}
    return value
