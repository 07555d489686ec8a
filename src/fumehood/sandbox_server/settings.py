"""Settings of the sandbox server, with safe defaults."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from fumehood.configuration import (
    ByteSize,
    NonNegative,
    NonNegativeByteSize,
    NonNegativeNumber,
    Positive,
    PositiveNumber,
)
from fumehood.protocol.sandbox.sandbox_messages import IsolationMode, LimitEnforcement, MemoryTier

type DiskMode = Literal["auto", "required", "off"]
type TcpPort = Annotated[int, Meta(ge=1, le=65_535)]
type UidBase = Annotated[int, Meta(ge=65_536, le=4_000_000_000)]  # where no other users are


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxServerSettings:
    """All settings of a sandbox server.

    mode: isolation mode; see docs/security.md.
    limits: `enforced` refuses to start if cgroups cannot limit memory and processes; `best-effort` falls back to
        rlimits, which do not limit memory.
    pool: number of sandboxes kept ready; each is claimed by one caller only.
    capacity: maximum number of sandboxes.
    shards: number of zygotes. Tenants are spread over them, so that fewer share an address-space layout and fewer
        lose their sandboxes when a zygote ends. Each uses about 150 MB.
    memory_total, cpus_total: limits of all sandboxes together; None means four fifths of the host's memory, and
        all CPUs.
    cpus: CPU limit of one sandbox; under contention all get equal shares.
    processes, open_files: limits of one sandbox.
    inodes: maximum number of files in /mnt/data, /tmp, home and /dev/shm of one sandbox together.
    file_bytes: maximum size of one file or archive in a transfer.
    unpacked_members, unpacked_bytes: limits for the contents of one archive, or of many files in one request.
    transfer_timeout: maximum duration of a transfer; transfer_idle_timeout: without any progress.
    output_bytes, display_bytes: maximum printed and displayed output of one execution.
    interrupt_grace: seconds between the first interrupt at a timeout and the kill.
    start_timeout: seconds until a zygote or a sandbox that has not started counts as failed.
    uid_base: as root, the first uid of sandboxes.
    preload: packages that zygotes import, where they are installed.
    guest_socket: mode `pod`: the socket of the container that runs the code.
    egress_socket: mode `pod`: the socket of the container that installs packages and runs the egress proxy; None means
        that there is none, and packages and allow-lists are refused.
    state_dir: mode `pod`: a directory that lasts as long as the pod and that only this server has; a mark in it keeps a
        restarted server from serving a second sandbox in the same pod.
    pod_memory: mode `pod`: the memory tier that the pod was made for; None means the largest one within the limit of
        the code's container.
    pod_linger_seconds: mode `pod`: how long the server answers after its sandbox has ended, before it exits.
    packages: whether callers and code may install packages.
    index_url: the package index; None means FUMEHOOD_INDEX_URL, UV_DEFAULT_INDEX, UV_INDEX_URL or PIP_INDEX_URL of
        the environment, otherwise PyPI. Credentials in it are never shown.
    find_links: a directory with further wheels.
    packages_dir: the package store; None means FUMEHOOD_PACKAGES_DIR of the environment, otherwise
        /var/cache/fumehood/packages for root, otherwise fumehood/packages in the user's cache directory.
    packages_bytes: maximum size of the store without uv's own cache; packages in use are never evicted.
    install_timeout: seconds for resolving or installing.
    tenant_sandboxes, tenant_memory: quotas of one tenant: number of sandboxes, and bytes of their memory tiers
        together; None means no quota. The empty name is a tenant like any other.
    idle_seconds: a sandbox that is idle for so long is ended; None means never.
    queued_executions: maximum number of executions that wait behind the running one.
    retained_executions, retained_output_bytes: how many ended executions of a sandbox stay readable, and their total
        size. The last one is always readable, unless all sandboxes together retain more than 16 times as much.
    max_tombstones, tombstone_seconds: for how many ended sandboxes the reason is remembered, and how long.
    connections: maximum number of connections.
    request_seconds: maximum time for a JSON body to arrive.
    request_bytes, one_shot_bytes: maximum JSON body of a request, and of one to `POST /execute`.
    produced_files, produced_bytes: limits for the files that `POST /execute` returns.
    egress: whether callers may request a network policy with an allow-list; see docs/network.md.
    egress_domains: the domains that they may request; None means any.
    egress_ports: the allowed ports.
    egress_private_networks: private networks that may be reached, as `10.1.0.0/16`.
    egress_hosts: fixed addresses of host names.
    egress_ca_file: certificate authorities to trust besides the system's, in the proxy and in sandboxes with an
        allow-list.
    egress_connections, egress_connections_total: concurrent connections of one sandbox, and of all.
    egress_idle_seconds: idle timeout of a connection.
    egress_bytes: bytes that one sandbox may send and receive in total; None means no limit.
    disks: whether files of large tiers (16g, 64g) are on a disk of their own instead of in memory: `auto` if root,
        loop devices and mkfs.ext4 are available; `required` refuses without them; `off`.
    disk_dir: directory of the unnamed disk images; None means /var/lib/fumehood/disks.
    disk_size_ratio: size of a disk per byte of the tier's memory.
    disk_backing_ratio: part of the promised disk space that must be free on the host to create another disk; below 1
        it overcommits.
    disk_reserve: bytes that disks leave free on the host.
    """

    mode: IsolationMode = "namespaces"
    limits: LimitEnforcement = "enforced"
    pool: NonNegative = 1
    capacity: Positive = 256
    shards: Positive = 1
    memory_total: ByteSize | None = None
    cpus_total: PositiveNumber | None = None
    cpus: PositiveNumber | None = 1.0
    processes: Positive = 256
    open_files: Positive = 4096
    inodes: Positive = 100_000
    file_bytes: ByteSize = 4 << 30
    unpacked_members: Positive = 20_000
    unpacked_bytes: ByteSize = 4 << 30
    transfer_timeout: PositiveNumber = 3600.0
    transfer_idle_timeout: PositiveNumber = 30.0
    output_bytes: ByteSize = 1 << 20
    display_bytes: ByteSize = 32 << 20
    interrupt_grace: NonNegativeNumber = 1.5
    start_timeout: PositiveNumber = 60.0
    uid_base: UidBase = 2_000_000_000
    preload: tuple[str, ...] = ("numpy", "pandas", "pyarrow", "matplotlib")
    guest_socket: Path | None = None
    egress_socket: Path | None = None
    state_dir: Path | None = None
    pod_memory: MemoryTier | None = None
    pod_linger_seconds: NonNegativeNumber = 30.0
    packages: bool = True
    index_url: str | None = None
    find_links: Path | None = None
    packages_dir: Path | None = None
    packages_bytes: ByteSize = 10 << 30
    install_timeout: PositiveNumber = 300.0
    tenant_sandboxes: Positive | None = None
    tenant_memory: ByteSize | None = None
    idle_seconds: NonNegativeNumber | None = 86_400.0
    queued_executions: NonNegative = 32
    retained_executions: NonNegative = 64
    retained_output_bytes: NonNegativeByteSize = 64 << 20
    max_tombstones: NonNegative = 1000
    tombstone_seconds: NonNegativeNumber = 600.0
    connections: Positive = 2048
    request_seconds: PositiveNumber = 60.0
    request_bytes: ByteSize = 8 << 20
    one_shot_bytes: ByteSize = 64 << 20
    produced_files: NonNegative = 256
    produced_bytes: NonNegativeByteSize = 32 << 20
    egress: Literal["off", "allowlist"] = "off"
    egress_domains: tuple[str, ...] | None = None
    egress_ports: tuple[TcpPort, ...] = (80, 443)
    egress_private_networks: tuple[str, ...] = ()
    egress_hosts: Mapping[str, str] = field(default_factory=dict[str, str])
    egress_ca_file: Path | None = None
    egress_connections: Positive = 32
    egress_connections_total: Positive = 512
    egress_idle_seconds: PositiveNumber = 120.0
    egress_bytes: ByteSize | None = None
    disks: DiskMode = "auto"
    disk_dir: Path | None = None
    disk_size_ratio: PositiveNumber = 0.5
    disk_backing_ratio: NonNegativeNumber = 1.0
    disk_reserve: NonNegativeByteSize = 2 << 30

    def total_process_limit(self) -> int:
        """Enough for every sandbox to reach its own limit, but at most three quarters of the host's pids.

        One more for each: init is not in the sandbox's own cgroup.
        """
        wanted = self.capacity * (self.processes + 1) + 1024
        try:
            pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
        except OSError:  # hidden in some containers
            return wanted
        return min(wanted, pid_max * 3 // 4)

    def total_output_limit(self) -> int:
        """Limit of the retained output of all sandboxes, and the same again for running executions."""
        return 16 * self.retained_output_bytes

    def total_memory_limit(self) -> int:
        if self.memory_total is not None:
            return self.memory_total
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 4 // 5
