"""The types of parts in each view, and what makes one malformed; imports its siblings.

`schemas` says the same as JSON Schema, from the same tables.
"""

import msgspec

from fumehood.parts import payloads
from fumehood.parts.canonical import Json, JsonObject


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A type of part that holds a call, a response, or both, each under a key of its own.

    together: it may hold both, and needs one; `forbidden` are the keys that would make it two things at once.
    """

    type: str
    call: str = ""
    response: str = ""
    forbidden: frozenset[str] = frozenset()

    @property
    def together(self) -> bool:
        return bool(self.call and self.response)


_CALLS = frozenset({"tool_call", "server_tool_call", "request"})
_RESPONSES = frozenset({"response", "tool_response", "server_tool_call_response"})


def _form(kind: str, *, call: str = "", response: str = "") -> Form:
    others = _CALLS | _RESPONSES | (frozenset[str]() if call else {"arguments"})
    return Form(type=kind, call=call, response=response, forbidden=others - {call, response})


FORMS = {
    form.type: form
    for form in (
        _form("tool_call", call="tool_call"),
        _form("tool_call_response", response="response"),
        _form("server_tool_call", call="server_tool_call"),
        _form("server_tool_call_response", response="server_tool_call_response"),
        _form("server_tool", call="tool_call", response="tool_response"),
        _form("server_tool_execution", call="request", response="response"),
    )
}

# What the other parts must have, as OpenTelemetry says it.
PLAIN = {
    "text": ("content",),
    "reasoning": ("content",),
    "blob": ("modality", "content"),
    "file": ("modality", "file_id"),
    "uri": ("modality", "uri"),
}
RESERVED_TYPES = frozenset(FORMS) | frozenset(PLAIN)

VIEWS = {
    "option1": ("tool_call", "tool_call_response"),
    "option1-compat": ("tool_call", "tool_call_response"),
    "option2": ("server_tool_call", "server_tool_call_response", "tool_call", "tool_call_response"),
    "option3": ("server_tool", "tool_call", "tool_call_response"),
    "option3-alternative": ("server_tool_execution", "tool_call", "tool_call_response"),
}


class Malformed(Exception):
    """A part that is none; the message says why."""


def problem_of(part: Json, *, compat: bool = False) -> str:
    """Why this is no part, or nothing; `compat` also takes calls and responses from before payloads had types."""
    if not isinstance(part, dict):
        return "a part is an object"
    kind = part.get("type")
    if not isinstance(kind, str):
        return "`type` is missing" if kind is None else "`type` is not a string"
    if kind in PLAIN:
        return _problem_of_plain(part, kind)
    form = FORMS.get(kind)
    if form is None:
        return ""
    if compat and kind in VIEWS["option1-compat"]:
        return _problem_of_current(part, form)
    return _problem_of_head(part, form) or _problem_of_payloads(part, form)


def _problem_of_plain(part: JsonObject, kind: str) -> str:
    for key in PLAIN[kind]:
        if not isinstance(part.get(key), str):
            return f"a {kind} part needs `{key}`, a string"
    if "modality" in PLAIN[kind] and not isinstance(part.get("mime_type"), str | None):
        return "`mime_type` is neither a string nor null"
    return ""


def _problem_of_current(part: JsonObject, form: Form) -> str:
    if not isinstance(part.get("id"), str | None):
        return "`id` is neither a string nor null"
    if form.call:
        return "" if isinstance(part.get("name"), str) else "`name` is missing or no string"
    return "" if "response" in part else "`response` is missing"


def _problem_of_head(part: JsonObject, form: Form) -> str:
    if not isinstance(part.get("id"), str | None):
        return "`id` is neither a string nor null"
    if form.call and not isinstance(part.get("name"), str):
        return "`name` is missing or no string"
    if mixed := sorted(form.forbidden & part.keys()):
        return f"`{mixed[0]}` does not belong into a {form.type} part"
    if form.together and form.call not in part and form.response not in part:
        return f"neither `{form.call}` nor `{form.response}` is there"
    return ""


def _problem_of_payloads(part: JsonObject, form: Form) -> str:
    kinds: list[str] = []
    for key in filter(None, (form.call, form.response)):
        if form.together and key not in part:
            continue
        payload = part.get(key)
        if not isinstance(payload, dict):
            return f"`{key}` is missing or no object"
        kind = payload.get("type")
        if not isinstance(kind, str):
            return f"`{key}.type` is missing or no string"
        if problem := payloads.problem_with(kind, payload, call=key == form.call):
            return f"`{key}`: {problem}"
        kinds.append(kind)
        if form.call and (problem := problem_of_name(str(part["name"]), kind)):
            return problem
    if len(kinds) > 1 and kinds[0] != kinds[1]:
        return f"a {kinds[0]} call cannot have a {kinds[1]} response"
    return ""


def problem_of_name(name: str, kind: str) -> str:
    """A name that says what the tool is must be believed; functions and MCP tools are called as their makers like."""
    known = payloads.KINDS.get(kind)
    if name in payloads.RESERVED_NAMES and kind != name and (known is None or not known.named):
        return f"a tool with the name {name} cannot have a payload of the type {kind}"
    return ""
