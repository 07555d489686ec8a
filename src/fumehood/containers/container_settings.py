"""Settings of the container service."""

from dataclasses import dataclass, field
from typing import Literal

from fumehood.containers.file_sync import ContainerFileLimits
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier

type IsolationScope = Literal["container", "execution"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """Limits and lifetimes of containers.

    isolation: `container`: a container keeps one sandbox, with its variables, until it expires. `execution`: every
        call gets a new sandbox, and only files are carried from call to call.
    claim_timeout: seconds to wait for a sandbox before a call fails.
    containers_per_tenant: maximum of running containers.
    allowed_domains: domains that a container's network may name; `*` allows every domain.
    idle_minutes, max_idle_minutes: default and maximum of the idle time after which a container expires.
    max_lifetime_hours: age at which a container expires even if it is in use.
    retention_hours: how long the record of an expired container, and the files that users put there, are kept. The
        container that replaces it receives these files.
    retained_bytes: maximum of such files per tenant; the oldest are deleted first.
    concurrent_uploads: uploads into containers of one tenant at the same time; further ones wait.
    sandboxes_survive_restart: whether sandboxes of an earlier process may still run. If not, containers that had one
        expire at startup.
    memory_tiers: tiers that there are sandboxes of; None for all.
    sweep_interval_seconds: pause between two sweeps for expired containers and orphans.
    orphan_idle_seconds: idle time after which a sandbox without a container is destroyed.
    """

    isolation: IsolationScope = "container"
    claim_timeout: float = 30.0
    containers_per_tenant: int = 50
    allowed_domains: frozenset[str] = frozenset()
    idle_minutes: int = 20
    max_idle_minutes: int = 60
    max_lifetime_hours: float = 24.0
    retention_hours: float = 168.0
    retained_bytes: int = 2 << 30
    concurrent_uploads: int = 16
    file_limits: ContainerFileLimits = field(default_factory=ContainerFileLimits)
    sandboxes_survive_restart: bool = True
    memory_tiers: tuple[MemoryTier, ...] | None = None
    sweep_interval_seconds: float = 30.0
    orphan_idle_seconds: float = 300.0
