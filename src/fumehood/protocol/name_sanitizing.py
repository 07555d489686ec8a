"""Sanitizes untrusted names and finds free ones.

File names come from uploads, archives and untrusted code. `sanitize_name` is applied before a name goes into a prompt,
a citation, a header or a log; files are found by their ids, so nothing is lost.
"""

import itertools
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

MAX_NAME_LENGTH = 200

# Control, format (invisible or changing text direction), surrogate, private and unassigned characters, line and
# paragraph separators.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ELLIPSIS = "…"


def sanitize_name(name: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """Return the name on one line with unsafe characters replaced; a long one is shortened in the middle."""
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
    """Return the path, or a similar one that is not taken."""
    return FreeNameAllocator(taken).allocate(path)


def candidate_names(path: str) -> Iterator[str]:
    """Yield a.txt, a-2.txt, a-3.txt, … without end."""
    suffix = PurePosixPath(path).suffix
    yield path
    for number in itertools.count(2):
        yield f"{path.removesuffix(suffix)}-{number}{suffix}"


class FreeNameAllocator:
    """Allocates names that are not taken. However many are asked for, no candidate is tried twice."""

    def __init__(self, taken: Collection[str]) -> None:
        self._taken = taken
        self._allocated: set[str] = set()
        self._candidates: dict[str, Iterator[str]] = {}

    def allocate(self, name: str) -> str:
        """Return the name, or a similar one."""
        candidates = self._candidates.setdefault(name, candidate_names(name))
        free = next(each for each in candidates if each not in self._taken and each not in self._allocated)
        self._allocated.add(free)
        return free


def join_names(names: Sequence[str], limit: int) -> str:
    """Join the first `limit` names and say how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
