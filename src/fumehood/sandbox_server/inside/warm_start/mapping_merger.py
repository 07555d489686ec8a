"""Reads the memory mappings of this process, and merges those of libraries' code.

A fork copies every mapping of its parent, and the exit of a process tears each one down; a shared library has four or
five. Merging three of them into one makes each fork and exit faster: for its figure see file_backed_heap.py. The plain
way is to leave them.
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
    file: str  # "" without a file; "[stack]" and the like for special mappings

    @property
    def size(self) -> int:
        return self.end - self.start

    def is_adjacent_to(self, other: "MemoryMapping") -> bool:
        """Whether both map one file, side by side in memory and in the file."""
        of_file = self.file == other.file and self.file.startswith("/")
        beside = self.end == other.start or self.start == other.end
        return of_file and beside and self.start - self.offset == other.start - other.offset


def read_mappings() -> Iterator[MemoryMapping]:
    """Yield the mappings of this process, in address order."""
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        addresses, permissions, offset, _, _, *name = line.split(maxsplit=5)
        start, _, end = addresses.partition("-")
        yield MemoryMapping(
            int(start, 16), int(end, 16), permissions, int(offset, 16), name[0] if name else ""
        )


def merge_code_mappings() -> None:
    """Make the constants beside a library's code executable too, so that the kernel merges all three mappings.

    Nothing becomes writable. Code that could jump there can map executable memory of its own anyway.
    """
    found = [*read_mappings()]
    for before, code, behind in zip(found, found[1:], found[2:], strict=False):
        if code.permissions == "r-xp":
            for part in (before, behind):
                if part.permissions == "r--p" and part.is_adjacent_to(code):
                    # If the kernel refuses, there is one mapping more.
                    _libc.mprotect(part.start, part.size, mmap.PROT_READ | mmap.PROT_EXEC)
