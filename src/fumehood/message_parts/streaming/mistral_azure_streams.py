"""Streams of Mistral's conversations, of Azure's run steps, and of Bedrock's agents."""

from typing import cast

from fumehood.message_parts.canonical_parts import Json, JsonObject
from fumehood.message_parts.field_codecs import copy_json, get_text_at_path
from fumehood.message_parts.streaming.partial_items import PartialItems, read_int, read_object

_ENTRY_FIELDS = ("id", "name", "tool_call_id", "model", "agent_id", "created_at", "confirmation_status")
_HANDOFF_SOURCE_FIELDS = ("previous_agent_id", "previous_agent_name")
_HANDOFF_TARGET_FIELDS = ("next_agent_id", "next_agent_name")


class MistralConversationStream:
    """Mistral: events name their entry by id; the entry itself is never sent."""

    def __init__(self) -> None:
        self.partial_items = PartialItems()
        self._indexes: dict[str, int] = {}

    def feed(self, event: JsonObject) -> None:
        match event.get("type"):
            case "tool.execution.started":
                self._start_entry(event, "tool.execution", {"arguments": event.get("arguments", "")})
            case "tool.execution.delta":
                self.partial_items.append_text(self._index_of(event), ("arguments",), event.get("arguments"))
            case "tool.execution.done":
                index = self._index_of(event)
                self.partial_items.set_value(index, ("info",), event.get("info", {}))
                self.partial_items.set_value(index, ("completed_at",), event.get("created_at"))
                self.partial_items.end_item(index)
            case "agent.handoff.started":
                self._start_entry(
                    event,
                    "agent.handoff",
                    {key: event[key] for key in _HANDOFF_SOURCE_FIELDS if key in event},
                )
            case "agent.handoff.done":
                index = self._index_of(event)
                for key in _HANDOFF_TARGET_FIELDS:
                    self.partial_items.set_value(index, (key,), event.get(key))
                self.partial_items.set_value(index, ("completed_at",), event.get("created_at"))
                self.partial_items.end_item(index)
            case "function.call.delta":
                self._start_entry(event, "function.call", {"arguments": ""})
                self.partial_items.append_text(self._index_of(event), ("arguments",), event.get("arguments"))
            case "message.output.delta":
                self._start_entry(event, "message.output", {"role": "assistant", "content": []})
                self._append_content(self._index_of(event), event.get("content"))
            case "conversation.response.done":
                for index in self._indexes.values():
                    self.partial_items.end_item(index)
            case _:
                pass

    def _index_of(self, event: JsonObject) -> int:
        known = get_text_at_path(event, ("id",)) or ""
        return self._indexes.setdefault(known, len(self._indexes))

    def _start_entry(self, event: JsonObject, kind: str, empty: JsonObject) -> None:
        about = {key: event[key] for key in _ENTRY_FIELDS if key in event}
        self.partial_items.start_item(
            self._index_of(event), {"object": "entry", "type": kind, **about, **empty}
        )

    def _append_content(self, index: int, content: Json) -> None:
        known = self.partial_items.get_value(index, ("content",))
        chunks = known if isinstance(known, list) else []
        if not isinstance(content, str):
            self.partial_items.extend_list(index, ("content",), [content])
            return
        last = chunks[-1] if chunks else None
        if not isinstance(last, dict) or last.get("type") != "text":
            self.partial_items.extend_list(index, ("content",), [{"type": "text", "text": ""}])
            chunks = [*chunks, None]
        self.partial_items.append_text(index, ("content", len(chunks) - 1, "text"), content)

    def build_document(self) -> Json:
        return [_flatten_text(item) for item in self.partial_items.build_items()]


def _flatten_text(item: Json) -> Json:
    """Replace the content of a message that is only text by that text."""
    content = item.get("content") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(content, list) or len(content) != 1:
        return item
    only = content[0]
    alone = isinstance(only, dict) and only.keys() == {"type", "text"} and only["type"] == "text"
    return {**item, "content": only["text"]} if alone and isinstance(only, dict) else item


class AzureRunStepStream:
    """Azure: events are `{"event": …, "data": …}`; a delta has the shape of what it extends."""

    def __init__(self) -> None:
        self.partial_items = PartialItems()
        self._steps: dict[str, JsonObject] = {}

    def feed(self, event: JsonObject) -> None:
        kind, data = get_text_at_path(event, ("event",)) or "", read_object(event, "data")
        known = get_text_at_path(data, ("id",))
        if known is None or not kind.startswith("thread.run.step."):
            return
        if kind.endswith(".delta"):
            step = self._steps.setdefault(known, {"id": known})
            self._steps[known] = cast(JsonObject, _merge_delta(step, read_object(data, "delta")))
        else:
            self._steps[known] = cast(JsonObject, copy_json(data))

    def build_document(self) -> Json:
        return [copy_json(step) for step in self._steps.values()]


def _merge_delta(known: Json, delta: Json) -> Json:
    """Concatenate strings, merge objects, and merge list entries by their `index`."""
    if isinstance(known, dict) and isinstance(delta, dict):
        return {
            **known,
            **{
                key: _merge_field(known.get(key), value, key)
                for key, value in delta.items()
                if key != "index"
            },
        }
    if isinstance(delta, list):
        return _merge_list(list(known) if isinstance(known, list) else [], delta)
    if isinstance(known, str) and isinstance(delta, str):
        return known + delta
    if isinstance(delta, dict):
        return _merge_delta({}, delta)
    return copy_json(delta) if delta is not None else known


def _merge_field(known: Json, value: Json, key: str) -> Json:
    """Merge one field; identifiers are repeated in each delta, not continued."""
    return value if key in ("id", "type", "name") and value is not None else _merge_delta(known, value)


def _merge_list(entries: list[Json], delta: list[Json]) -> list[Json]:
    for entry in delta:
        index = read_int(entry, "index") if isinstance(entry, dict) and "index" in entry else len(entries)
        if 0 <= index < len(entries):
            entries[index] = _merge_delta(entries[index], entry)
        else:
            entries.append(_merge_delta(None, entry))
    return entries


class BedrockAgentsStream:
    """Bedrock's Agents: every event is an item."""

    def __init__(self) -> None:
        self.partial_items = PartialItems()
        self._count = 0

    def feed(self, event: JsonObject) -> None:
        self.partial_items.replace_item(self._count, event)
        self._count += 1

    def build_document(self) -> Json:
        return self.partial_items.build_items()
