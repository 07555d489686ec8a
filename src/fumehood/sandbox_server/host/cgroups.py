"""Limits memory, processes and CPU of sandboxes with cgroups.

    open_tree() ─ CgroupTree            one parent cgroup per supervisor, with the limits of all sandboxes together
                   ├─ create("zygote")  the process that sandboxes are forked from
                   └─ create("sb-1")    one Cgroup per sandbox

On v1 the tree exists once in each hierarchy, below the supervisor's own cgroup. On v2 a cgroup has either processes
or children, so the supervisor first moves into a leaf of its own if necessary.
"""

import errno
import fcntl
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fumehood.sandbox_server.host.cgroup_discovery import (
    REQUIRED_CONTROLLERS,
    CgroupUnavailable,
    CgroupVersion,
    DelegatedCgroup,
    enable_controllers,
    find_mounts,
    find_parents_v1,
    prepare_parent_v2,
    read_control_file,
    read_member_pids,
    to_unavailable,
    write_control_file,
)

__all__ = [
    "Cgroup",
    "CgroupLimits",
    "CgroupTree",
    "CgroupUnavailable",
    "open_join_fds",
    "open_tree",
    "remove_stale_trees",
]

REMOVE_TIMEOUT = 5.0
_QUOTA_PERIOD_US = 100_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_TREE_NAME = re.compile(r"fumehood-(?P<pid>\d+)-(?P<start>\d+)-(?P<pidns>\d+)-[0-9a-f]{8}")
_MEMORY_LIMIT = {"v1": "memory.limit_in_bytes", "v2": "memory.max"}
_MEMORY_USAGE = {"v1": "memory.usage_in_bytes", "v2": "memory.current"}
_OOM_COUNTS = {"v1": "memory.oom_control", "v2": "memory.events"}
_V1_MEMSW = "memory.memsw.limit_in_bytes"
_V1_TCP = "memory.kmem.tcp.limit_in_bytes"
_V1_TCP_BYTES = 64 << 20


@dataclass(frozen=True)
class CgroupLimits:
    """The limits of one sandbox; `cpus` is a hard quota."""

    memory: int
    pids: int
    cpus: float | None = None

    def __post_init__(self) -> None:
        if self.memory <= 0 or self.pids <= 0:
            raise ValueError(f"Limits out of range: {self}")


# --- Killing and removing------------------------------------------------------------------------------


def _rmdir(cgroup: str, dir_fd: int | None = None) -> bool:
    try:
        os.rmdir(cgroup, dir_fd=dir_fd)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True


def _kill_once(cgroup: str, dir_fd: int | None = None) -> None:
    """Send SIGKILL to every member once; forking is disabled first, so that repeating this terminates."""
    with suppress(OSError):
        write_control_file(f"{cgroup}/pids.max", 0, dir_fd)
    try:
        write_control_file(f"{cgroup}/cgroup.kill", 1, dir_fd)
    except OSError:  # v1, or v2 before Linux 5.14
        with suppress(FileNotFoundError):
            pids = read_member_pids(cgroup, dir_fd)
            for start in range(0, len(pids), 64):
                _kill_batch(pids[start : start + 64], cgroup, dir_fd)


def _kill_batch(pids: Sequence[int], cgroup: str, dir_fd: int | None) -> None:
    # A pid may be reused between reading the list and the signal. So pin the processes first, then signal those
    # whose pid is *still* listed.
    pinned: dict[int, int] = {}
    try:
        for pid in pids:
            if pid not in (0, os.getpid()):
                with suppress(ProcessLookupError):
                    pinned[pid] = os.pidfd_open(pid)
        for pid in pinned.keys() & set(read_member_pids(cgroup, dir_fd)):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pinned[pid], signal.SIGKILL)
    finally:
        for fd in pinned.values():
            os.close(fd)


def _retry_until(attempt: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    delay = 0.0005
    while not attempt():
        if time.monotonic() >= deadline:
            return False
        time.sleep(delay)
        delay = min(delay * 2, 0.02)
    return True


def _try_destroy(cgroup: Path) -> bool:
    """Kill and remove a cgroup with everything below it, without waiting; returns whether it is gone."""
    if _rmdir(str(cgroup)):
        return True
    _kill_once(str(cgroup))
    # Every child is tried even when one of them is still busy.
    removed = [_try_destroy(child) for child in _list_children(cgroup)]
    return all(removed) and _rmdir(str(cgroup))


def _list_children(cgroup: Path) -> list[Path]:
    try:
        with os.scandir(cgroup) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, PermissionError):
        return []


# --- One sandbox ----------------------------------------------------------------------------------


class Cgroup:
    """The cgroup of one sandbox, in every hierarchy of its tree. Created by `CgroupTree.create`.

    Methods raise OSError (FileNotFoundError once the cgroup is removed), except for `kill`, `try_remove` and
    `remove`, which may be called at any time and any number of times.
    """

    __slots__ = ("_memory", "_tree", "name")

    def __init__(self, tree: "CgroupTree", name: str) -> None:
        self.name = name
        self._tree = tree
        self._memory: int | None = None

    def open_join_fds(self) -> list[int]:
        """Open the member list of every hierarchy; a process joins by writing "0" to each. The caller closes them.

        Only for single-threaded processes: on v1 it is the list of threads, because moving a whole process waits for
        an RCU grace period (10 ms and more), and moving the calling thread does not.

        The kernel checks the opener's rights, not the writer's (before Linux 5.16, both), so code in a sandbox must
        never hold these. On v1 a supervisor that is not root may only move processes of its own uid: join before
        changing the uid.
        """
        members = "tasks" if self._tree.version == "v1" else "cgroup.procs"
        fds: list[int] = []
        try:
            for dir_fd in self._tree.directory_fds():
                fd = os.open(f"{self.name}/{members}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=dir_fd)
                fds.append(fd)
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def add(self, pid: int) -> None:
        for dir_fd in self._tree.directory_fds():
            write_control_file(f"{self.name}/cgroup.procs", pid, dir_fd)

    def apply(self, limits: CgroupLimits) -> None:
        self.set_memory(limits.memory)
        write_control_file(f"{self.name}/pids.max", limits.pids, self._tree.directory_fd("pids"))
        if self._tree.version == "v1":
            # Only on v1 the memory limit does not include TCP socket buffers.
            with suppress(FileNotFoundError):
                write_control_file(f"{self.name}/{_V1_TCP}", _V1_TCP_BYTES, self._tree.directory_fd("memory"))
        if limits.cpus is not None and self._tree.has_cpu:
            _set_quota(self.name, limits.cpus, self._tree.version, self._tree.directory_fd("cpu"))

    def set_weight(self, weight: int) -> None:
        """CPU weight on v2's scale (1 to 10000, default 100); requires `has_cpu`."""
        dir_fd = self._tree.directory_fd("cpu")
        if self._tree.version == "v1":
            # As the kernel maps them: v2's default of 100 is v1's default of 1024.
            write_control_file(f"{self.name}/cpu.shares", weight * 1024 // 100, dir_fd)
        else:
            write_control_file(f"{self.name}/cpu.weight", weight, dir_fd)

    def set_memory(self, limit: int) -> None:
        """Set the limit, without swap. Below current usage v1 raises EBUSY and v2 kills a member."""
        _set_memory(self.name, limit, self._memory, self._tree)
        self._memory = limit

    def memory_current(self) -> int:
        return int(self._read_value("memory", _MEMORY_USAGE[self._tree.version]))

    def unreclaimable_memory(self) -> int:
        """Bytes that the kernel cannot reclaim: everything except the page cache of files."""
        counts = _parse_stat(self._read_value("memory", "memory.stat"))
        return self.memory_current() - counts["inactive_file"] - counts["active_file"]

    def oom_kills(self) -> int:
        """Number of members that the kernel has killed for lack of memory."""
        for line in self._read_value("memory", _OOM_COUNTS[self._tree.version]).splitlines():
            key, _, count = line.partition(" ")
            if key == "oom_kill":
                return int(count)
        return 0

    def processes(self) -> list[int]:
        """Pids of the members in our pid namespace."""
        found: set[int] = set()
        for dir_fd in self._tree.directory_fds():
            found.update(read_member_pids(self.name, dir_fd))
        return sorted(found - {0})

    def kill(self, seconds: float = REMOVE_TIMEOUT) -> bool:
        """Kill every member and wait until they are gone; afterwards nothing can fork here."""
        return _retry_until(self._kill_attempt, seconds)

    def _kill_attempt(self) -> bool:
        empty = True
        for dir_fd in self._tree.open_directory_fds():
            with suppress(FileNotFoundError):
                if read_member_pids(self.name, dir_fd):
                    _kill_once(self.name, dir_fd)
                    empty = False
        return empty

    def try_remove(self) -> bool:
        """One step of `remove`, without waiting; returns whether it is gone."""
        gone = True
        for dir_fd in self._tree.open_directory_fds():
            # Nearly always the sandbox is dead already and rmdir is enough.
            if _rmdir(self.name, dir_fd):
                continue
            _kill_once(self.name, dir_fd)
            gone = _rmdir(self.name, dir_fd) and gone
        return gone

    def remove(self, seconds: float = REMOVE_TIMEOUT) -> bool:
        """Kill all members and remove the cgroup; False if a member is left after `seconds`."""
        return _retry_until(self.try_remove, seconds)

    def _read_value(self, controller: str, file: str) -> str:
        return read_control_file(f"{self.name}/{file}", self._tree.directory_fd(controller))


def _parse_stat(stat: str) -> dict[str, int]:
    return {name: int(count) for name, count in map(str.split, stat.splitlines())}


def _set_memory(cgroup: str, limit: int, previous: int | None, tree: "CgroupTree") -> None:
    dir_fd = tree.directory_fd("memory")
    files = [_MEMORY_LIMIT[tree.version]]
    if tree.has_memsw:
        files.append(_V1_MEMSW)
        # memory <= memory+swap must hold at every moment; a new cgroup has no limit, so the first one lowers it.
        if previous is not None and limit > previous:
            files.reverse()
    for file in files:
        write_control_file(f"{cgroup}/{file}", limit, dir_fd)


def _set_quota(cgroup: str, cpus: float, version: str, dir_fd: int | None) -> None:
    quota = max(1000, int(cpus * _QUOTA_PERIOD_US))
    try:
        if version == "v2":
            write_control_file(f"{cgroup}/cpu.max", f"{quota} {_QUOTA_PERIOD_US}", dir_fd)
        else:
            write_control_file(f"{cgroup}/cpu.cfs_quota_us", quota, dir_fd)  # per default period
    except OSError as error:
        # v1 refuses (EINVAL) a quota above an ancestor's, which applies anyway; a kernel may lack quotas.
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise


# --- All sandboxes of one supervisor --------------------------------------------------------------


class CgroupTree:
    """The parent cgroup of one supervisor's sandboxes. Created by `open_tree`; `close` removes everything."""

    def __init__(
        self,
        version: CgroupVersion,
        parents: Sequence[DelegatedCgroup],
        name: str,
        undo_preparation: Callable[[], None] | None = None,
    ) -> None:
        self.version: CgroupVersion = version
        self.name = name
        self.has_memsw = False
        self._undo_preparation = undo_preparation
        self.paths: list[Path] = []
        self._fds: list[int] = []
        self._by_controller: dict[str, int] = {}
        try:
            for parent in parents:
                self._create_below(parent)
        except OSError:
            self.close()
            raise

    @property
    def has_cpu(self) -> bool:
        return "cpu" in self._by_controller

    def _create_below(self, parent: DelegatedCgroup) -> None:
        path = parent.path / self.name
        try:
            os.mkdir(path, 0o755)
        except OSError:
            if parent.controllers & REQUIRED_CONTROLLERS:
                raise
            return
        self.paths.append(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._fds.append(fd)
        # Shows supervisors in other pid namespaces, who cannot see our pid, that this tree is in use.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._by_controller |= dict.fromkeys(parent.controllers, fd)

    def set_limits(self, memory: int | None, cpus: float | None, pids: int | None) -> None:
        """Set the limits of the whole tree and enable the controllers for the sandboxes."""
        if self.version == "v1":
            memory_fd = self.directory_fd("memory")
            self.has_memsw = os.access(_V1_MEMSW, os.W_OK, dir_fd=memory_fd)
            with suppress(OSError):  # Absent on new kernels, where children always count in their parents.
                write_control_file("memory.use_hierarchy", 1, memory_fd)
        else:
            with suppress(OSError):  # Absent without swap accounting. Applies to all below.
                write_control_file("memory.swap.max", 0, self.directory_fd("memory"))
        if memory is not None:
            _set_memory(".", memory, None, self)
        if pids is not None:
            write_control_file("pids.max", pids, self.directory_fd("pids"))
        if cpus is not None and self.has_cpu:
            _set_quota(".", cpus, self.version, self.directory_fd("cpu"))
        if self.version == "v2":
            enabled = enable_controllers(self.paths[0], frozenset(self._by_controller))
            self._by_controller = dict.fromkeys(enabled, self._fds[0])

    def memory_current(self) -> int:
        """Bytes used by the whole tree."""
        return int(read_control_file(_MEMORY_USAGE[self.version], self.directory_fd("memory")))

    def unreclaimable_memory(self) -> int:
        """The part of it that the kernel cannot reclaim.

        Negative dentries stay in memory until it is needed, even after their sandbox is gone. v1 does not separate
        them from other kernel memory of the tree, so there no kernel memory is counted.
        """
        counts = _parse_stat(read_control_file("memory.stat", self.directory_fd("memory")))
        if self.version == "v1":
            return counts["total_rss"] + counts["total_shmem"]
        kernel = counts.get("kernel", 0) - counts.get("slab_reclaimable", 0)
        return counts["anon"] + counts["shmem"] + max(kernel, 0)

    def directory_fds(self) -> list[int]:
        """The tree's directories, one per hierarchy; raises FileNotFoundError once closed."""
        if not self._fds:
            raise FileNotFoundError(errno.ENOENT, "The cgroup tree is closed", self.name)
        return self._fds

    def open_directory_fds(self) -> list[int]:
        return self._fds

    def directory_fd(self, controller: str) -> int:
        self.directory_fds()
        return self._by_controller[controller]

    def create(self, name: str, limits: CgroupLimits | None = None) -> Cgroup:
        """Create a child cgroup; raises OSError (FileExistsError) and then leaves nothing.

        Without `limits` only the tree's apply: for the zygote, whose children join from inside the delegated subtree.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"Not a cgroup name: {name!r}")
        created_in: list[int] = []
        cgroup = Cgroup(self, name)
        try:
            for dir_fd in self.directory_fds():
                os.mkdir(name, 0o755, dir_fd=dir_fd)
                created_in.append(dir_fd)
            if limits is not None:
                cgroup.apply(limits)
        except OSError:
            for dir_fd in created_in:
                _rmdir(name, dir_fd)
            raise
        return cgroup

    def close(self, seconds: float = REMOVE_TIMEOUT) -> bool:
        """Kill and remove everything in the tree and the tree; False if something is left after `seconds`."""
        removed = _retry_until(self._close_attempt, seconds)
        fds, self._fds = self._fds, []
        self._by_controller.clear()
        for fd in fds:
            os.close(fd)
        if removed and self._undo_preparation is not None:
            undo, self._undo_preparation = self._undo_preparation, None
            undo()
        return removed

    def _close_attempt(self) -> bool:
        removed = [_try_destroy(path) for path in self.paths]
        return all(removed)


def open_tree(
    *,
    memory_total: int | None,
    cpus: float | None,
    pids_total: int | None,
    name: str | None = None,
    root: Path = Path("/sys/fs/cgroup"),
    proc: Path = Path("/proc"),
) -> CgroupTree:
    """Create the supervisor's parent cgroup with the limits of all sandboxes together (None: no limit).

    name: for tests; `remove_stale_trees` does not recognise such a tree.
    Raises CgroupUnavailable if memory or pids cannot be limited; without a cpu controller `has_cpu` is False.
    """
    identity = f"{os.getpid()}-{read_start_time(proc, 'self')}-{_read_pid_namespace(proc)}"
    name = name or f"fumehood-{identity}-{secrets.token_hex(4)}"
    if not _NAME.fullmatch(name):
        raise ValueError(f"Not a cgroup name: {name!r}")
    mounts = list(find_mounts(root, proc))
    unified = next((m for m in mounts if m.version == "v2" and m.controllers >= REQUIRED_CONTROLLERS), None)
    try:
        if unified is not None:
            parent, undo = prepare_parent_v2(unified)
            tree = CgroupTree("v2", [parent], name, undo)
        else:
            tree = CgroupTree("v1", find_parents_v1(mounts, root), name)
    except OSError as error:
        raise to_unavailable(error, "v1" if unified is None else "v2") from error
    try:
        tree.set_limits(memory_total, cpus, pids_total)
    except OSError as error:
        tree.close()
        raise to_unavailable(error, tree.version) from error
    return tree


@contextmanager
def open_join_fds(cgroup: Cgroup | None) -> Generator[list[int]]:
    """`Cgroup.open_join_fds`, closed after the block; none without a cgroup."""
    fds = [] if cgroup is None else cgroup.open_join_fds()
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


# --- Trees of dead supervisors --------------------------------------------------------------------


def remove_stale_trees(
    *,
    root: Path = Path("/sys/fs/cgroup"),
    proc: Path = Path("/proc"),
    directories: Iterable[Path] | None = None,
    seconds: float = REMOVE_TIMEOUT,
) -> list[Path]:
    """Kill and remove the trees of dead supervisors of our uid; returns their paths.

    Searches all mounted hierarchies (a supervisor started in another session had another parent cgroup), or only
    `directories`. Safe beside live supervisors, and when several do it at once.
    """
    if directories is None:
        found = [tree for mount in find_mounts(root, proc) for tree in _find_trees(mount.path)]
    else:
        found = [
            child
            for path in directories
            for child in _list_children(path)
            if _TREE_NAME.fullmatch(child.name)
        ]
    return [tree for tree in found if _remove_if_stale(tree, proc, seconds)]


def _find_trees(top: Path) -> Iterator[Path]:
    for child in _list_children(top):
        if _TREE_NAME.fullmatch(child.name):
            yield child
        else:
            yield from _find_trees(child)


def _remove_if_stale(tree: Path, proc: Path, seconds: float) -> bool:
    match = _TREE_NAME.fullmatch(tree.name)
    if match is None:
        return False
    same_namespace = int(match["pidns"]) == _read_pid_namespace(proc)
    if same_namespace and read_start_time(proc, match["pid"]) == int(match["start"]):
        return False
    try:
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        # Not in our own namespace: children forked by a dead supervisor may still hold the lock.
        if not same_namespace:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _retry_until(lambda: _try_destroy(tree), seconds)
    except OSError:
        return False
    finally:
        os.close(fd)


def _read_pid_namespace(proc: Path) -> int:
    try:
        return os.stat(proc / "self/ns/pid").st_ino
    except OSError:
        return 0


def read_start_time(proc: Path, pid: str) -> int | None:
    """Start time of a process in clock ticks after boot; None if it is dead."""
    try:
        state, *fields = read_control_file(str(proc / pid / "stat")).rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])
