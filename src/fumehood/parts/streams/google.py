"""Gemini's streams: chunks of a response, and steps of an interaction; imports `fumehood.parts`."""

from typing import cast

from fumehood.parts.canonical import Json, JsonObject, Path
from fumehood.parts.lenses import copied
from fumehood.parts.streams.pieces import Pieces, member, number


class ChunkStream:
    """generateContent: chunks are responses; their parts follow each other, their other members replace each other."""

    def __init__(self) -> None:
        self.pieces = Pieces()
        self._response: JsonObject = {}
        self._candidates: dict[int, JsonObject] = {}
        self._parts: dict[int, list[tuple[JsonObject, list[str]]]] = {}

    def feed(self, event: JsonObject) -> None:
        self._response |= {key: copied(value) for key, value in event.items() if key != "candidates"}
        candidates = event.get("candidates")
        for candidate in candidates if isinstance(candidates, list) else []:
            if isinstance(candidate, dict):
                self._add(number(candidate, "index"), candidate)

    def _add(self, place: int, candidate: JsonObject) -> None:
        known = self._candidates.setdefault(place, {})
        content = member(candidate, "content")
        known |= {key: copied(value) for key, value in candidate.items() if key != "content"}
        known["content"] = {**member(known, "content"), **{k: v for k, v in content.items() if k != "parts"}}
        parts = content.get("parts")
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, dict):
                self._join(self._parts.setdefault(place, []), part)

    def _join(self, parts: list[tuple[JsonObject, list[str]]], part: JsonObject) -> None:
        """Pieces of a text are kept apart until somebody asks for it."""
        last, pieces = parts[-1] if parts else ({}, [])
        if _is_text(last) and _is_text(part) and last.get("thought") == part.get("thought"):
            pieces.append(cast(str, part["text"]))
        else:
            begun = [cast(str, part["text"])] if _is_text(part) else []
            parts.append((cast(JsonObject, copied(part)), begun))

    def document(self) -> Json:
        candidates: list[Json] = []
        for place in sorted(self._candidates):
            known = self._candidates[place]
            parts: list[Json] = [
                {**part, "text": "".join(pieces)} if pieces else part
                for part, pieces in self._parts.get(place, [])
            ]
            content: JsonObject = {**member(known, "content"), "parts": parts}
            candidates.append({**known, "content": content})
        return {"candidates": candidates, **self._response} if candidates else {**self._response}


def _is_text(part: JsonObject) -> bool:
    return isinstance(part.get("text"), str) and part.keys() <= {"text", "thought"}


class StepStream:
    """Interactions: steps that begin, grow and end."""

    def __init__(self) -> None:
        self.pieces = Pieces()

    def feed(self, event: JsonObject) -> None:
        place = number(event, "index")
        match event.get("event_type"):
            case "step.start":
                self.pieces.begin(place, event.get("step"))
            case "step.delta":
                self._grow(place, member(event, "delta"))
            case "step.stop":
                self.pieces.end(place)
            case _:
                pass

    def _grow(self, place: int, delta: JsonObject) -> None:
        match delta.get("type"):
            case "arguments_delta":
                self.pieces.add(place, ("arguments",), delta.get("arguments"), parsed=True)
            case "text":
                self.pieces.add(place, (*self._last(place, "content"), "text"), delta.get("text"))
            case "thought_summary":
                content = member(delta, "content")
                self.pieces.add(place, (*self._last(place, "summary"), "text"), content.get("text"))
            case "thought_signature":
                self.pieces.put(place, ("signature",), delta.get("signature"))
            case "text_annotation_delta":
                found = delta.get("annotations")
                path = (*self._last(place, "content"), "annotations")
                self.pieces.extend(place, path, found if isinstance(found, list) else [])
            case "image" | "audio" | "video" | "document":
                self.pieces.extend(place, ("content",), [delta])
            case str():
                self._merge(place, delta)
            case _:
                pass

    def _last(self, place: int, name: str) -> Path:
        """The text that is being written, the last of the list."""
        entries = self.pieces.get(place, (name,))
        known = entries if isinstance(entries, list) else []
        if not known or not isinstance(known[-1], dict) or known[-1].get("type") != "text":
            self.pieces.extend(place, (name,), [{"type": "text", "text": ""}])
            return (name, len(known))
        return (name, len(known) - 1)

    def _merge(self, place: int, delta: JsonObject) -> None:
        """A delta of a call or result has the members of its step."""
        for key, value in delta.items():
            known = self.pieces.get(place, (key,))
            if key == "type" or value is None:
                continue
            if key == "result" and isinstance(value, str):
                self.pieces.add(place, (key,), value)
            elif isinstance(value, list):
                self.pieces.extend(place, (key,), value)
            elif isinstance(value, dict) and isinstance(known, dict):
                self.pieces.put(place, (key,), {**known, **value})
            else:
                self.pieces.put(place, (key,), value)

    def document(self) -> Json:
        return self.pieces.items()
