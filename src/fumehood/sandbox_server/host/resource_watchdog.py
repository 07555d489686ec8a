"""Ends sandboxes that hoard what the kernel gives without counting it.

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

CHECK_INTERVAL = 0.5  # seconds; docs/security.md says what can be taken in that time
MAX_LOCKS = 1024
MAX_SOCKETS = 8192
_FILE_NR_PATH = "/proc/sys/fs/file-nr"
_IGNORED_FILES_DIVISOR = 20  # that part of all that there may be is nobody's concern
_READ_BYTES = 4096
_MEMORY_CHECK_INTERVAL = 0.05
_KILL_TIMEOUT = 5.0  # then the next one goes
_SPARE, _LEAST_SPARE = 10, 256 << 20  # that part of the memory of all, or so many bytes, is to be left
_MAX_LOCKS_READ = 20_000  # at a time: the kernel walks to the end of the last piece for each further one

logger = logging.getLogger(__name__)


class WatchedSandbox(Protocol):
    """A sandbox; all but `kill` is called from another thread, also when it has just ended."""

    def kill(self, reason: str) -> None: ...

    def processes(self) -> list[int]:
        """Its processes, by the numbers they have here; none where nobody knows. OSError when it has ended."""
        ...

    def init_pid(self) -> int | None:
        """Its first process; None for a sandbox without a network namespace of its own."""
        ...

    def device_number(self) -> int | None:
        """The file system on which its files lie, and no others."""
        ...

    def unreclaimable_memory(self) -> int:
        """Bytes that the kernel could not take back; OSError when it has ended."""
        ...


class WatchedMemory(Protocol):
    """That of all sandboxes; OSError when it is not counted any more."""

    def memory_current(self) -> int: ...

    def unreclaimable_memory(self) -> int: ...


async def watch_kernel_objects(list_sandboxes: Callable[[], Sequence[WatchedSandbox]]) -> None:
    """Look now and then, for ever."""
    while True:
        await asyncio.sleep(CHECK_INTERVAL)
        if watched := list_sandboxes():
            # In a thread: the kernel lets a reader of locks wait until no processor is about to change one.
            for holder, hoard in await asyncio.to_thread(find_offenders, watched):
                holder.kill(f"it held {hoard}")


async def watch_memory(
    list_sandboxes: Callable[[], Sequence[WatchedSandbox]], memory: WatchedMemory, limit: int
) -> None:
    """Look often, for ever; one at a time is ended, and then what it held is waited for."""
    enough = limit - max(limit // _SPARE, min(_LEAST_SPARE, limit // 4))
    now = asyncio.get_running_loop().time
    ending, until = None, 0.0
    while True:
        await asyncio.sleep(_MEMORY_CHECK_INTERVAL)
        if now() < until and ending in list_sandboxes():
            continue
        with contextlib.suppress(OSError):
            if memory.memory_current() <= enough or memory.unreclaimable_memory() <= enough:
                continue
            if ending := await asyncio.to_thread(_find_largest, list_sandboxes()):
                ending.kill("all sandboxes together had nearly used up their memory, and it held most of it")
                until = now() + _KILL_TIMEOUT


def _find_largest(holders: Sequence[WatchedSandbox]) -> WatchedSandbox | None:
    """None where there is one alone: that harms nobody, and its own bound holds."""
    held: list[tuple[int, WatchedSandbox]] = []
    for holder in holders:
        with contextlib.suppress(OSError):  # it has ended
            held.append((holder.unreclaimable_memory(), holder))
    return max(held, key=lambda pair: pair[0])[1] if len(held) > 1 else None


def find_offenders(sandboxes: Sequence[WatchedSandbox]) -> list[tuple[WatchedSandbox, str]]:
    """Those that hold too much, and of what."""
    found: list[tuple[WatchedSandbox, str]] = []
    for look, hoard in (
        (_exceeding_locks, f"more than {MAX_LOCKS} file locks"),
        (_exceeding_sockets, f"more than {MAX_SOCKETS} TCP sockets"),
        (_exceeding_open_files, "too many of the files that this host can open (fs.file-max)"),
    ):
        try:
            found += [(holder, hoard) for holder in look(sandboxes)]
        # No descriptors, or a /proc unlike others: the next look may do better.
        except (OSError, ValueError, IndexError) as error:
            logger.debug("Who holds %s could not be found out: %s", hoard, error)
    return found


# ---- locks ------------------------------------------------------------------------------------------------------


def _exceeding_locks(holders: Sequence[WatchedSandbox]) -> Iterator[WatchedSandbox]:
    locks = _read_locks()
    if len(locks) <= MAX_LOCKS:
        return
    by_process = Counter(pid for pid, _ in locks)
    # So each lock is looked at once, however many sandboxes there are.
    by_device: dict[int | None, list[int]] = {}
    for pid, device in locks:
        by_device.setdefault(device, []).append(pid)
    for holder in holders:
        members = _read_pids(holder)
        # A process may have ended and left a lock to another one: on the sandbox's own files it is known all the same.
        left = sum(pid not in members for pid in by_device.get(holder.device_number(), ()))
        if left + sum(by_process[pid] for pid in members) > MAX_LOCKS:
            yield holder


def _read_locks() -> list[tuple[int, int]]:
    """Process and device of the locks that are held on this host, the latest of each processor first."""
    lines: list[bytes] = []
    rest = b""
    with open("/proc/locks", "rb", buffering=0) as file:
        while len(lines) < _MAX_LOCKS_READ and (piece := file.read(_READ_BYTES)):
            *whole, rest = (rest + piece).split(b"\n")
            lines += whole
    return [
        _parse_lock(fields) for line in lines if (fields := line.split())[1] != b"->"
    ]  # that one only waits


def _parse_lock(fields: list[bytes]) -> tuple[int, int]:
    major, minor, _ = fields[5].split(b":")
    return int(fields[4]), os.makedev(int(major, 16), int(minor, 16))


def _read_pids(holder: WatchedSandbox) -> set[int]:
    try:
        return set(holder.processes())
    except OSError:  # it has ended
        return set()


# ---- sockets ----------------------------------------------------------------------------------------------------


def _exceeding_sockets(holders: Sequence[WatchedSandbox]) -> Iterator[WatchedSandbox]:
    if _read_sockstat("/proc/net/sockstat", "TCP:", "alloc") > MAX_SOCKETS:  # those of all network namespaces
        yield from (holder for holder in holders if _count_sockets(holder.init_pid()) > MAX_SOCKETS)


def _count_sockets(first: int | None) -> int:
    used = 0
    if first is not None:
        with contextlib.suppress(OSError):  # it has ended, or the kernel has no IPv6
            used += _read_sockstat(f"/proc/{first}/net/sockstat", "TCP:", "inuse")
            used += _read_sockstat(f"/proc/{first}/net/sockstat6", "TCP6:", "inuse")
    return used


def _read_sockstat(path: str, subject: str, name: str) -> int:
    with open(path) as file:
        for line in file:
            first, *fields = line.split()
            if first == subject:
                return int(fields[fields.index(name) + 1])
    return 0


# ---- open files -------------------------------------------------------------------------------------------------


def _exceeding_open_files(holders: Sequence[WatchedSandbox]) -> Iterator[WatchedSandbox]:
    """When half of them are in use, whoever has the most: one at a look, as that may do."""
    with open(_FILE_NR_PATH) as file:
        used, _, most = map(int, file.read().split())
    if used > most // 2 and holders:
        counted = [(sum(map(_count_descriptors, _read_pids(holder))), holder) for holder in holders]
        count, holder = max(counted, key=lambda pair: pair[0])
        if count > most // _IGNORED_FILES_DIVISOR:
            yield holder


def _count_descriptors(pid: int) -> int:
    """How many descriptors a process has room for: unlike how many it has, anybody may ask that."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:  # else it has ended
        for line in file:
            if line.startswith("FDSize:"):
                return int(line.split()[1])
    return 0
