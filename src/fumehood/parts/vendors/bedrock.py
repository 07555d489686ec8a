"""Amazon Bedrock's Converse: blocks with one member that says what they are; imports `fumehood.parts`.

Blobs are base64 text here, as AWS writes them in JSON.
"""

from fumehood.parts.canonical import Blob, Execution, Json, JsonObject, Path, Reasoning, Text, Uri
from fumehood.parts.lenses import at, text_at
from fumehood.parts.shapes import Claim, Field, Saying, Shape, Vendor, claims_of, fields

_SERVER = "server_tool_use"


def _use(name: str, kind: str, execution: Execution = "server", **paths: str) -> Shape:
    begins: JsonObject = {"toolUseId": "", "name": name, "input": {}}
    if execution == "server":
        begins["type"] = _SERVER
    return Shape(
        type=f"toolUse:{name}" if name else "toolUse",
        kind=kind,
        call=fields(**paths),
        id=("toolUseId",),
        name=("name",) if kind == "function" else (),
        status=(),
        execution=execution,
        begins={"toolUse": begins},
    ).within(("toolUse",))


def _result(name: str, kind: str, execution: Execution = "server", **paths: str) -> Shape:
    begins: JsonObject = {"toolUseId": "", "content": [], "status": "success"}
    if execution == "server":
        begins |= {"type": f"{name}_result", "content": [{"json": {}}]}
    return Shape(
        type=f"toolResult:{name}_result" if name else "toolResult",
        kind=kind,
        result=fields(**paths),
        id=(),
        call_id=("toolUseId",),
        execution=execution,
        begins={"toolResult": begins},
    ).within(("toolResult",))


SHAPES = (
    _use("nova_code_interpreter", "code_interpreter", code="input.snippet"),
    _result(
        "nova_code_interpreter",
        "code_interpreter",
        outputs="content.0.json.stdOut|log",
        exit_code="content.0.json.exitCode",
        error="content.0.json.stdErr",
    ),
    _use("nova_grounding", "web_search", queries="input.query|one"),
    _result("nova_grounding", "web_search", content=""),
    _use("", "function", "client", arguments="input"),
    _result("", "function", "client", result="content"),
)
_BY_TYPE = {shape.type: shape for shape in SHAPES}


def claims(item: JsonObject) -> list[Claim]:
    if shape := _shape_of(item):
        return claims_of(item, shape)
    if isinstance(item.get("text"), str):
        return [Claim(Text(content=""), fields(content="text"))]
    if isinstance(at(item, ("reasoningContent", "reasoningText", "text")), str):
        return [Claim(Reasoning(content=""), fields(content="reasoningContent.reasoningText.text"))]
    if isinstance(at(item, ("citationsContent", "content")), list):
        return _cited(item)
    return _medium(item)


def _shape_of(item: JsonObject) -> Shape | None:
    """Tools of the server say so; one that is not known here is a kind of its own."""
    if isinstance(item.get("toolUse"), dict):
        name = text_at(item, ("toolUse", "name")) or ""
        if text_at(item, ("toolUse", "type")) != _SERVER or not name:
            return _BY_TYPE["toolUse"]
        return _BY_TYPE.get(f"toolUse:{name}") or _use(name, name, arguments="input")
    if isinstance(item.get("toolResult"), dict):
        name = (text_at(item, ("toolResult", "type")) or "").removesuffix("_result")
        if not name:
            return _BY_TYPE["toolResult"]
        return _BY_TYPE.get(f"toolResult:{name}_result") or _result(name, name, result="content")
    return None


def _cited(item: JsonObject) -> list[Claim]:
    found = at(item, ("citationsContent", "content"))
    entries = found if isinstance(found, list) else []
    return [
        Claim(Text(content=""), (Field("content", ("citationsContent", "content", number, "text")),))
        for number, entry in enumerate(entries)
        if text_at(entry, ("text",)) is not None
    ]


def _medium(item: JsonObject) -> list[Claim]:
    for modality in ("image", "video", "audio", "document"):
        form = text_at(item, (modality, "format"))
        mime = f"{modality}/{form}" if form and modality != "document" else None
        if text_at(item, (modality, "source", "bytes")) is not None:
            part = Blob(content="", modality=modality, mime_type=mime)
            return [Claim(part, (Field("content", (modality, "source", "bytes")),))]
        if text_at(item, (modality, "source", "s3Location", "uri")) is not None:
            part = Uri(uri="", modality=modality, mime_type=mime)
            return [Claim(part, (Field("uri", (modality, "source", "s3Location", "uri")),))]
    return []


def places(document: Json) -> list[Path]:
    """A response has its message in `output`; a conversation is a list of messages."""
    if isinstance(document, list):
        return [(number, *place) for number, entry in enumerate(document) for place in places(entry)]
    found: list[Path] = [("content",), ("output", "message", "content")]
    return [place for place in found if isinstance(at(document, place), list)]


VENDOR = Vendor(
    name="bedrock",
    title="Bedrock Converse",
    shapes=SHAPES,
    claims=claims,
    text=Saying({"text": ""}, ("text",)),
    reasoning=Saying(
        {"reasoningContent": {"reasoningText": {"text": ""}}}, ("reasoningContent", "reasoningText", "text")
    ),
    places=places,
)
