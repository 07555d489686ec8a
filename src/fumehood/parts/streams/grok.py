"""xAI's streams: events of a response as OpenAI's, or chunks of its chat API; imports `fumehood.parts`."""

from fumehood.parts.canonical import Json, JsonObject
from fumehood.parts.lenses import copied
from fumehood.parts.streams.openai import ResponseStream
from fumehood.parts.streams.pieces import Pieces, member, number

# As its protobuf messages are written in JSON, with either kind of names.
_TEXTS = ("content", "reasoning_content", "encrypted_content", "reasoningContent", "encryptedContent")
_REASONS = ("finish_reason", "finishReason")


class ChatStream:
    """Chunks are responses whose outputs have deltas for messages.

    Texts are continued and lists are added to: calls come whole, and one that has ended comes once more with its new
    status, as in a response that comes in one piece. Anything else is replaced by what comes later.
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
                self.pieces.extend(place, path, value)
            else:
                self.pieces.put(place, path, value)

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
