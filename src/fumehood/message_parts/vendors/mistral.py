"""Mistral's Conversations: one entry for call and result, arguments as JSON text.

Results of a search are not in its entry, but in the references of the message that follows.
"""

from functools import partial

from fumehood.message_parts.canonical_parts import (
    FilePart,
    Json,
    JsonObject,
    JsonPath,
    ReasoningPart,
    TextPart,
    UriPart,
)
from fumehood.message_parts.json_path_access import get_at_path, get_text_at_path
from fumehood.message_parts.partial_items import VendorStreamCollector
from fumehood.message_parts.vendor_codec import (
    FieldMapping,
    ItemMapping,
    PartSkeleton,
    TextItemTemplate,
    VendorCodec,
    draft_entries,
    draft_error,
    draft_tool_parts,
    map_fallback,
    map_fields,
)

_CALL_ID = ("tool_call_id",)


def _execution_mapping(name: str, kind: str, call: dict[str, str], result: dict[str, str]) -> ItemMapping:
    return ItemMapping(
        type=f"tool.execution:{name}",
        kind=kind,
        call=(*map_fields(**call), *map_fallback("arguments", "arguments")),
        response=(*map_fields(**result), *map_fallback("info", "info")),
        started_at=("created_at",),
        ended_at=("completed_at",),
        template={"object": "entry", "type": "tool.execution", "name": name, "arguments": "{}"},
    )


ITEM_MAPPINGS = (
    _execution_mapping(
        "code_interpreter",
        "code_interpreter",
        {"code": "arguments|json.code"},
        {"outputs": "info.code_output|log"},
    ),
    _execution_mapping("web_search", "web_search", {"queries": "arguments|json.query"}, {"info": ""}),
    _execution_mapping("web_search_premium", "web_search", {"queries": "arguments|json.query"}, {"info": ""}),
    _execution_mapping("document_library", "file_search", {"queries": "arguments|json.query"}, {"info": ""}),
    _execution_mapping(
        "image_generation", "image_generation", {"prompt": "arguments|json.prompt"}, {"info": ""}
    ),
    ItemMapping(
        type="agent.handoff",
        kind="agent_handoff",
        call=map_fields(agent="next_agent_name", previous_agent="previous_agent_name"),
        started_at=("created_at",),
        ended_at=("completed_at",),
    ),
    ItemMapping(
        type="function.call",
        kind="function",
        call=map_fields(arguments=""),
        call_id=_CALL_ID,
        name=("name",),
        execution="client",
        template={
            "object": "entry",
            "type": "function.call",
            "tool_call_id": "",
            "name": "",
            "arguments": "{}",
        },
    ),
    ItemMapping(
        type="function.result",
        kind="function",
        response=map_fields(result=""),
        call_id=_CALL_ID,
        execution="client",
        template={"object": "entry", "type": "function.result", "tool_call_id": "", "result": ""},
    ),
)
_BY_TYPE = {mapping.type: mapping for mapping in ITEM_MAPPINGS}


def draft_parts(item: JsonObject) -> list[PartSkeleton]:
    match item.get("type"):
        case "tool.execution":
            return _draft_execution(item)
        case "message.output":
            return _draft_message(item, "assistant")
        case "message.input":
            return _draft_message(item, get_text_at_path(item, ("role",)) or "user")
        case "error":
            return draft_error()
        case str() as kind if kind in _BY_TYPE:
            return draft_tool_parts(item, _BY_TYPE[kind])
        case _:
            return []


def _draft_execution(item: JsonObject) -> list[PartSkeleton]:
    """Draft a tool execution; an unknown connector becomes a kind of its own."""
    name = get_text_at_path(item, ("name",))
    if not name:
        return []
    mapping = _BY_TYPE.get(f"tool.execution:{name}")
    return draft_tool_parts(item, mapping or _execution_mapping(name, name, {"arguments": ""}, {"info": ""}))


def _draft_message(item: JsonObject, role: str) -> list[PartSkeleton]:
    content = item.get("content")
    if isinstance(content, str):
        return [PartSkeleton(TextPart(content="", role=role), map_fields(content=""))]
    return draft_entries(item, "content", partial(_draft_chunk, role))


def _draft_chunk(role: str, chunk: JsonObject, path: JsonPath) -> list[PartSkeleton]:
    match chunk.get("type"):
        case "text":
            return [
                PartSkeleton(TextPart(content="", role=role), (FieldMapping("content", (*path, "text")),))
            ]
        case "tool_file":
            mime = get_text_at_path(chunk, ("file_type",))
            part = FilePart(file_id="", modality="file", mime_type=mime)
            fields = (
                FieldMapping("file_id", (*path, "file_id")),
                FieldMapping("filename", (*path, "file_name")),
            )
            return [PartSkeleton(part, fields)]
        case "tool_reference":
            return _draft_reference(chunk, path)
        case "image_url" | "document_url" as kind:
            inner = (*path, kind, "url") if isinstance(chunk.get(kind), dict) else (*path, kind)
            part = UriPart(uri="", modality=kind.removesuffix("_url"))
            return [
                PartSkeleton(
                    part, (FieldMapping("uri", inner), FieldMapping("title", (*path, "document_name")))
                )
            ]
        case "thinking":
            thoughts = chunk.get("thinking")
            return [
                PartSkeleton(
                    ReasoningPart(content=""), (FieldMapping("content", (*path, "thinking", number, "text")),)
                )
                for number, is_reasoning in enumerate(thoughts if isinstance(thoughts, list) else [])
                if get_text_at_path(is_reasoning, ("text",)) is not None
            ]
        case _:
            return []


def _draft_reference(chunk: JsonObject, path: JsonPath) -> list[PartSkeleton]:
    """Draft a result of a search: a URI with its title, or the title alone."""
    about = [FieldMapping(name, (*path, name)) for name in ("title", "description")]
    if isinstance(chunk.get("url"), str):
        return [
            PartSkeleton(UriPart(uri="", modality="document"), (FieldMapping("uri", (*path, "url")), *about))
        ]
    content = FieldMapping("content", (*path, "title"))
    return [PartSkeleton(TextPart(content=""), (content, about[1]))]


def find_item_lists(document: Json) -> list[JsonPath]:
    if isinstance(document, dict) and "type" in document:
        return []
    found: list[JsonPath] = [("outputs",), ("entries",)]
    return [path for path in found if isinstance(get_at_path(document, path), list)]


# --- the stream ----------------------------------------------------------------------------------------

_ENTRY_FIELDS = ("id", "name", "tool_call_id", "model", "agent_id", "created_at", "confirmation_status")
_HANDOFF_SOURCE_FIELDS = ("previous_agent_id", "previous_agent_name")
_HANDOFF_TARGET_FIELDS = ("next_agent_id", "next_agent_name")


_EVENT_PREFIXES = ("conversation.", "tool.execution.", "function.call.", "message.output.", "agent.handoff.")


class MistralConversationStream(VendorStreamCollector):
    """Events name their entry by id; the entry itself is never sent."""

    def __init__(self) -> None:
        super().__init__()
        self._indexes: dict[str, int] = {}

    def recognizes(self, event: JsonObject) -> bool:
        return (get_text_at_path(event, ("type",)) or "").startswith(_EVENT_PREFIXES)

    def feed(self, event: JsonObject) -> None:
        match event.get("type"):
            case "tool.execution.started":
                self._start_entry(event, "tool.execution", {"arguments": event.get("arguments", "")})
            case "tool.execution.delta":
                self.partial_items.append_text(self._index_of(event), ("arguments",), event.get("arguments"))
            case "tool.execution.done":
                index = self._index_of(event)
                self.partial_items.set_value(index, ("info",), event.get("info", {}))
                self.partial_items.set_value(index, ("completed_at",), event.get("created_at"))
                self.partial_items.end_item(index)
            case "agent.handoff.started":
                self._start_entry(
                    event,
                    "agent.handoff",
                    {key: event[key] for key in _HANDOFF_SOURCE_FIELDS if key in event},
                )
            case "agent.handoff.done":
                index = self._index_of(event)
                for key in _HANDOFF_TARGET_FIELDS:
                    self.partial_items.set_value(index, (key,), event.get(key))
                self.partial_items.set_value(index, ("completed_at",), event.get("created_at"))
                self.partial_items.end_item(index)
            case "function.call.delta":
                self._start_entry(event, "function.call", {"arguments": ""})
                self.partial_items.append_text(self._index_of(event), ("arguments",), event.get("arguments"))
            case "message.output.delta":
                self._start_entry(event, "message.output", {"role": "assistant", "content": []})
                self._append_content(self._index_of(event), event.get("content"))
            case "conversation.response.done":
                for index in self._indexes.values():
                    self.partial_items.end_item(index)
            case "conversation.response.error":
                self.partial_items.add_error({**event, "type": "error"})
            case _:
                pass

    def _index_of(self, event: JsonObject) -> int:
        known = get_text_at_path(event, ("id",)) or ""
        return self._indexes.setdefault(known, len(self._indexes))

    def _start_entry(self, event: JsonObject, kind: str, empty: JsonObject) -> None:
        about = {key: event[key] for key in _ENTRY_FIELDS if key in event}
        self.partial_items.start_item(
            self._index_of(event), {"object": "entry", "type": kind, **about, **empty}
        )

    def _append_content(self, index: int, content: Json) -> None:
        known = self.partial_items.get_value(index, ("content",))
        chunks = known if isinstance(known, list) else []
        if not isinstance(content, str):
            self.partial_items.extend_list(index, ("content",), [content])
            return
        last = chunks[-1] if chunks else None
        if not isinstance(last, dict) or last.get("type") != "text":
            self.partial_items.extend_list(index, ("content",), [{"type": "text", "text": ""}])
            chunks = [*chunks, None]
        self.partial_items.append_text(index, ("content", len(chunks) - 1, "text"), content)

    def build_document(self) -> Json:
        return [_flatten_text(item) for item in self.partial_items.build_items()]


def _flatten_text(item: Json) -> Json:
    """Replace the content of a message that is only text by that text."""
    content = item.get("content") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(content, list) or len(content) != 1:
        return item
    only = content[0]
    alone = isinstance(only, dict) and only.keys() == {"type", "text"} and only["type"] == "text"
    return {**item, "content": only["text"]} if alone and isinstance(only, dict) else item


VENDOR = VendorCodec(
    name="mistral",
    title="Mistral Conversations",
    item_mappings=ITEM_MAPPINGS,
    draft_parts=draft_parts,
    text=TextItemTemplate(
        {"object": "entry", "type": "message.output", "role": "assistant", "content": ""}, ("content",)
    ),
    user_text=TextItemTemplate(
        {"object": "entry", "type": "message.input", "role": "user", "content": ""}, ("content",)
    ),
    reasoning=TextItemTemplate(
        {
            "object": "entry",
            "type": "message.output",
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": [{"type": "text", "text": ""}]}],
        },
        ("content", 0, "thinking", 0, "text"),
    ),
    find_item_lists=find_item_lists,
    stream=MistralConversationStream,
)
