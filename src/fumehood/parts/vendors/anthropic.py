"""Anthropic's Messages API: calls and results are blocks of their own, tied by an id; imports `fumehood.parts`."""

import msgspec

from fumehood.parts.canonical import Blob, File, Json, JsonObject, Path, Reasoning, Text, Uri
from fumehood.parts.lenses import text_at
from fumehood.parts.shapes import Claim, Saying, Shape, Vendor, claims_of, fields

_CALLED = ("tool_use_id",)
_ERROR = ("content", "error_code")


def _call(name: str, kind: str, **paths: str) -> Shape:
    begins: JsonObject = {"type": "server_tool_use", "id": "", "name": name, "input": {}}
    return Shape(type=f"server_tool_use:{name}", kind=kind, call=fields(**paths), begins=begins)


def _result(name: str, kind: str, **paths: str) -> Shape:
    return Shape(
        type=f"{name}_tool_result",
        kind=kind,
        result=(*fields(**paths), *fields(error="content.error_code")),
        id=(),
        call_id=_CALLED,
        failed=_ERROR,
        begins={"type": f"{name}_tool_result", "tool_use_id": ""},
    )


SHAPES = (
    _call("code_execution", "code_interpreter", code="input.code"),
    msgspec.structs.replace(
        _result(
            "code_execution", "code_interpreter", outputs="content|streams", exit_code="content.return_code"
        ),
        begins={
            "type": "code_execution_tool_result",
            "tool_use_id": "",
            "content": {
                "type": "code_execution_result",
                "stdout": "",
                "stderr": "",
                "return_code": 0,
                "content": [],
            },
        },
    ),
    _call("bash_code_execution", "shell", commands="input.command|one"),
    msgspec.structs.replace(
        _result("bash_code_execution", "shell", outputs="content|process"),
        begins={
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "",
            "content": {
                "type": "bash_code_execution_result",
                "stdout": "",
                "stderr": "",
                "return_code": 0,
                "content": [],
            },
        },
    ),
    _call("text_editor_code_execution", "text_editor", arguments="input"),
    _result("text_editor_code_execution", "text_editor", result="content"),
    _call("web_search", "web_search", queries="input.query|one"),
    _result("web_search", "web_search", results="content"),
    _call("web_fetch", "web_fetch", url="input.url"),
    _result("web_fetch", "web_fetch", url="content.url", document="content.content"),
    _call("tool_search_tool_regex", "tool_search", arguments="input"),
    _call("tool_search_tool_bm25", "tool_search", arguments="input"),
    _result("tool_search", "tool_search", tools="content.tool_references"),
    Shape(
        type="mcp_tool_use",
        kind="mcp",
        call=fields(arguments="input", server_label="server_name"),
        name=("name",),
        begins={"type": "mcp_tool_use", "id": "", "name": "", "server_name": "", "input": {}},
    ),
    Shape(
        type="mcp_tool_result",
        kind="mcp",
        result=fields(output="content"),
        id=(),
        call_id=_CALLED,
        failed=("is_error",),
        begins={"type": "mcp_tool_result", "tool_use_id": "", "is_error": False, "content": ""},
    ),
    Shape(
        type="tool_use",
        kind="function",
        call=fields(arguments="input"),
        name=("name",),
        execution="client",
        begins={"type": "tool_use", "id": "", "name": "", "input": {}},
    ),
    Shape(
        type="tool_result",
        kind="function",
        result=fields(result="content"),
        id=(),
        call_id=_CALLED,
        failed=("is_error",),
        execution="client",
        begins={"type": "tool_result", "tool_use_id": "", "content": ""},
    ),
)
_BY_TYPE = {shape.type: shape for shape in SHAPES}


def claims(item: JsonObject) -> list[Claim]:
    kind = item.get("type")
    if not isinstance(kind, str):
        return []
    if shape := _shape_of(kind, item):
        return claims_of(item, shape)
    match kind:
        case "text":
            return [Claim(Text(content=""), fields(content="text"))]
        case "thinking":
            return [Claim(Reasoning(content=""), fields(content="thinking"))]
        case "container_upload":
            return [Claim(File(file_id="", modality="file"), fields(file_id=""))]
        case "image" | "document":
            return _medium(item, "image" if kind == "image" else "document")
        case _:
            return []


def _shape_of(kind: str, item: JsonObject) -> Shape | None:
    """A server tool that is not known here is a kind of its own, called and answered under its name."""
    if kind == "server_tool_use":
        name = text_at(item, ("name",))
        if not name:
            return None
        return _BY_TYPE.get(f"{kind}:{name}") or _call(name, name, arguments="input")
    if kind not in _BY_TYPE and kind.endswith("_tool_result"):
        name = kind.removesuffix("_tool_result")
        return _result(name, name, result="content") if name else None
    return _BY_TYPE.get(kind)


def _medium(item: JsonObject, modality: str) -> list[Claim]:
    mime = text_at(item, ("source", "media_type"))
    match text_at(item, ("source", "type")):
        case "base64":
            part = Blob(content="", modality=modality, mime_type=mime)
            return [Claim(part, fields(content="source.data"))]
        case "url":
            return [Claim(Uri(uri="", modality=modality), fields(uri="source.url"))]
        case "file":
            return [Claim(File(file_id="", modality=modality), fields(file_id="source.file_id"))]
        case _:
            return []


def places(document: Json) -> list[Path]:
    """A message has its blocks in `content`; a conversation is a list of messages."""
    if isinstance(document, list):
        return [(number, "content") for number, entry in enumerate(document) if _is_message(entry)]
    return [("content",)] if _is_message(document) else []


def _is_message(value: Json) -> bool:
    return isinstance(value, dict) and "role" in value and isinstance(value.get("content"), list)


VENDOR = Vendor(
    name="anthropic",
    title="Anthropic Messages",
    shapes=SHAPES,
    claims=claims,
    text=Saying({"type": "text", "text": ""}, ("text",)),
    reasoning=Saying({"type": "thinking", "thinking": "", "signature": ""}, ("thinking",)),
    places=places,
)
