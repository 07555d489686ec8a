"""The methods of `interfaces.Sandbox` on a sandbox of this process, for `fumehood exec`, benchmarks and tests."""

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing

from fumehood.protocol.sandbox.bundle_encoding import (
    BundleContent,
    BundledFile,
    ReadFilesResponseDecoder,
    encode_bundle,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    ExecuteRequest,
    ExecutionEvent,
    FileEntry,
    FileListing,
    UnpackSummary,
    WriteFilesSummary,
)
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance


async def iter_events(execution: SandboxExecution, after: int = -1) -> AsyncGenerator[ExecutionEvent]:
    """The events after number `after` up to the end, as they come."""
    async for batch in execution.event_batches(after):
        for event in batch:
            yield event


class InProcessSandbox:
    """An isolated sandbox of this process's supervisor as an `interfaces.Sandbox`; raises what that says."""

    def __init__(self, instance: SandboxInstance) -> None:
        self._instance = instance
        self._files = instance.files

    @property
    def id(self) -> str:
        return self._instance.name

    def execute(self, request: ExecuteRequest) -> AsyncGenerator[ExecutionEvent]:
        return iter_events(self._instance.executions.start_or_get(request))

    def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[ExecutionEvent]:
        return iter_events(self._instance.executions.get(execution_id), after)

    async def interrupt(self, execution_id: str | None = None) -> bool:
        self._instance.check_alive()
        return self._instance.executions.interrupt(execution_id)

    async def list_files(self, since: str | None = None) -> FileListing:
        return await self._files.list(since)

    async def read_file(self, path: str) -> AsyncGenerator[bytes]:
        async with await self._files.open(path) as opened:
            async for chunk in opened.chunks():
                yield chunk

    async def read_files(self, paths: Sequence[str]) -> AsyncGenerator[Sequence[BundleContent]]:
        reader = ReadFilesResponseDecoder(paths)
        async with aclosing(self._files.read_bundle(paths)) as chunks:
            async for chunk in chunks:
                yield reader.feed(chunk)
        reader.finish()

    async def write_file(
        self, path: str, content: bytes | AsyncIterable[bytes], *, executable: bool = False
    ) -> FileEntry:
        return await self._files.write(path, content, executable=executable)

    async def write_files(
        self, files: Callable[[], AsyncIterable[Sequence[BundledFile]]]
    ) -> WriteFilesSummary:
        return await self._files.write_bundle(encode_bundle(files()))

    async def delete_file(self, path: str) -> None:
        await self._files.delete(path)

    async def unpack_archive(
        self, content: bytes | AsyncIterable[bytes], *, kind: ArchiveFormat, into: str = ""
    ) -> UnpackSummary:
        return await self._files.unpack(content, kind=kind, into=into)
