"""Settings, shared context and per-container state of the container service."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from fumehood.containers.domain_secret_sealer import DomainSecretSealer
from fumehood.containers.file_sync import ContainerFileLimits, FileSync
from fumehood.gateway_stats import ContainerStats
from fumehood.interfaces import (
    Clock,
    ContainerFileRecordStore,
    ContainerStore,
    Sandbox,
    SandboxProvider,
    SandboxRef,
)
from fumehood.protocol.openai.container_objects import ContainerRecord
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier
from fumehood.timed_steps import start_timing

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


class ContainerRecordStore(ContainerStore, ContainerFileRecordStore, Protocol):
    """Containers and their files in one store."""


@dataclass(frozen=True, slots=True)
class ContainerContext:
    """What all containers of one process share."""

    provider: SandboxProvider
    store: ContainerRecordStore
    files: FileSync
    clock: Clock
    settings: ContainerSettings
    domain_secrets: DomainSecretSealer
    stats: ContainerStats

    @contextmanager
    def time_file_sync(self) -> Generator[None]:
        """Measure the restoring or collecting of a call's files."""
        with start_timing("files"), self.stats.file_seconds.time(self.clock.monotonic):
            yield


@dataclass(slots=True, eq=False)
class ContainerState:
    """A container as this process knows it.

    record: the current record. stored: the record as last read or written. They differ in `mark` and
        `last_active_at`, which are saved only now and then: losing them costs a longer listing and a little idle time.
    call_lock: calls run one after another, so that each finds its own files. Across processes the sandbox server
        keeps the order.
    files_lock: held while the sandbox's files and their records change together.
    active_operations: calls and transfers that run or wait. open_handles: handles not released yet.
    sandbox: the sandbox of the last call, which probably still runs.
    ephemeral_sandboxes: sandboxes of single calls or uploads.
    has_ended: whether the store says that the container has expired or was deleted.
    """

    record: ContainerRecord
    stored: ContainerRecord
    call_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    files_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    active_operations: int = 0
    open_handles: int = 0
    sandbox: Sandbox | None = None
    ephemeral_sandboxes: set[SandboxRef] = field(default_factory=set[SandboxRef])
    has_ended: bool = False

    @property
    def in_use(self) -> bool:
        return self.active_operations > 0 or self.open_handles > 0

    def update(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)

    async def save(self, store: ContainerStore) -> bool:
        """Write the record, merged with what another process wrote. False if the container has ended."""
        while (record := self.record) != self.stored and not self.has_ended:
            if await store.update_container(record, expected=self.stored):
                self.stored = record
                break
            latest = await store.get_container(record.id)
            if latest is None or latest.status != "running":
                self.has_ended = True
            else:
                self.merge_stored(latest)
        return not self.has_ended

    @contextmanager
    def keep_in_use(self) -> Generator[None]:
        """Keep the container from expiring during the block."""
        self.active_operations += 1
        try:
            yield
        finally:
            self.active_operations -= 1

    def merge_stored(self, stored: ContainerRecord) -> None:
        """Adopt a record that another process wrote.

        The stored sandbox wins, unless this process has changed its own since or has a later incarnation. The later
        `last_active_at` wins.
        """
        ours, before = self.record, self.stored
        record = msgspec.structs.replace(
            stored, last_active_at=max(stored.last_active_at, ours.last_active_at)
        )
        if ours.incarnation > stored.incarnation or _sandbox_binding(stored) == _sandbox_binding(before):
            record = msgspec.structs.replace(
                record,
                sandbox=ours.sandbox,
                address=ours.address,
                incarnation=ours.incarnation,
                mark=stored.mark if ours.mark == before.mark else ours.mark,
            )
        self.record, self.stored, self.has_ended = record, stored, False


def _sandbox_binding(record: ContainerRecord) -> tuple[int, str, str]:
    return record.incarnation, record.sandbox, record.address
