"""OpenAI's stream of a response."""

from collections.abc import Callable

from fumehood.message_parts.canonical_parts import Json, JsonObject, JsonPath
from fumehood.message_parts.field_codecs import get_text_at_path
from fumehood.message_parts.streaming.partial_items import PartialItems, read_int, read_object

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


class OpenAIResponseStream:
    """The last event repeats all items and takes precedence over the events of each item."""

    def __init__(self) -> None:
        self.partial_items = PartialItems()

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
            self._replace_all_items(read_object(event, "response").get("output"))
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

    def build_document(self) -> Json:
        return self.partial_items.build_items()
