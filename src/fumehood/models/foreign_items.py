"""What a model is shown of items that tools of other servers made; imports msgspec and `protocol`.

Clients give back whatever they once got, from another server too: searches, shell commands, lists of tools, and types
that nobody here knows. A call is shown with what came of it, as far as items tell both; everything else is left out.
"""

import re

import msgspec

from fumehood.protocol.conversation import Entry, ToolExchange

_NAMES = re.compile(r"[^\w-]", re.ASCII)
_LONGEST_NAME = 64
_LONGEST_RESULT = 20_000
# What says nothing about a call but that there was one.
_BOOKKEEPING = frozenset({"id", "type", "call_id", "status", "name", "caller", "created_by", "server_label"})
# Where a call that needs no further item keeps its result; a picture, as `result`, is none that can be told.
_OWN_RESULTS = ("output", "outputs", "results", "error")

type Json = str | int | float | bool | list["Json"] | dict[str, "Json"] | None
type Fields = dict[str, Json]


class Call(msgspec.Struct, frozen=True):
    """Worth showing once its result is there."""

    call_id: str
    name: str
    arguments: str


class Result(msgspec.Struct, frozen=True):
    call_id: str
    text: str


def read(entry: Entry) -> Call | Result | ToolExchange | None:
    """A call, a result, both in one, or nothing that a model could be told; raises msgspec.DecodeError."""
    fields: Fields = msgspec.json.decode(entry.raw)
    call_id = fields.get("call_id")
    if entry.type.endswith("_output"):
        call_id = call_id or fields.get("id")  # as local_shell_call_output has it
        return (
            Result(call_id, _text(fields, ("output", "result", "tools")))
            if isinstance(call_id, str)
            else None
        )
    named = str(fields.get("name") or entry.type.removesuffix("_call") or "tool")
    name = _NAMES.sub("_", named)[:_LONGEST_NAME]
    if isinstance(call_id, str):
        return Call(call_id, name, _arguments(fields))
    if entry.type.endswith("_call") and any(fields.get(field) for field in _OWN_RESULTS):
        output = _text(fields, _OWN_RESULTS)
        return ToolExchange(call_id=entry.id or name, name=name, arguments=_arguments(fields), output=output)
    return None


def _arguments(fields: Fields) -> str:
    given = fields.get("arguments")
    if isinstance(given, str):
        return given
    if isinstance(given, dict):
        return _encode(given)
    hidden = _BOOKKEEPING.union(_OWN_RESULTS)
    rest: Fields = {key: value for key, value in fields.items() if key not in hidden and value is not None}
    return _encode(rest)


def _text(fields: Fields, where: tuple[str, ...]) -> str:
    found = next((fields[field] for field in where if fields.get(field)), fields.get("status") or "(nothing)")
    text = found if isinstance(found, str) else _encode(found)
    return text if len(text) <= _LONGEST_RESULT else text[:_LONGEST_RESULT] + "…"


def _encode(value: Json) -> str:
    return msgspec.json.encode(_without_data(value)).decode()


def _without_data(value: Json) -> Json:
    """Pictures say nothing as text."""
    if isinstance(value, str):
        return "(data)" if value.startswith("data:") else value
    if isinstance(value, list):
        return [_without_data(element) for element in value]
    if isinstance(value, dict):
        return {key: _without_data(element) for key, element in value.items()}
    return value
