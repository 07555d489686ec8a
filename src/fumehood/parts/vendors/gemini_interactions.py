"""Gemini's Interactions API: calls and results are steps, tied by an id; imports `fumehood.parts`."""

import msgspec

from fumehood.parts.canonical import Blob, Execution, Json, JsonObject, Path, Reasoning, Text, Uri
from fumehood.parts.lenses import text_at
from fumehood.parts.shapes import Claim, Field, Saying, Shape, Vendor, claims_of, fields


def _call(name: str, kind: str, **paths: str) -> Shape:
    return Shape(
        type=f"{name}_call",
        kind=kind,
        call=fields(**paths),
        status=(),
        begins={"type": f"{name}_call", "id": "", "arguments": {}},
    )


def _result(name: str, kind: str, **paths: str) -> Shape:
    return Shape(
        type=f"{name}_result",
        kind=kind,
        result=fields(**paths),
        id=(),
        call_id=("call_id",),
        status=(),
        failed=("is_error",),
        begins={"type": f"{name}_result", "call_id": ""},
    )


def _named(shape: Shape, execution: Execution = "server") -> Shape:
    name = ("name",) if shape.call is not None else ()
    return msgspec.structs.replace(shape, name=name, execution=execution)


SHAPES = (
    _call("code_execution", "code_interpreter", code="arguments.code", language="arguments.language"),
    _result("code_execution", "code_interpreter", outputs="result|log"),
    _call("google_search", "web_search", queries="arguments.queries"),
    _result("google_search", "web_search", results="result"),
    _call("file_search", "file_search", queries="arguments.queries"),
    _result("file_search", "file_search", results="result"),
    _call("url_context", "url_context", urls="arguments.urls"),
    _result("url_context", "url_context", results="result"),
    _call("google_maps", "google_maps", queries="arguments.queries"),
    _result("google_maps", "google_maps", results="result"),
    _call("retrieval", "retrieval", queries="arguments.queries"),
    _result("retrieval", "retrieval", results="result"),
    _call("processing", "processing", arguments=""),
    _result("processing", "processing", result=""),
    msgspec.structs.replace(
        _named(_call("mcp_server_tool", "mcp", arguments="", server_label="server_name")),
        begins={"type": "mcp_server_tool_call", "id": "", "name": "", "server_name": "", "arguments": {}},
    ),
    _named(_result("mcp_server_tool", "mcp", output="result")),
    _named(_call("function", "function", arguments=""), "client"),
    _named(_result("function", "function", result=""), "client"),
)
_BY_TYPE = {shape.type: shape for shape in SHAPES}


def claims(item: JsonObject) -> list[Claim]:
    kind = item.get("type")
    if not isinstance(kind, str):
        return []
    if shape := _BY_TYPE.get(kind):
        return claims_of(item, shape)
    if kind == "thought":
        return _contents(item, "summary", "", thought=True)
    if kind in ("model_output", "user_input"):
        return _contents(item, "content", "user" if kind == "user_input" else "assistant")
    return []


def _contents(item: JsonObject, key: str, role: str, *, thought: bool = False) -> list[Claim]:
    made: list[Claim] = []
    entries = item.get(key)
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, dict):
            made += _content(entry, (key, number), role, thought=thought)
    return made


def _content(entry: JsonObject, place: Path, role: str, *, thought: bool) -> list[Claim]:
    kind, mime = text_at(entry, ("type",)) or "", text_at(entry, ("mime_type",))
    if kind == "text":
        part = Reasoning(content="") if thought else Text(content="", role=role)
        return [Claim(part, (Field("content", (*place, "text")),))]
    if isinstance(entry.get("data"), str):
        return [Claim(Blob(content="", modality=kind, mime_type=mime), (Field("content", (*place, "data")),))]
    if isinstance(entry.get("uri"), str):
        return [Claim(Uri(uri="", modality=kind, mime_type=mime), (Field("uri", (*place, "uri")),))]
    return []


def places(document: Json) -> list[Path]:
    if not isinstance(document, dict) or "type" in document:
        return []
    return [(key,) for key in ("input", "steps", "outputs") if isinstance(document.get(key), list)]


VENDOR = Vendor(
    name="gemini-interactions",
    title="Gemini Interactions",
    shapes=SHAPES,
    claims=claims,
    text=Saying({"type": "model_output", "content": [{"type": "text", "text": ""}]}, ("content", 0, "text")),
    asked=Saying({"type": "user_input", "content": [{"type": "text", "text": ""}]}, ("content", 0, "text")),
    reasoning=Saying({"type": "thought", "summary": [{"type": "text", "text": ""}]}, ("summary", 0, "text")),
    places=places,
)
