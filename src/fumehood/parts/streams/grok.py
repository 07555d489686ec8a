"""xAI's streams: events of a response as OpenAI's, or chunks of its chat API; imports `fumehood.parts`."""

from fumehood.parts.canonical import Json, JsonObject, Path
from fumehood.parts.lenses import copied
from fumehood.parts.streams.openai import ResponseStream
from fumehood.parts.streams.pieces import Pieces, member, number

# As its protobuf messages are written in JSON, with either kind of names.
_TEXTS = ("content", "reasoning_content", "encrypted_content", "reasoningContent", "encryptedContent")
_CALLS = ("tool_calls", "toolCalls")
_REASONS = ("finish_reason", "finishReason")


class ChatStream:
    """Chunks are responses whose outputs have deltas for messages.

    Texts are continued and lists are added to. Calls come whole; one that comes again is the same call with its new
    status. Anything else is replaced by what comes later.
    """

    def __init__(self) -> None:
        self.pieces = Pieces()
        self._response: JsonObject = {}

    def feed(self, event: JsonObject) -> None:
        for key, value in event.items():
            known = self._response.get(key)
            if isinstance(value, list) and key == "outputs":
                for output in value:
                    if isinstance(output, dict):
                        self._add(number(output, "index"), output)
            elif isinstance(value, list) and isinstance(known, list):
                self._response[key] = [*known, *value]
            else:
                self._response[key] = copied(value)

    def _add(self, place: int, output: JsonObject) -> None:
        self.pieces.begin(place, {"message": {}})
        for key in output:
            if key == "delta":
                self._grow(place, "message", member(output, key))
            elif key == "logprobs":
                self._grow(place, key, member(output, key))
            else:
                self.pieces.put(place, (key,), output[key])
        if any(reason in output for reason in _REASONS):
            self.pieces.end(place)

    def _grow(self, place: int, within: str, delta: JsonObject) -> None:
        for key, value in delta.items():
            path = (within, key)
            if isinstance(value, str) and key in _TEXTS:
                self.pieces.add(place, path, value)
            elif isinstance(value, list):
                new = [entry for entry in value if not self._renewed(place, path, entry)]
                self.pieces.extend(place, path, new)
            else:
                self.pieces.put(place, path, value)

    def _renewed(self, place: int, path: Path, entry: Json) -> bool:
        """Whether it takes the place of an entry that is there, as a call does that has been told before."""
        known = self.pieces.get(place, path) if path[-1] in _CALLS else None
        for position, each in enumerate(known if isinstance(known, list) else []):
            if isinstance(each, dict) and isinstance(entry, dict) and each.get("id", "") == entry.get("id"):
                self.pieces.put(place, (*path, position), entry)
                return True
        return False

    def document(self) -> Json:
        outputs = self.pieces.items()
        return {"outputs": outputs, **self._response} if outputs else {**self._response}


class GrokStream:
    """Whichever of the two it is; their events cannot be mistaken, since chunks have no type."""

    def __init__(self) -> None:
        self._stream: ChatStream | ResponseStream | None = None

    @property
    def pieces(self) -> Pieces:
        return self._stream.pieces if self._stream else Pieces()

    def feed(self, event: JsonObject) -> None:
        if self._stream is None:
            self._stream = ResponseStream() if "type" in event else ChatStream()
        self._stream.feed(event)

    def document(self) -> Json:
        return self._stream.document() if self._stream else []
