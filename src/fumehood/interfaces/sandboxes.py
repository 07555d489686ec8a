"""Sandboxes and their providers."""

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
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
    WriteSummary,
)


@dataclass(frozen=True, slots=True)
class SandboxRef:
    """What is kept of a sandbox to find it again, after a restart too; `address` is the provider's own affair."""

    id: str
    address: str = ""
    from_warm_pool: bool | None = field(
        default=None, compare=False
    )  # of one just made: whether it had been waiting


class Sandbox(Protocol):
    """One sandbox of a provider. Every method raises SandboxGone once it has ended, SandboxNotFound if it never
    was or is long forgotten, Unreachable if the server behind it does not answer.
    """

    @property
    def id(self) -> str: ...

    def execute(self, request: ExecuteRequest) -> AsyncGenerator[ExecutionEvent]:
        """Run code and yield its events, the `End` last; calls of one sandbox run one after another.

        Leaving the iterator does not stop the code: `interrupt` does. The same `execution_id` again attaches to the
        call that is there. Raises Conflict if that was another code, RequestRefused, TooLarge; and SandboxGone or
        SandboxNotFound, which are `refused` where it is certain that nothing has begun.
        """
        ...

    def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[ExecutionEvent]:
        """The events of a call from the one after number `after`; raises ExecutionNotFound."""
        ...

    async def interrupt(self, execution_id: str | None = None) -> bool:
        """Stop this call, or the one that runs, as a keyboard interrupt would; False if none does."""
        ...

    async def list_files(self, since: str | None = None) -> FileListing:
        """What is in /mnt/data; with the mark of an earlier listing, what changed since."""
        ...

    def read_file(self, path: str) -> AsyncGenerator[bytes]:
        """The content of one regular file in pieces; raises FileNotFound, FileRefused."""
        ...

    def read_files(self, paths: Sequence[str]) -> AsyncGenerator[Sequence[BundleContent]]:
        """What is in many small files, in this order and as many at a time as have come; in place of the content of
        one FileNotFound, FileRefused, or TooLarge if it is larger than `sandbox_bundles.SMALL`.
        """
        ...

    async def write_file(
        self, path: str, content: bytes | AsyncIterable[bytes], *, executable: bool = False
    ) -> FileEntry:
        """Put a file in place, whole or not at all; raises FileRefused, TooLarge."""
        ...

    async def write_files(self, files: AsyncIterable[Sequence[BundledFile]]) -> WriteSummary:
        """Put many small files in place, each as `write` would: what is refused is told, and the rest is there. Raises
        FileRefused, TooLarge and whatever `files` raises, and then nothing of it is there.
        """
        ...

    async def delete_file(self, path: str) -> None:
        """Remove one file; raises FileNotFound, FileRefused."""
        ...

    async def unpack_archive(
        self, content: bytes | AsyncIterable[bytes], *, kind: ArchiveFormat, into: str = ""
    ) -> UnpackSummary:
        """Unpack an archive below `into`; raises FileRefused, TooLarge, and then nothing of it is there."""
        ...


class SandboxProvider(Protocol):
    """Makes and finds sandboxes. They outlive requests and, where the server is another process, its callers."""

    async def create(self, spec: SandboxSpec, name: str | None = None) -> SandboxRef:
        """A new sandbox; asking again for a name that lives with the same spec gives that one.

        Raises Conflict (the name lives with another spec), AtCapacity, QuotaExceeded, InstallFailed, RequestRefused,
        SandboxStartFailed, Unreachable.
        """
        ...

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """The sandbox of a reference; raises SandboxNotFound, SandboxGone, Unreachable."""
        ...

    async def destroy(self, ref: SandboxRef) -> None:
        """End it with all its files; one that is not there is no error. Raises Unreachable."""
        ...

    async def list_sandboxes(self) -> list[SandboxInfo]:
        """All that live; raises Unreachable."""
        ...

    async def close(self) -> None:
        """Let go of connections and of what this provider itself started."""
        ...
