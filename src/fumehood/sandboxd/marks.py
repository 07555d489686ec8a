"""Remembers earlier states of a sandbox's files to tell what changed since; imports only `inside.files`."""

import secrets
from collections import OrderedDict

from fumehood.sandboxd.inside.files import Found

MOST_MARKS = 8
_ENTRY_BYTES = 250  # what an entry takes besides its name, about
_MOST_BYTES = 16 << 20


class Marks:
    """The last few states of one sandbox; an older one, or one too large to keep, is forgotten."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, dict[str, Found]] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._states)

    def find(self, mark: str) -> dict[str, Found] | None:
        return self._states.get(mark)

    def keep(self, found: list[Found]) -> str:
        """The mark of this state; an unchanged one keeps the mark it has."""
        state = {item.path: item for item in found}
        if self._states:
            mark, latest = next(reversed(self._states.items()))
            if latest == state:
                return mark
        mark = secrets.token_hex(12)
        size = sum(_ENTRY_BYTES + len(item.path) for item in found)
        if size <= _MOST_BYTES:
            self._states[mark], self._sizes[mark] = state, size
        while len(self._states) > MOST_MARKS or sum(self._sizes.values()) > _MOST_BYTES:
            oldest, _ = self._states.popitem(last=False)
            del self._sizes[oldest]
        return mark

    @staticmethod
    def changes(before: dict[str, Found], found: list[Found]) -> tuple[list[Found], list[str]]:
        """What is new or not what it was, and the paths that are no more."""
        there = {item.path for item in found}
        return [item for item in found if before.get(item.path) != item], sorted(before.keys() - there)
