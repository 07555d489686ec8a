"""Amazon Bedrock's Agents: calls and results are traces of an agent's steps; imports `fumehood.parts`."""

from fumehood.parts.canonical import Execution, Json, JsonObject, Path, Reasoning, Text
from fumehood.parts.lenses import at, text_at
from fumehood.parts.shapes import Claim, Field, Saying, Shape, Vendor, claims_of, fields

_IN = "invocationInput"
_OUT = "observation"
_TRACES = ("orchestrationTrace", "routingClassifierTrace")
# Where a trace may be: an event of the stream, a trace part, or what is in one.
_PREFIXES: tuple[Path, ...] = (("trace", "trace"), ("trace",), ())
_BEGINS_IN = ("trace", "trace", _TRACES[0])


def _call(member: str, kind: str, **paths: str) -> Shape:
    return Shape(
        type=f"{member}Input",
        kind=kind,
        call=fields(**{name: f"{member}Input.{place or name}" for name, place in paths.items()}),
        id=("traceId",),
        status=(),
        begins={"trace": {"trace": {_TRACES[0]: {_IN: {f"{member}Input": {}}}}}},
    )


def _result(member: str, kind: str, failed: Path = (), **paths: str) -> Shape:
    return Shape(
        type=f"{member}Output",
        kind=kind,
        result=fields(**{name: f"{member}Output.{place or name}" for name, place in paths.items()}),
        id=("traceId",),
        status=(),
        failed=failed,
        begins={"trace": {"trace": {_TRACES[0]: {_OUT: {f"{member}Output": {}}}}}},
    )


def _returned(item: JsonObject) -> Execution:
    """Control is given back to the client where that is how the action is carried out."""
    for prefix in _PREFIXES:
        for trace in _TRACES:
            place = (*prefix, trace, _IN, "actionGroupInvocationInput", "executionType")
            if text_at(item, place) == "RETURN_CONTROL":
                return "client"
    return "server"


_ACTION = Shape(
    type="actionGroupInvocationInput",
    kind="function",
    call=fields(arguments="actionGroupInvocationInput.parameters"),
    id=("traceId",),
    name=("actionGroupInvocationInput", "function"),
    status=(),
    execution=_returned,
    begins={"trace": {"trace": {_TRACES[0]: {_IN: {"actionGroupInvocationInput": {}}}}}},
)
_INPUTS = (
    _call("codeInterpreterInvocation", "code_interpreter", code=""),
    _call("knowledgeBaseLookup", "file_search", queries="text|one"),
    _ACTION,
    _call("agentCollaboratorInvocation", "agent", arguments="input"),
)
_OUTPUTS = (
    _result(
        "codeInterpreterInvocation",
        "code_interpreter",
        ("codeInterpreterInvocationOutput", "executionError"),
        outputs="executionOutput|log",
        error="executionError",
    ),
    _result("knowledgeBaseLookup", "file_search", results="retrievedReferences"),
    _result("actionGroupInvocation", "function", result="text"),
    _result("agentCollaboratorInvocation", "agent", result="output"),
)
SHAPES = (
    *(shape.within((*_BEGINS_IN, _IN)) for shape in _INPUTS),
    *(shape.within((*_BEGINS_IN, _OUT)) for shape in _OUTPUTS),
)


def claims(item: JsonObject) -> list[Claim]:
    for prefix in _PREFIXES:
        for trace in _TRACES:
            found = at(item, (*prefix, trace))
            if isinstance(found, dict):
                return _traced(item, (*prefix, trace), found)
    return []


def _traced(item: JsonObject, prefix: Path, trace: JsonObject) -> list[Claim]:
    for side, shapes in ((_IN, _INPUTS), (_OUT, _OUTPUTS)):
        inner = trace.get(side)
        for shape in shapes:
            if isinstance(inner, dict) and isinstance(inner.get(shape.type), dict):
                return claims_of(item, shape.within((*prefix, side)))
    if text_at(trace, ("rationale", "text")) is not None:
        return [Claim(Reasoning(content=""), (Field("content", (*prefix, "rationale", "text")),))]
    if text_at(trace, (_OUT, "finalResponse", "text")) is not None:
        return [Claim(Text(content=""), (Field("content", (*prefix, _OUT, "finalResponse", "text")),))]
    return []


def places(document: Json) -> list[Path]:
    return [("completion",)] if isinstance(at(document, ("completion",)), list) else []


VENDOR = Vendor(
    name="bedrock-agents",
    title="Bedrock Agents",
    shapes=SHAPES,
    claims=claims,
    text=Saying(
        {"trace": {"trace": {_TRACES[0]: {_OUT: {"finalResponse": {"text": ""}, "type": "FINISH"}}}}},
        (*_BEGINS_IN, _OUT, "finalResponse", "text"),
    ),
    reasoning=Saying(
        {"trace": {"trace": {_TRACES[0]: {"rationale": {"text": ""}}}}}, (*_BEGINS_IN, "rationale", "text")
    ),
    places=places,
)
