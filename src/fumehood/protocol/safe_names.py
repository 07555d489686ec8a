"""Names that others chose, made fit for people and models to read.

File names come from uploads, archives and code that nobody trusts. Whoever puts one into a prompt, a citation, a header
or a log passes it through `clean_name` first; files are found by their ids, so what it changes is lost to nobody.
"""

import itertools
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

MAX_NAME_LENGTH = 200

# Control characters, invisible ones and those that turn the direction of text, halves of pairs, private and
# unassigned ones, ends of lines and paragraphs.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ELLIPSIS = "…"


def sanitize_name(name: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """The name on one line, visible and bounded; of a longer one the beginning and the end are kept."""
    if len(name) > max_length:
        tail = max_length // 3
        name = name[: max_length - tail - len(_ELLIPSIS)] + _ELLIPSIS + name[-tail:]
    if name.isascii() and name.isprintable():
        return name
    return "".join(
        _REPLACEMENT if unicodedata.category(character) in _UNSAFE_CATEGORIES else character
        for character in name
    )


def find_free_name(path: str, taken: Collection[str]) -> str:
    """The path itself, or one like it that nothing has."""
    return FreeNameAllocator(taken).allocate(path)


def candidate_names(path: str) -> Iterator[str]:
    """The path, and what is tried in its place, without end: a.txt, a-2.txt, a-3.txt, …"""
    suffix = PurePosixPath(path).suffix
    yield path
    for number in itertools.count(2):
        yield f"{path.removesuffix(suffix)}-{number}{suffix}"


class FreeNameAllocator:
    """Gives out names that are free. However many want the same one, none is tried twice.

    taken: those that are not; it is not changed.
    """

    def __init__(self, taken: Collection[str]) -> None:
        self._taken = taken
        self._allocated: set[str] = set()
        self._candidates: dict[str, Iterator[str]] = {}

    def allocate(self, name: str) -> str:
        """The name, or one like it."""
        untried = self._candidates.setdefault(name, candidate_names(name))
        free = next(one for one in untried if one not in self._taken and one not in self._allocated)
        self._allocated.add(free)
        return free


def join_names(names: Sequence[str], limit: int) -> str:
    """So many of them, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
