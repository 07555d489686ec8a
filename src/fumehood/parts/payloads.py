"""What calls and results of each kind of tool hold, as types that check and describe themselves; imports msgspec.

Fields that no vendor leaves out are required, and null where the value is not known; others may always be there.
"""

from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from fumehood.parts.canonical import Json, JsonObject

type Maybe[T] = T | UnsetType | None


# --- functions and MCP: the tool's own name is the part's ---------------------------------------------


class FunctionToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A function of the application's; `arguments` as they were written, JSON text or an object."""

    arguments: Any


class FunctionToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    result: Any
    error: Maybe[str] = UNSET


class McpToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp"):
    """A tool of an MCP server."""

    arguments: Any
    server_label: Maybe[str] = UNSET


class McpToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp"):
    output: Any
    error: Any = UNSET


# --- code and commands --------------------------------------------------------------------------------


class CodeInterpreterToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="code_interpreter"):
    """Code that is run in a sandbox."""

    code: str | None
    container_id: Maybe[str] = UNSET
    language: Maybe[str] = UNSET


class CodeOutput(msgspec.Struct, kw_only=True):
    """`logs` with its text (`stream` where it is told apart), `image` with a url, `file` with a file_id, or other."""

    type: str
    logs: Maybe[str] = UNSET
    stream: Maybe[str] = UNSET
    url: Any = UNSET
    file_id: Maybe[str] = UNSET


class CodeInterpreterToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="code_interpreter"):
    outputs: list[CodeOutput] | None
    exit_code: Maybe[int] = UNSET
    error: Maybe[str] = UNSET


class ShellToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="shell"):
    """Commands for a shell, or `argv` of one program."""

    commands: list[str] | None
    argv: Maybe[list[str]] = UNSET
    working_directory: Maybe[str] = UNSET
    timeout_ms: Maybe[int] = UNSET
    container_id: Maybe[str] = UNSET


class ShellOutput(msgspec.Struct, kw_only=True):
    """What one command printed, how it ended, and the files that it left."""

    stdout: Maybe[str] = UNSET
    stderr: Maybe[str] = UNSET
    exit_code: Maybe[int] = UNSET
    file_ids: Maybe[list[str]] = UNSET
    outcome: Maybe[dict[str, Any]] = UNSET


class ShellToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="shell"):
    outputs: list[ShellOutput] | None
    error: Maybe[str] = UNSET


class PatchOperation(msgspec.Struct, kw_only=True):
    type: str
    path: Maybe[str] = UNSET
    diff: Maybe[str] = UNSET


class ApplyPatchToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch"):
    operation: PatchOperation | None


class ApplyPatchToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch"):
    output: str | None
    error: Maybe[str] = UNSET


# --- searches -----------------------------------------------------------------------------------------


class WebSearchToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="web_search"):
    """A search, or what is done with its results: `action` says which."""

    queries: list[str] | None
    action: Maybe[str] = UNSET
    query: Maybe[str] = UNSET
    url: Maybe[str] = UNSET
    pattern: Maybe[str] = UNSET


class WebSearchResult(msgspec.Struct, kw_only=True):
    url: Maybe[str] = UNSET
    title: Maybe[str] = UNSET


class WebSearchToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="web_search"):
    results: list[WebSearchResult] | None
    error: Maybe[str] = UNSET


class FileSearchToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="file_search"):
    queries: list[str] | None


class FileSearchResult(msgspec.Struct, kw_only=True):
    file_id: Maybe[str] = UNSET
    filename: Maybe[str] = UNSET
    score: Maybe[float] = UNSET
    text: Maybe[str] = UNSET


class FileSearchToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="file_search"):
    results: list[FileSearchResult] | None
    error: Maybe[str] = UNSET


# --- pictures and screens -----------------------------------------------------------------------------


class MediaReference(msgspec.Struct, kw_only=True):
    """Stands where data was: a `uri` or `file` part, with the digest and the size of what it replaces."""

    type: str
    digest: Maybe[str] = UNSET
    bytes: Maybe[int] = UNSET


class ImageGenerationToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="image_generation"):
    prompt: str | None


class ImageGenerationToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="image_generation"):
    """`result` is the picture as base64, or what stands for it."""

    result: str | MediaReference | None
    revised_prompt: Maybe[str] = UNSET
    error: Maybe[str] = UNSET


class ComputerAction(msgspec.Struct, kw_only=True):
    type: str


class ComputerToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="computer"):
    actions: list[ComputerAction] | None
    pending_safety_checks: Maybe[list[Any]] = UNSET


class ComputerOutput(msgspec.Struct, kw_only=True):
    """A picture of the screen, under the name that the vendor gives it."""

    type: str
    image_url: Any = UNSET


class ComputerToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="computer"):
    output: ComputerOutput | None
    acknowledged_safety_checks: Maybe[list[Any]] = UNSET
    error: Maybe[str] = UNSET


# --- the table of kinds -------------------------------------------------------------------------------


class Kind(msgspec.Struct, frozen=True):
    """One kind of tools, and what is said by a call of one and by its response.

    `named`: tools of this kind have names of their own.
    """

    name: str
    call: type[msgspec.Struct]
    response: type[msgspec.Struct]
    named: bool = False

    def type_of(self, *, call: bool) -> type[msgspec.Struct]:
        return self.call if call else self.response


KINDS = {
    kind.name: kind
    for kind in (
        Kind("function", FunctionToolCall, FunctionToolCallResponse, named=True),
        Kind("code_interpreter", CodeInterpreterToolCall, CodeInterpreterToolCallResponse),
        Kind("file_search", FileSearchToolCall, FileSearchToolCallResponse),
        Kind("web_search", WebSearchToolCall, WebSearchToolCallResponse),
        Kind("shell", ShellToolCall, ShellToolCallResponse),
        Kind("mcp", McpToolCall, McpToolCallResponse, named=True),
        Kind("image_generation", ImageGenerationToolCall, ImageGenerationToolCallResponse),
        Kind("computer", ComputerToolCall, ComputerToolCallResponse),
        Kind("apply_patch", ApplyPatchToolCall, ApplyPatchToolCallResponse),
    )
}
RESERVED_NAMES = frozenset(kind.name for kind in KINDS.values() if not kind.named)


@cache
def fields_of(kind: Kind, *, call: bool) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(kind.type_of(call=call)))


@cache
def forbidden_in(kind: Kind, *, call: bool) -> frozenset[str]:
    """Fields of the other half: a call that holds its outcome is no call."""
    return fields_of(kind, call=not call) - fields_of(kind, call=call)


@cache
def required_in(kind: Kind, *, call: bool) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind.type_of(call=call)) if field.required)


def problem_with(kind: str, payload: JsonObject, *, call: bool) -> str:
    """Why this cannot be the payload of such a call or result, or nothing. Any payload fits a kind not known here."""
    known = KINDS.get(kind)
    if known is None:
        return ""
    if mixed := sorted(forbidden_in(known, call=call) & payload.keys()):
        ours, other = ("call", "response") if call else ("response", "call")
        return f"a {kind} {ours} cannot hold `{mixed[0]}`, which belongs to the {other}"
    told: JsonObject = {**payload, "type": kind}
    expected = known.type_of(call=call)
    try:
        msgspec.convert(told, expected)
    except (msgspec.ValidationError, UnicodeEncodeError):
        try:
            msgspec.convert(_as_schemas_read(told), expected)
        except msgspec.ValidationError as error:
            return str(error)
    return ""


def _as_schemas_read(value: Json) -> Json:
    """The same to a JSON Schema, which takes 1.0 for an integer, any number and any text; msgspec does not."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return 0 if value.is_integer() else value
    if isinstance(value, int) and not isinstance(value, bool):
        return 0
    if isinstance(value, list):
        return [_as_schemas_read(inner) for inner in value]
    if isinstance(value, dict):
        return {str(_as_schemas_read(key)): _as_schemas_read(inner) for key, inner in value.items()}
    return value
