"""Kills sandboxes that would exhaust the host: they hold too much of what cgroups do not limit.

File locks and TCP connections in the accept queue count in no cgroup and no rlimit: one program could use all memory
of the host with them. Many locks on a shared file (/dev/null, a library) slow down every process that closes it. The
limit of open files is one for the whole host. The watchdog therefore polls: three short reads while the host as a
whole has few of these, and a search for the sandbox otherwise.

Memory is limited, but when all sandboxes together use it up, the kernel kills the process with the most mapped pages.
A sandbox that holds files or memfds has none, so a neighbour would die. Before that happens, the watchdog kills the
sandbox that holds most.
"""

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

CHECK_INTERVAL = 0.5  # seconds; docs/security.md says what can be allocated in that time
MAX_LOCKS = 1024
MAX_SOCKETS = 8192
_FILE_NR_PATH = "/proc/sys/fs/file-nr"
_IGNORED_FILES_DIVISOR = 20  # a sandbox with less than this part of the host's open files is orphaned alone
_READ_BYTES = 4096
_MEMORY_CHECK_INTERVAL = 0.05
_KILL_TIMEOUT = 5.0  # then the next one is killed
_RESERVE_DIVISOR, _MIN_RESERVE = 10, 256 << 20  # part of the total memory, or bytes, to keep free
_MAX_LOCKS_READ = 20_000  # for each read the kernel walks the list from its start

logger = logging.getLogger(__name__)


class WatchedSandbox(Protocol):
    """A sandbox; all methods but `kill` are called from another thread, also when it has just ended."""

    def kill(self, reason: str) -> None: ...

    def processes(self) -> list[int]:
        """Its pids in our namespace; empty if unknown. Raises OSError when it has ended."""
        ...

    def init_pid(self) -> int | None:
        """Pid of its init; None for a sandbox without its own network namespace."""
        ...

    def device_number(self) -> int | None:
        """Device of the file system that holds only its files."""
        ...

    def unreclaimable_memory(self) -> int:
        """Bytes that the kernel cannot reclaim; raises OSError when it has ended."""
        ...


class CombinedMemoryUsage(Protocol):
    """The memory of all sandboxes; raises OSError once it is not counted any more."""

    def memory_current(self) -> int: ...

    def unreclaimable_memory(self) -> int: ...


async def watch_kernel_objects(list_sandboxes: Callable[[], Sequence[WatchedSandbox]]) -> None:
    """Kill sandboxes with too many locks, sockets or open files; runs forever."""
    while True:
        await asyncio.sleep(CHECK_INTERVAL)
        if watched := list_sandboxes():
            # In a thread: a reader of /proc/locks waits for every CPU that changes a lock.
            for sandbox, excess in await asyncio.to_thread(find_offenders, watched):
                sandbox.kill(f"it held {excess}")


async def watch_memory(
    list_sandboxes: Callable[[], Sequence[WatchedSandbox]], memory: CombinedMemoryUsage, limit: int
) -> None:
    """Kill the sandbox that holds most when memory runs out, one at a time; runs forever."""
    threshold = limit - max(limit // _RESERVE_DIVISOR, min(_MIN_RESERVE, limit // 4))
    now = asyncio.get_running_loop().time
    killed, wait_until = None, 0.0
    while True:
        await asyncio.sleep(_MEMORY_CHECK_INTERVAL)
        if now() < wait_until and killed in list_sandboxes():
            continue
        with contextlib.suppress(OSError):
            if memory.memory_current() <= threshold or memory.unreclaimable_memory() <= threshold:
                continue
            if killed := await asyncio.to_thread(_find_largest, list_sandboxes()):
                killed.kill("all sandboxes together had nearly used up their memory, and it held most of it")
                wait_until = now() + _KILL_TIMEOUT


def _find_largest(sandboxes: Sequence[WatchedSandbox]) -> WatchedSandbox | None:
    """None if there is only one: it harms nobody, and its own limit applies."""
    sizes: list[tuple[int, WatchedSandbox]] = []
    for sandbox in sandboxes:
        with contextlib.suppress(OSError):  # it has ended
            sizes.append((sandbox.unreclaimable_memory(), sandbox))
    return max(sizes, key=lambda pair: pair[0])[1] if len(sizes) > 1 else None


def find_offenders(sandboxes: Sequence[WatchedSandbox]) -> list[tuple[WatchedSandbox, str]]:
    """Sandboxes that hold too much, and of what."""
    found: list[tuple[WatchedSandbox, str]] = []
    for find, excess in (
        (_exceeding_locks, f"more than {MAX_LOCKS} file locks"),
        (_exceeding_sockets, f"more than {MAX_SOCKETS} TCP sockets"),
        (_exceeding_open_files, "too many of the files that this host can open (fs.file-max)"),
    ):
        try:
            found += [(sandbox, excess) for sandbox in find(sandboxes)]
        # No descriptors, or an unusual /proc: the next check may succeed.
        except (OSError, ValueError, IndexError) as error:
            logger.debug("Searching for sandboxes with %s failed: %s", excess, error)
    return found


# ---- locks ------------------------------------------------------------------------------------------------------


def _exceeding_locks(sandboxes: Sequence[WatchedSandbox]) -> Iterator[WatchedSandbox]:
    locks = _read_locks()
    if len(locks) <= MAX_LOCKS:
        return
    by_process = Counter(pid for pid, _ in locks)
    # Visits each lock once, however many sandboxes there are.
    by_device: dict[int | None, list[int]] = {}
    for pid, device in locks:
        by_device.setdefault(device, []).append(pid)
    for sandbox in sandboxes:
        members = _read_pids(sandbox)
        # A process may have ended and orphaned a lock to another; on the sandbox's own files it still counts.
        orphaned = sum(pid not in members for pid in by_device.get(sandbox.device_number(), ()))
        if orphaned + sum(by_process[pid] for pid in members) > MAX_LOCKS:
            yield sandbox


def _read_locks() -> list[tuple[int, int]]:
    """Pid and device of the locks held on this host, the latest of each CPU first."""
    lines: list[bytes] = []
    rest = b""
    with open("/proc/locks", "rb", buffering=0) as file:
        while len(lines) < _MAX_LOCKS_READ and (chunk := file.read(_READ_BYTES)):
            *whole, rest = (rest + chunk).split(b"\n")
            lines += whole
    # "->" marks a process that waits for a lock.
    return [_parse_lock(fields) for line in lines if (fields := line.split())[1] != b"->"]


def _parse_lock(fields: list[bytes]) -> tuple[int, int]:
    major, minor, _ = fields[5].split(b":")
    return int(fields[4]), os.makedev(int(major, 16), int(minor, 16))


def _read_pids(sandbox: WatchedSandbox) -> set[int]:
    try:
        return set(sandbox.processes())
    except OSError:  # it has ended
        return set()


# ---- sockets ----------------------------------------------------------------------------------------------------


def _exceeding_sockets(sandboxes: Sequence[WatchedSandbox]) -> Iterator[WatchedSandbox]:
    if _read_sockstat("/proc/net/sockstat", "TCP:", "alloc") > MAX_SOCKETS:  # in all network namespaces
        yield from (sandbox for sandbox in sandboxes if _count_sockets(sandbox.init_pid()) > MAX_SOCKETS)


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


def _exceeding_open_files(sandboxes: Sequence[WatchedSandbox]) -> Iterator[WatchedSandbox]:
    """When the host has half of its open files in use: the sandbox with the most, one per check."""
    with open(_FILE_NR_PATH) as file:
        used, _, limit = map(int, file.read().split())
    if used > limit // 2 and sandboxes:
        counted = [(sum(map(_count_descriptors, _read_pids(sandbox))), sandbox) for sandbox in sandboxes]
        count, sandbox = max(counted, key=lambda pair: pair[0])
        if count > limit // _IGNORED_FILES_DIVISOR:
            yield sandbox


def _count_descriptors(pid: int) -> int:
    """Size of the descriptor table: unlike the number of open descriptors, any user may read it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:  # OSError: it has ended
        for line in file:
            if line.startswith("FDSize:"):
                return int(line.split()[1])
    return 0
