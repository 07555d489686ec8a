"""Names that others chose, made fit for people and models to read; imports the standard library.

File names come from uploads, archives and code that nobody trusts. Whoever puts one into a prompt, a citation, a header
or a log passes it through `clean_name` first; files are found by their ids, so what it changes is lost to nobody.
"""

import itertools
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

LONGEST_NAME = 200

# Control characters, invisible ones and those that turn the direction of text, halves of pairs, private and
# unassigned ones, ends of lines and paragraphs.
_UNFIT = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_INSTEAD = "\N{REPLACEMENT CHARACTER}"
_CUT = "…"


def clean_name(name: str, longest: int = LONGEST_NAME) -> str:
    """The name on one line, visible and bounded; of a longer one the beginning and the end are kept."""
    if len(name) > longest:
        tail = longest // 3
        name = name[: longest - tail - len(_CUT)] + _CUT + name[-tail:]
    if name.isascii() and name.isprintable():
        return name
    return "".join(_INSTEAD if unicodedata.category(character) in _UNFIT else character for character in name)


def free_name(path: str, taken: Collection[str]) -> str:
    """The path itself, or one like it that nothing has."""
    return FreeNames(taken).take(path)


def names_like(path: str) -> Iterator[str]:
    """The path, and what is tried in its place, without end: a.txt, a-2.txt, a-3.txt, …"""
    suffix = PurePosixPath(path).suffix
    yield path
    for number in itertools.count(2):
        yield f"{path.removesuffix(suffix)}-{number}{suffix}"


class FreeNames:
    """Gives out names that are free. However many want the same one, none is tried twice.

    taken: those that are not; it is not changed.
    """

    def __init__(self, taken: Collection[str]) -> None:
        self._taken = taken
        self._given: set[str] = set()
        self._untried: dict[str, Iterator[str]] = {}

    def take(self, name: str) -> str:
        """The name, or one like it."""
        untried = self._untried.setdefault(name, names_like(name))
        free = next(one for one in untried if one not in self._taken and one not in self._given)
        self._given.add(free)
        return free


def in_words(names: Sequence[str], most: int) -> str:
    """So many of them, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
