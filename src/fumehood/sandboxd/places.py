"""What sandboxes take of the host: cgroups, users, directories, disks; imports `fumehood.protocol` and siblings."""

import asyncio
import contextlib
import logging
import os
import secrets
from collections import deque
from dataclasses import dataclass

from fumehood.protocol.sandbox import MEMORY_TIERS, MemoryTier
from fumehood.protocol.sandbox_errors import AtCapacity
from fumehood.sandboxd import cgroups, remains
from fumehood.sandboxd.cgroups import Cgroup, CgroupLimits, CgroupTree, CgroupUnavailable
from fumehood.sandboxd.disks import Disk, Disks
from fumehood.sandboxd.errors import IsolationUnavailable
from fumehood.sandboxd.inside import jail, layout
from fumehood.sandboxd.launching import root_entries
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.users import UserRange, reserve_users, subordinate_users

logger = logging.getLogger(__name__)

# What makes sandboxes works for all, and no code runs in its cgroup: as many as may be busy must not hold up a new one.
_ZYGOTE_WEIGHT = 10_000
_LIMITS_ADVICE = (
    "Or set limits to best-effort, which runs code without a bound on memory: one program can then use up the "
    "host's."
)


@dataclass(slots=True)
class Place:
    """What was taken for one sandbox, and is given back after its end.

    scratch: degraded mode: the host directory that holds its files.
    directly_readable: False when the supervisor may not read the files, or could have to wait for a disk.
    disk: large tiers: holds its files, which else are in memory.
    """

    uid: int
    cgroup: Cgroup | None
    scratch: str | None
    directly_readable: bool
    disk: Disk | None = None

    @property
    def work_directory(self) -> str:
        return layout.DATA if self.scratch is None else f"{self.scratch}/data"

    def environment(self) -> dict[str, str]:
        """What differs from `layout.ENVIRON`."""
        if self.scratch is None:
            return {}
        return {
            "OUTPUT_DIR": self.work_directory,
            "TMPDIR": f"{self.scratch}/tmp",
            "HOME": f"{self.scratch}/home",
        }


_NOWHERE = Place(uid=0, cgroup=None, scratch=None, directly_readable=False)


def data_quota(memory: MemoryTier) -> int:
    """Files count as memory: at most half of the tier may be files."""
    return MEMORY_TIERS[memory] // 2


class Places:
    """The host's side of all sandboxes of one supervisor; `open` raises IsolationUnavailable, OSError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._free_uids: deque[int] = deque()
        self._scratch_root: remains.Scratch | None = None
        self.tree: CgroupTree | None = None
        self.zygote_cgroup: Cgroup | None = None
        self.users: UserRange | None = None
        self.scratch: str | None = None
        self.disks: Disks | None = None

    def open(self) -> None:
        if self._settings.mode == "pod":
            return
        self._open_cgroups()
        self._find_users()
        self.disks = Disks(self._settings, None if self.users is None else self.users.zygote)
        if self._settings.mode == "unsafe-degraded":
            self._scratch_root = remains.Scratch()
            self.scratch = self._scratch_root.path
            os.chmod(self.scratch, 0o711)  # noqa: S103 - sandboxes may enter, not list it

    def _open_cgroups(self) -> None:
        try:
            self.tree = cgroups.open_tree(
                memory_total=self._settings.aggregate_memory(),
                cpus=self._settings.cpus_total,
                pids_total=self._settings.aggregate_processes(),
            )
        except CgroupUnavailable as error:
            if self._settings.limits == "enforced":
                raise IsolationUnavailable(error.reason, f"{error.advice} {_LIMITS_ADVICE}") from error
            logger.warning(
                "Limits are best-effort: %s The memory of sandboxes is not bounded, and processors are shared "
                "without a limit.",
                error.reason,
            )
            return
        self.zygote_cgroup = self.tree.leaf("zygote")
        if self.tree.has_cpu:
            self.zygote_cgroup.set_weight(_ZYGOTE_WEIGHT)

    def _find_users(self) -> None:
        """Kernel users for sandboxes: as root a block of our own, else what /etc/subuid grants, else none."""
        if os.geteuid() == 0:
            self.users = reserve_users(self._settings.uid_base)
        elif self._settings.mode == "namespaces":
            self.users = subordinate_users()
        if self.users is not None:
            self._free_uids.extend(range(1, self.users.count))

    def take(self, number: int, memory: MemoryTier, disk: Disk | None, undo: contextlib.ExitStack) -> Place:
        """A place for one sandbox; `undo` gives everything but the disk back. Raises AtCapacity, OSError."""
        uid = 0
        if self.users is not None and self._settings.mode == "namespaces":
            if not self._free_uids:  # never two sandboxes under one user where each can have its own
                raise AtCapacity(
                    f"All {self.users.count - 1} users for sandboxes are taken; delete a sandbox, or wait."
                )
            uid = self._free_uids.popleft()
            undo.callback(self._free_uids.append, uid)
        cgroup = None
        if self.tree is not None:
            limits = CgroupLimits(
                memory=MEMORY_TIERS[memory], pids=self._settings.processes, cpus=self._settings.cpus
            )
            cgroup = self.tree.create(f"sb-{number}", limits)
            undo.callback(cgroup.remove)
        # Whoever looks something up on a disk waits for it: its own helper may, the supervisor must not.
        readable = disk is None and (
            os.geteuid() == 0 or (self.users is None and self._settings.mode != "pod")
        )
        scratch = None
        if self.scratch is not None:
            # Sandboxes share a user in this mode: that they do not know the name keeps them out of each other's.
            scratch = self._make_scratch(f"{self.scratch}/{secrets.token_hex(16)}")
        return Place(uid=uid, cgroup=cgroup, scratch=scratch, directly_readable=readable, disk=disk)

    def _make_scratch(self, path: str) -> str:
        """A host directory in place of the private file system that degraded mode does not have."""
        for directory in (path, *(f"{path}/{name}" for name in ("data", "tmp", "home"))):
            self.make_directory(directory)
        return path

    def make_directory(self, path: str) -> None:
        os.mkdir(path, 0o700)
        if self.users is not None:
            os.chown(path, self.users.zygote, self.users.zygote)

    def plan(
        self, place: Place = _NOWHERE, *, memory: MemoryTier = "1g", fresh_interpreter: bool = False
    ) -> jail.Plan:
        """What the first process of a sandbox is told; without a place, what all of them have in common."""
        namespaces = self._settings.mode == "namespaces"
        read_only = layout.READ_ONLY if namespaces else layout.POD_READ_ONLY
        writable = layout.WRITABLE
        if place.scratch is not None:
            read_only = ("/usr", *root_entries(), f"{self.scratch}/cache")
            writable = (place.scratch,)
        return jail.Plan(
            walls="namespaces" if namespaces else "process",
            uid=place.uid,
            data_bytes=data_quota(memory),
            data_inodes=self._settings.inodes,
            processes=self._settings.processes,
            open_files=self._settings.open_files,
            fresh_interpreter=fresh_interpreter,
            writable=list(writable),
            read_only=list(read_only),
            deny_tcp=self._settings.mode == "unsafe-degraded",
            needs_landlock=self._settings.mode == "unsafe-degraded",
            work_directory=place.work_directory,
            disk=place.disk is not None,
        )

    async def give_back(self, place: Place) -> None:
        """After its sandbox has ended; waits until the kernel has let go of the cgroup."""
        if place.cgroup is not None and not await _removed(place.cgroup):
            logger.error("The cgroup %s could not be removed.", place.cgroup.name)
            place.uid = 0  # something may still run as that user: nobody else gets it
        if place.disk is not None and self.disks is not None:
            await self.disks.give_back(place.disk)
        if place.scratch is not None:
            await asyncio.to_thread(remains.remove_tree, place.scratch)
        if place.uid:
            self._free_uids.append(place.uid)

    async def close(self) -> None:
        if self.disks is not None:
            await self.disks.close()
        if self.tree is not None:
            await asyncio.to_thread(self.tree.close)
            self.tree = None
        if self.users is not None:
            self.users.close()
            self.users = None
        if self._scratch_root is not None:
            await asyncio.to_thread(self._scratch_root.remove)


async def _removed(cgroup: Cgroup) -> bool:
    for _ in range(500):
        if cgroup.try_remove():
            return True
        await asyncio.sleep(0.01)
    return False
