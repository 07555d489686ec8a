"""What this process knows of the containers that it serves: the state of each, and what all of them share."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fumehood.containers.container_settings import ContainerSettings
from fumehood.containers.domain_secret_sealer import DomainSecretSealer
from fumehood.containers.file_sync import FileSync
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
from fumehood.timed_steps import start_timing


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
class ContainerRuntimeState:
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
