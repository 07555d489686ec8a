"""What an operator may set about sandboxes, with defaults that are safe."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fumehood.protocol.sandbox.sandbox_messages import IsolationMode, LimitEnforcement

type DiskMode = Literal["auto", "required", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set about a sandbox server.

    mode: which walls; see docs/security.md.
    limits: `enforced` refuses to start where memory and processes cannot be bounded by cgroups; `best-effort`
        goes on with what rlimits can do, which does not bound memory.
    pool: sandboxes kept ready, each given to one caller only.
    capacity: how many sandboxes may live at once.
    shards: zygotes that sandboxes are made from; tenants are spread over them, so that fewer share an address-space
        layout, and fewer lose their sandboxes when one ends. Each takes about 150 MB.
    memory_total, cpus_total: bounds of all sandboxes together; None means four fifths of the host's memory, and
        no bound on processors.
    cpus: processors one sandbox may use at most; under contention all get equal shares.
    processes, open_files: bounds of one sandbox.
    inodes: files one sandbox may have in /mnt/data, /tmp, home and /dev/shm together.
    file_bytes: how large one file or archive may be on its way in or out.
    unpacked_members, unpacked_bytes: what one archive may hold, or many files that come together.
    transfer_timeout: how long one may take in all; transfer_idle_timeout: how long nothing of it may move.
    output_bytes, display_bytes: what one call may print, and show.
    interrupt_grace: seconds between the first interrupt of code that ran too long and its being killed.
    start_timeout: seconds until a zygote or a sandbox that has not started counts as failed.
    uid_base: as root, the first of the users that sandboxes run as.
    preload: packages imported before any fork, where they are installed.
    guest_socket: mode `pod`: where the container that runs the code listens.
    packages: whether callers and code may have further packages installed.
    index_url: where these come from; None means FUMEHOOD_INDEX_URL, UV_DEFAULT_INDEX, UV_INDEX_URL or PIP_INDEX_URL
        of the environment, else PyPI. Credentials in it are shown to nobody.
    find_links: a directory with further wheels.
    packages_dir: where installed packages are kept; None means FUMEHOOD_PACKAGES_DIR of the environment, else
        /var/cache/fumehood/packages for root, else fumehood/packages in the user's cache directory.
    packages_bytes: how much may be kept there besides uv's own cache; what is in use stays.
    install_timeout: seconds that resolving or installing may take.

    What the service in front of the sandboxes allows:

    tenant_sandboxes, tenant_memory: how many sandboxes one tenant may have at once, and how many bytes their
        memory tiers may add up to; None means no bound. The empty name is a tenant like any other.
    idle_seconds: a sandbox that nobody has used for so long is ended, in case its owner is dead; None means never.
    queued_executions: how many executions of one sandbox may wait behind the one that runs.
    retained_executions, retained_output_bytes: how many ended executions of one sandbox can still be read, and how large they may be
        together; the last one can always be read, unless all sandboxes keep more than 16 times as much.
    max_tombstones, tombstone_seconds: of how many sandboxes that have ended it is remembered why, and for how long.
    connections: how many callers may be connected at once.
    request_seconds: how long a JSON body may take to arrive.
    request_bytes, one_shot_bytes: the largest JSON body of a request, and of one to `POST /execute`.
    produced_files, produced_bytes: what `POST /execute` gives back at most of the files that the code wrote.
    egress: whether callers may ask for a network policy with an allow-list; see docs/network.md.
    egress_domains: the domains they may ask for; None means any.
    egress_ports: the ports that may be connected to.
    egress_private_networks: networks that may be reached although their addresses are private, as `10.1.0.0/16`.
    egress_hosts: addresses of names that are not looked up.
    egress_ca_file: certificate authorities to trust besides the system's, here and in sandboxes with an allow-list.
    egress_connections, egress_connections_total: at once, of one sandbox and of all.
    egress_idle_seconds: how long neither side of a connection may send anything.
    egress_bytes: what one sandbox may send and receive in all; None means no bound.
    disks: whether the files of a large tier (16g, 64g) lie on a disk of its own instead of in memory: `auto`, where
        root, loop devices and mkfs.ext4 are to be had; `required` refuses where they are not; `off`.
    disk_dir: the images of these disks lie here, without names; None means /var/lib/fumehood/disks.
    disk_size_ratio: the size of a disk for each byte of the tier's memory.
    disk_backing_ratio: which part of what was promised to disks has to be free on the host when another one is made; less
        than 1 promises more than there is.
    disk_reserve: bytes that disks leave free on the host.
    """

    mode: IsolationMode = "namespaces"
    limits: LimitEnforcement = "enforced"
    pool: int = 1
    capacity: int = 256
    shards: int = 1
    memory_total: int | None = None
    cpus_total: float | None = None
    cpus: float | None = 1.0
    processes: int = 256
    open_files: int = 4096
    inodes: int = 100_000
    file_bytes: int = 4 << 30
    unpacked_members: int = 20_000
    unpacked_bytes: int = 4 << 30
    transfer_timeout: float = 3600.0
    transfer_idle_timeout: float = 30.0
    output_bytes: int = 1 << 20
    display_bytes: int = 32 << 20
    interrupt_grace: float = 1.5
    start_timeout: float = 60.0
    uid_base: int = 2_000_000_000
    preload: tuple[str, ...] = ("numpy", "pandas", "pyarrow", "matplotlib")
    guest_socket: Path | None = None
    packages: bool = True
    index_url: str | None = None
    find_links: Path | None = None
    packages_dir: Path | None = None
    packages_bytes: int = 10 << 30
    install_timeout: float = 300.0
    tenant_sandboxes: int | None = None
    tenant_memory: int | None = None
    idle_seconds: float | None = 86_400.0
    queued_executions: int = 32
    retained_executions: int = 64
    retained_output_bytes: int = 64 << 20
    max_tombstones: int = 1000
    tombstone_seconds: float = 600.0
    connections: int = 2048
    request_seconds: float = 60.0
    request_bytes: int = 8 << 20
    one_shot_bytes: int = 64 << 20
    produced_files: int = 256
    produced_bytes: int = 32 << 20
    egress: Literal["off", "allowlist"] = "off"
    egress_domains: tuple[str, ...] | None = None
    egress_ports: tuple[int, ...] = (80, 443)
    egress_private_networks: tuple[str, ...] = ()
    egress_hosts: Mapping[str, str] = field(default_factory=dict[str, str])
    egress_ca_file: Path | None = None
    egress_connections: int = 32
    egress_connections_total: int = 512
    egress_idle_seconds: float = 120.0
    egress_bytes: int | None = None
    disks: DiskMode = "auto"
    disk_dir: Path | None = None
    disk_size_ratio: float = 0.5
    disk_backing_ratio: float = 1.0
    disk_reserve: int = 2 << 30

    def total_process_limit(self) -> int:
        """Enough for every sandbox to have all of its own, short of what the host has in all.

        One more for each: the first process is not in the sandbox's own cgroup.
        """
        wanted = self.capacity * (self.processes + 1) + 1024
        try:
            most = int(Path("/proc/sys/kernel/pid_max").read_text())
        except OSError:  # hidden in some containers
            return wanted
        return min(wanted, most * 3 // 4)

    def total_output_limit(self) -> int:
        """What the server keeps of the calls of all sandboxes, and as much again while they run."""
        return 16 * self.retained_output_bytes

    def total_memory_limit(self) -> int:
        if self.memory_total is not None:
            return self.memory_total
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 4 // 5
