"""Allocates what a sandbox needs of the host: uid, cgroup, directory, disk."""

import asyncio
import contextlib
import logging
import os
import secrets
from collections import deque
from dataclasses import dataclass

from fumehood.protocol.sandbox.sandbox_errors import SandboxServerAtCapacity
from fumehood.protocol.sandbox.sandbox_messages import MEMORY_TIERS, MemoryTier
from fumehood.sandbox_server.host import cgroups, orphan_cleanup
from fumehood.sandbox_server.host.cgroups import Cgroup, CgroupLimits, CgroupTree, CgroupUnavailable
from fumehood.sandbox_server.host.disks import Disk, DiskManager
from fumehood.sandbox_server.host.jail_launcher import read_root_links
from fumehood.sandbox_server.host.uid_ranges import UidRange, reserve_subordinate_uids, reserve_uid_range
from fumehood.sandbox_server.inside import layout
from fumehood.sandbox_server.inside.jail import jail_builder
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.settings import SandboxServerSettings

logger = logging.getLogger(__name__)

# Zygotes serve all sandboxes and run no user code: busy sandboxes must not delay a new one.
_ZYGOTE_WEIGHT = 10_000
_LIMITS_ADVICE = (
    "Or use --limits best-effort, which runs code without a memory limit: one program can then use up all memory "
    "of the host."
)


@dataclass(slots=True)
class SandboxResources:
    """What was allocated for one sandbox, released after its end.

    scratch_directory: mode unsafe-degraded: the host directory with its files.
    directly_readable: False if the supervisor may not read the files, or would have to wait for a disk.
    disk: large tiers: holds its files, which are in memory otherwise.
    """

    uid: int
    cgroup: Cgroup | None
    scratch_directory: str | None
    directly_readable: bool
    disk: Disk | None = None

    @property
    def work_directory(self) -> str:
        return layout.DATA_DIRECTORY if self.scratch_directory is None else f"{self.scratch_directory}/data"

    def environment_overrides(self) -> dict[str, str]:
        """Variables that differ from `layout.ENVIRON`."""
        if self.scratch_directory is None:
            return {}
        return {
            "OUTPUT_DIR": self.work_directory,
            "TMPDIR": f"{self.scratch_directory}/tmp",
            "HOME": f"{self.scratch_directory}/home",
        }


def file_quota_bytes(memory: MemoryTier) -> int:
    """Files count as memory: at most half of the tier."""
    return MEMORY_TIERS[memory] // 2


class ResourceAllocator:
    """Host resources of all sandboxes of one supervisor; `open` raises IsolationUnavailable, OSError."""

    def __init__(self, settings: SandboxServerSettings) -> None:
        self._settings = settings
        self._free_uids: deque[int] = deque()
        self._scratch: orphan_cleanup.ScratchDirectory | None = None
        self.cgroup_tree: CgroupTree | None = None
        self.zygote_cgroup: Cgroup | None = None
        self.uid_range: UidRange | None = None
        self.scratch_directory: str | None = None
        self.disks: DiskManager | None = None

    def open(self) -> None:
        if self._settings.mode == "pod":
            return
        self._open_cgroups()
        self._open_uid_range()
        self.disks = DiskManager(
            self._settings, None if self.uid_range is None else self.uid_range.zygote_uid
        )
        if self._settings.mode == "unsafe-degraded":
            self._scratch = orphan_cleanup.ScratchDirectory()
            self.scratch_directory = self._scratch.path
            os.chmod(self.scratch_directory, 0o711)  # noqa: S103 - sandboxes may enter, not list it

    def _open_cgroups(self) -> None:
        try:
            self.cgroup_tree = cgroups.open_tree(
                memory_total=self._settings.total_memory_limit(),
                cpus=self._settings.cpus_total,
                pids_total=self._settings.total_process_limit(),
            )
        except CgroupUnavailable as error:
            if self._settings.limits == "enforced":
                raise IsolationUnavailable(error.reason, f"{error.advice} {_LIMITS_ADVICE}") from error
            logger.warning(
                "Limits are best-effort: %s The memory and CPU of sandboxes are not limited.",
                error.reason,
            )
            return
        self.zygote_cgroup = self.cgroup_tree.create("zygote")
        if self.cgroup_tree.has_cpu:
            self.zygote_cgroup.set_weight(_ZYGOTE_WEIGHT)

    def _open_uid_range(self) -> None:
        """Uids for sandboxes: as root a block of our own, otherwise what /etc/subuid grants, otherwise none."""
        if os.geteuid() == 0:
            self.uid_range = reserve_uid_range(self._settings.uid_base)
        elif self._settings.mode == "namespaces":
            self.uid_range = reserve_subordinate_uids()
        if self.uid_range is not None:
            self._free_uids.extend(range(1, self.uid_range.count))

    def allocate(
        self, number: int, memory: MemoryTier, disk: Disk | None, undo: contextlib.ExitStack
    ) -> SandboxResources:
        """Allocate for one sandbox; `undo` releases all but the disk. Raises SandboxServerAtCapacity, OSError."""
        uid = 0
        if self.uid_range is not None and self._settings.mode == "namespaces":
            if not self._free_uids:  # two sandboxes never share a uid if each can have its own
                raise SandboxServerAtCapacity(
                    f"All {self.uid_range.count - 1} uids for sandboxes are in use; delete a sandbox, or retry later."
                )
            uid = self._free_uids.popleft()
            undo.callback(self._free_uids.append, uid)
        cgroup = None
        if self.cgroup_tree is not None:
            limits = CgroupLimits(
                memory=MEMORY_TIERS[memory], pids=self._settings.processes, cpus=self._settings.cpus
            )
            cgroup = self.cgroup_tree.create(f"sb-{number}", limits)
            undo.callback(cgroup.remove)
        # A lookup on a disk may block: a helper may wait for it, the supervisor must not.
        readable = disk is None and (
            os.geteuid() == 0 or (self.uid_range is None and self._settings.mode != "pod")
        )
        scratch = None
        if self.scratch_directory is not None:
            # Sandboxes share a uid in this mode: an unguessable name keeps them apart.
            scratch = self._create_scratch(f"{self.scratch_directory}/{secrets.token_hex(16)}")
        return SandboxResources(
            uid=uid, cgroup=cgroup, scratch_directory=scratch, directly_readable=readable, disk=disk
        )

    def _create_scratch(self, path: str) -> str:
        """A host directory instead of the private file system that this mode lacks."""
        for directory in (path, *(f"{path}/{name}" for name in ("data", "tmp", "home"))):
            self.create_directory(directory)
        return path

    def create_directory(self, path: str) -> None:
        os.mkdir(path, 0o700)
        if self.uid_range is not None:
            os.chown(path, self.uid_range.zygote_uid, self.uid_range.zygote_uid)

    def build_plan(
        self, resources: SandboxResources, *, memory: MemoryTier, fresh_interpreter: bool
    ) -> jail_builder.JailPlan:
        """Return the plan for a sandbox's jail."""
        namespaces = self._settings.mode == "namespaces"
        read_only = layout.READ_ONLY if namespaces else layout.POD_READ_ONLY
        writable = layout.WRITABLE
        if resources.scratch_directory is not None:
            read_only = ("/usr", *read_root_links(), f"{self.scratch_directory}/cache")
            writable = (resources.scratch_directory,)
        return jail_builder.JailPlan(
            isolation="namespaces" if namespaces else "process",
            uid=resources.uid,
            data_bytes=file_quota_bytes(memory),
            data_inodes=self._settings.inodes,
            processes=self._settings.processes,
            open_files=self._settings.open_files,
            fresh_interpreter=fresh_interpreter,
            writable=list(writable),
            read_only=list(read_only),
            deny_tcp=self._settings.mode == "unsafe-degraded",
            needs_landlock=self._settings.mode == "unsafe-degraded",
            work_directory=resources.work_directory,
            disk=resources.disk is not None,
        )

    async def release(self, resources: SandboxResources) -> None:
        """Release after the sandbox has ended; waits until the cgroup can be removed."""
        if resources.cgroup is not None and not await _remove_cgroup(resources.cgroup):
            logger.error("The cgroup %s could not be removed.", resources.cgroup.name)
            resources.uid = 0  # a process may still run with it: do not reuse it
        if resources.disk is not None and self.disks is not None:
            await self.disks.release(resources.disk)
        if resources.scratch_directory is not None:
            await asyncio.to_thread(orphan_cleanup.remove_tree, resources.scratch_directory)
        if resources.uid:
            self._free_uids.append(resources.uid)

    async def close(self) -> None:
        if self.disks is not None:
            await self.disks.close()
        if self.cgroup_tree is not None:
            await asyncio.to_thread(self.cgroup_tree.close)
            self.cgroup_tree = None
        if self.uid_range is not None:
            self.uid_range.close()
            self.uid_range = None
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.remove)


async def _remove_cgroup(cgroup: Cgroup) -> bool:
    """`Cgroup.remove` without a thread, because many sandboxes may end at once."""
    for _ in range(500):
        if cgroup.try_remove():
            return True
        await asyncio.sleep(0.01)
    return False
