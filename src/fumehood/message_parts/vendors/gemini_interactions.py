"""Gemini's Interactions API: calls and results are steps with a common id."""

from copy import copy
from functools import partial

import msgspec

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
from fumehood.message_parts.json_path_access import get_text_at_path
from fumehood.message_parts.partial_items import VendorStreamCollector, read_int, read_object
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


def _call_mapping(name: str, kind: str, **paths: str) -> ItemMapping:
    return ItemMapping(
        type=f"{name}_call",
        kind=kind,
        call=(*map_fields(**paths), *map_fallback("arguments", "arguments")),
        status=(),
        template={"type": f"{name}_call", "id": "", "arguments": {}},
    )


def _response_mapping(name: str, kind: str, **paths: str) -> ItemMapping:
    return ItemMapping(
        type=f"{name}_result",
        kind=kind,
        response=(*map_fields(**paths), *map_fallback("result", "result")),
        id=(),
        call_id=("call_id",),
        status=(),
        failed=("is_error",),
        template={"type": f"{name}_result", "call_id": ""},
    )


def _with_name(mapping: ItemMapping, execution: Execution = "server") -> ItemMapping:
    name = ("name",) if mapping.call is not None else ()
    return msgspec.structs.replace(mapping, name=name, execution=execution)


ITEM_MAPPINGS = (
    _call_mapping("code_execution", "code_interpreter", code="arguments.code", language="arguments.language"),
    msgspec.structs.replace(
        _response_mapping("code_execution", "code_interpreter", outputs="result|log"),
        template={"type": "code_execution_result", "call_id": "", "result": "", "is_error": False},
    ),
    _call_mapping("google_search", "web_search", queries="arguments.queries"),
    _response_mapping("google_search", "web_search", results="result"),
    _call_mapping("file_search", "file_search", queries="arguments.queries"),
    _response_mapping("file_search", "file_search", results="result"),
    _call_mapping("url_context", "url_context", urls="arguments.urls"),
    _response_mapping("url_context", "url_context", results="result"),
    _call_mapping("google_maps", "google_maps", queries="arguments.queries"),
    _response_mapping("google_maps", "google_maps", results="result"),
    _call_mapping("retrieval", "retrieval", queries="arguments.queries"),
    _response_mapping("retrieval", "retrieval", results="result"),
    _call_mapping("processing", "processing", arguments=""),
    _response_mapping("processing", "processing", result=""),
    msgspec.structs.replace(
        _with_name(_call_mapping("mcp_server_tool", "mcp", arguments="", server_label="server_name")),
        template={"type": "mcp_server_tool_call", "id": "", "name": "", "server_name": "", "arguments": {}},
    ),
    _with_name(_response_mapping("mcp_server_tool", "mcp", output="result")),
    _with_name(_call_mapping("function", "function", arguments=""), "client"),
    _with_name(_response_mapping("function", "function", result=""), "client"),
)
_BY_TYPE = {mapping.type: mapping for mapping in ITEM_MAPPINGS}


def draft_parts(item: JsonObject) -> list[PartSkeleton]:
    kind = item.get("type")
    if not isinstance(kind, str):
        return []
    if mapping := _BY_TYPE.get(kind):
        return draft_tool_parts(item, mapping)
    if kind == "thought":
        return draft_entries(item, "summary", partial(_draft_content, ReasoningPart(content="")))
    if kind in ("model_output", "user_input"):
        role = "user" if kind == "user_input" else "assistant"
        drafts = draft_entries(item, "content", partial(_draft_content, TextPart(content="", role=role)))
        if get_text_at_path(item, ("error", "message")) is not None:
            drafts += draft_error()
        return drafts
    if kind == "error":
        return draft_error()
    # Earlier versions of the API have content where there are steps now.
    return _draft_content(TextPart(content=""), item, ()) if kind in _CONTENT_TYPES else []


_CONTENT_TYPES = ("text", "image", "audio", "video", "document")


def _draft_content(text: TextPart | ReasoningPart, entry: JsonObject, path: JsonPath) -> list[PartSkeleton]:
    """text: what a text becomes."""
    kind, mime = get_text_at_path(entry, ("type",)) or "", get_text_at_path(entry, ("mime_type",))
    name = FieldMapping("filename", (*path, "name"))
    if kind == "text":
        fields = (
            FieldMapping("content", (*path, "text")),
            FieldMapping("annotations", (*path, "annotations")),
        )
        return [PartSkeleton(copy(text), fields)]
    if isinstance(entry.get("data"), str):
        part = BlobPart(content="", modality=kind, mime_type=mime)
        return [PartSkeleton(part, (FieldMapping("content", (*path, "data")), name))]
    if isinstance(entry.get("uri"), str):
        part = UriPart(uri="", modality=kind, mime_type=mime)
        return [PartSkeleton(part, (FieldMapping("uri", (*path, "uri")), name))]
    return []


def find_item_lists(document: Json) -> list[JsonPath]:
    if not isinstance(document, dict) or "type" in document:
        return []
    return [(key,) for key in ("input", "steps", "outputs") if isinstance(document.get(key), list)]


# --- the stream ----------------------------------------------------------------------------------------


class GeminiInteractionsStream(VendorStreamCollector):
    """Steps start, grow and end; in earlier versions of the API, content does."""

    def recognizes(self, event: JsonObject) -> bool:
        kind = get_text_at_path(event, ("event_type",)) or ""
        return kind.startswith(("interaction.", "step.", "content.")) or kind == "error"

    def feed(self, event: JsonObject) -> None:
        index = read_int(event, "index")
        match event.get("event_type"):
            case "step.start":
                self.partial_items.start_item(index, event.get("step"))
            case "content.start":
                self.partial_items.start_item(index, event.get("content"))
            case "step.delta":
                self._apply_delta(index, read_object(event, "delta"))
            case "content.delta":
                self._apply_content_delta(index, read_object(event, "delta"))
            case "step.stop" | "content.stop":
                self.partial_items.end_item(index)
            case "error":
                self.partial_items.add_error({"type": "error", **read_object(event, "error")})
            case _:
                pass

    def _apply_content_delta(self, index: int, delta: JsonObject) -> None:
        """Apply a delta to content, which is a step itself; its first delta may start it."""
        kind = get_text_at_path(delta, ("type",)) or ""
        self.partial_items.start_item(index, {"type": "thought" if kind.startswith("thought_") else kind})
        match kind:
            case "text":
                self.partial_items.append_text(index, ("text",), delta.get("text"))
            case "image" | "audio" | "video" | "document":
                self._merge_fields(index, delta)
            case _:
                self._apply_delta(index, delta)

    def _apply_delta(self, index: int, delta: JsonObject) -> None:
        match delta.get("type"):
            case "arguments_delta":
                self.partial_items.append_text(index, ("arguments",), delta.get("arguments"), is_json=True)
            case "text":
                self.partial_items.append_text(
                    index, (*self._last_text_path(index, "content"), "text"), delta.get("text")
                )
            case "thought_summary":
                content = read_object(delta, "content")
                self.partial_items.append_text(
                    index, (*self._last_text_path(index, "summary"), "text"), content.get("text")
                )
            case "thought_signature":
                self.partial_items.set_value(index, ("signature",), delta.get("signature"))
            case "text_annotation_delta":
                found = delta.get("annotations")
                path = (*self._last_text_path(index, "content"), "annotations")
                self.partial_items.extend_list(index, path, found if isinstance(found, list) else [])
            case "image" | "audio" | "video" | "document":
                self.partial_items.extend_list(index, ("content",), [delta])
            case str():
                self._merge_fields(index, delta)
            case _:
                pass

    def _last_text_path(self, index: int, name: str) -> JsonPath:
        """Path of the text that is being written, the last in its list."""
        entries = self.partial_items.get_value(index, (name,))
        known = entries if isinstance(entries, list) else []
        if not known or not isinstance(known[-1], dict) or known[-1].get("type") != "text":
            self.partial_items.extend_list(index, (name,), [{"type": "text", "text": ""}])
            return (name, len(known))
        return (name, len(known) - 1)

    def _merge_fields(self, index: int, delta: JsonObject) -> None:
        """Merge a delta of a call or response, which has the members of its step."""
        for key, value in delta.items():
            known = self.partial_items.get_value(index, (key,))
            if key == "type" or value is None:
                continue
            if key == "result" and isinstance(value, str):
                self.partial_items.append_text(index, (key,), value)
            elif isinstance(value, list):
                self.partial_items.extend_list(index, (key,), value)
            elif isinstance(value, dict) and isinstance(known, dict):
                self.partial_items.set_value(index, (key,), {**known, **value})
            else:
                self.partial_items.set_value(index, (key,), value)


VENDOR = VendorCodec(
    name="gemini-interactions",
    title="Gemini Interactions",
    item_mappings=ITEM_MAPPINGS,
    draft_parts=draft_parts,
    text=TextItemTemplate(
        {"type": "model_output", "content": [{"type": "text", "text": ""}]}, ("content", 0, "text")
    ),
    user_text=TextItemTemplate(
        {"type": "user_input", "content": [{"type": "text", "text": ""}]}, ("content", 0, "text")
    ),
    reasoning=TextItemTemplate(
        {"type": "thought", "summary": [{"type": "text", "text": ""}]}, ("summary", 0, "text")
    ),
    find_item_lists=find_item_lists,
    stream=GeminiInteractionsStream,
)
