"""xAI: OpenAI's items, and the messages of its own chat API with tool calls in them; imports `fumehood.parts`."""

import msgspec

from fumehood.parts.canonical import Json, JsonObject, Path, Reasoning, Text
from fumehood.parts.lenses import at, text_at
from fumehood.parts.shapes import Claim, Field, Shape, Vendor, claims_of, fields
from fumehood.parts.vendors import openai

_PREFIX = "TOOL_CALL_TYPE_"
_CLIENTS = f"{_PREFIX}CLIENT_SIDE_TOOL"
_OUTCOMES = {
    "code_interpreter": ("outputs", "log"),
    "mcp": ("output", ""),
    "function": ("result", ""),
    "image_generation": ("result", ""),
}


def _called(name: str, kind: str, **paths: str) -> Shape:
    return Shape(
        type=name,
        kind=kind,
        call=fields(**paths),
        name=("function", "name") if kind in ("function", "mcp") else (),
        failed=("error_message",),
        execution="client" if kind == "function" else "server",
    )


CALLS = (
    _called(_CLIENTS, "function", arguments="function.arguments"),
    _called(f"{_PREFIX}WEB_SEARCH_TOOL", "web_search", queries="function.arguments|json.query"),
    _called(f"{_PREFIX}X_SEARCH_TOOL", "x_search", arguments="function.arguments"),
    _called(f"{_PREFIX}CODE_EXECUTION_TOOL", "code_interpreter", code="function.arguments|json.code"),
    _called(f"{_PREFIX}COLLECTIONS_SEARCH_TOOL", "file_search", queries="function.arguments|json.query"),
    _called(f"{_PREFIX}ATTACHMENT_SEARCH_TOOL", "file_search", queries="function.arguments|json.query"),
    _called(f"{_PREFIX}MCP_TOOL", "mcp", arguments="function.arguments"),
    _called(f"{_PREFIX}IMAGE_GENERATION_TOOL", "image_generation", prompt="function.arguments|json.prompt"),
)
# In the Responses API, searches on X are calls of tools with these names.
_X_TOOLS = ("x_keyword_search", "x_semantic_search", "x_user_search", "x_thread_fetch")
X_SEARCHES = (
    Shape(type="custom_tool_call", kind="x_search", call=fields(arguments="input"), call_id=("call_id",)),
    Shape(type="x_search_call", kind="x_search", call=fields(arguments="action")),
)
_BY_TYPE = {shape.type: shape for shape in (*CALLS, X_SEARCHES[1])}


def claims(item: JsonObject) -> list[Claim]:
    kind = text_at(item, ("type",)) or ""
    if kind == "custom_tool_call" and item.get("name") in _X_TOOLS:
        return claims_of(item, X_SEARCHES[0])
    if kind.startswith(_PREFIX) or kind in _BY_TYPE:
        return claims_of(item, _shape_of(kind))
    if isinstance(item.get("message"), dict):
        return _message(item, ("message",))
    if (text_at(item, ("role",)) or "").startswith("ROLE_"):
        return _message(item, ())
    return openai.claims(item)


def _shape_of(kind: str) -> Shape:
    """A tool that is not known here is a kind of its own."""
    own = kind.removeprefix(_PREFIX).removesuffix("_TOOL").lower()
    return _BY_TYPE.get(kind) or _called(kind, own, arguments="function.arguments")


def _message(item: JsonObject, prefix: Path) -> list[Claim]:
    """A message of the chat API: thoughts, text and calls of an assistant, or what came of the call it repeats."""
    tool = text_at(item, (*prefix, "role")) == "ROLE_TOOL"
    made: list[Claim] = []
    if not tool:
        for member in ("reasoning_content", "reasoningContent", "content"):
            if text_at(item, (*prefix, member)):
                part = Text(content="") if member == "content" else Reasoning(content="")
                made.append(Claim(part, (Field("content", (*prefix, member)),)))
    for key in ("tool_calls", "toolCalls"):
        calls = at(item, (*prefix, key))
        for number, call in enumerate(calls if isinstance(calls, list) else []):
            shape = _shape_of(text_at(call, ("type",)) or _CLIENTS)
            place = (*prefix, key, number)
            if not tool:
                made += claims_of(item, shape.within(place))
            elif not made:
                made += claims_of(item, _answered(shape, place, (*prefix, "content")))
    return made


def _answered(shape: Shape, call: Path, content: Path) -> Shape:
    name, lens = _OUTCOMES.get(shape.kind, ("text", ""))
    result = (Field(name, content, lens),)
    return msgspec.structs.replace(shape.within(call), call=None, result=result)


def places(document: Json) -> list[Path]:
    if isinstance(at(document, ("outputs",)), list):
        return [("outputs",)]
    return openai.places(document)


VENDOR = Vendor(
    name="xai",
    title="xAI",
    shapes=(*openai.SHAPES, *CALLS, *X_SEARCHES),
    claims=claims,
    text=openai.VENDOR.text,
    asked=openai.VENDOR.asked,
    reasoning=openai.VENDOR.reasoning,
    places=places,
)
