"""Counts what a supervisor has on the host, so that a test can tell what is left of it.

The machine may have other supervisors: only what can be told to be this one's counts. Processes and cgroups are
found by the name of its cgroup tree and by descent, loop devices and mounts by its directory for images.
"""

import collections
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.waiting import becomes_true

_CGROUPS = Path("/sys/fs/cgroup")
type Roles = dict[str, list[int]]


@dataclass(frozen=True)
class HostPaths:
    """Where one supervisor has things that bear names; give each its own directories."""

    temporary: Path
    disk_dir: Path


@dataclass(frozen=True, kw_only=True)
class Census:
    """What there is, by kind; two are equal when nothing was left and nothing is missing."""

    processes: frozenset[str] = frozenset()  # by name and number: which pid it is does not matter
    cgroups: frozenset[str] = frozenset()
    loop_devices: frozenset[str] = frozenset()
    mounts: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    descriptors: int = 0  # of the supervisor, the spawner and the zygote

    def growth_over(self, other: "Census") -> dict[str, object]:
        """What is here and not there, for a message."""
        kinds = ("processes", "cgroups", "loop_devices", "mounts", "files")
        more: dict[str, object] = {kind: getattr(self, kind) - getattr(other, kind) for kind in kinds}
        more["descriptors"] = max(self.descriptors - other.descriptors, 0)
        return {kind: found for kind, found in more.items() if found}


@dataclass
class CensusTaker:
    """Counts for one supervisor after another in the same directories; remembers the names of all their trees."""

    paths: HostPaths
    trees: set[str] = field(default_factory=set[str])

    supervisor: int = -1

    def watch_supervisor(self, supervisor: int, trees: list[str]) -> None:
        self.supervisor = supervisor
        self.trees |= {os.path.basename(path) for path in trees}

    def take_census(self) -> Census:
        devices = frozenset(_loop_devices(self.paths.disk_dir))
        names = collections.Counter(_name(pid) for pid in set(self._processes()))
        return Census(
            processes=frozenset(f"{name} {number}" for name in names for number in range(names[name])),
            cgroups=frozenset(self._cgroups()),
            loop_devices=devices,
            mounts=frozenset(_mounts(devices, self.paths)),
            files=frozenset(_files(self.paths)),
            descriptors=sum(map(_descriptors, self._servers())),
        )

    def _servers(self) -> list[int]:
        found = find_processes_by_role(self.supervisor)
        return [self.supervisor, *found["spawner"], *found["zygote"]]

    def own_descriptors(self) -> int:
        """How many the supervisor alone has open."""
        return _descriptors(self.supervisor)

    def _processes(self) -> Iterator[int]:
        yield from descendants(self.supervisor)
        for pid in _pids():
            with contextlib.suppress(OSError):
                if any(tree in Path(f"/proc/{pid}/cgroup").read_text() for tree in self.trees):
                    yield pid

    def _cgroups(self) -> Iterator[str]:
        for tree in self.trees:
            for directory, below, _ in os.walk(_CGROUPS):
                if tree in below:
                    below.remove(tree)
                    for found, _, _ in os.walk(f"{directory}/{tree}"):
                        yield found

    def wait_until_stable(self, seconds: float = 20) -> Census:
        """What a supervisor without sandboxes has, once the last of them is given back."""
        seen: list[Census] = [Census()]

        def calm() -> bool:
            seen.append(self.take_census())
            busy = any(os.path.basename(name).startswith("sb-") for name in seen[-1].cgroups)
            return not busy and not seen[-1].loop_devices and seen[-1] == seen[-2]

        assert becomes_true(calm, seconds), f"it does not come to rest: {seen[-1]}"
        return seen[-1]

    def wait_for_census(self, wanted: Census, seconds: float = 20) -> dict[str, object]:
        """What is still there beyond `wanted` after some patience: the kernel ends things behind our back."""
        beyond: dict[str, object] = {}

        def settled() -> bool:
            nonlocal beyond
            beyond = self.take_census().growth_over(
                wanted
            )  # not taken once more: the supervisor opens files now and then
            return not beyond

        becomes_true(settled, seconds)
        return beyond


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no memory")


def find_processes_by_role(supervisor: int) -> Roles:
    """The processes of a supervisor in mode namespaces by what they are."""
    found: Roles = {role: [] for role in ("jail", "spawner", "zygote", "init", "interpreter", "helper")}
    found["supervisor"] = [supervisor]
    children = _children()
    for jail in children.get(supervisor, []):
        if _name(jail) == "fumehood-jail":
            found["jail"].append(jail)
            found["spawner"] += children.get(jail, [])
    for spawner in found["spawner"]:
        own = _depth(spawner)
        if own == 0:
            continue
        below = {child: _depth(child) for child in children.get(spawner, [])}
        found["init"] += [child for child, depth in below.items() if depth > own]
        # The first that the spawner forks, before it serves anybody, is the zygote. One that has ended since has no
        # place in this order: it would be taken for the first, and the zygote for a helper.
        started = ((_started(child), child) for child, depth in below.items() if depth == own)
        beside = [child for start, child in sorted(started) if start]
        found["zygote"] += beside[:1]
        found["helper"] += beside[1:]
    for zygote in found["zygote"]:
        found["interpreter"] += children.get(zygote, [])
    return found


def descendants(top: int) -> set[int]:
    children = _children()
    found: set[int] = set()
    pending = [top]
    while pending:
        below = children.get(pending.pop(), [])
        found.update(below)
        pending += below
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if state not in "ZX":
                found.setdefault(int(parent), []).append(pid)
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> int:
    """In ticks since the machine was started; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def _depth(pid: int) -> int:
    """In how many PID namespaces a process has a number; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((len(line.split()) for line in lines if line.startswith("NSpid:")), 0)


def _loop_devices(directory: Path) -> Iterator[str]:
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # just cleared
            if path.read_text().startswith(f"{directory}/"):
                yield path.parents[1].name


def _mounts(devices: frozenset[str], paths: HostPaths) -> Iterator[str]:
    """In every mount namespace that a process is in."""
    wanted = [*(f"/dev/{device} " for device in devices), f" {paths.temporary}/", f" {paths.disk_dir}/"]
    for pid in _pids():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
                if any(mark in line for mark in wanted):
                    yield line.split()[4]


def _files(paths: HostPaths) -> Iterator[str]:
    for top in (paths.temporary, paths.disk_dir):
        for directory, below, names in os.walk(top):
            yield from (f"{directory}/{name}" for name in (*below, *names))


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
