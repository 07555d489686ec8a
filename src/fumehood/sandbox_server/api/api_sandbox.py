"""One named sandbox of the API, and the tombstones of those that ended."""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Sequence
from typing import Literal

from fumehood.protocol.sandbox.bundle_encoding import BundleContent, BundledFile, BundleReader, encode_bundle
from fumehood.protocol.sandbox.sandbox_errors import SandboxGone
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    FileEntry,
    FileListing,
    SandboxInfo,
    SandboxSpec,
    UnpackSummary,
    WriteSummary,
)
from fumehood.sandbox_server.settings import Settings
from fumehood.sandbox_server.supervisor.execution_registry import ExecutionRegistry, RegisteredExecution
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution
from fumehood.sandbox_server.supervisor.sandbox_files import OpenFile
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance

type TransferDirection = Literal["in", "out"]


class ApiSandbox:
    """Created by `SandboxService`; implements the seam `Sandbox` and raises what it says."""

    def __init__(
        self,
        name: str,
        spec: SandboxSpec,
        instance: SandboxInstance,
        settings: Settings,
        *,
        check_accepting_work: Callable[[], None],
        on_execution_start: Callable[[SandboxExecution, SandboxInstance], None],
        on_execution_end: Callable[["ApiSandbox", RegisteredExecution, ExecutionEnd], None],
        on_file_bytes: Callable[[TransferDirection, int], None],
    ) -> None:
        self.id = name
        self.spec = spec
        self.instance = instance
        self.executions = ExecutionRegistry(
            instance, settings, lambda registered, end: on_execution_end(self, registered, end)
        )
        self.created_at = self.last_used_at = time.time()
        self._check_accepting_work = check_accepting_work
        self._on_execution_start = on_execution_start
        self._on_file_bytes = on_file_bytes
        self._last_used_monotonic = time.monotonic()
        self._active_uses = 0

    @property
    def end_reason(self) -> str | None:
        return self.instance.end_reason

    def info(self) -> SandboxInfo:
        return SandboxInfo(
            id=self.id,
            memory=self.spec.memory,
            tenant=self.spec.tenant,
            created_at=self.created_at,
            last_used_at=self.last_used_at,
            running=self.executions.running_id,
            waiting=self.executions.queued_count,
            warm=self.instance.warm,
        )

    # ---- use --------------------------------------------------------------------------------------------------

    def idle_seconds(self) -> float:
        """Seconds since the last use; 0 while it is in use."""
        return (
            0
            if self._active_uses or not self.executions.is_idle
            else time.monotonic() - self._last_used_monotonic
        )

    def touch(self) -> None:
        self.last_used_at = time.time()
        self._last_used_monotonic = time.monotonic()

    @contextlib.contextmanager
    def _mark_in_use(self) -> Generator[None]:
        if self.end_reason is not None:
            raise SandboxGone(f"The sandbox is gone: {self.end_reason}.")
        self._active_uses += 1
        try:
            yield
        finally:
            self._active_uses -= 1
            self.touch()

    # ---- executions -------------------------------------------------------------------------------------------

    def start_execution(self, request: ExecuteRequest) -> RegisteredExecution:
        """Start an execution, or return the one that was started under the same id."""
        self._check_accepting_work()
        registered = self.executions.start_or_get(request)
        if not registered.execution.has_ended:
            self._on_execution_start(registered.execution, self.instance)
        self.touch()
        return registered

    async def execute(self, request: ExecuteRequest) -> AsyncGenerator[ExecutionEvent]:
        async for batch in self.start_execution(request).event_batches():
            for event in batch:
                yield event

    async def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[ExecutionEvent]:
        async for batch in self.executions.get(execution_id).event_batches(after):
            for event in batch:
                yield event

    async def interrupt(self, execution_id: str | None = None) -> bool:
        with self._mark_in_use():
            return self.executions.interrupt(execution_id)

    # ---- files ------------------------------------------------------------------------------------------------

    async def list_files(self, since: str | None = None) -> FileListing:
        with self._mark_in_use():
            return await self.instance.files.list(since)

    @contextlib.asynccontextmanager
    async def open(self, path: str) -> AsyncGenerator[OpenFile]:
        with self._mark_in_use():
            async with await self.instance.files.open(path) as opened:
                try:
                    yield opened
                finally:
                    self._on_file_bytes("out", opened.bytes_read)

    async def read_file(self, path: str) -> AsyncGenerator[bytes]:
        async with self.open(path) as opened:
            async for chunk in opened.chunks():
                yield chunk

    async def read_bundle(self, paths: Sequence[str]) -> AsyncGenerator[bytes]:
        """`read_files` in the encoding of `bundle_encoding`."""
        with self._mark_in_use():
            async with contextlib.aclosing(self.instance.files.read_bundle(paths)) as chunks:
                async for chunk in chunks:
                    self._on_file_bytes("out", len(chunk))
                    yield chunk

    async def read_files(self, paths: Sequence[str]) -> AsyncGenerator[Sequence[BundleContent]]:
        reader = BundleReader(paths)
        async with contextlib.aclosing(self.read_bundle(paths)) as chunks:
            async for chunk in chunks:
                yield reader.feed(chunk)
        reader.finish()

    async def write_file(
        self, path: str, content: bytes | AsyncIterable[bytes], *, executable: bool = False
    ) -> FileEntry:
        with self._mark_in_use():
            entry = await self.instance.files.write(path, content, executable=executable)
            self._on_file_bytes("in", entry.size)
            return entry

    async def write_bundle(self, content: AsyncIterable[bytes]) -> WriteSummary:
        """`write_files` in the encoding of `bundle_encoding`."""
        with self._mark_in_use():
            written = await self.instance.files.write_bundle(content)
            self._on_file_bytes("in", written.bytes)
            return written

    async def write_files(self, files: Callable[[], AsyncIterable[Sequence[BundledFile]]]) -> WriteSummary:
        return await self.write_bundle(encode_bundle(files()))

    async def delete_file(self, path: str) -> None:
        with self._mark_in_use():
            await self.instance.files.delete(path)

    async def unpack_archive(
        self, content: bytes | AsyncIterable[bytes], *, kind: ArchiveFormat, into: str = ""
    ) -> UnpackSummary:
        with self._mark_in_use():
            unpacked = await self.instance.files.unpack(content, kind=kind, into=into)
            self._on_file_bytes("in", unpacked.bytes)
            return unpacked


_TRIM_EVERY = 32


class SandboxTombstones:
    """Ended sandboxes, the newest last; bounded in number, age and retained output."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tombstones: dict[str, tuple[float, ApiSandbox]] = {}
        self._retained_bytes = self._added_since_trim = 0

    def add(self, sandbox: ApiSandbox) -> None:
        self.remove(sandbox.id)
        self._tombstones[sandbox.id] = (time.monotonic(), sandbox)
        self._retained_bytes += sandbox.executions.retained_bytes
        self._added_since_trim += 1
        self._expire()
        # Not each time, because it visits all. The sum is inexact: an execution may end after its sandbox.
        if (
            self._retained_bytes > self._settings.retained_output_bytes
            or self._added_since_trim >= _TRIM_EVERY
        ):
            self._trim_output()

    def get(self, name: str) -> ApiSandbox | None:
        self._expire()
        found = self._tombstones.get(name)
        return None if found is None else found[1]

    def remove(self, name: str) -> None:
        self._tombstones.pop(name, None)

    def _expire(self) -> None:
        oldest = time.monotonic() - self._settings.tombstone_seconds
        while self._tombstones:
            name, (since, _) = next(iter(self._tombstones.items()))
            if since >= oldest and len(self._tombstones) <= self._settings.max_tombstones:
                return
            del self._tombstones[name]

    def _trim_output(self) -> None:
        """All tombstones together retain no more output than one live sandbox may."""
        room = self._settings.retained_output_bytes
        for _, sandbox in reversed(self._tombstones.values()):
            room -= sandbox.executions.retained_bytes
            if room < 0 and sandbox.executions.retained_bytes:
                room += sandbox.executions.retained_bytes
                sandbox.executions.evict_all()
        self._retained_bytes = self._settings.retained_output_bytes - room
        self._added_since_trim = 0
