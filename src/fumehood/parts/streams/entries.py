"""Streams of Mistral's conversations, of Azure's run steps, and of whole items; imports `fumehood.parts`."""

from typing import cast

from fumehood.parts.canonical import Json, JsonObject
from fumehood.parts.lenses import copied, text_at
from fumehood.parts.streams.pieces import Pieces, member, number

_ABOUT = ("id", "name", "tool_call_id", "model", "agent_id", "created_at", "confirmation_status")
_FROM = ("previous_agent_id", "previous_agent_name")
_TO = ("next_agent_id", "next_agent_name")


class ConversationStream:
    """Mistral: events of an entry have its id; the entry itself is told nowhere."""

    def __init__(self) -> None:
        self.pieces = Pieces()
        self._places: dict[str, int] = {}

    def feed(self, event: JsonObject) -> None:
        match event.get("type"):
            case "tool.execution.started":
                self._begin(event, "tool.execution", {"arguments": event.get("arguments", "")})
            case "tool.execution.delta":
                self.pieces.add(self._place(event), ("arguments",), event.get("arguments"))
            case "tool.execution.done":
                place = self._place(event)
                self.pieces.put(place, ("info",), event.get("info", {}))
                self.pieces.put(place, ("completed_at",), event.get("created_at"))
                self.pieces.end(place)
            case "agent.handoff.started":
                self._begin(event, "agent.handoff", {key: event[key] for key in _FROM if key in event})
            case "agent.handoff.done":
                place = self._place(event)
                for key in _TO:
                    self.pieces.put(place, (key,), event.get(key))
                self.pieces.put(place, ("completed_at",), event.get("created_at"))
                self.pieces.end(place)
            case "function.call.delta":
                self._begin(event, "function.call", {"arguments": ""})
                self.pieces.add(self._place(event), ("arguments",), event.get("arguments"))
            case "message.output.delta":
                self._begin(event, "message.output", {"role": "assistant", "content": []})
                self._say(self._place(event), event.get("content"))
            case "conversation.response.done":
                for place in self._places.values():
                    self.pieces.end(place)
            case _:
                pass

    def _place(self, event: JsonObject) -> int:
        known = text_at(event, ("id",)) or ""
        return self._places.setdefault(known, len(self._places))

    def _begin(self, event: JsonObject, kind: str, empty: JsonObject) -> None:
        about = {key: event[key] for key in _ABOUT if key in event}
        self.pieces.begin(self._place(event), {"object": "entry", "type": kind, **about, **empty})

    def _say(self, place: int, content: Json) -> None:
        known = self.pieces.get(place, ("content",))
        chunks = known if isinstance(known, list) else []
        if not isinstance(content, str):
            self.pieces.extend(place, ("content",), [content])
            return
        last = chunks[-1] if chunks else None
        if not isinstance(last, dict) or last.get("type") != "text":
            self.pieces.extend(place, ("content",), [{"type": "text", "text": ""}])
            chunks = [*chunks, None]
        self.pieces.add(place, ("content", len(chunks) - 1, "text"), content)

    def document(self) -> Json:
        return [_plain(item) for item in self.pieces.items()]


def _plain(item: Json) -> Json:
    """A message of nothing but text is that text."""
    content = item.get("content") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(content, list) or len(content) != 1:
        return item
    only = content[0]
    alone = isinstance(only, dict) and only.keys() == {"type", "text"} and only["type"] == "text"
    return {**item, "content": only["text"]} if alone and isinstance(only, dict) else item


class RunStepStream:
    """Azure: events are `{"event": …, "data": …}`; deltas have the shape of what they add to."""

    def __init__(self) -> None:
        self.pieces = Pieces()
        self._steps: dict[str, JsonObject] = {}

    def feed(self, event: JsonObject) -> None:
        kind, data = text_at(event, ("event",)) or "", member(event, "data")
        known = text_at(data, ("id",))
        if known is None or not kind.startswith("thread.run.step."):
            return
        if kind.endswith(".delta"):
            step = self._steps.setdefault(known, {"id": known})
            self._steps[known] = cast(JsonObject, _merged(step, member(data, "delta")))
        else:
            self._steps[known] = cast(JsonObject, copied(data))

    def document(self) -> Json:
        return [copied(step) for step in self._steps.values()]


def _merged(known: Json, delta: Json) -> Json:
    """Texts are continued, objects are merged, entries of lists find their places by `index`."""
    if isinstance(known, dict) and isinstance(delta, dict):
        return {
            **known,
            **{key: _grown(known.get(key), value, key) for key, value in delta.items() if key != "index"},
        }
    if isinstance(delta, list):
        return _placed(list(known) if isinstance(known, list) else [], delta)
    if isinstance(known, str) and isinstance(delta, str):
        return known + delta
    if isinstance(delta, dict):
        return _merged({}, delta)
    return copied(delta) if delta is not None else known


def _grown(known: Json, value: Json, key: str) -> Json:
    """What names a thing is repeated, not continued."""
    return value if key in ("id", "type", "name") and value is not None else _merged(known, value)


def _placed(entries: list[Json], delta: list[Json]) -> list[Json]:
    for entry in delta:
        place = number(entry, "index") if isinstance(entry, dict) and "index" in entry else len(entries)
        if 0 <= place < len(entries):
            entries[place] = _merged(entries[place], entry)
        else:
            entries.append(_merged(None, entry))
    return entries


class ItemStream:
    """Bedrock's Agents: every event is an item."""

    def __init__(self) -> None:
        self.pieces = Pieces()
        self._count = 0

    def feed(self, event: JsonObject) -> None:
        self.pieces.replace(self._count, event)
        self._count += 1

    def document(self) -> Json:
        return self.pieces.items()
