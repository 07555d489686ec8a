"""Azure AI agents: tool calls of run steps, messages of threads, and OpenAI's items."""

from typing import cast

from fumehood.message_parts.canonical_parts import (
    Execution,
    FilePart,
    Json,
    JsonObject,
    JsonPath,
    TextPart,
    UriPart,
)
from fumehood.message_parts.json_path_access import MISSING, copy_json, get_at_path, get_text_at_path
from fumehood.message_parts.partial_items import VendorStreamCollector, read_int, read_object
from fumehood.message_parts.vendor_codec import (
    FieldMapping,
    ItemMapping,
    PartSkeleton,
    VendorCodec,
    draft_tool_parts,
    map_fields,
)
from fumehood.message_parts.vendors import openai


def _run_step_mapping(
    name: str, kind: str, call: dict[str, str], result: dict[str, str], execution: Execution = "server"
) -> ItemMapping:
    """A tool call of a run step: call and result in a member named after the tool."""
    return ItemMapping(
        type=name,
        kind=kind,
        call=map_fields(**{field: f"{name}.{path or field}" for field, path in call.items()}),
        response=map_fields(**{field: f"{name}.{path or field}" for field, path in result.items()}),
        name=(name, "name") if kind in ("function", "openapi") else (),
        status=(),
        execution=execution,
        template={"type": name, "id": "", name: {}},
    )


RUN_STEP_MAPPINGS = (
    _run_step_mapping("code_interpreter", "code_interpreter", {"code": "input"}, {"outputs": ""}),
    _run_step_mapping("file_search", "file_search", {"queries": ""}, {"results": ""}),
    _run_step_mapping("bing_grounding", "web_search", {"url": "requesturl"}, {"response_metadata": ""}),
    _run_step_mapping("bing_custom_search", "web_search", {"url": "requesturl"}, {"response_metadata": ""}),
    _run_step_mapping("azure_ai_search", "file_search", {"queries": "input|one"}, {"output": ""}),
    _run_step_mapping("openapi", "openapi", {"arguments": ""}, {"output": ""}),
    _run_step_mapping("function", "function", {"arguments": ""}, {"result": "output"}, "client"),
    ItemMapping(
        type="mcp",
        kind="mcp",
        call=map_fields(arguments="", server_label=""),
        response=map_fields(output="", error=""),
        name=("name",),
        status=(),
        failed=("error",),
        template={"type": "mcp", "id": "", "name": "", "arguments": "{}"},
    ),
)
_BY_TYPE = {mapping.type: mapping for mapping in RUN_STEP_MAPPINGS}
_OUTPUT_SUFFIX = "_call_output"
_CALL_SUFFIX = "_call"


def draft_parts(item: JsonObject) -> list[PartSkeleton]:
    kind = item.get("type")
    if isinstance(kind, str):
        if mapping := _BY_TYPE.get(kind):
            return draft_tool_parts(item, mapping)
        if kind in _MESSAGE_CONTENT_FIELDS:
            return _draft_message_content(kind, item)
        if kind not in openai.BY_TYPE and (mapping := _azure_mapping(kind, item)):
            return draft_tool_parts(item, mapping)
    return openai.draft_parts(item)


# Content of a thread's message.
_MESSAGE_CONTENT_FIELDS = {"text": "value", "image_file": "file_id", "image_url": "url"}


def _draft_message_content(kind: str, entry: JsonObject) -> list[PartSkeleton]:
    path = (kind, _MESSAGE_CONTENT_FIELDS[kind])
    if get_text_at_path(entry, path) is None:
        return []
    if kind == "text":
        fields = (FieldMapping("content", path), FieldMapping("annotations", (kind, "annotations")))
        return [PartSkeleton(TextPart(content=""), fields)]
    if kind == "image_file":
        return [PartSkeleton(FilePart(file_id="", modality="image"), (FieldMapping("file_id", path),))]
    return [PartSkeleton(UriPart(uri="", modality="image"), (FieldMapping("uri", path),))]


def _azure_mapping(kind: str, item: JsonObject) -> ItemMapping | None:
    """Azure's own tools among OpenAI's items: `azure_ai_search_call`, `azure_ai_search_call_output` and the like."""
    if kind.endswith(_OUTPUT_SUFFIX):
        name = kind.removesuffix(_OUTPUT_SUFFIX)
        return ItemMapping(type=kind, kind=name, response=map_fields(output=""), call_id=("call_id",))
    if kind.endswith(_CALL_SUFFIX):
        name = kind.removesuffix(_CALL_SUFFIX)
        return ItemMapping(type=kind, kind=name, call=map_fields(arguments=""), call_id=("call_id",))
    # A tool without a mapping, or of a later version of the service.
    if isinstance(item.get(kind), dict) and get_text_at_path(item, ("id",)) is not None:
        return _unknown_step_mapping(kind, item)
    return None


def _unknown_step_mapping(kind: str, item: JsonObject) -> ItemMapping:
    output = (FieldMapping("output", (kind, "output")),)
    for call_ids in ("input", "arguments"):
        if (
            get_at_path(item, (kind, call_ids)) is not MISSING
            and get_at_path(item, (kind, "output")) is not MISSING
        ):
            call = (FieldMapping("arguments", (kind, call_ids)),)
            return ItemMapping(type=kind, kind=kind, call=call, response=output, status=())
    return ItemMapping(type=kind, kind=kind, call=(FieldMapping("arguments", (kind,)),), status=())


def find_item_lists(document: Json) -> list[JsonPath]:
    """Calls are in `step_details` of a run step, text is in `content` of a thread's message.

    Steps and messages come alone, in a list, or in a page of a list.
    """
    listed = get_at_path(document, ("data",)) if isinstance(document, dict) else document
    prefix: JsonPath = ("data",) if isinstance(document, dict) and isinstance(listed, list) else ()
    entries = listed if isinstance(listed, list) else []
    paths = [(*prefix, number) for number, _ in enumerate(entries)]
    found = [path for position in [*paths, ()] for path in _find_step_or_message(document, position)]
    return found or openai.find_item_lists(document)


def _find_step_or_message(document: Json, position: JsonPath) -> list[JsonPath]:
    if isinstance(get_at_path(document, (*position, "step_details", "tool_calls")), list):
        return [(*position, "step_details", "tool_calls")]
    is_message = get_at_path(document, (*position, "object")) == "thread.message"
    if is_message and isinstance(get_at_path(document, (*position, "content")), list):
        return [(*position, "content")]
    return []


# --- the stream ----------------------------------------------------------------------------------------


_THREAD_EVENTS = ("thread.run.step.", "thread.message.")


class AzureThreadStream(VendorStreamCollector):
    """Events are `{"event": …, "data": …}`; a delta has the shape of what it extends: a run step, or a message."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, JsonObject] = {}

    def recognizes(self, event: JsonObject) -> bool:
        kind = get_text_at_path(event, ("event",)) or ""
        return kind.startswith("thread.") or kind in ("done", "error")

    def feed(self, event: JsonObject) -> None:
        kind, data = get_text_at_path(event, ("event",)) or "", read_object(event, "data")
        known = get_text_at_path(data, ("id",))
        if kind == "error":
            self.partial_items.add_error({"type": "error", **data})
        if known is None or not kind.startswith(_THREAD_EVENTS):
            return
        if kind.endswith(".delta"):
            is_message = kind.startswith("thread.message.")
            begun: JsonObject = {"id": known, "object": "thread.message"} if is_message else {"id": known}
            entry = self._entries.setdefault(known, begun)
            self._entries[known] = cast(JsonObject, _merge_delta(entry, read_object(data, "delta")))
        else:
            self._entries[known] = cast(JsonObject, copy_json(data))

    def build_document(self) -> Json:
        return [*(copy_json(entry) for entry in self._entries.values()), *self.partial_items.build_items()]


class AzureStream(VendorStreamCollector):
    """A stream of either API: events of a response, plain or as `data` of an event, or events of a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._response = openai.OpenAIResponseStream()
        self._thread = AzureThreadStream()

    def recognizes(self, event: JsonObject) -> bool:
        return self._response.recognizes(_unwrap_event(event)) or self._thread.recognizes(event)

    def feed(self, event: JsonObject) -> None:
        inner = _unwrap_event(event)
        stream = self._response if self._response.recognizes(inner) else self._thread
        stream.feed(inner if stream is self._response else event)
        self.partial_items = stream.partial_items

    def build_document(self) -> Json:
        thread = cast(list[Json], self._thread.build_document())
        return [*thread, *cast(list[Json], self._response.build_document())]


def _unwrap_event(event: JsonObject) -> JsonObject:
    """Return the event of a response that a client reads as `{"event": …, "data": …}`."""
    return read_object(event, "data") if "type" in read_object(event, "data") else event


def _merge_delta(known: Json, delta: Json) -> Json:
    """Concatenate strings, merge objects, and merge list entries by their `index`."""
    if isinstance(known, dict) and isinstance(delta, dict):
        return {
            **known,
            **{
                key: _merge_field(known.get(key), value, key)
                for key, value in delta.items()
                if key != "index"
            },
        }
    if isinstance(delta, list):
        return _merge_list(list(known) if isinstance(known, list) else [], delta)
    if isinstance(known, str) and isinstance(delta, str):
        return known + delta
    if isinstance(delta, dict):
        return _merge_delta({}, delta)
    return copy_json(delta) if delta is not None else known


def _merge_field(known: Json, value: Json, key: str) -> Json:
    """Merge one field; identifiers are repeated in each delta, not continued."""
    return value if key in ("id", "type", "name") and value is not None else _merge_delta(known, value)


def _merge_list(entries: list[Json], delta: list[Json]) -> list[Json]:
    for entry in delta:
        index = read_int(entry, "index") if isinstance(entry, dict) and "index" in entry else len(entries)
        if 0 <= index < len(entries):
            entries[index] = _merge_delta(entries[index], entry)
        else:
            entries.append(_merge_delta(None, entry))
    return entries


VENDOR = VendorCodec(
    name="azure",
    title="Azure AI agents",
    item_mappings=(*RUN_STEP_MAPPINGS, *openai.ITEM_MAPPINGS),
    draft_parts=draft_parts,
    text=openai.VENDOR.text,
    user_text=openai.VENDOR.user_text,
    reasoning=openai.VENDOR.reasoning,
    find_item_lists=find_item_lists,
    stream=AzureStream,
)
