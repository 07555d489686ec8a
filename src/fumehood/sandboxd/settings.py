"""What an operator may set about sandboxes, with defaults that are safe; imports only `fumehood.protocol.sandbox`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fumehood.protocol.sandbox import Limits, Mode

type Disks = Literal["auto", "required", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """
    mode: which walls; see docs/security.md.
    limits: `enforced` refuses to start where memory and processes cannot be bounded by cgroups; `best-effort`
        goes on with what rlimits can do, which does not bound memory.
    pool: sandboxes kept ready, each given to one caller only.
    capacity: how many sandboxes may live at once.
    memory_total, cpus_total: bounds of all sandboxes together; None means four fifths of the host's memory, and
        no bound on processors.
    cpus: processors one sandbox may use at most; under contention all get equal shares.
    processes, open_files: bounds of one sandbox.
    inodes: files one sandbox may have in /mnt/data, /tmp, home and /dev/shm together.
    file_bytes: how large one file or archive may be on its way in or out.
    unpacked_members, unpacked_bytes: what one archive may hold.
    transfer_seconds: how long one may take in all; transfer_patience: how long nothing of it may move.
    output_bytes, display_bytes: what one call may print, and show.
    interrupt_grace: seconds between the first interrupt of code that ran too long and its being killed.
    start_timeout: seconds until a zygote or a sandbox that has not started counts as failed.
    uid_base: as root, the first of the users that sandboxes run as.
    preload: packages imported before any fork, where they are installed.
    bubblewrap: use this executable.
    guest_socket: mode `pod`: where the container that runs the code listens.
    disks: whether the files of a large tier (16g, 64g) lie on a disk of its own instead of in memory: `auto`, where
        root, loop devices and mkfs.ext4 are to be had; `required` refuses where they are not; `off`.
    disk_dir: the images of these disks lie here, without names; None means /var/lib/fumehood/disks.
    disk_share: the size of a disk for each byte of the tier's memory.
    disk_backing: which part of what was promised to disks has to be free on the host when another one is made; less
        than 1 promises more than there is.
    disk_reserve: bytes that disks leave free on the host.
    """

    mode: Mode = "namespaces"
    limits: Limits = "enforced"
    pool: int = 1
    capacity: int = 256
    memory_total: int | None = None
    cpus_total: float | None = None
    cpus: float | None = 1.0
    processes: int = 256
    open_files: int = 4096
    inodes: int = 100_000
    file_bytes: int = 4 << 30
    unpacked_members: int = 10_000
    unpacked_bytes: int = 4 << 30
    transfer_seconds: float = 3600.0
    transfer_patience: float = 30.0
    output_bytes: int = 1 << 20
    display_bytes: int = 32 << 20
    interrupt_grace: float = 1.5
    start_timeout: float = 60.0
    uid_base: int = 2_000_000_000
    preload: tuple[str, ...] = ("numpy", "pandas", "pyarrow", "matplotlib")
    bubblewrap: Path | None = None
    guest_socket: Path | None = None
    disks: Disks = "auto"
    disk_dir: Path | None = None
    disk_share: float = 0.5
    disk_backing: float = 1.0
    disk_reserve: int = 2 << 30

    def aggregate_processes(self) -> int:
        """Enough for every sandbox to have all of its own, short of what the host has in all."""
        wanted = self.capacity * self.processes + 1024
        try:
            most = int(Path("/proc/sys/kernel/pid_max").read_text())
        except OSError:  # hidden in some containers
            return wanted
        return min(wanted, most * 3 // 4)

    def aggregate_memory(self) -> int:
        if self.memory_total is not None:
            return self.memory_total
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 4 // 5
