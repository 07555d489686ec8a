"""xAI: OpenAI's items, and messages of its own chat API with tool calls."""

import msgspec

from fumehood.message_parts.canonical_parts import Json, JsonObject, JsonPath, ReasoningPart, TextPart
from fumehood.message_parts.json_path_access import copy_json, get_at_path, get_text_at_path
from fumehood.message_parts.partial_items import VendorStreamCollector, read_int, read_object
from fumehood.message_parts.tool_payloads import RESERVED_NAMES
from fumehood.message_parts.vendor_codec import (
    FieldMapping,
    ItemMapping,
    PartSkeleton,
    VendorCodec,
    draft_tool_parts,
    map_fallback,
    map_fields,
)
from fumehood.message_parts.vendors import openai

_TOOL_TYPE_PREFIX = "TOOL_CALL_TYPE_"
_CLIENT_TOOL_TYPE = f"{_TOOL_TYPE_PREFIX}CLIENT_SIDE_TOOL"
_RESPONSE_FIELDS = {
    "code_interpreter": ("outputs", "log"),
    "mcp": ("output", ""),
    "function": ("result", ""),
    "image_generation": ("result", ""),
}


def _call_mapping(name: str, kind: str, **paths: str) -> ItemMapping:
    return ItemMapping(
        type=name,
        kind=kind,
        call=(*map_fields(**paths), *map_fallback("arguments", "function.arguments")),
        name=("function", "name") if kind not in RESERVED_NAMES else (),
        failed=("error_message",),
        execution="client" if kind == "function" else "server",
    )


CALL_MAPPINGS = (
    _call_mapping(_CLIENT_TOOL_TYPE, "function", arguments="function.arguments"),
    _call_mapping(
        f"{_TOOL_TYPE_PREFIX}WEB_SEARCH_TOOL", "web_search", queries="function.arguments|json.query"
    ),
    _call_mapping(f"{_TOOL_TYPE_PREFIX}X_SEARCH_TOOL", "x_search", arguments="function.arguments"),
    _call_mapping(
        f"{_TOOL_TYPE_PREFIX}CODE_EXECUTION_TOOL", "code_interpreter", code="function.arguments|json.code"
    ),
    _call_mapping(
        f"{_TOOL_TYPE_PREFIX}COLLECTIONS_SEARCH_TOOL", "file_search", queries="function.arguments|json.query"
    ),
    _call_mapping(
        f"{_TOOL_TYPE_PREFIX}ATTACHMENT_SEARCH_TOOL", "file_search", queries="function.arguments|json.query"
    ),
    _call_mapping(f"{_TOOL_TYPE_PREFIX}MCP_TOOL", "mcp", arguments="function.arguments"),
    _call_mapping(
        f"{_TOOL_TYPE_PREFIX}IMAGE_GENERATION_TOOL",
        "image_generation",
        prompt="function.arguments|json.prompt",
    ),
)
# Searches on X are calls of tools with these names in the Responses API.
_X_SEARCH_TOOLS = ("x_keyword_search", "x_semantic_search", "x_user_search", "x_thread_fetch")
X_SEARCH_MAPPINGS = (
    ItemMapping(
        type="custom_tool_call",
        kind="x_search",
        call=(*map_fields(arguments="input"), *map_fields(arguments="")),
        call_id=("call_id",),
        name=("name",),
    ),
    ItemMapping(
        type="x_search_call",
        kind="x_search",
        call=(*map_fields(arguments="action"), *map_fields(arguments=""), *map_fields(arguments="input")),
        name=("name",),
    ),
)


def _with_arguments(name: str, kind: str = "", **paths: str) -> ItemMapping:
    """OpenAI's item, or one of xAI's own, whose call is JSON text in `arguments`, `input` or `action`."""
    known = openai.BY_TYPE.get(name) or ItemMapping(type=name, kind=kind, call=(), name=("name",))
    more = (
        *map_fields(**paths),
        *(FieldMapping("arguments", (key,), is_fallback=True) for key in _INPUT_FIELDS),
    )
    return msgspec.structs.replace(known, call=(*(known.call or ()), *more))


_INPUT_FIELDS = ("arguments", "input", "action")
ARGUMENT_MAPPINGS = (
    _with_arguments("code_interpreter_call", code="arguments|json.code"),
    msgspec.structs.replace(
        _with_arguments("code_interpreter_call", code="arguments|json.code"), type="code_execution_call"
    ),
    _with_arguments("web_search_call", queries="arguments|json.query", url="arguments|json.url"),
    _with_arguments("file_search_call", queries="arguments|json.query"),
    _with_arguments("image_generation_call", prompt="arguments|json.prompt"),
    _with_arguments("view_image_call", "view_image"),
    _with_arguments("view_x_video_call", "view_x_video"),
)
_BY_TYPE = {mapping.type: mapping for mapping in (*CALL_MAPPINGS, *ARGUMENT_MAPPINGS, X_SEARCH_MAPPINGS[1])}


def draft_parts(item: JsonObject) -> list[PartSkeleton]:
    kind = get_text_at_path(item, ("type",)) or ""
    if kind == "custom_tool_call" and item.get("name") in _X_SEARCH_TOOLS:
        return draft_tool_parts(item, X_SEARCH_MAPPINGS[0])
    if kind.startswith(_TOOL_TYPE_PREFIX) or kind in _BY_TYPE:
        return draft_tool_parts(item, _with_error(item, _mapping_of(kind), ()))
    if isinstance(item.get("message"), dict):
        return _draft_message(item, ("message",))
    if (get_text_at_path(item, ("role",)) or "").startswith("ROLE_"):
        return _draft_message(item, ())
    return openai.draft_parts(item)


def _mapping_of(kind: str) -> ItemMapping:
    """Return the mapping of a call type; an unknown one becomes a kind of its own."""
    own = kind.removeprefix(_TOOL_TYPE_PREFIX).removesuffix("_TOOL").lower()
    return _BY_TYPE.get(kind) or _call_mapping(kind, own, arguments="function.arguments")


def _draft_message(item: JsonObject, prefix: JsonPath) -> list[PartSkeleton]:
    """Draft a message of the chat API: reasoning, text and calls of an assistant, or the result of a call."""
    tool = get_text_at_path(item, (*prefix, "role")) == "ROLE_TOOL"
    made: list[PartSkeleton] = []
    if not tool:
        for member in ("reasoning_content", "reasoningContent", "content"):
            if get_text_at_path(item, (*prefix, member)):
                part = TextPart(content="") if member == "content" else ReasoningPart(content="")
                made.append(PartSkeleton(part, (FieldMapping("content", (*prefix, member)),)))
    for key in ("tool_calls", "toolCalls"):
        calls = get_at_path(item, (*prefix, key))
        for number, call in enumerate(calls if isinstance(calls, list) else []):
            mapping = _mapping_of(get_text_at_path(call, ("type",)) or _CLIENT_TOOL_TYPE)
            path = (*prefix, key, number)
            if not tool:
                made += draft_tool_parts(item, _with_error(item, mapping.nested_under(path), path))
            elif not made:
                made += draft_tool_parts(item, _response_mapping(mapping, path, (*prefix, "content")))
    return made


def _response_mapping(mapping: ItemMapping, call: JsonPath, content: JsonPath) -> ItemMapping:
    name, codec = _RESPONSE_FIELDS.get(mapping.kind, ("text", ""))
    result = (FieldMapping(name, content, codec), *_error_fields(call), *_content_fallback(content))
    return msgspec.structs.replace(mapping.nested_under(call), call=None, response=result)


def _with_error(item: JsonObject, mapping: ItemMapping, call: JsonPath) -> ItemMapping:
    """Add a response to a call that says itself that it failed."""
    if mapping.response is not None or not mapping.read_failure(item):
        return mapping
    return msgspec.structs.replace(mapping, response=_error_fields(call))


def _error_fields(call: JsonPath) -> tuple[FieldMapping, ...]:
    return tuple(FieldMapping("error", (*call, name)) for name in ("error_message", "errorMessage"))


def _content_fallback(content: JsonPath) -> tuple[FieldMapping, ...]:
    return (FieldMapping("content", content, is_fallback=True),)


def find_item_lists(document: Json) -> list[JsonPath]:
    if isinstance(document, dict) and "type" in document:
        return []
    if isinstance(get_at_path(document, ("outputs",)), list):
        return [("outputs",)]
    return openai.find_item_lists(document)


# --- the stream ----------------------------------------------------------------------------------------

# Protobuf field names in JSON, in both spellings.
_TEXT_FIELDS = ("content", "reasoning_content", "encrypted_content", "reasoningContent", "encryptedContent")
_CALL_FIELDS = ("tool_calls", "toolCalls")
_FINISH_REASON_FIELDS = ("finish_reason", "finishReason")


_CHUNK_FIELDS = ("id", "model", "outputs", "usage", "citations")


class XaiGrpcChatStream(VendorStreamCollector):
    """Chunks are responses with deltas of messages in their outputs.

    Texts are continued, lists extended. Calls arrive complete; a repeated call is an update of its status. Anything
    else is replaced by a later value.
    """

    def __init__(self) -> None:
        super().__init__()
        self._response: JsonObject = {}

    def recognizes(self, event: JsonObject) -> bool:
        return "type" not in event and not event.keys().isdisjoint(_CHUNK_FIELDS)

    def feed(self, event: JsonObject) -> None:
        for key, value in event.items():
            known = self._response.get(key)
            if isinstance(value, list) and key == "outputs":
                for output in value:
                    if isinstance(output, dict):
                        self._add_output(read_int(output, "index"), output)
            elif isinstance(value, list) and isinstance(known, list):
                self._response[key] = [*known, *value]
            else:
                self._response[key] = copy_json(value)

    def _add_output(self, index: int, output: JsonObject) -> None:
        self.partial_items.start_item(index, {"message": {}})
        for key in output:
            if key == "delta":
                self._apply_delta(index, "message", read_object(output, key))
            elif key == "logprobs":
                self._apply_delta(index, key, read_object(output, key))
            else:
                self.partial_items.set_value(index, (key,), output[key])
        if any(reason in output for reason in _FINISH_REASON_FIELDS):
            self.partial_items.end_item(index)

    def _apply_delta(self, index: int, within: str, delta: JsonObject) -> None:
        for key, value in delta.items():
            path = (within, key)
            if isinstance(value, str) and key in _TEXT_FIELDS:
                self.partial_items.append_text(index, path, value)
            elif isinstance(value, list):
                new = [entry for entry in value if not self._replace_known_call(index, path, entry)]
                self.partial_items.extend_list(index, path, new)
            else:
                self.partial_items.set_value(index, path, value)

    def _replace_known_call(self, index: int, path: JsonPath, entry: Json) -> bool:
        """Replace an entry that is already there, such as a repeated call; return whether there was one."""
        known = self.partial_items.get_value(index, path) if path[-1] in _CALL_FIELDS else None
        for position, each in enumerate(known if isinstance(known, list) else []):
            if isinstance(each, dict) and isinstance(entry, dict) and each.get("id", "") == entry.get("id"):
                self.partial_items.set_value(index, (*path, position), entry)
                return True
        return False

    def build_document(self) -> Json:
        outputs = self.partial_items.build_items()
        return {"outputs": outputs, **self._response} if outputs else {**self._response}


class XaiAutoStream(VendorStreamCollector):
    """A stream of either API, decided by its first event: chunks of the chat API have no type."""

    def __init__(self) -> None:
        super().__init__()
        self._stream: VendorStreamCollector | None = None

    def recognizes(self, event: JsonObject) -> bool:
        return (self._stream or _choose_stream(event)).recognizes(event)

    def feed(self, event: JsonObject) -> None:
        if self._stream is None:
            self._stream = _choose_stream(event)
        self._stream.feed(event)
        self.partial_items = self._stream.partial_items

    def build_document(self) -> Json:
        return self._stream.build_document() if self._stream else []


def _choose_stream(event: JsonObject) -> VendorStreamCollector:
    return openai.OpenAIResponseStream() if "type" in event else XaiGrpcChatStream()


VENDOR = VendorCodec(
    name="xai",
    title="xAI",
    item_mappings=(*openai.ITEM_MAPPINGS, *CALL_MAPPINGS, *X_SEARCH_MAPPINGS, *ARGUMENT_MAPPINGS[-2:]),
    draft_parts=draft_parts,
    text=openai.VENDOR.text,
    user_text=openai.VENDOR.user_text,
    reasoning=openai.VENDOR.reasoning,
    find_item_lists=find_item_lists,
    stream=XaiAutoStream,
)
