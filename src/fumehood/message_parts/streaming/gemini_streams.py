"""Gemini's streams: chunks of generateContent, and steps of an interaction."""

from typing import cast

from fumehood.message_parts.canonical_parts import Json, JsonObject, JsonPath
from fumehood.message_parts.field_codecs import copy_json
from fumehood.message_parts.streaming.partial_items import PartialItems, read_int, read_object


class GeminiStream:
    """generateContent: each chunk is a response. Parts are appended, other members replaced."""

    def __init__(self) -> None:
        self.partial_items = PartialItems()
        self._response: JsonObject = {}
        self._candidates: dict[int, JsonObject] = {}
        self._parts: dict[int, list[tuple[JsonObject, list[str]]]] = {}

    def feed(self, event: JsonObject) -> None:
        self._response |= {key: copy_json(value) for key, value in event.items() if key != "candidates"}
        candidates = event.get("candidates")
        for candidate in candidates if isinstance(candidates, list) else []:
            if isinstance(candidate, dict):
                self._add_candidate(read_int(candidate, "index"), candidate)

    def _add_candidate(self, index: int, candidate: JsonObject) -> None:
        known = self._candidates.setdefault(index, {})
        content = read_object(candidate, "content")
        known |= {key: copy_json(value) for key, value in candidate.items() if key != "content"}
        known["content"] = {
            **read_object(known, "content"),
            **{k: v for k, v in content.items() if k != "parts"},
        }
        parts = content.get("parts")
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, dict):
                self._append_part(self._parts.setdefault(index, []), part)

    def _append_part(self, parts: list[tuple[JsonObject, list[str]]], part: JsonObject) -> None:
        """Append a part; text is joined only when it is read."""
        last, deltas = parts[-1] if parts else ({}, [])
        if _is_text(last) and _is_text(part) and last.get("thought") == part.get("thought"):
            deltas.append(cast(str, part["text"]))
        else:
            started = [cast(str, part["text"])] if _is_text(part) else []
            parts.append((cast(JsonObject, copy_json(part)), started))

    def build_document(self) -> Json:
        candidates: list[Json] = []
        for index in sorted(self._candidates):
            known = self._candidates[index]
            parts: list[Json] = [
                {**part, "text": "".join(deltas)} if deltas else part
                for part, deltas in self._parts.get(index, [])
            ]
            content: JsonObject = {**read_object(known, "content"), "parts": parts}
            candidates.append({**known, "content": content})
        return {"candidates": candidates, **self._response} if candidates else {**self._response}


def _is_text(part: JsonObject) -> bool:
    return isinstance(part.get("text"), str) and part.keys() <= {"text", "thought"}


class GeminiInteractionsStream:
    """Interactions: steps that start, grow and end."""

    def __init__(self) -> None:
        self.partial_items = PartialItems()

    def feed(self, event: JsonObject) -> None:
        index = read_int(event, "index")
        match event.get("event_type"):
            case "step.start":
                self.partial_items.start_item(index, event.get("step"))
            case "step.delta":
                self._apply_delta(index, read_object(event, "delta"))
            case "step.stop":
                self.partial_items.end_item(index)
            case _:
                pass

    def _apply_delta(self, index: int, delta: JsonObject) -> None:
        match delta.get("type"):
            case "arguments_delta":
                self.partial_items.append_text(index, ("arguments",), delta.get("arguments"), is_json=True)
            case "text":
                self.partial_items.append_text(
                    index, (*self._last_text_path(index, "content"), "text"), delta.get("text")
                )
            case "thought_summary":
                content = read_object(delta, "content")
                self.partial_items.append_text(
                    index, (*self._last_text_path(index, "summary"), "text"), content.get("text")
                )
            case "thought_signature":
                self.partial_items.set_value(index, ("signature",), delta.get("signature"))
            case "text_annotation_delta":
                found = delta.get("annotations")
                path = (*self._last_text_path(index, "content"), "annotations")
                self.partial_items.extend_list(index, path, found if isinstance(found, list) else [])
            case "image" | "audio" | "video" | "document":
                self.partial_items.extend_list(index, ("content",), [delta])
            case str():
                self._merge_fields(index, delta)
            case _:
                pass

    def _last_text_path(self, index: int, name: str) -> JsonPath:
        """Path of the text that is being written, the last in its list."""
        entries = self.partial_items.get_value(index, (name,))
        known = entries if isinstance(entries, list) else []
        if not known or not isinstance(known[-1], dict) or known[-1].get("type") != "text":
            self.partial_items.extend_list(index, (name,), [{"type": "text", "text": ""}])
            return (name, len(known))
        return (name, len(known) - 1)

    def _merge_fields(self, index: int, delta: JsonObject) -> None:
        """Merge a delta of a call or response, which has the members of its step."""
        for key, value in delta.items():
            known = self.partial_items.get_value(index, (key,))
            if key == "type" or value is None:
                continue
            if key == "result" and isinstance(value, str):
                self.partial_items.append_text(index, (key,), value)
            elif isinstance(value, list):
                self.partial_items.extend_list(index, (key,), value)
            elif isinstance(value, dict) and isinstance(known, dict):
                self.partial_items.set_value(index, (key,), {**known, **value})
            else:
                self.partial_items.set_value(index, (key,), value)

    def build_document(self) -> Json:
        return self.partial_items.build_items()
