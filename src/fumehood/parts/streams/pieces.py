"""Items that arrive in pieces: what they began as, and the texts that grow in them; imports its siblings.

Nothing is joined or parsed before somebody asks for the items, so a stream costs the same per event however long it is.
"""

import json
from collections.abc import Iterable
from typing import cast

from fumehood.parts.canonical import Json, JsonObject, Path
from fumehood.parts.lenses import MISSING, at, copied, put_at

_CLOSING = {"{": "}", "[": "]"}


def started(text: str) -> Json:
    """What JSON text says that may have been cut off anywhere: all of its values but the one that is not there yet."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    end = _Ending(text)
    whole = text[: end.whole]
    for candidate in (
        (text[:-1] if end.escaped else text) + ('"' if end.quoted else "") + end.closing,
        whole + _Ending(whole).closing,
    ):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    return None


class _Ending:
    """How JSON text breaks off: what closes it, whether within a string, and up to where its values are whole."""

    def __init__(self, text: str) -> None:
        self.quoted, self.escaped, self.whole = False, False, 0
        open_ = list[str]()
        for place, letter in enumerate(text):
            if self.quoted:
                self.quoted, self.escaped = self.escaped or letter != '"', letter == "\\" and not self.escaped
            elif letter == '"':
                self.quoted = True
            elif letter in _CLOSING:
                open_.append(_CLOSING[letter])
                self.whole = place + 1
            elif open_ and letter == open_[-1]:
                open_.pop()
            elif letter == ",":
                self.whole = place
        self.closing = "".join(reversed(open_))


class Pieces:
    """Items by their places in the stream."""

    def __init__(self) -> None:
        self._items: dict[int, Json] = {}
        self._texts: dict[int, dict[Path, list[str]]] = {}
        self._written: set[tuple[int, Path]] = set()
        self._done: set[int] = set()

    def begin(self, place: int, item: Json) -> None:
        self._items.setdefault(place, copied(item))

    def replace(self, place: int, item: Json) -> None:
        """The item as it is in the end."""
        self._items[place] = copied(item)
        self._texts.pop(place, None)
        self.end(place)

    def end(self, place: int) -> None:
        self._done.add(place)

    def add(self, place: int, path: Path, text: Json, *, parsed: bool = False) -> None:
        """More of the text at `path`; `parsed` if it is JSON text whose value belongs there."""
        if isinstance(text, str) and place in self._items:
            self._texts.setdefault(place, {}).setdefault(path, []).append(text)
            if parsed:
                self._written.add((place, path))

    def put(self, place: int, path: Path, value: Json) -> None:
        """The value at `path`, instead of whatever grew there; the next of a list may be added so."""
        self._texts.get(place, {}).pop(path, None)
        item = self._items.get(place)
        within = at(item, path[:-1]) if path else MISSING
        if isinstance(within, list) and path[-1] == len(within):
            within.append(copied(value))
        elif place in self._items and not (within is MISSING and len(path) > 1):
            self._items[place] = _put(item, path, copied(value))

    def get(self, place: int, path: Path) -> Json:
        found = at(self._items.get(place), path)
        return None if found is MISSING else found

    def extend(self, place: int, path: Path, values: Iterable[Json]) -> None:
        known = self.get(place, path)
        if place in self._items:
            self._items[place] = _put(
                self._items[place], path, [*(known if isinstance(known, list) else []), *values]
            )

    @property
    def unfinished(self) -> set[int]:
        """Positions in `items` of those that have not ended."""
        return {number for number, place in enumerate(sorted(self._items)) if place not in self._done}

    def items(self) -> list[Json]:
        return [item for _, item in self.by_place()]

    def by_place(self) -> list[tuple[int, Json]]:
        return [(place, self._whole(place)) for place in sorted(self._items)]

    def _whole(self, place: int) -> Json:
        item = copied(self._items[place])
        for path, pieces in self._texts.get(place, {}).items():
            text = "".join(pieces)
            if (place, path) in self._written:
                item = _put(item, path, started(text) if text else cast(Json, {}))
            else:
                before = at(item, path)
                item = _put(item, path, (before if isinstance(before, str) else "") + text)
        return item


def _put(item: Json, path: Path, value: Json) -> Json:
    """A stream may speak of places that are not there; then nothing is put."""
    try:
        return put_at(item, path, value)
    except ValueError:
        return item


def number(event: JsonObject, name: str) -> int:
    value = event.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def member(event: JsonObject, name: str) -> JsonObject:
    value = event.get(name)
    return value if isinstance(value, dict) else {}
