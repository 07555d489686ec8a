"""Azure AI agents: tool calls of run steps, and OpenAI's items beside Azure's own; imports `fumehood.parts`."""

from fumehood.parts.canonical import Execution, Json, JsonObject, Path
from fumehood.parts.lenses import MISSING, at, text_at
from fumehood.parts.shapes import Claim, Field, Shape, Vendor, claims_of, fields
from fumehood.parts.vendors import openai


def _step(
    name: str, kind: str, call: dict[str, str], result: dict[str, str], execution: Execution = "server"
) -> Shape:
    """A tool call of a run step: what was asked and what came of it, in a member of the tool's name."""
    return Shape(
        type=name,
        kind=kind,
        call=fields(**{field: f"{name}.{place or field}" for field, place in call.items()}),
        result=fields(**{field: f"{name}.{place or field}" for field, place in result.items()}),
        name=(name, "name") if kind == "function" else (),
        status=(),
        execution=execution,
        begins={"type": name, "id": "", name: {}},
    )


STEPS = (
    _step("code_interpreter", "code_interpreter", {"code": "input"}, {"outputs": ""}),
    _step("file_search", "file_search", {"queries": ""}, {"results": ""}),
    _step("bing_grounding", "web_search", {"url": "requesturl"}, {"response_metadata": ""}),
    _step("bing_custom_search", "web_search", {"url": "requesturl"}, {"response_metadata": ""}),
    _step("azure_ai_search", "file_search", {"queries": "input|one"}, {"output": ""}),
    _step("openapi", "openapi", {"arguments": ""}, {"output": ""}),
    _step("function", "function", {"arguments": ""}, {"result": "output"}, "client"),
    Shape(
        type="mcp",
        kind="mcp",
        call=fields(arguments="", server_label=""),
        result=fields(output="", error=""),
        name=("name",),
        status=(),
        failed=("error",),
        begins={"type": "mcp", "id": "", "name": "", "arguments": "{}"},
    ),
)
_BY_TYPE = {shape.type: shape for shape in STEPS}
_OUTPUT = "_call_output"
_CALL = "_call"


def claims(item: JsonObject) -> list[Claim]:
    kind = item.get("type")
    if isinstance(kind, str):
        if shape := _BY_TYPE.get(kind):
            return claims_of(item, shape)
        if kind not in openai.BY_TYPE and (shape := _own(kind, item)):
            return claims_of(item, shape)
    return openai.claims(item)


def _own(kind: str, item: JsonObject) -> Shape | None:
    """Azure's tools beside OpenAI's: `azure_ai_search_call` and `azure_ai_search_call_output`, and so on."""
    if kind.endswith(_OUTPUT):
        name = kind.removesuffix(_OUTPUT)
        return Shape(type=kind, kind=name, result=fields(output=""), call_id=("call_id",))
    if kind.endswith(_CALL):
        name = kind.removesuffix(_CALL)
        return Shape(type=kind, kind=name, call=fields(arguments=""), call_id=("call_id",))
    # A tool that has no table, or that a later version of the service runs in its steps.
    if isinstance(item.get(kind), dict) and text_at(item, ("id",)) is not None:
        return _step_of(kind, item)
    return None


def _step_of(kind: str, item: JsonObject) -> Shape:
    output = (Field("output", (kind, "output")),)
    for asked in ("input", "arguments"):
        if at(item, (kind, asked)) is not MISSING and at(item, (kind, "output")) is not MISSING:
            call = (Field("arguments", (kind, asked)),)
            return Shape(type=kind, kind=kind, call=call, result=output, status=())
    return Shape(type=kind, kind=kind, call=(Field("arguments", (kind,)),), status=())


def places(document: Json) -> list[Path]:
    """A run step has its calls in `step_details`; steps come one by one, in a list, or in a page of a list."""
    steps = at(document, ("data",)) if isinstance(document, dict) else document
    prefix: Path = ("data",) if isinstance(document, dict) and isinstance(steps, list) else ()
    entries = steps if isinstance(steps, list) else []
    found: list[Path] = [(*prefix, number, "step_details", "tool_calls") for number, _ in enumerate(entries)]
    found.append(("step_details", "tool_calls"))
    return [place for place in found if isinstance(at(document, place), list)] or openai.places(document)


VENDOR = Vendor(
    name="azure",
    title="Azure AI agents",
    shapes=(*STEPS, *openai.SHAPES),
    claims=claims,
    text=openai.VENDOR.text,
    asked=openai.VENDOR.asked,
    reasoning=openai.VENDOR.reasoning,
    places=places,
)
