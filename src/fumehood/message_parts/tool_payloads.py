"""Payload types of calls and responses, by kind of tool. They validate payloads and give their JSON Schemas.

Required fields are null where the value is not known; other fields are always allowed.
"""

from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from fumehood.message_parts.canonical_parts import Json, JsonObject

type OptionalField[T] = T | UnsetType | None


# --- functions and MCP: the tool's own name is the part's ---------------------------------------------


class FunctionToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A function of the application; `arguments` as written by the model, JSON text or an object."""

    arguments: Any


class FunctionToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    result: Any
    error: OptionalField[str] = UNSET


class McpToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp"):
    """A tool of an MCP server."""

    arguments: Any
    server_label: OptionalField[str] = UNSET


class McpToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp"):
    output: Any
    error: Any = UNSET


# --- code and commands --------------------------------------------------------------------------------


class CodeInterpreterToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="code_interpreter"):
    """Code that runs in a sandbox."""

    code: str | None
    container_id: OptionalField[str] = UNSET
    language: OptionalField[str] = UNSET


class CodeInterpreterOutput(msgspec.Struct, kw_only=True):
    """`logs` with text (and its `stream`, if known), `image` with a url, `file` with a file_id, or another type."""

    type: str
    logs: OptionalField[str] = UNSET
    stream: OptionalField[str] = UNSET
    url: Any = UNSET
    file_id: OptionalField[str] = UNSET


class CodeInterpreterToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="code_interpreter"):
    outputs: list[CodeInterpreterOutput] | None
    exit_code: OptionalField[int] = UNSET
    error: OptionalField[str] = UNSET


class ShellToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="shell"):
    """Commands for a shell, or the `argv` of one program."""

    commands: list[str] | None
    argv: OptionalField[list[str]] = UNSET
    working_directory: OptionalField[str] = UNSET
    timeout_ms: OptionalField[int] = UNSET
    container_id: OptionalField[str] = UNSET


class ShellToolOutput(msgspec.Struct, kw_only=True):
    """Output, exit status and produced files of one command."""

    stdout: OptionalField[str] = UNSET
    stderr: OptionalField[str] = UNSET
    exit_code: OptionalField[int] = UNSET
    file_ids: OptionalField[list[str]] = UNSET
    outcome: OptionalField[dict[str, Any]] = UNSET


class ShellToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="shell"):
    outputs: list[ShellToolOutput] | None
    error: OptionalField[str] = UNSET


class PatchOperation(msgspec.Struct, kw_only=True):
    type: str
    path: OptionalField[str] = UNSET
    diff: OptionalField[str] = UNSET


class ApplyPatchToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch"):
    operation: PatchOperation | None


class ApplyPatchToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch"):
    output: str | None
    error: OptionalField[str] = UNSET


# --- searches -----------------------------------------------------------------------------------------


class WebSearchToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="web_search"):
    """A search, or a step on its results: `action` says which."""

    queries: list[str] | None
    action: OptionalField[str] = UNSET
    query: OptionalField[str] = UNSET
    url: OptionalField[str] = UNSET
    pattern: OptionalField[str] = UNSET


class WebSearchResult(msgspec.Struct, kw_only=True):
    url: OptionalField[str] = UNSET
    title: OptionalField[str] = UNSET


class WebSearchToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="web_search"):
    results: list[WebSearchResult] | None
    error: OptionalField[str] = UNSET


class FileSearchToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="file_search"):
    queries: list[str] | None


class FileSearchResult(msgspec.Struct, kw_only=True):
    file_id: OptionalField[str] = UNSET
    filename: OptionalField[str] = UNSET
    score: OptionalField[float] = UNSET
    text: OptionalField[str] = UNSET


class FileSearchToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="file_search"):
    results: list[FileSearchResult] | None
    error: OptionalField[str] = UNSET


# --- pictures and screens -----------------------------------------------------------------------------


class MediaDigest(msgspec.Struct, kw_only=True):
    """Replaces inline data: a `uri` or `file` part with the digest and size of the data."""

    type: str
    digest: OptionalField[str] = UNSET
    bytes: OptionalField[int] = UNSET


class ImageGenerationToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="image_generation"):
    prompt: str | None


class ImageGenerationToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="image_generation"):
    """`result` is the image as base64, or its digest."""

    result: str | MediaDigest | None
    revised_prompt: OptionalField[str] = UNSET
    error: OptionalField[str] = UNSET


class ComputerAction(msgspec.Struct, kw_only=True):
    type: str


class ComputerToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="computer"):
    actions: list[ComputerAction] | None
    pending_safety_checks: OptionalField[list[Any]] = UNSET


class ComputerOutput(msgspec.Struct, kw_only=True):
    """A screenshot, under the vendor's name for it."""

    type: str
    image_url: Any = UNSET


class ComputerToolCallResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="computer"):
    output: ComputerOutput | None
    acknowledged_safety_checks: OptionalField[list[Any]] = UNSET
    error: OptionalField[str] = UNSET


# --- the table of kinds -------------------------------------------------------------------------------


class ToolKind(msgspec.Struct, frozen=True):
    """A kind of tool with the payload types of its calls and responses.

    has_named_tools: tools of this kind have names of their own.
    """

    name: str
    call: type[msgspec.Struct]
    response: type[msgspec.Struct]
    has_named_tools: bool = False

    def payload_type(self, *, call: bool) -> type[msgspec.Struct]:
        return self.call if call else self.response


TOOL_KINDS = {
    kind.name: kind
    for kind in (
        ToolKind("function", FunctionToolCall, FunctionToolCallResponse, has_named_tools=True),
        ToolKind("code_interpreter", CodeInterpreterToolCall, CodeInterpreterToolCallResponse),
        ToolKind("file_search", FileSearchToolCall, FileSearchToolCallResponse),
        ToolKind("web_search", WebSearchToolCall, WebSearchToolCallResponse),
        ToolKind("shell", ShellToolCall, ShellToolCallResponse),
        ToolKind("mcp", McpToolCall, McpToolCallResponse, has_named_tools=True),
        ToolKind("image_generation", ImageGenerationToolCall, ImageGenerationToolCallResponse),
        ToolKind("computer", ComputerToolCall, ComputerToolCallResponse),
        ToolKind("apply_patch", ApplyPatchToolCall, ApplyPatchToolCallResponse),
    )
}
RESERVED_NAMES = frozenset(kind.name for kind in TOOL_KINDS.values() if not kind.has_named_tools)


@cache
def payload_fields(kind: ToolKind, *, call: bool) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(kind.payload_type(call=call)))


@cache
def forbidden_fields(kind: ToolKind, *, call: bool) -> frozenset[str]:
    """Fields of the other half, which this half must not have."""
    return payload_fields(kind, call=not call) - payload_fields(kind, call=call)


@cache
def required_fields(kind: ToolKind, *, call: bool) -> tuple[str, ...]:
    return tuple(
        field.name for field in msgspec.structs.fields(kind.payload_type(call=call)) if field.required
    )


def find_payload_error(kind: str, payload: JsonObject, *, call: bool) -> str:
    """Return why the payload is invalid, or an empty string. Any payload is valid for an unknown kind."""
    known = TOOL_KINDS.get(kind)
    if known is None:
        return ""
    if mixed := sorted(forbidden_fields(known, call=call) & payload.keys()):
        ours, other = ("call", "response") if call else ("response", "call")
        return f"a {kind} {ours} cannot hold `{mixed[0]}`, which belongs to the {other}"
    attributes: JsonObject = {**payload, "type": kind}
    expected = known.payload_type(call=call)
    try:
        msgspec.convert(attributes, expected)
    except (msgspec.ValidationError, UnicodeEncodeError):
        try:
            msgspec.convert(_normalize_for_schema(attributes), expected)
        except msgspec.ValidationError as error:
            return str(error)
    return ""


def _normalize_for_schema(value: Json) -> Json:
    """Normalise for msgspec what JSON Schema accepts: 1.0 as an integer, numbers and strings of any size."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return 0 if value.is_integer() else value
    if isinstance(value, int) and not isinstance(value, bool):
        return 0
    if isinstance(value, list):
        return [_normalize_for_schema(inner) for inner in value]
    if isinstance(value, dict):
        return {str(_normalize_for_schema(key)): _normalize_for_schema(inner) for key, inner in value.items()}
    return value
