"""Ends sandboxes that hoard what the kernel gives without counting it; imports only the standard library.

File locks and TCP connections that nobody has accepted are charged to no cgroup and bounded by no rlimit: one program
could take all memory of the host with them. Many locks on a file that others open as well (/dev/null, a library) slow
down whoever closes it, on the whole host. And the files that a host may open are one number for all. So somebody has to
look. Where the host as a whole has few of these, that is three short reads; only else is it found out whose they are.

Memory is counted, but when that of all sandboxes together is used up the kernel ends the process with the most pages
mapped: whoever keeps files or memfds has none, and a neighbour goes. So before that, the sandbox which holds most is
ended.
"""

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

EVERY = 0.5  # seconds; docs/security.md says what can be taken in that time
MOST_LOCKS = 1024
MOST_SOCKETS = 8192
_FILE_NUMBERS = "/proc/sys/fs/file-nr"
_FEW_FILES = 20  # that part of all that there may be is nobody's concern
_PIECE = 4096
_MEMORY_EVERY = 0.05
_LONGEST_END = 5.0  # then the next one goes
_SPARE, _LEAST_SPARE = 10, 256 << 20  # that part of the memory of all, or so many bytes, is to be left
_LOCKS_READ = 20_000  # at a time: the kernel walks to the end of the last piece for each further one

logger = logging.getLogger(__name__)


class Holder(Protocol):
    """A sandbox; all but `kill` is called from another thread, also when it has just ended."""

    def kill(self, reason: str) -> None: ...

    def processes(self) -> list[int]:
        """Its processes, by the numbers they have here; none where nobody knows. OSError when it has ended."""
        ...

    def first_process(self) -> int | None:
        """Its first process; None for a sandbox without a network namespace of its own."""
        ...

    def own_device(self) -> int | None:
        """The file system on which its files lie, and no others."""
        ...

    def memory_held(self) -> int:
        """Bytes that the kernel could not take back; OSError when it has ended."""
        ...


class Memory(Protocol):
    """That of all sandboxes; OSError when it is not counted any more."""

    def memory_current(self) -> int: ...

    def memory_held(self) -> int: ...


async def watch(holders: Callable[[], Sequence[Holder]]) -> None:
    """Look now and then, for ever."""
    while True:
        await asyncio.sleep(EVERY)
        if watched := holders():
            # In a thread: the kernel lets a reader of locks wait until no processor is about to change one.
            for holder, hoard in await asyncio.to_thread(find, watched):
                holder.kill(f"it held {hoard}")


async def watch_memory(holders: Callable[[], Sequence[Holder]], memory: Memory, most: int) -> None:
    """Look often, for ever; one at a time is ended, and then what it held is waited for."""
    enough = most - max(most // _SPARE, min(_LEAST_SPARE, most // 4))
    now = asyncio.get_running_loop().time
    ending, until = None, 0.0
    while True:
        await asyncio.sleep(_MEMORY_EVERY)
        if now() < until and ending in holders():
            continue
        with contextlib.suppress(OSError):
            if memory.memory_current() <= enough or memory.memory_held() <= enough:
                continue
            if ending := await asyncio.to_thread(_holding_most, holders()):
                ending.kill("all sandboxes together had nearly used up their memory, and it held most of it")
                until = now() + _LONGEST_END


def _holding_most(holders: Sequence[Holder]) -> Holder | None:
    """None where there is one alone: that harms nobody, and its own bound holds."""
    held: list[tuple[int, Holder]] = []
    for holder in holders:
        with contextlib.suppress(OSError):  # it has ended
            held.append((holder.memory_held(), holder))
    return max(held, key=lambda pair: pair[0])[1] if len(held) > 1 else None


def find(holders: Sequence[Holder]) -> list[tuple[Holder, str]]:
    """Those that hold too much, and of what."""
    found: list[tuple[Holder, str]] = []
    for look, hoard in (
        (_by_locks, f"more than {MOST_LOCKS} file locks"),
        (_by_sockets, f"more than {MOST_SOCKETS} TCP sockets"),
        (_by_files, "too many of the files that this host can open (fs.file-max)"),
    ):
        try:
            found += [(holder, hoard) for holder in look(holders)]
        # No descriptors, or a /proc unlike others: the next look may do better.
        except (OSError, ValueError, IndexError) as error:
            logger.debug("Who holds %s could not be found out: %s", hoard, error)
    return found


# ---- locks ------------------------------------------------------------------------------------------------------


def _by_locks(holders: Sequence[Holder]) -> Iterator[Holder]:
    locks = _locks()
    if len(locks) <= MOST_LOCKS:
        return
    by_process = Counter(pid for pid, _ in locks)
    # So each lock is looked at once, however many sandboxes there are.
    by_device: dict[int | None, list[int]] = {}
    for pid, device in locks:
        by_device.setdefault(device, []).append(pid)
    for holder in holders:
        members = _members(holder)
        # A process may have ended and left a lock to another one: on the sandbox's own files it is known all the same.
        left = sum(pid not in members for pid in by_device.get(holder.own_device(), ()))
        if left + sum(by_process[pid] for pid in members) > MOST_LOCKS:
            yield holder


def _locks() -> list[tuple[int, int]]:
    """Process and device of the locks that are held on this host, the latest of each processor first."""
    lines: list[bytes] = []
    rest = b""
    with open("/proc/locks", "rb", buffering=0) as file:
        while len(lines) < _LOCKS_READ and (piece := file.read(_PIECE)):
            *whole, rest = (rest + piece).split(b"\n")
            lines += whole
    return [_lock(fields) for line in lines if (fields := line.split())[1] != b"->"]  # that one only waits


def _lock(fields: list[bytes]) -> tuple[int, int]:
    major, minor, _ = fields[5].split(b":")
    return int(fields[4]), os.makedev(int(major, 16), int(minor, 16))


def _members(holder: Holder) -> set[int]:
    try:
        return set(holder.processes())
    except OSError:  # it has ended
        return set()


# ---- sockets ----------------------------------------------------------------------------------------------------


def _by_sockets(holders: Sequence[Holder]) -> Iterator[Holder]:
    if _figure("/proc/net/sockstat", "TCP:", "alloc") > MOST_SOCKETS:  # those of all network namespaces
        yield from (holder for holder in holders if _sockets(holder.first_process()) > MOST_SOCKETS)


def _sockets(first: int | None) -> int:
    used = 0
    if first is not None:
        with contextlib.suppress(OSError):  # it has ended, or the kernel has no IPv6
            used += _figure(f"/proc/{first}/net/sockstat", "TCP:", "inuse")
            used += _figure(f"/proc/{first}/net/sockstat6", "TCP6:", "inuse")
    return used


def _figure(path: str, subject: str, name: str) -> int:
    with open(path) as file:
        for line in file:
            first, *fields = line.split()
            if first == subject:
                return int(fields[fields.index(name) + 1])
    return 0


# ---- open files -------------------------------------------------------------------------------------------------


def _by_files(holders: Sequence[Holder]) -> Iterator[Holder]:
    """When half of them are in use, whoever has the most: one at a look, as that may do."""
    with open(_FILE_NUMBERS) as file:
        used, _, most = map(int, file.read().split())
    if used > most // 2 and holders:
        counted = [(sum(map(_descriptors, _members(holder))), holder) for holder in holders]
        count, holder = max(counted, key=lambda pair: pair[0])
        if count > most // _FEW_FILES:
            yield holder


def _descriptors(pid: int) -> int:
    """How many descriptors a process has room for: unlike how many it has, anybody may ask that."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:  # else it has ended
        for line in file:
            if line.startswith("FDSize:"):
                return int(line.split()[1])
    return 0
