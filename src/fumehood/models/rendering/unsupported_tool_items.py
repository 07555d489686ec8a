"""Converts items that tools of other servers produced into function calls and results.

Clients send back what any server gave them: searches, shell commands, tool lists, unknown types. A call is rendered if
its result is known; everything else is dropped.
"""

import re

import msgspec

from fumehood.protocol.conversation import COMPACTION_TYPE, ConversationEntry, ToolExchange
from fumehood.protocol.openai.api_errors import InvalidRequest

_INVALID_NAME_CHARS = re.compile(r"[^\w-]", re.ASCII)
_MAX_NAME_LENGTH = 64
_MAX_RESULT_CHARS = 20_000
# Fields that are not arguments of a call.
_METADATA_FIELDS = frozenset(
    {"id", "type", "call_id", "status", "name", "caller", "created_by", "server_label"}
)
# Fields with the result of a call that has no output item. `result` is missing: it is an image.
_RESULT_FIELDS = ("output", "outputs", "results", "error")

type JsonValue = str | int | float | bool | list["JsonValue"] | dict[str, "JsonValue"] | None
type ItemFields = dict[str, JsonValue]


class ExternalToolCall(msgspec.Struct, frozen=True):
    """A call, to be rendered if its result is found."""

    call_id: str
    name: str
    arguments: str


class ExternalToolResult(msgspec.Struct, frozen=True):
    call_id: str
    text: str


def convert_unsupported_item(
    entry: ConversationEntry,
) -> ExternalToolCall | ExternalToolResult | ToolExchange | None:
    """A call, a result, both in one, or None if there is nothing to render.

    Raises msgspec.DecodeError, and InvalidRequest for a compaction, which replaces all items before it.
    """
    if entry.type == COMPACTION_TYPE:
        raise InvalidRequest("An item of type 'compaction' cannot be shown to this model.", param="input")
    fields: ItemFields = msgspec.json.decode(entry.raw)
    call_id = fields.get("call_id")
    if entry.type.endswith("_output"):
        call_id = call_id or fields.get("id")  # local_shell_call_output has no call_id
        return (
            ExternalToolResult(call_id, _encode_result(fields, ("output", "result", "tools")))
            if isinstance(call_id, str)
            else None
        )
    raw_name = str(fields.get("name") or entry.type.removesuffix("_call") or "tool")
    name = _INVALID_NAME_CHARS.sub("_", raw_name)[:_MAX_NAME_LENGTH]
    if isinstance(call_id, str):
        return ExternalToolCall(call_id, name, _encode_arguments(fields))
    if entry.type.endswith("_call") and any(fields.get(field) for field in _RESULT_FIELDS):
        output = _encode_result(fields, _RESULT_FIELDS)
        return ToolExchange(
            call_id=entry.id or name, name=name, arguments=_encode_arguments(fields), output=output
        )
    return None


def _encode_arguments(fields: ItemFields) -> str:
    arguments = fields.get("arguments")
    if isinstance(arguments, str):
        return arguments
    if isinstance(arguments, dict):
        return _encode(arguments)
    excluded = _METADATA_FIELDS.union(_RESULT_FIELDS)
    rest: ItemFields = {
        key: value for key, value in fields.items() if key not in excluded and value is not None
    }
    return _encode(rest)


def _encode_result(fields: ItemFields, field_names: tuple[str, ...]) -> str:
    result = next(
        (fields[field] for field in field_names if fields.get(field)), fields.get("status") or "(nothing)"
    )
    text = result if isinstance(result, str) else _encode(result)
    return text if len(text) <= _MAX_RESULT_CHARS else text[:_MAX_RESULT_CHARS] + "…"


def _encode(value: JsonValue) -> str:
    return msgspec.json.encode(_strip_data_urls(value)).decode()


def _strip_data_urls(value: JsonValue) -> JsonValue:
    """Replace data URLs: images are useless as text."""
    if isinstance(value, str):
        return "(data)" if value.startswith("data:") else value
    if isinstance(value, list):
        return [_strip_data_urls(element) for element in value]
    if isinstance(value, dict):
        return {key: _strip_data_urls(element) for key, element in value.items()}
    return value
