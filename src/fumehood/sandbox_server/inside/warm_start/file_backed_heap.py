"""Puts the zygote's heap into a memory file (memfd), so that forking it is cheap.

A fork copies a page-table entry for each page of anonymous memory, twenty thousand here, and its exit frees them all:
more work than the rest of a sandbox's start. File pages are not copied: the child maps them when it uses them. So the
memory that preloading fills is a memfd mapped shared; afterwards the same pages are mapped private, and writes from
then on are copied.

Memory in use is never remapped. Python allocates many objects that nobody uses; their pools are replaced by file pages
with the same content; then the objects are freed, and later objects use that memory. The free end of the C library's
heap is empty, so it is remapped directly.

Without it a sandbox takes 1.17 to 1.23 times the CPU time and twice the memory. The plain way is to do nothing, as for
a server with a single sandbox.
"""

import ctypes
import mmap
import os
from collections import Counter

_PAGE = mmap.PAGESIZE
_POOL = 16 << 10  # pymalloc's pool of objects of one size
_BLOCK = 496  # a size class
_BLOCKS = 32  # blocks of that size in a pool
_EMPTY_BYTES = 33  # size of an empty `bytes` object
_KEEP_EVERY = 512 << 10  # keep a block alive in each arena, or Python would free it
_OBJECTS = 44 << 20  # preloading the usual packages takes this much
_HEAP = 40 << 20
_SPARE = 1 << 20  # larger than any hole in the heap
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = (1 << 31) - 1
_MMAP_BYTES, _TRIM_BYTES = 4 << 20, 16 << 20  # for programs: between glibc's defaults and their maximum
_MAP_FIXED = 0x10

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
    """Keeps the memory of imports in a file that forks share. Create it before them, call `make_private` after them."""

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
        """Remap a large block at the end of the heap while it is empty, then free it for later allocations."""
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

    def _map(self, start: int, size: int, offset: int, kind: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(start, size, protection, kind | _MAP_FIXED, self._file, offset) != start:
            raise OSError(ctypes.get_errno(), "the zygote's heap could not be mapped to a file")

    def make_private(self) -> None:
        """Map the file privately, so that writes are copied from now on, and close it; nobody else has it open."""
        for start, size, offset in self._mapped_ranges:
            self._map(start, size, offset, mmap.MAP_PRIVATE)
        self._release_heap_end()
        os.close(self._file)
        _libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)

    def _release_heap_end(self) -> None:
        """Map the unused end of the heap as anonymous memory again: it holds nothing to share."""
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


def _inner_pages(address: int, size: int) -> tuple[int, int]:
    """Return the bounds of the whole pages within a block, without the C library's bookkeeping beside it."""
    return -(-address // _PAGE) * _PAGE + _PAGE, (address + size) // _PAGE * _PAGE - _PAGE


def _contiguous_ranges(pools: list[int]) -> list[tuple[int, int]]:
    """Join neighbouring pools: address and size of each range."""
    ranges: list[tuple[int, int]] = []
    for pool in pools:
        if ranges and sum(ranges[-1]) == pool:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + _POOL)
        else:
            ranges.append((pool, _POOL))
    return ranges
