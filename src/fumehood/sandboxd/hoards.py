"""Ends sandboxes that hoard what the kernel gives without counting it; imports only siblings.

File locks and TCP connections that nobody has accepted are charged to no cgroup and bounded by no rlimit: one program
could take all memory of the host with them. And many locks on a file that others open as well (/dev/null, a library)
slow down whoever closes it, on the whole host. So somebody has to look. Where the host as a whole has few of them that
is two short reads; only where it has many is it found out whose they are.
"""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

EVERY = 0.5  # seconds; in that time code can take some 150 MB
MOST_LOCKS = 1024
MOST_SOCKETS = 8192
_PIECE = 4096
_LOCKS_READ = 20_000  # at a time: the kernel walks to the end of the last piece for each further one


@dataclass(frozen=True, slots=True)
class Watched:
    """One sandbox, as far as this module has to know it.

    first: its first process, None before there is one; device: of its own files, where no others lie.
    """

    first: int | None
    device: int | None
    processes: Callable[[], list[int]]
    end: Callable[[str], None]


async def watch(sandboxes: Callable[[], Iterable[Watched]]) -> None:
    """Look now and then, for ever."""
    while True:
        await asyncio.sleep(EVERY)
        if not (watched := [*sandboxes()]):
            continue
        # In a thread: the kernel lets a reader of locks wait until no processor is about to change one.
        for sandbox, hoard in await asyncio.to_thread(find, watched):
            sandbox.end(hoard)


def find(watched: list[Watched]) -> list[tuple[Watched, str]]:
    """Those that hold too much, and of what."""
    found = [(sandbox, f"it held more than {MOST_LOCKS} file locks") for sandbox in _by_locks(watched)]
    found += [(sandbox, f"it held more than {MOST_SOCKETS} TCP sockets") for sandbox in _by_sockets(watched)]
    return found


def _by_locks(watched: list[Watched]) -> list[Watched]:
    locks = _locks()
    if len(locks) <= MOST_LOCKS:
        return []
    by_process = Counter(pid for pid, _ in locks)
    found: list[Watched] = []
    for sandbox in watched:
        members: set[int] = set()
        with contextlib.suppress(OSError):  # it has ended
            members.update(sandbox.processes())
        held = sum(by_process[pid] for pid in members)
        # A process may have ended and left a lock to another one: on the sandbox's own files it is known all the same.
        held += sum(pid not in members and device == sandbox.device for pid, device in locks)
        if held > MOST_LOCKS:
            found.append(sandbox)
    return found


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


def _by_sockets(watched: list[Watched]) -> list[Watched]:
    if _figure("/proc/net/sockstat", "TCP:", "alloc") <= MOST_SOCKETS:  # those of all network namespaces
        return []
    return [one for one in watched if one.first is not None and _sockets(one.first) > MOST_SOCKETS]


def _sockets(first: int) -> int:
    used = 0
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
