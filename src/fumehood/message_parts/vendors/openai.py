"""OpenAI's Responses API: one item for call and result where OpenAI runs the tool."""

from collections.abc import Callable
from functools import partial

from fumehood.message_parts.canonical_parts import (
    BlobPart,
    Execution,
    FilePart,
    Json,
    JsonObject,
    JsonPath,
    ReasoningPart,
    TextPart,
    UriPart,
)
from fumehood.message_parts.json_path_access import get_at_path, get_text_at_path
from fumehood.message_parts.partial_items import (
    PartialItems,
    VendorStreamCollector,
    read_int,
    read_object,
)
from fumehood.message_parts.vendor_codec import (
    FieldMapping,
    ItemMapping,
    PartSkeleton,
    TextItemTemplate,
    VendorCodec,
    draft_entries,
    draft_error,
    draft_tool_parts,
    map_fields,
)

_CALL_ID = ("call_id",)


def _shell_execution(item: JsonObject) -> Execution:
    """OpenAI runs a shell only in a container; without an environment, or with a local one, the client does."""
    return (
        "server"
        if (get_text_at_path(item, ("environment", "type")) or "").startswith("container")
        else "client"
    )


def _tool_search_execution(item: JsonObject) -> Execution:
    return "client" if item.get("execution") == "client" else "server"


ITEM_MAPPINGS = (
    ItemMapping(
        type="code_interpreter_call",
        kind="code_interpreter",
        call=map_fields(code="", container_id=""),
        response=map_fields(outputs="", exit_code="fumehood:execution.exit_code"),
        duration_ms=("fumehood:execution", "duration_ms"),
        template={
            "type": "code_interpreter_call",
            "status": "completed",
            "container_id": "",
            "code": None,
            "outputs": None,
        },
    ),
    ItemMapping(
        type="file_search_call",
        kind="file_search",
        call=map_fields(queries=""),
        response=map_fields(results=""),
        template={"type": "file_search_call", "status": "completed", "queries": [], "results": None},
    ),
    ItemMapping(
        type="web_search_call",
        kind="web_search",
        call=(
            *map_fields(action="action.type", queries="action.queries", query="action.query"),
            *map_fields(url="action.url", pattern="action.pattern"),
        ),
        response=map_fields(results="action.sources"),
        template={"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
    ),
    ItemMapping(
        type="image_generation_call",
        kind="image_generation",
        call=map_fields(prompt=""),
        response=map_fields(result="", revised_prompt="", error="error.message", error_code="error.code"),
        template={"type": "image_generation_call", "status": "completed", "result": None},
    ),
    ItemMapping(
        type="mcp_call",
        kind="mcp",
        call=map_fields(arguments="", server_label=""),
        response=map_fields(output="", error=""),
        name=("name",),
        failed=("error",),
        template={"type": "mcp_call", "server_label": "", "name": "", "arguments": "{}"},
    ),
    ItemMapping(
        type="function_call",
        kind="function",
        call=map_fields(arguments=""),
        call_id=_CALL_ID,
        name=("name",),
        execution="client",
        template={"type": "function_call", "call_id": "", "name": "", "arguments": "{}"},
    ),
    ItemMapping(
        type="function_call_output",
        kind="function",
        response=map_fields(result="output"),
        call_id=_CALL_ID,
        execution="client",
        template={"type": "function_call_output", "call_id": "", "output": "", "status": "completed"},
    ),
    ItemMapping(
        type="custom_tool_call",
        kind="function",
        call=map_fields(arguments="input"),
        call_id=_CALL_ID,
        name=("name",),
        execution="client",
    ),
    ItemMapping(
        type="custom_tool_call_output",
        kind="function",
        response=map_fields(result="output"),
        call_id=_CALL_ID,
        execution="client",
    ),
    ItemMapping(
        type="shell_call",
        kind="shell",
        call=(
            *map_fields(commands="action.commands", timeout_ms="action.timeout_ms"),
            *map_fields(container_id="environment.container_id"),
        ),
        call_id=_CALL_ID,
        execution=_shell_execution,
        template={"type": "shell_call", "status": "completed", "action": {"commands": []}},
    ),
    ItemMapping(
        type="shell_call_output",
        kind="shell",
        response=map_fields(outputs="output|ran") + map_fields(outputs="output"),
        call_id=_CALL_ID,
        execution="client",
        template={
            "type": "shell_call_output",
            "status": "completed",
            "max_output_length": None,
            "output": [],
        },
    ),
    ItemMapping(
        type="local_shell_call",
        kind="shell",
        call=(
            *map_fields(argv="action.command", working_directory="action.working_directory"),
            *map_fields(timeout_ms="action.timeout_ms"),
        ),
        call_id=_CALL_ID,
        execution="client",
    ),
    ItemMapping(
        type="local_shell_call_output",
        kind="shell",
        response=map_fields(outputs="output|stdout"),
        call_id=_CALL_ID,
        execution="client",
    ),
    ItemMapping(
        type="computer_call",
        kind="computer",
        call=map_fields(actions="", pending_safety_checks="") + map_fields(actions="action|one"),
        call_id=_CALL_ID,
        execution="client",
        template={"type": "computer_call", "status": "completed", "pending_safety_checks": []},
    ),
    ItemMapping(
        type="computer_call_output",
        kind="computer",
        response=map_fields(output="", acknowledged_safety_checks=""),
        call_id=_CALL_ID,
        execution="client",
        template={"type": "computer_call_output"},
    ),
    ItemMapping(
        type="apply_patch_call",
        kind="apply_patch",
        call=map_fields(operation=""),
        call_id=_CALL_ID,
        execution="client",
        template={"type": "apply_patch_call", "status": "completed"},
    ),
    ItemMapping(
        type="apply_patch_call_output",
        kind="apply_patch",
        response=map_fields(output=""),
        call_id=_CALL_ID,
        execution="client",
        template={"type": "apply_patch_call_output", "status": "completed"},
    ),
    ItemMapping(
        type="tool_search_call",
        kind="tool_search",
        call=map_fields(arguments=""),
        call_id=_CALL_ID,
        execution=_tool_search_execution,
    ),
    ItemMapping(
        type="tool_search_output",
        kind="tool_search",
        response=map_fields(tools=""),
        call_id=_CALL_ID,
        execution=_tool_search_execution,
    ),
    ItemMapping(type="program", kind="program", call=map_fields(code=""), call_id=_CALL_ID),
    ItemMapping(type="program_output", kind="program", response=map_fields(result=""), call_id=_CALL_ID),
    ItemMapping(
        type="mcp_list_tools",
        kind="mcp_list_tools",
        call=map_fields(server_label=""),
        response=map_fields(tools="", error=""),
        failed=("error",),
    ),
    ItemMapping(
        type="mcp_approval_request",
        kind="mcp_approval",
        call=map_fields(server_label="", name="", arguments=""),
        execution="client",
    ),
    ItemMapping(
        type="mcp_approval_response",
        kind="mcp_approval",
        response=map_fields(approve="", reason=""),
        call_id=("approval_request_id",),
        execution="client",
    ),
)
BY_TYPE = {mapping.type: mapping for mapping in ITEM_MAPPINGS}
_TEXT_FIELDS = {"output_text": "text", "input_text": "text", "text": "text", "refusal": "refusal"}


def draft_parts(item: JsonObject) -> list[PartSkeleton]:
    kind = item.get("type")
    # The type of a message is optional in a request.
    if kind == "message" or (kind is None and "role" in item):
        return _draft_message(item)
    if kind == "reasoning":
        return _draft_reasoning(item)
    if kind == "error" or (kind is None and isinstance(item.get("error"), dict)):
        return draft_error()
    mapping = BY_TYPE.get(kind) if isinstance(kind, str) else None
    return [] if mapping is None else draft_tool_parts(item, mapping)


def _draft_message(item: JsonObject) -> list[PartSkeleton]:
    role = get_text_at_path(item, ("role",)) or "assistant"
    content = item.get("content")
    if isinstance(content, str):
        return [PartSkeleton(TextPart(content="", role=role), map_fields(content=""))]
    return draft_entries(item, "content", partial(_draft_content, role))


def _draft_content(role: str, entry: JsonObject, path: JsonPath) -> list[PartSkeleton]:
    kind = entry.get("type")
    if isinstance(kind, str) and kind in _TEXT_FIELDS:
        fields = (
            FieldMapping("content", (*path, _TEXT_FIELDS[kind])),
            FieldMapping("annotations", (*path, "annotations")),
        )
        return [PartSkeleton(TextPart(content="", role=role), fields)]
    if kind == "input_image":
        return draft_image(entry, path, "image_url") or _draft_file(entry, path, "image")
    if kind == "input_file":
        return (
            _draft_file(entry, path, "file")
            or _draft_file_data(entry, path)
            or draft_image(entry, path, "file_url", "file")
        )
    return []


def draft_image(entry: JsonObject, path: JsonPath, key: str, modality: str = "image") -> list[PartSkeleton]:
    """Draft an image or file from its URL, which may be a `data:` URL."""
    url = entry.get(key)
    if not isinstance(url, str):
        return []
    filename = FieldMapping("filename", (*path, "filename"))
    if url.startswith("data:"):
        mime = url.removeprefix("data:").partition(";")[0]
        part = BlobPart(content="", modality=mime.partition("/")[0] or modality, mime_type=mime or None)
        return [PartSkeleton(part, (FieldMapping("content", (*path, key), "data_url"), filename))]
    return [PartSkeleton(UriPart(uri="", modality=modality), (FieldMapping("uri", (*path, key)), filename))]


def _draft_file(entry: JsonObject, path: JsonPath, modality: str) -> list[PartSkeleton]:
    if not isinstance(entry.get("file_id"), str):
        return []
    fields = (FieldMapping("file_id", (*path, "file_id")), FieldMapping("filename", (*path, "filename")))
    return [PartSkeleton(FilePart(file_id="", modality=modality), fields)]


def _draft_file_data(entry: JsonObject, path: JsonPath) -> list[PartSkeleton]:
    """Draft a file from its data: a `data:` URL, or only the base64 of one."""
    data = entry.get("file_data")
    if not isinstance(data, str) or data.startswith("data:"):
        return draft_image(entry, path, "file_data", "file")
    fields = (FieldMapping("content", (*path, "file_data")), FieldMapping("filename", (*path, "filename")))
    return [PartSkeleton(BlobPart(content="", modality="file"), fields)]


def _draft_reasoning(item: JsonObject) -> list[PartSkeleton]:
    def draft(_entry: JsonObject, path: JsonPath) -> list[PartSkeleton]:
        return [PartSkeleton(ReasoningPart(content=""), (FieldMapping("content", (*path, "text")),))]

    content = draft_entries(item, "content", draft)
    if content and _read_texts(item, "summary") == _read_texts(item, "content"):
        return content  # servers of open models repeat the text as summary
    return [*draft_entries(item, "summary", draft), *content]


def _read_texts(item: JsonObject, key: str) -> list[str | None]:
    entries = item.get(key)
    return [get_text_at_path(entry, ("text",)) for entry in entries] if isinstance(entries, list) else []


def find_item_lists(document: Json) -> list[JsonPath]:
    """Items are in `output` of a response, in `input` of a request, or in `data` of a list."""
    if not isinstance(document, dict) or "type" in document:
        return []
    return [(key,) for key in ("input", "output", "data") if isinstance(get_at_path(document, (key,)), list)]


# --- the stream ----------------------------------------------------------------------------------------

# Texts that grow: their paths in the item, and the field that holds the whole text at the end.
_TEXT_DELTA_EVENTS: dict[str, tuple[Callable[[JsonObject], JsonPath], str]] = {
    "code_interpreter_call_code": (lambda _: ("code",), "code"),
    "mcp_call_arguments": (lambda _: ("arguments",), "arguments"),
    "function_call_arguments": (lambda _: ("arguments",), "arguments"),
    "custom_tool_call_input": (lambda _: ("input",), "input"),
    "apply_patch_call_operation_diff": (lambda _: ("operation", "diff"), "diff"),
    "shell_call_command": (lambda event: ("action", "commands", read_int(event, "command_index")), "command"),
    "output_text": (lambda event: ("content", read_int(event, "content_index"), "text"), "text"),
    "refusal": (lambda event: ("content", read_int(event, "content_index"), "refusal"), "refusal"),
    "reasoning_text": (lambda event: ("content", read_int(event, "content_index"), "text"), "text"),
    "reasoning_summary_text": (lambda event: ("summary", read_int(event, "summary_index"), "text"), "text"),
}


class OpenAIResponseStream(VendorStreamCollector):
    """The last event repeats all items and takes precedence over the events of each item."""

    def recognizes(self, event: JsonObject) -> bool:
        kind = get_text_at_path(event, ("type",)) or ""
        return kind.startswith("response.") or kind in ("error", "keepalive")

    def feed(self, event: JsonObject) -> None:
        kind = (get_text_at_path(event, ("type",)) or "").removeprefix("response.")
        stem, _, step = kind.rpartition(".")
        index = read_int(event, "output_index")
        if stem == "output_item":
            item = event.get("item")
            self.partial_items.start_item(
                index, item
            ) if step == "added" else self.partial_items.replace_item(index, item)
        elif stem in _TEXT_DELTA_EVENTS:
            self._apply_text_event(index, stem, step, event)
        elif stem == "content_part":
            self.partial_items.set_value(
                index, ("content", read_int(event, "content_index")), event.get("part")
            )
        elif stem == "reasoning_summary_part":
            self.partial_items.set_value(
                index, ("summary", read_int(event, "summary_index")), event.get("part")
            )
        elif stem == "output_text.annotation":
            path = ("content", read_int(event, "content_index"), "annotations")
            self.partial_items.extend_list(index, path, [event.get("annotation")])
        elif stem == "shell_call_output_content":
            self._apply_shell_output(index, step, event)
        elif kind in ("completed", "incomplete", "failed", "cancelled"):
            response = read_object(event, "response")
            self._replace_all_items(response.get("output"))
            if error := read_object(response, "error"):
                self.partial_items.add_error({"type": "error", **error})
        elif kind == "error":
            self.partial_items.add_error(event)
        elif stem.endswith("_call") and step != "partial_image":
            self.partial_items.set_value(index, ("status",), step)

    def _replace_all_items(self, output: Json) -> None:
        """Replace all items by those of the last event; some servers leave them out there."""
        if isinstance(output, list) and output:
            self.partial_items = PartialItems()
            for index, item in enumerate(output):
                self.partial_items.replace_item(index, item)

    def _apply_text_event(self, index: int, stem: str, step: str, event: JsonObject) -> None:
        location, name = _TEXT_DELTA_EVENTS[stem]
        if step == "delta":
            self.partial_items.append_text(index, location(event), event.get("delta"))
        else:
            self.partial_items.set_value(index, location(event), event.get(name))

    def _apply_shell_output(self, index: int, step: str, event: JsonObject) -> None:
        path = ("output", read_int(event, "command_index"))
        if step == "done":
            outputs = event.get("output")
            if isinstance(outputs, list) and outputs:
                self.partial_items.set_value(index, path, outputs[0])
            return
        if self.partial_items.get_value(index, path) is None:
            self.partial_items.set_value(index, path, {})
        for name, text in read_object(event, "delta").items():
            self.partial_items.append_text(index, (*path, name), text)


VENDOR = VendorCodec(
    name="openai",
    title="OpenAI Responses",
    item_mappings=ITEM_MAPPINGS,
    draft_parts=draft_parts,
    text=TextItemTemplate(
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]},
        ("content", 0, "text"),
    ),
    user_text=TextItemTemplate(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ""}]},
        ("content", 0, "text"),
    ),
    reasoning=TextItemTemplate(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": ""}]}, ("summary", 0, "text")
    ),
    find_item_lists=find_item_lists,
    stream=OpenAIResponseStream,
)
