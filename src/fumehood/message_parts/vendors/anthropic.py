"""Anthropic's Messages API: calls and results are separate blocks with a common id."""

import msgspec

from fumehood.message_parts.canonical_parts import (
    BlobPart,
    FilePart,
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
    ItemMapping,
    PartSkeleton,
    TextItemTemplate,
    VendorCodec,
    draft_error,
    draft_tool_parts,
    map_fallback,
    map_fields,
)

_CALL_ID = ("tool_use_id",)
_ERROR = ("content", "error_code")


def _call_mapping(name: str, kind: str, **paths: str) -> ItemMapping:
    template: JsonObject = {"type": "server_tool_use", "id": "", "name": name, "input": {}}
    fields = (*map_fields(**paths), *map_fallback("arguments", "input"))
    return ItemMapping(type=f"server_tool_use:{name}", kind=kind, call=fields, template=template)


def _response_mapping(name: str, kind: str, **paths: str) -> ItemMapping:
    return ItemMapping(
        type=f"{name}_tool_result",
        kind=kind,
        response=(
            *map_fields(**paths),
            *map_fields(error="content.error_code", error_message="content.error_message"),
            *map_fallback("content", "content"),
        ),
        id=(),
        call_id=_CALL_ID,
        failed=_ERROR,
        template={"type": f"{name}_tool_result", "tool_use_id": ""},
    )


ITEM_MAPPINGS = (
    _call_mapping("code_execution", "code_interpreter", code="input.code"),
    msgspec.structs.replace(
        _response_mapping(
            "code_execution", "code_interpreter", outputs="content|streams", exit_code="content.return_code"
        ),
        template={
            "type": "code_execution_tool_result",
            "tool_use_id": "",
            "content": {
                "type": "code_execution_result",
                "stdout": "",
                "stderr": "",
                "return_code": 0,
                "content": [],
            },
        },
    ),
    _call_mapping("bash_code_execution", "shell", commands="input.command|one"),
    msgspec.structs.replace(
        _response_mapping("bash_code_execution", "shell", outputs="content|process"),
        template={
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "",
            "content": {
                "type": "bash_code_execution_result",
                "stdout": "",
                "stderr": "",
                "return_code": 0,
                "content": [],
            },
        },
    ),
    _call_mapping("text_editor_code_execution", "text_editor", arguments="input"),
    _response_mapping("text_editor_code_execution", "text_editor", result="content"),
    _call_mapping("web_search", "web_search", queries="input.query|one"),
    _response_mapping("web_search", "web_search", results="content"),
    _call_mapping("web_fetch", "web_fetch", url="input.url"),
    _response_mapping("web_fetch", "web_fetch", url="content.url", document="content.content"),
    _call_mapping("tool_search_tool_regex", "tool_search", arguments="input"),
    _call_mapping("tool_search_tool_bm25", "tool_search", arguments="input"),
    _response_mapping("tool_search", "tool_search", tools="content.tool_references"),
    ItemMapping(
        type="mcp_tool_listing",
        kind="mcp_list_tools",
        call=map_fields(server_label="mcp_server_name"),
        response=map_fields(tools=""),
    ),
    ItemMapping(
        type="mcp_tool_use",
        kind="mcp",
        call=map_fields(arguments="input", server_label="server_name"),
        name=("name",),
        template={"type": "mcp_tool_use", "id": "", "name": "", "server_name": "", "input": {}},
    ),
    ItemMapping(
        type="mcp_tool_result",
        kind="mcp",
        response=map_fields(output="content"),
        id=(),
        call_id=_CALL_ID,
        failed=("is_error",),
        template={"type": "mcp_tool_result", "tool_use_id": "", "is_error": False, "content": ""},
    ),
    ItemMapping(
        type="tool_use",
        kind="function",
        call=map_fields(arguments="input"),
        name=("name",),
        execution="client",
        template={"type": "tool_use", "id": "", "name": "", "input": {}},
    ),
    ItemMapping(
        type="tool_result",
        kind="function",
        response=map_fields(result="content"),
        id=(),
        call_id=_CALL_ID,
        failed=("is_error",),
        execution="client",
        template={"type": "tool_result", "tool_use_id": "", "content": ""},
    ),
)
_BY_TYPE = {mapping.type: mapping for mapping in ITEM_MAPPINGS}


def draft_parts(item: JsonObject) -> list[PartSkeleton]:
    kind = item.get("type")
    if not isinstance(kind, str):
        return []
    if mapping := _mapping_of(kind, item):
        return draft_tool_parts(item, mapping)
    match kind:
        case "text":
            return [PartSkeleton(TextPart(content=""), map_fields(content="text", annotations="citations"))]
        case "compaction":
            return [PartSkeleton(TextPart(content=""), map_fields(content=""))]
        case "error":
            return draft_error()
        case "thinking":
            return [PartSkeleton(ReasoningPart(content=""), map_fields(content="thinking"))]
        case "container_upload":
            return [PartSkeleton(FilePart(file_id="", modality="file"), map_fields(file_id=""))]
        case "image" | "document":
            return _draft_media(item, "image" if kind == "image" else "document")
        case _:
            return []


def _mapping_of(kind: str, item: JsonObject) -> ItemMapping | None:
    """Return the mapping of a block; an unknown server tool becomes a kind of its own."""
    if kind == "server_tool_use":
        name = get_text_at_path(item, ("name",))
        if not name:
            return None
        return _BY_TYPE.get(f"{kind}:{name}") or _call_mapping(name, name, arguments="input")
    if kind not in _BY_TYPE and kind.endswith("_tool_result"):
        name = kind.removesuffix("_tool_result")
        return _response_mapping(name, name, result="content") if name else None
    return _BY_TYPE.get(kind)


def _draft_media(item: JsonObject, modality: str) -> list[PartSkeleton]:
    mime = get_text_at_path(item, ("source", "media_type"))
    match get_text_at_path(item, ("source", "type")):
        case "base64":
            part = BlobPart(content="", modality=modality, mime_type=mime)
            return [PartSkeleton(part, map_fields(content="source.data", title="", context=""))]
        case "url":
            fields = map_fields(uri="source.url", title="", context="")
            return [PartSkeleton(UriPart(uri="", modality=modality), fields)]
        case "file":
            fields = map_fields(file_id="source.file_id", title="", context="")
            return [PartSkeleton(FilePart(file_id="", modality=modality), fields)]
        case "text":
            fields = map_fields(content="source.data", title="", context="")
            return [PartSkeleton(TextPart(content="", role="user"), fields)]
        case _:
            return []


def find_item_lists(document: Json) -> list[JsonPath]:
    """Blocks are in `content` of a message; a conversation is a list of messages."""
    if isinstance(document, list):
        return [(number, "content") for number, entry in enumerate(document) if _is_message(entry)]
    return [("content",)] if _is_message(document) else []


def _is_message(value: Json) -> bool:
    return isinstance(value, dict) and "role" in value and isinstance(value.get("content"), list)


# --- the stream ----------------------------------------------------------------------------------------


class AnthropicStream(VendorStreamCollector):
    """Blocks start, grow and end."""

    def recognizes(self, event: JsonObject) -> bool:
        kind = get_text_at_path(event, ("type",)) or ""
        return kind.startswith(("message_", "content_block_")) or kind in ("ping", "error")

    def feed(self, event: JsonObject) -> None:
        index = read_int(event, "index")
        match event.get("type"):
            case "content_block_start":
                self.partial_items.start_item(index, event.get("content_block"))
            case "content_block_delta":
                self._apply_delta(index, read_object(event, "delta"))
            case "content_block_stop":
                self.partial_items.end_item(index)
            case "error":
                self.partial_items.add_error(event)
            case _:
                pass

    def _apply_delta(self, index: int, delta: JsonObject) -> None:
        match delta.get("type"):
            case "text_delta":
                self.partial_items.append_text(index, ("text",), delta.get("text"))
            case "thinking_delta":
                self.partial_items.append_text(index, ("thinking",), delta.get("thinking"))
            case "signature_delta":
                self.partial_items.set_value(index, ("signature",), delta.get("signature"))
            case "input_json_delta":
                self.partial_items.append_text(index, ("input",), delta.get("partial_json"), is_json=True)
            case "citations_delta":
                self.partial_items.extend_list(index, ("citations",), [delta.get("citation")])
            case "compaction_delta":
                for name in ("content", "encrypted_content"):
                    if name in delta:
                        self.partial_items.set_value(index, (name,), delta[name])
            case _:
                pass


VENDOR = VendorCodec(
    name="anthropic",
    title="Anthropic Messages",
    item_mappings=ITEM_MAPPINGS,
    draft_parts=draft_parts,
    text=TextItemTemplate({"type": "text", "text": ""}, ("text",)),
    reasoning=TextItemTemplate({"type": "thinking", "thinking": "", "signature": ""}, ("thinking",)),
    find_item_lists=find_item_lists,
    stream=AnthropicStream,
)
