"""Mistral's Conversations: one entry for call and outcome, arguments as JSON text; imports `fumehood.parts`.

What a search found is not in its entry: the message that follows refers to it, and keeps it.
"""

from fumehood.parts.canonical import File, Json, JsonObject, Path, Reasoning, Text
from fumehood.parts.lenses import at, text_at
from fumehood.parts.shapes import Claim, Field, Saying, Shape, Vendor, claims_of, fields

_CALL_ID = ("tool_call_id",)


def _executed(name: str, kind: str, call: dict[str, str], result: dict[str, str]) -> Shape:
    return Shape(
        type=f"tool.execution:{name}",
        kind=kind,
        call=fields(**call),
        result=fields(**result),
        begins={"object": "entry", "type": "tool.execution", "name": name, "arguments": "{}"},
    )


SHAPES = (
    _executed(
        "code_interpreter",
        "code_interpreter",
        {"code": "arguments|json.code"},
        {"outputs": "info.code_output|log"},
    ),
    _executed("web_search", "web_search", {"queries": "arguments|json.query"}, {"info": ""}),
    _executed("web_search_premium", "web_search", {"queries": "arguments|json.query"}, {"info": ""}),
    _executed("document_library", "file_search", {"queries": "arguments|json.query"}, {"info": ""}),
    _executed("image_generation", "image_generation", {"prompt": "arguments|json.prompt"}, {"info": ""}),
    Shape(
        type="function.call",
        kind="function",
        call=fields(arguments=""),
        call_id=_CALL_ID,
        name=("name",),
        execution="client",
        begins={
            "object": "entry",
            "type": "function.call",
            "tool_call_id": "",
            "name": "",
            "arguments": "{}",
        },
    ),
    Shape(
        type="function.result",
        kind="function",
        result=fields(result=""),
        call_id=_CALL_ID,
        execution="client",
        begins={"object": "entry", "type": "function.result", "tool_call_id": "", "result": ""},
    ),
)
_BY_TYPE = {shape.type: shape for shape in SHAPES}


def claims(item: JsonObject) -> list[Claim]:
    match item.get("type"):
        case "tool.execution":
            return _execution(item)
        case "message.output":
            return _said(item, "assistant")
        case "message.input":
            return _said(item, text_at(item, ("role",)) or "user")
        case str() as kind if kind in _BY_TYPE:
            return claims_of(item, _BY_TYPE[kind])
        case _:
            return []


def _execution(item: JsonObject) -> list[Claim]:
    """A connector that is not known here is a kind of its own."""
    name = text_at(item, ("name",))
    if not name:
        return []
    shape = _BY_TYPE.get(f"tool.execution:{name}")
    return claims_of(item, shape or _executed(name, name, {"arguments": ""}, {"info": ""}))


def _said(item: JsonObject, role: str) -> list[Claim]:
    content = item.get("content")
    if isinstance(content, str):
        return [Claim(Text(content="", role=role), fields(content=""))]
    made: list[Claim] = []
    for number, chunk in enumerate(content if isinstance(content, list) else []):
        if isinstance(chunk, dict):
            made += _chunk(chunk, ("content", number), role)
    return made


def _chunk(chunk: JsonObject, place: Path, role: str) -> list[Claim]:
    match chunk.get("type"):
        case "text":
            return [Claim(Text(content="", role=role), (Field("content", (*place, "text")),))]
        case "tool_file":
            mime = text_at(chunk, ("file_type",))
            part = File(file_id="", modality="file", mime_type=mime)
            return [Claim(part, (Field("file_id", (*place, "file_id")),))]
        case "thinking":
            thoughts = chunk.get("thinking")
            return [
                Claim(Reasoning(content=""), (Field("content", (*place, "thinking", number, "text")),))
                for number, thought in enumerate(thoughts if isinstance(thoughts, list) else [])
                if text_at(thought, ("text",)) is not None
            ]
        case _:
            return []


def places(document: Json) -> list[Path]:
    found: list[Path] = [("outputs",), ("entries",)]
    return [place for place in found if isinstance(at(document, place), list)]


VENDOR = Vendor(
    name="mistral",
    title="Mistral Conversations",
    shapes=SHAPES,
    claims=claims,
    text=Saying(
        {"object": "entry", "type": "message.output", "role": "assistant", "content": ""}, ("content",)
    ),
    asked=Saying({"object": "entry", "type": "message.input", "role": "user", "content": ""}, ("content",)),
    reasoning=Saying(
        {
            "object": "entry",
            "type": "message.output",
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": [{"type": "text", "text": ""}]}],
        },
        ("content", 0, "thinking", 0, "text"),
    ),
    places=places,
)
