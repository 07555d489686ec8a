"""Sandboxes, which run code, and their providers."""

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fumehood.protocol.sandbox.bundle_encoding import BundleContent, BundledFile
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    ExecuteRequest,
    ExecutionEvent,
    FileEntry,
    FileListing,
    SandboxInfo,
    SandboxSpec,
    UnpackSummary,
    WriteFilesSummary,
)


@dataclass(frozen=True, slots=True)
class SandboxRef:
    """How to find a sandbox again, also after a restart.

    address: where it is; only its provider interprets it.
    from_warm_pool: of a new sandbox, whether it was taken from the warm pool.
    """

    id: str
    address: str = ""
    from_warm_pool: bool | None = field(default=None, compare=False)


class Sandbox(Protocol):
    """One sandbox. Paths are relative to /mnt/data.

    Every method raises SandboxGone if it has ended, SandboxNotFound if it never existed or its tombstone has expired,
    and SandboxServerUnreachable if its server does not answer.
    """

    @property
    def id(self) -> str:
        """The name of the sandbox."""
        ...

    def execute(self, request: ExecuteRequest) -> AsyncGenerator[ExecutionEvent]:
        """Run code and yield its events, `ExecutionEnd` last. Executions of one sandbox run one after another.

        A broken connection is restored, and no event is lost. Closing the generator does not stop the code:
        `interrupt` does.

        request: the code, its language and its timeout. A known `execution_id` attaches to that execution.

        Raises SandboxConflict if the `execution_id` belongs to other code, InvalidSandboxRequest and
        SandboxPayloadTooLarge.
        Every error is final, and has `nothing_started` set if the code has certainly not begun.
        """
        ...

    def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[ExecutionEvent]:
        """Yield the events of an execution, past and future.

        execution_id: from its request.
        after: number of the last event to skip.

        Raises ExecutionNotFound.
        """
        ...

    async def interrupt(self, execution_id: str | None = None) -> bool:
        """Interrupt an execution as Ctrl-C does; False if there is none to interrupt.

        execution_id: from its request; None for the one that runs.
        """
        ...

    async def list_files(self, since: str | None = None) -> FileListing:
        """List the files, with a snapshot token for the next listing.

        since: snapshot token of an earlier listing, to list what changed since.
        """
        ...

    def read_file(self, path: str) -> AsyncGenerator[bytes]:
        """Yield the content of a regular file in chunks.

        path: of the file.

        Raises SandboxFileNotFound, FileRefused.
        """
        ...

    def read_files(self, paths: Sequence[str]) -> AsyncGenerator[Sequence[BundleContent]]:
        """Yield the contents of many small files, in order and in batches.

        A file that cannot be read has an error in place of its content: SandboxFileNotFound, FileRefused, or
        SandboxPayloadTooLarge if it is larger than `bundle_encoding.MAX_BUNDLED_FILE_BYTES`.

        paths: of the files.
        """
        ...

    async def write_file(
        self, path: str, content: bytes | AsyncIterable[bytes], *, executable: bool = False
    ) -> FileEntry:
        """Write a file, whole or not at all.

        path: of the file; directories are created.
        content: all bytes, or chunks.
        executable: set the x bits.

        Raises FileRefused, SandboxPayloadTooLarge, and whatever `content` raises.
        """
        ...

    async def write_files(
        self, files: Callable[[], AsyncIterable[Sequence[BundledFile]]]
    ) -> WriteFilesSummary:
        """Write many small files. A file that is refused is in the summary, and the others are written.

        files: returns the files in batches. Called again if the connection breaks.

        Raises FileRefused, SandboxPayloadTooLarge and whatever `files` raises; then no file is written.
        """
        ...

    async def delete_file(self, path: str) -> None:
        """Delete a file.

        path: of the file.

        Raises SandboxFileNotFound, FileRefused.
        """
        ...

    async def unpack_archive(
        self, content: bytes | AsyncIterable[bytes], *, kind: ArchiveFormat, into: str = ""
    ) -> UnpackSummary:
        """Unpack an archive, whole or not at all.

        content: all bytes, or chunks.
        kind: the format.
        into: a directory.

        Raises FileRefused, SandboxPayloadTooLarge, and whatever `content` raises.
        """
        ...


class SandboxProvider(Protocol):
    """Creates and finds sandboxes.

    A sandbox outlives the request that created it; on a remote server, also the gateway.
    Every method raises SandboxServerUnreachable if the sandbox server does not answer.
    """

    async def create(self, spec: SandboxSpec, name: str | None = None) -> SandboxRef:
        """Create a sandbox, or return the running one of the same name and spec.

        spec: memory, network, packages and tenant.
        name: its id; None to have one chosen.

        Raises SandboxConflict if the name runs with another spec, SandboxServerAtCapacity, TenantQuotaExceeded,
        InstallFailed, InvalidSandboxRequest, SandboxStartFailed, SandboxGone if the server ended meanwhile.
        """
        ...

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """Return the sandbox of a reference.

        ref: from `create`.

        Raises SandboxNotFound, SandboxGone.
        """
        ...

    async def destroy(self, ref: SandboxRef) -> None:
        """End a sandbox and delete its files. A missing one is no error.

        ref: from `create`.
        """
        ...

    async def extend_lifetime(self, ref: SandboxRef, until: float) -> None:
        """Keep a sandbox from ending before a time, where sandboxes end at an age. A missing one is no error.

        ref: from `create`.
        until: seconds since 1970.
        """
        ...

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """Return all running sandboxes."""
        ...

    async def close(self) -> None:
        """Close connections, and end what this provider itself has started. Later calls raise
        SandboxServerUnreachable.
        """
        ...
