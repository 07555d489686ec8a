"""Vendors' streams: items that arrive in deltas.

Text is joined and parsed only when the items are read, so the cost per event does not grow with the stream.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import cast

from fumehood.message_parts.canonical_parts import Json, JsonObject, JsonPath
from fumehood.message_parts.json_path_access import MISSING, copy_json, get_at_path, set_at_path

_CLOSING_BRACKETS = {"{": "}", "[": "]"}


def parse_partial_json(text: str) -> Json:
    """Parse JSON text that may end anywhere; the last incomplete value is dropped."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    end = _PartialJsonScan(text)
    whole = text[: end.complete_length]
    for candidate in (
        (text[:-1] if end.is_escaped else text) + ('"' if end.is_in_string else "") + end.closing,
        whole + _PartialJsonScan(whole).closing,
    ):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    return None


class _PartialJsonScan:
    """How JSON text ends: the brackets to close, whether inside a string, and where its complete values end."""

    def __init__(self, text: str) -> None:
        self.is_in_string, self.is_escaped, self.complete_length = False, False, 0
        open_ = list[str]()
        for index, letter in enumerate(text):
            if self.is_in_string:
                self.is_in_string, self.is_escaped = (
                    self.is_escaped or letter != '"',
                    letter == "\\" and not self.is_escaped,
                )
            elif letter == '"':
                self.is_in_string = True
            elif letter in _CLOSING_BRACKETS:
                open_.append(_CLOSING_BRACKETS[letter])
                self.complete_length = index + 1
            elif open_ and letter == open_[-1]:
                open_.pop()
            elif letter == ",":
                self.complete_length = index
        self.closing = "".join(reversed(open_))


class PartialItems:
    """Items by their index in the stream."""

    def __init__(self) -> None:
        self._items: dict[int, Json] = {}
        self._text_deltas: dict[int, dict[JsonPath, list[str]]] = {}
        self._json_text_paths: set[tuple[int, JsonPath]] = set()
        self._ended: set[int] = set()
        self.lost_deltas = 0

    def add_error(self, item: Json) -> None:
        """Append an error that ended the stream."""
        self.replace_item(max(self._items, default=-1) + 1, item)

    def start_item(self, index: int, item: Json) -> None:
        self._items.setdefault(index, copy_json(item))

    def replace_item(self, index: int, item: Json) -> None:
        """Set the final item."""
        self._items[index] = copy_json(item)
        self._text_deltas.pop(index, None)
        self.end_item(index)

    def end_item(self, index: int) -> None:
        self._ended.add(index)

    def append_text(self, index: int, path: JsonPath, text: Json, *, is_json: bool = False) -> None:
        """Append to the text at `path`. is_json: the text is JSON whose value belongs there."""
        if index not in self._items:
            self.lost_deltas += 1  # its item started before the first event
        elif isinstance(text, str):
            self._text_deltas.setdefault(index, {}).setdefault(path, []).append(text)
            if is_json:
                self._json_text_paths.add((index, path))

    def set_value(self, index: int, path: JsonPath, value: Json) -> None:
        """Set the value at `path` instead of the text that grew there; a list may be extended by one entry."""
        self._text_deltas.get(index, {}).pop(path, None)
        item = self._items.get(index)
        within = get_at_path(item, path[:-1]) if path else MISSING
        if isinstance(within, list) and path[-1] == len(within):
            within.append(copy_json(value))
        elif index in self._items and not (within is MISSING and len(path) > 1):
            self._items[index] = _set_if_possible(item, path, copy_json(value))

    def get_value(self, index: int, path: JsonPath) -> Json:
        found = get_at_path(self._items.get(index), path)
        return None if found is MISSING else found

    def extend_list(self, index: int, path: JsonPath, values: Iterable[Json]) -> None:
        known = self.get_value(index, path)
        if index in self._items:
            self._items[index] = _set_if_possible(
                self._items[index], path, [*(known if isinstance(known, list) else []), *values]
            )

    @property
    def unfinished_positions(self) -> set[int]:
        """Positions in `items` of those that have not ended."""
        return {number for number, index in enumerate(sorted(self._items)) if index not in self._ended}

    def build_items(self) -> list[Json]:
        return [item for _, item in self.build_items_by_index()]

    def build_items_by_index(self) -> list[tuple[int, Json]]:
        return [(index, self._build_item(index)) for index in sorted(self._items)]

    def _build_item(self, index: int) -> Json:
        item = copy_json(self._items[index])
        for path, deltas in self._text_deltas.get(index, {}).items():
            text = "".join(deltas)
            if (index, path) in self._json_text_paths:
                item = _set_if_possible(item, path, parse_partial_json(text) if text else cast(Json, {}))
            else:
                before = get_at_path(item, path)
                item = _set_if_possible(item, path, (before if isinstance(before, str) else "") + text)
        return item


def _set_if_possible(item: Json, path: JsonPath, value: Json) -> Json:
    """Set the value, unless the path does not exist."""
    try:
        return set_at_path(item, path, value)
    except ValueError:
        return item


class VendorStreamCollector(ABC):
    """Collects the events of one stream. `partial_items` knows which items have not ended, where the vendor says so."""

    def __init__(self) -> None:
        self.partial_items = PartialItems()

    @abstractmethod
    def recognizes(self, event: JsonObject) -> bool:
        """Whether this is an event of such a stream, known or not."""

    @abstractmethod
    def feed(self, event: JsonObject) -> None: ...

    def build_document(self) -> Json:
        """Return the items, or the response, as far as they have arrived."""
        return self.partial_items.build_items()


def read_int(event: JsonObject, name: str) -> int:
    value = event.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def read_object(event: JsonObject, name: str) -> JsonObject:
    value = event.get(name)
    return value if isinstance(value, dict) else {}
