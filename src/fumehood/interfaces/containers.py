"""Containers and their files, as tools and routes use them."""

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fumehood.interfaces.callers import Caller
from fumehood.protocol.openai.container_objects import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.openai.page_query import PageQuery
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    ExecuteRequest,
    ExecutionEvent,
    FileEntry,
)

# --- containers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExecutionStarted:
    """A call is handed to its sandbox: it does not wait for another call, or for a sandbox, any more."""


type ContainerEvent = ExecutionStarted | ExecutionEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedFiles:
    """What calls in a container have left.

    files: written or changed, recorded and kept.
    missing: written or changed, but not to be fetched, as far as their names are known.
    complete: whether all were fetched; False with nothing missing means that they could not even be listed.
    """

    files: Sequence[ContainerFileRecord] = ()
    missing: Sequence[FileEntry] = ()
    is_complete: bool = True


class Container(Protocol):
    """A container of a caller's; its sandbox comes with the first call."""

    @property
    def id(self) -> str: ...

    def execute(self, request: ExecuteRequest) -> AsyncGenerator[ContainerEvent]:
        """Run code and yield its events, the `End` last; a `Note` before them tells when variables are gone because
        the sandbox is a new one. `Started` comes before the first event of the code itself, and again should the
        sandbox turn out to be gone; a call that cannot run has none. Closing the generator interrupts the code. A
        sandbox that cannot be had or is lost is an `End`, not an exception.
        """
        ...

    def release(self) -> None:
        """Whoever has opened it does not come back; until then it neither expires nor makes room for another."""
        ...

    async def collect_files(self) -> CollectedFiles:
        """The files of calls of this object; each is told once."""
        ...

    async def save_file(self, path: str, content: bytes) -> ContainerFileRecord:
        """Put a file of the assistant's beside those that the code wrote; another name is found if it is taken.
        Raises TooLarge if the container may keep no more.
        """
        ...


class ContainerService(Protocol):
    """Container identity over sandboxes: who owns it, how long it lives, which files it has.

    What an operator allows (networks, minutes, how many, how much) is enforced here, for tools and clients alike. Every
    method that is about one container's files, and `container`, counts as a use of it; `check` does not.
    """

    def reserve_id(self) -> str:
        """An id for a container that begins with its first call."""
        ...

    def validate_spec(self, spec: ContainerSpec) -> ContainerSpec:
        """The spec as a container would have it, with everything chosen; raises InvalidRequest for what no container
        may have here (`network_policy`, `expires_after.minutes`).
        """
        ...

    async def create_container(self, caller: Caller, spec: ContainerSpec) -> ContainerRecord:
        """A container that is there before its first call, with the uploads that the spec names; its sandbox comes
        later. Raises InvalidRequest (as `approve`; `file_ids`), RateLimited (as many as the tenant may have).
        """
        ...

    async def check_active(self, caller: Caller, container_id: str) -> ContainerRecord:
        """Raises NotFound, ContainerExpired."""
        ...

    async def open_container(
        self, caller: Caller, container_id: str, spec: ContainerSpec, replaces: str | None = None
    ) -> Container:
        """The container of that id, which begins now if it was only reserved; raises NotFound, ContainerExpired,
        InvalidRequest, RateLimited (as many as the tenant may have).

        heir_of: an earlier container of the caller's, which has expired; one that begins now is given the files that
            users had put there, as far as they are still kept.
        """
        ...

    async def get_container(self, caller: Caller, container_id: str) -> ContainerRecord:
        """The container as it stands, expired or not; raises NotFound."""
        ...

    async def list_containers(
        self, caller: Caller, query: PageQuery, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        """Those of the caller, expired ones too, all or those of that name. Raises InvalidRequest."""
        ...

    async def delete_container(self, caller: Caller, container_id: str) -> None:
        """End it, with its files and with what runs in it. Raises NotFound."""
        ...

    async def write_file(
        self, caller: Caller, container_id: str, path: str, content: bytes | AsyncIterable[bytes]
    ) -> ContainerFileRecord:
        """Put a user's file at that path below /mnt/data, in place of one that is there. Raises NotFound,
        InvalidRequest (`file`), BodyTooLarge, Unavailable, and what `content` raises; then nothing was changed.
        """
        ...

    async def copy_uploads(
        self, caller: Caller, container_id: str, file_ids: Sequence[str]
    ) -> Sequence[ContainerFileRecord]:
        """Put uploads into the container, under their names as far as these are free; one that is there already, of the
        same name and content, is not put there twice. Raises NotFound, InvalidRequest, BodyTooLarge, Unavailable.
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
        """Unpack a user's archive below a directory of /mnt/data; what it left there. Raises as `put` does."""
        ...

    async def get_file(self, caller: Caller, container_id: str, file_id: str) -> ContainerFileRecord:
        """Raises NotFound, also for what is another tenant's, and for files of an expired container."""
        ...

    async def list_files(
        self, caller: Caller, container_id: str, query: PageQuery | None = None
    ) -> Sequence[ContainerFileRecord]:
        """All of them, oldest first, or a window. Raises NotFound, InvalidRequest."""
        ...

    def read_file(
        self, caller: Caller, container_id: str, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        """The bytes from `start` up to `end`, or to the last, in pieces; raises NotFound before the first."""
        ...

    async def delete_file(self, caller: Caller, container_id: str, file_id: str) -> None:
        """Raises NotFound, Unavailable."""
        ...

    async def close(self) -> None: ...
