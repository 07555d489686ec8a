"""Amazon Bedrock's Converse API: each content block is an object with one key, and the key is its type.

Blobs are base64 text, as AWS writes them in JSON.
"""

from fumehood.message_parts.canonical_parts import (
    BlobPart,
    Execution,
    Json,
    JsonObject,
    JsonPath,
    ReasoningPart,
    TextPart,
    UriPart,
)
from fumehood.message_parts.json_path_access import copy_json, get_at_path, get_text_at_path
from fumehood.message_parts.partial_items import VendorStreamCollector, read_int, read_object
from fumehood.message_parts.vendor_codec import (
    FieldMapping,
    ItemMapping,
    PartSkeleton,
    TextItemTemplate,
    VendorCodec,
    draft_error,
    draft_tool_parts,
    map_fallback,
    map_fields,
)

_SERVER_TOOL_TYPE = "server_tool_use"


def _call_mapping(
    name: str,
    kind: str,
    execution: Execution = "server",
    fields: tuple[FieldMapping, ...] = (),
    **paths: str,
) -> ItemMapping:
    template: JsonObject = {"toolUseId": "", "name": name, "input": {}}
    if execution == "server":
        template["type"] = _SERVER_TOOL_TYPE
    return ItemMapping(
        type=f"toolUse:{name}" if name else "toolUse",
        kind=kind,
        call=(*map_fields(**paths), *fields, *map_fallback("arguments", "input")),
        id=("toolUseId",),
        name=("name",) if kind == "function" else (),
        status=(),
        execution=execution,
        template={"toolUse": template},
    ).nested_under(("toolUse",))


def _response_mapping(
    name: str,
    kind: str,
    execution: Execution = "server",
    fields: tuple[FieldMapping, ...] = (),
    **paths: str,
) -> ItemMapping:
    template: JsonObject = {"toolUseId": "", "content": [], "status": "success"}
    if execution == "server":
        template |= {"type": f"{name}_result", "content": [{"json": {}}]}
    return ItemMapping(
        type=f"toolResult:{name}_result" if name else "toolResult",
        kind=kind,
        response=(*map_fields(**paths), *fields, *map_fallback("content", "content")),
        id=(),
        call_id=("toolUseId",),
        execution=execution,
        template={"toolResult": template},
    ).nested_under(("toolResult",))


# Nova's code interpreter answers with an object, or with the same object as JSON text.
_NOVA_TEXT_FIELDS = (
    FieldMapping("", ("content", 0, "text"), "json"),
    *map_fields(
        outputs="content.0.text.1.stdOut|log",
        exit_code="content.0.text.1.exitCode",
        error="content.0.text.1.stdErr",
    ),
)

ITEM_MAPPINGS = (
    _call_mapping(
        "nova_code_interpreter",
        "code_interpreter",
        fields=map_fields(code="input.snippet"),
        code="input.code",
    ),
    _response_mapping(
        "nova_code_interpreter",
        "code_interpreter",
        fields=_NOVA_TEXT_FIELDS,
        outputs="content.0.json.stdOut|log",
        exit_code="content.0.json.exitCode",
        error="content.0.json.stdErr",
    ),
    _call_mapping("nova_grounding", "web_search", queries="input.query|one"),
    _response_mapping("nova_grounding", "web_search", content=""),
    _call_mapping("", "function", "client", arguments="input"),
    _response_mapping("", "function", "client", result="content"),
)
_BY_TYPE = {mapping.type: mapping for mapping in ITEM_MAPPINGS}


def draft_parts(item: JsonObject) -> list[PartSkeleton]:
    if mapping := _mapping_of(item):
        return draft_tool_parts(item, mapping)
    if isinstance(item.get("text"), str):
        return [PartSkeleton(TextPart(content=""), map_fields(content="text"))]
    if isinstance(get_at_path(item, ("reasoningContent", "reasoningText", "text")), str):
        return [
            PartSkeleton(ReasoningPart(content=""), map_fields(content="reasoningContent.reasoningText.text"))
        ]
    for path in (("citationsContent", "content"), ("searchResult", "content")):
        if isinstance(get_at_path(item, path), list):
            return _draft_texts(item, path)
    if isinstance(get_at_path(item, ("guardContent", "text", "text")), str):
        return [PartSkeleton(TextPart(content=""), map_fields(content="guardContent.text.text"))]
    if item.get("type") == "error":
        return draft_error()
    return _draft_media(item)


def _mapping_of(item: JsonObject) -> ItemMapping | None:
    """Return the mapping of a block; an unknown server tool becomes a kind of its own."""
    if isinstance(item.get("toolUse"), dict):
        name = get_text_at_path(item, ("toolUse", "name")) or ""
        if get_text_at_path(item, ("toolUse", "type")) != _SERVER_TOOL_TYPE or not name:
            return _BY_TYPE["toolUse"]
        return _BY_TYPE.get(f"toolUse:{name}") or _call_mapping(name, name, arguments="input")
    if isinstance(item.get("toolResult"), dict):
        name = (get_text_at_path(item, ("toolResult", "type")) or "").removesuffix("_result")
        if not name:
            return _BY_TYPE["toolResult"]
        return _BY_TYPE.get(f"toolResult:{name}_result") or _response_mapping(name, name, result="content")
    return None


def _draft_texts(item: JsonObject, path: JsonPath) -> list[PartSkeleton]:
    """Draft texts with what they cite, or a result of a search with its title and source."""
    found = get_at_path(item, path)
    about = (
        FieldMapping("annotations", (path[0], "citations")),
        FieldMapping("title", (path[0], "title")),
        FieldMapping("source", (path[0], "source")),
    )
    texts = [
        FieldMapping("content", (*path, number, "text"))
        for number, entry in enumerate(found if isinstance(found, list) else [])
        if get_text_at_path(entry, ("text",)) is not None
    ]
    return [
        PartSkeleton(TextPart(content=""), (text, *(about if number == 0 else ())))
        for number, text in enumerate(texts)
    ]


def _draft_media(item: JsonObject) -> list[PartSkeleton]:
    for modality in ("image", "video", "audio", "document"):
        part_type = get_text_at_path(item, (modality, "format"))
        mime = f"{modality}/{part_type}" if part_type and modality != "document" else None
        if get_text_at_path(item, (modality, "source", "bytes")) is not None:
            part = BlobPart(content="", modality=modality, mime_type=mime)
            return [PartSkeleton(part, (FieldMapping("content", (modality, "source", "bytes")),))]
        if get_text_at_path(item, (modality, "source", "s3Location", "uri")) is not None:
            part = UriPart(uri="", modality=modality, mime_type=mime)
            return [PartSkeleton(part, (FieldMapping("uri", (modality, "source", "s3Location", "uri")),))]
    return []


def find_item_lists(document: Json) -> list[JsonPath]:
    """The message is in `output` of a response; a conversation is a list of messages."""
    if isinstance(document, list):
        return [(number, *path) for number, entry in enumerate(document) for path in find_item_lists(entry)]
    found: list[JsonPath] = [("content",), ("output", "message", "content")]
    return [path for path in found if isinstance(get_at_path(document, path), list)]


# --- the stream ----------------------------------------------------------------------------------------


_EVENT_FIELDS = (
    "messageStart",
    "contentBlockStart",
    "contentBlockDelta",
    "contentBlockStop",
    "messageStop",
    "metadata",
)


def _find_exception(event: JsonObject) -> str | None:
    return next((name for name in event if name.endswith("Exception")), None)


class BedrockConverseStream(VendorStreamCollector):
    """A text block has no start event: its first delta starts it. A citation delta turns it into a citation block."""

    def __init__(self) -> None:
        super().__init__()
        self._citations: dict[int, list[Json]] = {}

    def recognizes(self, event: JsonObject) -> bool:
        return not event.keys().isdisjoint(_EVENT_FIELDS) or _find_exception(event) is not None

    def feed(self, event: JsonObject) -> None:
        if start := read_object(event, "contentBlockStart"):
            started = read_object(start, "start")
            if "toolUse" in started:
                started: JsonObject = {"toolUse": {**read_object(started, "toolUse"), "input": {}}}
            elif "toolResult" in started:
                started = {"toolResult": {**read_object(started, "toolResult"), "content": []}}
            self.partial_items.start_item(read_int(start, "contentBlockIndex"), started)
        elif delta := read_object(event, "contentBlockDelta"):
            self._apply_delta(read_int(delta, "contentBlockIndex"), read_object(delta, "delta"))
        elif stop := read_object(event, "contentBlockStop"):
            self.partial_items.end_item(read_int(stop, "contentBlockIndex"))
        elif (name := _find_exception(event)) is not None:
            self.partial_items.add_error({"type": "error", "code": name, **read_object(event, name)})

    def _apply_delta(self, index: int, delta: JsonObject) -> None:
        if "text" in delta:
            self.partial_items.start_item(index, {"text": ""})
            self.partial_items.append_text(index, ("text",), delta["text"])
        elif "toolUse" in delta:
            text = get_text_at_path(delta, ("toolUse", "input"))
            self.partial_items.append_text(index, ("toolUse", "input"), text, is_json=True)
        elif isinstance(found := delta.get("toolResult"), list):
            self.partial_items.extend_list(index, ("toolResult", "content"), found)
        elif "citation" in delta:
            self.partial_items.start_item(index, {"text": ""})
            self._citations.setdefault(index, []).append(copy_json(delta["citation"]))
        elif image := read_object(delta, "image"):
            for name, value in image.items():
                self.partial_items.set_value(index, ("image", name), value)
        elif "redactedContent" in (reasoning := read_object(delta, "reasoningContent")):
            self.partial_items.start_item(index, {"reasoningContent": {"redactedContent": ""}})
            self.partial_items.append_text(
                index, ("reasoningContent", "redactedContent"), reasoning["redactedContent"]
            )
        elif reasoning:
            self.partial_items.start_item(index, {"reasoningContent": {"reasoningText": {"text": ""}}})
            for name in ("text", "signature"):
                self.partial_items.append_text(
                    index, ("reasoningContent", "reasoningText", name), reasoning.get(name)
                )

    def build_document(self) -> Json:
        return [
            {"citationsContent": {"content": [item], "citations": copy_json(self._citations[index])}}
            if index in self._citations
            else item
            for index, item in self.partial_items.build_items_by_index()
        ]


VENDOR = VendorCodec(
    name="bedrock",
    title="Bedrock Converse",
    item_mappings=ITEM_MAPPINGS,
    draft_parts=draft_parts,
    text=TextItemTemplate({"text": ""}, ("text",)),
    reasoning=TextItemTemplate(
        {"reasoningContent": {"reasoningText": {"text": ""}}}, ("reasoningContent", "reasoningText", "text")
    ),
    find_item_lists=find_item_lists,
    stream=BedrockConverseStream,
)
