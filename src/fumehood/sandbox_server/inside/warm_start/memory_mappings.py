"""What this process has mapped, and how to have it in fewer pieces.

A fork copies every mapping of its parent, and the end of a process takes each of them apart; a shared library has four
or five.
"""

import ctypes
import mmap
from collections.abc import Iterator
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MemoryMapping(NamedTuple):
    """One line of /proc/self/maps."""

    start: int
    end: int
    permissions: str  # "r-xp"
    offset: int
    file: str  # "" for none, "[stack]" and the like for what is none

    @property
    def size(self) -> int:
        return self.end - self.start

    def is_adjacent_to(self, other: "MemoryMapping") -> bool:
        """Whether both are of one file, side by side in memory and in the file."""
        of_file = self.file == other.file and self.file.startswith("/")
        beside = self.end == other.start or self.start == other.end
        return of_file and beside and self.start - self.offset == other.start - other.offset


def read_mappings() -> Iterator[MemoryMapping]:
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        place, rights, offset, _, _, *name = line.split(maxsplit=5)
        start, _, end = place.partition("-")
        yield MemoryMapping(int(start, 16), int(end, 16), rights, int(offset, 16), name[0] if name else "")


def merge_code_mappings() -> None:
    """Let the constants before and behind a library's code be executable as well: then all three are one mapping.

    Nothing becomes writable. Whoever could jump there can as well map memory of his own to execute.
    """
    found = [*read_mappings()]
    for before, code, behind in zip(found, found[1:], found[2:], strict=False):
        if code.permissions == "r-xp":
            for part in (before, behind):
                if part.permissions == "r--p" and part.is_adjacent_to(code):
                    # Where the kernel refuses, there is one mapping more.
                    _libc.mprotect(part.start, part.size, mmap.PROT_READ | mmap.PROT_EXEC)
