"""Keeps the zygote's memory where forking it is cheap, in pages of a file.

A fork copies one table entry for every page of ordinary memory that the parent has, twenty thousand here, and its
end gives them all back: more work than all else that a sandbox's start takes. Pages of a file it leaves alone: the
child finds them when it uses them. So the memory that preloading fills is made to be a file without a name, mapped
shared, and at the end the same pages are mapped private: what anybody writes from then on is their own.

Nothing that is in use is ever exchanged. Python is made to take a piece of memory and to fill it with objects that
nobody touches; the piece is exchanged for the file with the same content; then the objects are given back and their
room is free for what comes. For the C library's heap it is simpler, since its free end holds nothing. The variables of
packages' libraries are exchanged as they are, since none of their code runs meanwhile.
"""

import contextlib
import ctypes
import mmap
import os
from collections import Counter

from fumehood.sandbox_server.inside.warm_start.memory_mappings import MemoryMapping, read_mappings

_PAGE = mmap.PAGESIZE
_POOL = 16 << 10  # Python's unit for objects of one size
_BLOCK = 496  # a size of which a pool holds a good number,
_BLOCKS = 32  # this one
_EMPTY_BYTES = 33  # what an empty `bytes` takes
_KEEP_EVERY = 512 << 10  # something has to stay in each megabyte, or Python would give it back
_OBJECTS = 44 << 20  # what preloading the usual packages takes
_HEAP = 40 << 20
_SPARE = 1 << 20  # larger than any hole in it
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = (1 << 31) - 1
_MMAP_BYTES, _TRIM_BYTES = (
    4 << 20,
    16 << 20,
)  # for programs, later: between the defaults and what these grow to
_MAP_FIXED = 0x10
_PACKAGES = "/site-packages/"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_void_p,)


class FileBackedHeap:
    """Made before the imports; `settle` after them, and after that nobody shares anything but what was there."""

    def __init__(self) -> None:
        self._file = os.memfd_create("zygote")
        self._size = 0
        self._mapped_ranges: list[tuple[int, int, int]] = []  # address, size, offset in the file
        self._pinned_blocks: list[bytes] = []
        self._heap_end = 0
        self._remap_object_pools()
        self._remap_malloc_heap()

    def _remap_object_pools(self) -> None:
        blocks = [bytes(_BLOCK - _EMPTY_BYTES) for _ in range(_OBJECTS // _BLOCK)]
        pools = Counter(id(block) & -_POOL for block in blocks)
        whole = sorted(pool for pool, count in pools.items() if count == _BLOCKS)
        for start, size in _contiguous_ranges(whole):
            self._remap(start, size)
        last = 0
        for block in sorted(blocks, key=id):
            if id(block) - last >= _KEEP_EVERY:
                last = id(block)
                self._pinned_blocks.append(block)

    def _remap(self, start: int, size: int) -> None:
        os.ftruncate(self._file, self._size + size)
        content = (ctypes.c_char * size).from_address(start)
        written = 0
        while written < size:
            written += os.pwrite(self._file, memoryview(content)[written:], self._size + written)
        self._map(start, size, self._size, mmap.MAP_SHARED)
        self._mapped_ranges.append((start, size, self._size))
        self._size += size

    def _remap_malloc_heap(self) -> None:
        """A large piece at its end, empty while it is exchanged, and then free for what comes."""
        _libc.mallopt(_M_MMAP_THRESHOLD, _NEVER)
        _libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        address: int = _libc.malloc(_HEAP)
        start, end = _inner_pages(address, _HEAP)
        os.ftruncate(self._file, self._size + end - start)
        self._map(start, end - start, self._size, mmap.MAP_SHARED)
        _libc.free(address)
        self._mapped_ranges.append((start, end - start, self._size))
        self._heap_end = end
        self._size += end - start

    def _map(self, start: int, size: int, offset: int, kind: int, *, writable: bool = True) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if _libc.mmap(start, size, protection, kind | _MAP_FIXED, self._file, offset) != start:
            raise OSError(ctypes.get_errno(), "the zygote's memory cannot be shared")

    def make_private(self) -> None:
        """From here on a write is a page of one's own. The file has no name, and nobody has it open."""
        for start, size, offset in self._mapped_ranges:
            self._map(start, size, offset, mmap.MAP_PRIVATE)
        self._release_heap_end()
        self._remap_library_variables()
        os.close(self._file)
        _libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)

    def _remap_library_variables(self) -> None:
        """Those of packages only: what this itself uses (Python, ctypes, the C library) may change at any moment."""
        for mapping in _library_variables():
            content = memoryview((ctypes.c_char * mapping.size).from_address(mapping.start))
            os.ftruncate(self._file, self._size + mapping.size)
            if os.pwrite(self._file, content, self._size) != mapping.size:
                return
            with contextlib.suppress(OSError):  # where the loader has sealed it, it stays what it is
                writable = mapping.permissions == "rw-p"
                self._map(mapping.start, mapping.size, self._size, mmap.MAP_PRIVATE, writable=writable)
            self._size += mapping.size

    def _release_heap_end(self) -> None:
        """What the heap has not used is ordinary memory again: there is nothing to share in it."""
        probe: int = _libc.malloc(_SPARE)
        _libc.free(probe)
        size = self._heap_end - probe - _SPARE
        if size <= 0:
            return
        address: int = _libc.malloc(size)
        start, end = _inner_pages(address, size)
        end = min(end, self._heap_end)
        if probe <= address and start < end:
            self._map(start, end - start, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _libc.free(address)


def _library_variables() -> list[MemoryMapping]:
    """What packages' libraries have as variables, those included that only the loader writes (RELRO)."""
    found = [one for one in read_mappings() if _PACKAGES in one.file]
    begin = {one.start for one in found if one.permissions == "rw-p"}
    return [one for one in found if one.start in begin or (one.permissions == "r--p" and one.end in begin)]


def _inner_pages(address: int, size: int) -> tuple[int, int]:
    """Whole pages of a piece, short of what the C library notes beside it."""
    return -(-address // _PAGE) * _PAGE + _PAGE, (address + size) // _PAGE * _PAGE - _PAGE


def _contiguous_ranges(pools: list[int]) -> list[tuple[int, int]]:
    """Neighbouring pools as one: address and size."""
    runs: list[tuple[int, int]] = []
    for pool in pools:
        if runs and sum(runs[-1]) == pool:
            runs[-1] = (runs[-1][0], runs[-1][1] + _POOL)
        else:
            runs.append((pool, _POOL))
    return runs
