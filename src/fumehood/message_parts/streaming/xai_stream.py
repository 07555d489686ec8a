"""xAI's streams: events of a response as OpenAI's, or chunks of its chat API."""

from fumehood.message_parts.canonical_parts import Json, JsonObject, JsonPath
from fumehood.message_parts.field_codecs import copy_json
from fumehood.message_parts.streaming.openai_responses_stream import OpenAIResponseStream
from fumehood.message_parts.streaming.partial_items import PartialItems, read_int, read_object

# Protobuf field names in JSON, in both spellings.
_TEXT_FIELDS = ("content", "reasoning_content", "encrypted_content", "reasoningContent", "encryptedContent")
_CALL_FIELDS = ("tool_calls", "toolCalls")
_FINISH_REASON_FIELDS = ("finish_reason", "finishReason")


class XaiChatStream:
    """Chunks are responses with deltas of messages in their outputs.

    Texts are continued, lists extended. Calls arrive complete; a repeated call is an update of its status. Anything
    else is replaced by a later value.
    """

    def __init__(self) -> None:
        self.partial_items = PartialItems()
        self._response: JsonObject = {}

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


class XaiStream:
    """Either of the two streams: chunks of the chat API have no type."""

    def __init__(self) -> None:
        self._stream: XaiChatStream | OpenAIResponseStream | None = None

    @property
    def partial_items(self) -> PartialItems:
        return self._stream.partial_items if self._stream else PartialItems()

    def feed(self, event: JsonObject) -> None:
        if self._stream is None:
            self._stream = OpenAIResponseStream() if "type" in event else XaiChatStream()
        self._stream.feed(event)

    def build_document(self) -> Json:
        return self._stream.build_document() if self._stream else []
