"""Measures processes: memory, CPU time, descriptors, mounts, cgroups."""

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_CPUACCT = Path("/sys/fs/cgroup/cpuacct")
_UNIFIED = Path("/sys/fs/cgroup")


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def process_tree(pid: int) -> Iterator[int]:
    """The process and its descendants."""
    pending = [pid]
    while pending:
        yield (pid := pending.pop())
        pending += children(pid)


def pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def group_by_namespace(pid: int) -> dict[str, list[int]]:
    """Descendants by PID namespace: one namespace is one sandbox."""
    found: dict[str, list[int]] = {}
    for one in process_tree(pid):
        found.setdefault(pid_namespace(one), []).append(one)
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size in bytes: private memory and its share of shared memory."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_seconds(pid: int) -> float:
    """CPU seconds of the process without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def cpu_clock(pid: int) -> float:
    """The same in nanoseconds, with ended threads, for short work."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) has it


def resident_bytes(pid: int) -> int:
    """Resident set size in bytes."""
    return _status(pid, "VmRSS:")


def peak_resident_bytes(pid: int) -> int:
    """Peak resident set size since the start, or since `forget_peak`."""
    return _status(pid, "VmHWM:")


def reset_peak(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/{pid}/status has no {name}")


class MeasurementUnavailable(Exception):
    """The CPU time of ended processes cannot be measured here."""


class CpuMeter:
    """CPU seconds of a process tree, with those that have ended.

    As root with the controller cpuacct in a hierarchy of its own, in a cgroup into which the tree is moved; else
    from the cgroups that the sandboxes are in on v2, with what the server itself has used.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._group = _CPUACCT / f"bench-{secrets.token_hex(4)}"
        self._own = _CPUACCT.is_dir() and os.access(_CPUACCT, os.W_OK)
        if self._own:
            self._group.mkdir()
        else:
            self.cpu_seconds()

    def adopt(self, pids: Iterable[int]) -> None:
        """Count these, and what they start from now on."""
        if not self._own:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (self._group / "cgroup.procs").write_text(str(pid))

    def cpu_seconds(self) -> float:
        if self._own:
            return int((self._group / "cpuacct.usage").read_text()) / 1e9
        return cpu_seconds(self._root) + sum(_cgroup_cpu(group) for group in self._groups())

    def _groups(self) -> set[Path]:
        """Where the sandboxes are on v2: the parent of the zygote's own cgroup, which keeps what the dead used."""
        own = pid_namespace(self._root)
        zygotes = [pid for pid in process_tree(self._root) if pid_namespace(pid) not in ("", own)][:1]
        found: set[Path] = set()
        for pid in zygotes:
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                group = _UNIFIED / line.removeprefix("0::/") / ".."
                if line.startswith("0::") and (group / "cpu.stat").exists():
                    found.add(group)
        if not found:
            raise MeasurementUnavailable("neither the controller cpuacct nor cgroup v2 counts it.")
        return found

    def close(self) -> None:
        if not self._own:
            return
        for pid in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (_CPUACCT / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            self._group.rmdir()


def _cgroup_cpu(group: Path) -> float:
    for line in (group / "cpu.stat").read_text().splitlines():
        if line.startswith("usage_usec"):
            return int(line.split()[1]) / 1e6
    return 0.0


@dataclass(frozen=True)
class ResourceCount:
    """Counts of what could leak: in the server's process tree, and by the server's name."""

    processes: int
    descriptors: int
    mounts: int
    cgroups: int
    files: int

    @classmethod
    def count(cls, root: int) -> "ResourceCount":
        processes = list(process_tree(root))
        return cls(
            processes=len(processes),
            descriptors=sum(_descriptors(pid) for pid in processes),
            mounts=sum(_mounts(pid) for pid in processes),
            cgroups=sum(1 for _ in _cgroups(root)),
            files=sum(1 for _ in _files()),
        )

    def growth_since(self, before: "ResourceCount") -> dict[str, int]:
        was, now = asdict(before), asdict(self)
        return {name: now[name] - was[name] for name in now if now[name] > was[name]}


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _mounts(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/mountinfo").read_bytes().count(b"\n")
    except OSError:
        return 0


def _cgroups(root: int) -> Iterator[str]:
    """Cgroups of this server's sandboxes, in any hierarchy."""
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        if f"/fumehood-{root}-" in directory:
            yield from names


def _files() -> Iterator[str]:
    for place in ("/tmp", "/dev/shm", "/run"):
        with contextlib.suppress(OSError):
            yield from (name for name in os.listdir(place) if name.startswith("fumehood"))
