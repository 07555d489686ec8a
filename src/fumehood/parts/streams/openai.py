"""OpenAI's stream of a response; imports `fumehood.parts`."""

from collections.abc import Callable

from fumehood.parts.canonical import Json, JsonObject, Path
from fumehood.parts.lenses import text_at
from fumehood.parts.streams.pieces import Pieces, member, number

# Texts that grow: where they are in the item, and under which name the whole is told at the end.
_GROWING: dict[str, tuple[Callable[[JsonObject], Path], str]] = {
    "code_interpreter_call_code": (lambda _: ("code",), "code"),
    "mcp_call_arguments": (lambda _: ("arguments",), "arguments"),
    "function_call_arguments": (lambda _: ("arguments",), "arguments"),
    "custom_tool_call_input": (lambda _: ("input",), "input"),
    "apply_patch_call_operation_diff": (lambda _: ("operation", "diff"), "diff"),
    "shell_call_command": (lambda event: ("action", "commands", number(event, "command_index")), "command"),
    "output_text": (lambda event: ("content", number(event, "content_index"), "text"), "text"),
    "refusal": (lambda event: ("content", number(event, "content_index"), "refusal"), "refusal"),
    "reasoning_text": (lambda event: ("content", number(event, "content_index"), "text"), "text"),
    "reasoning_summary_text": (lambda event: ("summary", number(event, "summary_index"), "text"), "text"),
}


class ResponseStream:
    """The last event repeats all items; what it says is final, also where an item's own last event said otherwise."""

    def __init__(self) -> None:
        self.pieces = Pieces()

    def feed(self, event: JsonObject) -> None:
        kind = (text_at(event, ("type",)) or "").removeprefix("response.")
        stem, _, step = kind.rpartition(".")
        place = number(event, "output_index")
        if stem == "output_item":
            item = event.get("item")
            self.pieces.begin(place, item) if step == "added" else self.pieces.replace(place, item)
        elif stem in _GROWING:
            self._grow(place, stem, step, event)
        elif stem == "content_part":
            self.pieces.put(place, ("content", number(event, "content_index")), event.get("part"))
        elif stem == "reasoning_summary_part":
            self.pieces.put(place, ("summary", number(event, "summary_index")), event.get("part"))
        elif stem == "output_text.annotation":
            path = ("content", number(event, "content_index"), "annotations")
            self.pieces.extend(place, path, [event.get("annotation")])
        elif stem == "shell_call_output_content":
            self._print(place, step, event)
        elif kind in ("completed", "incomplete", "failed", "cancelled"):
            self._finish(member(event, "response").get("output"))
        elif stem.endswith("_call") and step != "partial_image":
            self.pieces.put(place, ("status",), step)

    def _finish(self, output: Json) -> None:
        """Some servers leave the items out of the last event; then what came before it stands."""
        if isinstance(output, list) and output:
            self.pieces = Pieces()
            for place, item in enumerate(output):
                self.pieces.replace(place, item)

    def _grow(self, place: int, stem: str, step: str, event: JsonObject) -> None:
        where, name = _GROWING[stem]
        if step == "delta":
            self.pieces.add(place, where(event), event.get("delta"))
        else:
            self.pieces.put(place, where(event), event.get(name))

    def _print(self, place: int, step: str, event: JsonObject) -> None:
        path = ("output", number(event, "command_index"))
        if step == "done":
            outputs = event.get("output")
            if isinstance(outputs, list) and outputs:
                self.pieces.put(place, path, outputs[0])
            return
        if self.pieces.get(place, path) is None:
            self.pieces.put(place, path, {})
        for name, text in member(event, "delta").items():
            self.pieces.add(place, (*path, name), text)

    def document(self) -> Json:
        return self.pieces.items()
