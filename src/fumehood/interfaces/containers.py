"""Containers and their files, as tools and routes use them."""

import math
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fumehood.interfaces.callers import Caller
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    ExecuteRequest,
    ExecutionEvent,
    FileEntry,
    LinkEntry,
)


@dataclass(frozen=True, slots=True)
class ExecutionStarted:
    """The sandbox has accepted the execution: it no longer waits for another one or for a sandbox."""


type ContainerEvent = ExecutionStarted | ExecutionEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedFiles:
    """The files that executions wrote or changed.

    files: those that are stored now.
    missing: those that could not be fetched, as far as their names are known.
    is_complete: False if some could not be fetched; with nothing missing, the files could not even be listed.
    """

    files: Sequence[ContainerFileRecord] = ()
    missing: Sequence[FileEntry] = ()
    is_complete: bool = True


class Container(Protocol):
    """An open container. It gets a sandbox with its first execution."""

    @property
    def id(self) -> str:
        """The id of the container."""
        ...

    def execute(self, request: ExecuteRequest, timeout: float = math.inf) -> AsyncGenerator[ContainerEvent]:
        """Run code and yield its events as they come, `ExecutionEnd` last. Closing the generator interrupts the code.

        `ExecutionStarted` precedes the first event of the code, and comes again if the sandbox is replaced. An
        execution that cannot run has none. A notice comes first if variables are lost because the sandbox is new.

        request: the code, its language and its timeout.
        timeout: seconds until it ends in any case, also while it waits for a sandbox.

        Raises no SandboxError: a missing or lost sandbox is an `ExecutionEnd`.
        """
        ...

    def release(self) -> None:
        """Close this handle. An open container neither expires nor is evicted to make room for another."""
        ...

    async def collect_files(self) -> CollectedFiles:
        """Store the files that executions of this handle changed, and return each once.

        Raises nothing for files that cannot be fetched: they are `missing`.
        """
        ...

    async def save_file(self, path: str, content: bytes) -> ContainerFileRecord:
        """Store a file of the assistant's beside those of the code.

        path: below /mnt/data; a free name is chosen if it is in use.
        content: all of it.

        Raises SandboxPayloadTooLarge if the container may keep no more.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlistedFiles:
    """What a container's sandbox has besides its listed files.

    links: symbolic links, which nothing follows.
    paths: regular files beyond the limits of a container, or written since the last call ended.
    truncated: whether there is more that cannot even be named.
    """

    links: Sequence[LinkEntry] = ()
    paths: Sequence[str] = ()
    truncated: bool = False


class ContainerService(Protocol):
    """Containers: their owners, their files and their expiry, on top of sandboxes.

    It enforces the operator's limits on networks, lifetimes, numbers and sizes. `open_container` and every method on
    files count as a use of the container; `check_active` does not. Containers of other tenants are treated as absent.
    Every method that reads or writes records raises ServiceUnavailable if the storage fails.
    """

    def reserve_id(self) -> str:
        """Return an id for a container that is created with its first execution."""
        ...

    def validate_spec(self, spec: ContainerSpec) -> ContainerSpec:
        """Return the spec with all defaults filled in.

        spec: as the client sent it.

        Raises InvalidRequest for what is not allowed here (`network_policy`, `expires_after.minutes`).
        """
        ...

    async def create_container(self, caller: Caller, spec: ContainerSpec) -> ContainerRecord:
        """Create a container with the uploads that its spec names. Its sandbox comes with the first execution.

        caller: its owner.
        spec: as the client sent it.

        Raises InvalidRequest as `validate_spec` and for `file_ids`, RateLimited if the tenant has too many.
        """
        ...

    async def check_active(self, caller: Caller, container_id: str) -> ContainerRecord:
        """Return the record of a container that has not expired. It is not counted as a use.

        caller: its owner.
        container_id: its id.

        Raises NotFound, ContainerExpired.
        """
        ...

    async def open_container(
        self, caller: Caller, container_id: str, spec: ContainerSpec, replaces: str | None = None
    ) -> Container:
        """Open a container, and create it if its id was only reserved. The caller calls `release` in the end.

        caller: its owner.
        container_id: from `reserve_id` or `create_container`.
        spec: for a container to create.
        replaces: id of an expired container of the caller's; a container to create inherits its user files, as far as
            they are still stored.

        Raises NotFound, ContainerExpired, InvalidRequest, RateLimited if the tenant has too many.
        """
        ...

    async def get_container(self, caller: Caller, container_id: str) -> ContainerRecord:
        """Return the record of a container, expired or not.

        caller: its owner.
        container_id: its id.

        Raises NotFound.
        """
        ...

    async def list_containers(
        self, caller: Caller, query: PageQuery, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        """Return a page of the caller's containers, expired ones too.

        caller: their owner.
        query: order, cursor and limit.
        name: containers of this name only.

        Raises InvalidRequest if the cursor is unknown.
        """
        ...

    async def delete_container(self, caller: Caller, container_id: str) -> None:
        """Delete a container with its files and its sandbox.

        caller: its owner.
        container_id: its id.

        Raises NotFound.
        """
        ...

    async def write_file(
        self, caller: Caller, container_id: str, path: str, content: bytes | AsyncIterable[bytes]
    ) -> ContainerFileRecord:
        """Write a user's file, in place of an existing one.

        caller: owner of the container.
        container_id: its id.
        path: below /mnt/data.
        content: all bytes, or chunks.

        Raises NotFound, InvalidRequest (`file`), BodyTooLarge, ServiceUnavailable, and whatever `content` raises; then
        nothing is changed.
        """
        ...

    async def copy_uploads(
        self, caller: Caller, container_id: str, file_ids: Sequence[str]
    ) -> Sequence[ContainerFileRecord]:
        """Copy uploads into a container, under their names as far as these are free.

        A copy with the same name and content is reused.

        caller: owner of the container and of the uploads.
        container_id: its id.
        file_ids: of the uploads.

        Raises NotFound, InvalidRequest, BodyTooLarge, ServiceUnavailable.
        """
        ...

    async def unpack_archive(
        self,
        caller: Caller,
        container_id: str,
        content: bytes | AsyncIterable[bytes],
        kind: ArchiveFormat,
        into: str = "",
    ) -> Sequence[ContainerFileRecord]:
        """Unpack a user's archive, and return the files from it.

        caller: owner of the container.
        container_id: its id.
        content: all bytes, or chunks.
        kind: the format.
        into: a directory below /mnt/data.

        Raises as `write_file`.
        """
        ...

    async def get_file(self, caller: Caller, container_id: str, file_id: str) -> ContainerFileRecord:
        """Return the record of a file.

        caller: owner of the container.
        container_id: its id.
        file_id: of the file.

        Raises NotFound, also if the container has expired.
        """
        ...

    async def list_files(
        self, caller: Caller, container_id: str, query: PageQuery | None = None
    ) -> Sequence[ContainerFileRecord]:
        """Return the files of a container.

        caller: its owner.
        container_id: its id.
        query: order, cursor and limit; None for all, oldest first.

        Raises NotFound, InvalidRequest if the cursor is unknown.
        """
        ...

    async def find_unlisted_files(self, caller: Caller, container_id: str) -> UnlistedFiles:
        """Find what `list_files` does not show of the container's sandbox; nothing if it has no sandbox now.

        caller: owner of the container.
        container_id: its id.

        Raises NotFound, also if the container has expired, and ServiceUnavailable.
        """
        ...

    def read_file(
        self, caller: Caller, container_id: str, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        """Yield the content of a file in chunks.

        caller: owner of the container.
        container_id: its id.
        file_id: of the file.
        start, end: the range, as of a slice.

        Raises NotFound before the first chunk.
        """
        ...

    async def delete_file(self, caller: Caller, container_id: str, file_id: str) -> None:
        """Delete a file from the container and its sandbox.

        caller: owner of the container.
        container_id: its id.
        file_id: of the file.

        Raises NotFound, ServiceUnavailable.
        """
        ...

    async def close(self) -> None:
        """Stop the expiry of containers and write pending records. Sandboxes stay."""
        ...
