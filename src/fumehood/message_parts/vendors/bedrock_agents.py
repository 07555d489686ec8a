"""Amazon Bedrock's Agents: calls and results are traces of an agent's steps."""

from fumehood.message_parts.canonical_parts import (
    Execution,
    GenericPart,
    Json,
    JsonObject,
    JsonPath,
    ReasoningPart,
    TextPart,
)
from fumehood.message_parts.json_path_access import get_at_path, get_text_at_path
from fumehood.message_parts.partial_items import VendorStreamCollector
from fumehood.message_parts.vendor_codec import (
    FieldMapping,
    ItemMapping,
    PartSkeleton,
    TextItemTemplate,
    VendorCodec,
    draft_tool_parts,
    map_fields,
)

_INPUT_FIELD = "invocationInput"
_OUTPUT_FIELD = "observation"
_TRACE_FIELDS = ("orchestrationTrace", "routingClassifierTrace")
# Paths of a trace: in an event of the stream, in a trace part, or at the top.
_TRACE_PREFIXES: tuple[JsonPath, ...] = (("trace", "trace"), ("trace",), ())
_TEMPLATE_PATH = ("trace", "trace", _TRACE_FIELDS[0])


def _call_mapping(member: str, kind: str, **paths: str) -> ItemMapping:
    return ItemMapping(
        type=f"{member}Input",
        kind=kind,
        call=map_fields(**{name: f"{member}Input.{path or name}" for name, path in paths.items()}),
        id=("traceId",),
        status=(),
        template={"trace": {"trace": {_TRACE_FIELDS[0]: {_INPUT_FIELD: {f"{member}Input": {}}}}}},
    )


def _response_mapping(member: str, kind: str, failed: JsonPath = (), **paths: str) -> ItemMapping:
    return ItemMapping(
        type=f"{member}Output",
        kind=kind,
        response=map_fields(**{name: f"{member}Output.{path or name}" for name, path in paths.items()}),
        id=("traceId",),
        status=(),
        failed=failed,
        started_at=(f"{member}Output", "metadata", "startTime"),
        ended_at=(f"{member}Output", "metadata", "endTime"),
        duration_ms=(f"{member}Output", "metadata", "totalTimeMs"),
        template={"trace": {"trace": {_TRACE_FIELDS[0]: {_OUTPUT_FIELD: {f"{member}Output": {}}}}}},
    )


def _action_execution(item: JsonObject) -> Execution:
    """The client runs an action whose execution type returns control."""
    for prefix in _TRACE_PREFIXES:
        for trace in _TRACE_FIELDS:
            path = (*prefix, trace, _INPUT_FIELD, "actionGroupInvocationInput", "executionType")
            if get_text_at_path(item, path) == "RETURN_CONTROL":
                return "client"
    return "server"


_ACTION_MAPPING = ItemMapping(
    type="actionGroupInvocationInput",
    kind="function",
    call=map_fields(
        arguments="actionGroupInvocationInput.parameters",
        request_body="actionGroupInvocationInput.requestBody",
        path="actionGroupInvocationInput.apiPath",
        method="actionGroupInvocationInput.verb",
    ),
    id=("traceId",),
    name=("actionGroupInvocationInput", "function"),
    status=(),
    execution=_action_execution,
    template={"trace": {"trace": {_TRACE_FIELDS[0]: {_INPUT_FIELD: {"actionGroupInvocationInput": {}}}}}},
)
_INPUT_MAPPINGS = (
    _call_mapping("codeInterpreterInvocation", "code_interpreter", code=""),
    _call_mapping("knowledgeBaseLookup", "file_search", queries="text|one"),
    _ACTION_MAPPING,
    _call_mapping("agentCollaboratorInvocation", "agent", arguments="input", agent="agentCollaboratorName"),
)
_OUTPUT_MAPPINGS = (
    _response_mapping(
        "codeInterpreterInvocation",
        "code_interpreter",
        ("codeInterpreterInvocationOutput", "executionError"),
        outputs="executionOutput|log",
        error="executionError",
        timed_out="executionTimeout",
        files="",
    ),
    _response_mapping("knowledgeBaseLookup", "file_search", results="retrievedReferences"),
    _response_mapping("actionGroupInvocation", "function", result="text"),
    _response_mapping("agentCollaboratorInvocation", "agent", result="output"),
)
ITEM_MAPPINGS = (
    *(mapping.nested_under((*_TEMPLATE_PATH, _INPUT_FIELD)) for mapping in _INPUT_MAPPINGS),
    *(mapping.nested_under((*_TEMPLATE_PATH, _OUTPUT_FIELD)) for mapping in _OUTPUT_MAPPINGS),
)


def draft_parts(item: JsonObject) -> list[PartSkeleton]:
    for prefix in _TRACE_PREFIXES:
        for trace in _TRACE_FIELDS:
            found = get_at_path(item, (*prefix, trace))
            if isinstance(found, dict):
                return _draft_trace(item, (*prefix, trace), found)
    if get_text_at_path(item, ("chunk", "bytes")) is not None:
        return [PartSkeleton(TextPart(content=""), (FieldMapping("content", ("chunk", "bytes"), "base64"),))]
    for path in (*_FAILURE_PATHS, *((name, "message") for name in item if name.endswith("Exception"))):
        if get_text_at_path(item, path) is not None:
            return [PartSkeleton(GenericPart(type="error"), (FieldMapping("message", path),))]
    return []


def _draft_trace(item: JsonObject, prefix: JsonPath, trace: JsonObject) -> list[PartSkeleton]:
    for side, mappings in ((_INPUT_FIELD, _INPUT_MAPPINGS), (_OUTPUT_FIELD, _OUTPUT_MAPPINGS)):
        inner = trace.get(side)
        for mapping in mappings:
            if isinstance(inner, dict) and isinstance(inner.get(mapping.type), dict):
                return draft_tool_parts(item, mapping.nested_under((*prefix, side)))
    if get_text_at_path(trace, ("rationale", "text")) is not None:
        return [
            PartSkeleton(
                ReasoningPart(content=""), (FieldMapping("content", (*prefix, "rationale", "text")),)
            )
        ]
    for role, path in _TEXT_PATHS:
        if get_text_at_path(trace, path) is not None:
            part = TextPart(content="", role=role)
            return [PartSkeleton(part, (FieldMapping("content", (*prefix, *path)),))]
    return []


# Texts of a trace: the answer, a correction of the agent, and what its model was sent and has answered.
_TEXT_PATHS: tuple[tuple[str, JsonPath], ...] = (
    ("assistant", (_OUTPUT_FIELD, "finalResponse", "text")),
    ("assistant", (_OUTPUT_FIELD, "repromptResponse", "text")),
    ("user", ("modelInvocationInput", "text")),
    ("assistant", ("modelInvocationOutput", "rawResponse", "content")),
)
_FAILURE_PATHS: tuple[JsonPath, ...] = tuple(
    (*prefix, "failureTrace", "failureReason") for prefix in _TRACE_PREFIXES
)


def find_item_lists(document: Json) -> list[JsonPath]:
    return [("completion",)] if isinstance(get_at_path(document, ("completion",)), list) else []


# --- the stream ----------------------------------------------------------------------------------------


class BedrockAgentsStream(VendorStreamCollector):
    """Every event is an item."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def recognizes(self, event: JsonObject) -> bool:
        kinds = ("chunk", "trace", "returnControl", "files", *_TRACE_FIELDS)
        return not event.keys().isdisjoint(kinds) or any(name.endswith("Exception") for name in event)

    def feed(self, event: JsonObject) -> None:
        self.partial_items.replace_item(self._count, event)
        self._count += 1


VENDOR = VendorCodec(
    name="bedrock-agents",
    title="Bedrock Agents",
    item_mappings=ITEM_MAPPINGS,
    draft_parts=draft_parts,
    text=TextItemTemplate(
        {
            "trace": {
                "trace": {
                    _TRACE_FIELDS[0]: {_OUTPUT_FIELD: {"finalResponse": {"text": ""}, "type": "FINISH"}}
                }
            }
        },
        (*_TEMPLATE_PATH, _OUTPUT_FIELD, "finalResponse", "text"),
    ),
    reasoning=TextItemTemplate(
        {"trace": {"trace": {_TRACE_FIELDS[0]: {"rationale": {"text": ""}}}}},
        (*_TEMPLATE_PATH, "rationale", "text"),
    ),
    find_item_lists=find_item_lists,
    stream=BedrockAgentsStream,
)
