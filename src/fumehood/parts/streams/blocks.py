"""Streams of blocks, as Anthropic and Bedrock's Converse send them; imports `fumehood.parts`."""

from fumehood.parts.canonical import Json, JsonObject
from fumehood.parts.lenses import copied, text_at
from fumehood.parts.streams.pieces import Pieces, member, number


class MessageStream:
    """Anthropic's Messages."""

    def __init__(self) -> None:
        self.pieces = Pieces()

    def feed(self, event: JsonObject) -> None:
        place = number(event, "index")
        match event.get("type"):
            case "content_block_start":
                self.pieces.begin(place, event.get("content_block"))
            case "content_block_delta":
                self._grow(place, member(event, "delta"))
            case "content_block_stop":
                self.pieces.end(place)
            case _:
                pass

    def _grow(self, place: int, delta: JsonObject) -> None:
        match delta.get("type"):
            case "text_delta":
                self.pieces.add(place, ("text",), delta.get("text"))
            case "thinking_delta":
                self.pieces.add(place, ("thinking",), delta.get("thinking"))
            case "signature_delta":
                self.pieces.put(place, ("signature",), delta.get("signature"))
            case "input_json_delta":
                self.pieces.add(place, ("input",), delta.get("partial_json"), parsed=True)
            case "citations_delta":
                self.pieces.extend(place, ("citations",), [delta.get("citation")])
            case "compaction_delta":
                for name in ("content", "encrypted_content"):
                    if name in delta:
                        self.pieces.put(place, (name,), delta[name])
            case _:
                pass

    def document(self) -> Json:
        return self.pieces.items()


class ConverseStream:
    """Bedrock's Converse: text blocks begin with their first piece, and are others if something is cited in them."""

    def __init__(self) -> None:
        self.pieces = Pieces()
        self._cited: dict[int, list[Json]] = {}

    def feed(self, event: JsonObject) -> None:
        if start := member(event, "contentBlockStart"):
            begun = member(start, "start")
            if "toolUse" in begun:
                begun: JsonObject = {"toolUse": {**member(begun, "toolUse"), "input": {}}}
            elif "toolResult" in begun:
                begun = {"toolResult": {**member(begun, "toolResult"), "content": []}}
            self.pieces.begin(number(start, "contentBlockIndex"), begun)
        elif delta := member(event, "contentBlockDelta"):
            self._grow(number(delta, "contentBlockIndex"), member(delta, "delta"))
        elif stop := member(event, "contentBlockStop"):
            self.pieces.end(number(stop, "contentBlockIndex"))

    def _grow(self, place: int, delta: JsonObject) -> None:
        if "text" in delta:
            self.pieces.begin(place, {"text": ""})
            self.pieces.add(place, ("text",), delta["text"])
        elif "toolUse" in delta:
            text = text_at(delta, ("toolUse", "input"))
            self.pieces.add(place, ("toolUse", "input"), text, parsed=True)
        elif isinstance(found := delta.get("toolResult"), list):
            self.pieces.extend(place, ("toolResult", "content"), found)
        elif "citation" in delta:
            self.pieces.begin(place, {"text": ""})
            self._cited.setdefault(place, []).append(copied(delta["citation"]))
        elif picture := member(delta, "image"):
            for name, value in picture.items():
                self.pieces.put(place, ("image", name), value)
        elif "redactedContent" in (thought := member(delta, "reasoningContent")):
            self.pieces.begin(place, {"reasoningContent": {"redactedContent": ""}})
            self.pieces.add(place, ("reasoningContent", "redactedContent"), thought["redactedContent"])
        elif thought:
            self.pieces.begin(place, {"reasoningContent": {"reasoningText": {"text": ""}}})
            for name in ("text", "signature"):
                self.pieces.add(place, ("reasoningContent", "reasoningText", name), thought.get(name))

    def document(self) -> Json:
        return [
            {"citationsContent": {"content": [item], "citations": copied(self._cited[place])}}
            if place in self._cited
            else item
            for place, item in self.pieces.by_place()
        ]
