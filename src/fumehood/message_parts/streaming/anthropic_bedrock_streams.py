"""Streams of content blocks: Anthropic's Messages and Bedrock's Converse."""

from fumehood.message_parts.canonical_parts import Json, JsonObject
from fumehood.message_parts.field_codecs import copy_json, get_text_at_path
from fumehood.message_parts.streaming.partial_items import PartialItems, read_int, read_object


class AnthropicStream:
    """Anthropic's Messages."""

    def __init__(self) -> None:
        self.partial_items = PartialItems()

    def feed(self, event: JsonObject) -> None:
        index = read_int(event, "index")
        match event.get("type"):
            case "content_block_start":
                self.partial_items.start_item(index, event.get("content_block"))
            case "content_block_delta":
                self._apply_delta(index, read_object(event, "delta"))
            case "content_block_stop":
                self.partial_items.end_item(index)
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

    def build_document(self) -> Json:
        return self.partial_items.build_items()


class BedrockConverseStream:
    """Bedrock's Converse: text blocks start with their first delta, and change their type if it cites something."""

    def __init__(self) -> None:
        self.partial_items = PartialItems()
        self._citations: dict[int, list[Json]] = {}

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
        elif "redactedContent" in (is_reasoning := read_object(delta, "reasoningContent")):
            self.partial_items.start_item(index, {"reasoningContent": {"redactedContent": ""}})
            self.partial_items.append_text(
                index, ("reasoningContent", "redactedContent"), is_reasoning["redactedContent"]
            )
        elif is_reasoning:
            self.partial_items.start_item(index, {"reasoningContent": {"reasoningText": {"text": ""}}})
            for name in ("text", "signature"):
                self.partial_items.append_text(
                    index, ("reasoningContent", "reasoningText", name), is_reasoning.get(name)
                )

    def build_document(self) -> Json:
        return [
            {"citationsContent": {"content": [item], "citations": copy_json(self._citations[index])}}
            if index in self._citations
            else item
            for index, item in self.partial_items.build_items_by_index()
        ]
