"""One sandbox as its callers see it: a name, calls by id, files; imports `fumehood.protocol` and siblings."""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Sequence
from typing import Literal

from fumehood.protocol.sandbox import (
    AnyOutput,
    ArchiveFormat,
    End,
    ExecuteRequest,
    FileEntry,
    FileListing,
    SandboxInfo,
    SandboxSpec,
    Unpacked,
    Written,
)
from fumehood.protocol.sandbox_bundles import Answers, Content, WholeFile, bundled
from fumehood.protocol.sandbox_errors import SandboxGone
from fumehood.sandboxd.calls import Call, Calls
from fumehood.sandboxd.executions import Execution
from fumehood.sandboxd.files import OpenFile
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.settings import Settings

type Direction = Literal["in", "out"]


class ServedSandbox:
    """Made by `Service`; has the shape of the seam `Sandbox`, and raises what that says."""

    def __init__(
        self,
        name: str,
        spec: SandboxSpec,
        local: LocalSandbox,
        settings: Settings,
        *,
        check: Callable[[], None],
        on_begin: Callable[[Execution, LocalSandbox], None],
        on_end: Callable[["ServedSandbox", Call, End], None],
        on_bytes: Callable[[Direction, int], None],
    ) -> None:
        self.id = name
        self.spec = spec
        self.local = local
        self.calls = Calls(local, settings, lambda call, end: on_end(self, call, end))
        self.created_at = self.last_used_at = time.time()
        self._check = check
        self._on_begin = on_begin
        self._on_bytes = on_bytes
        self._last_used = time.monotonic()
        self._users = 0

    @property
    def gone(self) -> str | None:
        return self.local.gone

    def info(self) -> SandboxInfo:
        return SandboxInfo(
            id=self.id,
            memory=self.spec.memory,
            tenant=self.spec.tenant,
            created_at=self.created_at,
            last_used_at=self.last_used_at,
            running=self.calls.running,
            waiting=self.calls.waiting,
            warm=self.local.warm,
        )

    # ---- use --------------------------------------------------------------------------------------------------

    def idle_for(self) -> float:
        """Seconds since it was last used; 0 while something goes on."""
        return 0 if self._users or not self.calls.idle else time.monotonic() - self._last_used

    def touch(self) -> None:
        self.last_used_at = time.time()
        self._last_used = time.monotonic()

    @contextlib.contextmanager
    def _using(self) -> Generator[None]:
        if self.gone is not None:
            raise SandboxGone(f"The sandbox is gone: {self.gone}.")
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.touch()

    # ---- calls ------------------------------------------------------------------------------------------------

    def begin(self, request: ExecuteRequest) -> Call:
        """Start a call or find it again; what comes of it is in its log."""
        self._check()
        call = self.calls.begin(request)
        if not call.execution.ended:
            self._on_begin(call.execution, self.local)
        self.touch()
        return call

    async def execute(self, request: ExecuteRequest) -> AsyncGenerator[AnyOutput]:
        async for batch in self.begin(request).batches():
            for event in batch:
                yield event

    async def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[AnyOutput]:
        async for batch in self.calls.find(execution_id).batches(after):
            for event in batch:
                yield event

    async def interrupt(self, execution_id: str | None = None) -> bool:
        with self._using():
            return self.calls.interrupt(execution_id)

    # ---- files ------------------------------------------------------------------------------------------------

    async def list(self, since: str | None = None) -> FileListing:
        with self._using():
            return await self.local.files.list(since)

    @contextlib.asynccontextmanager
    async def open(self, path: str) -> AsyncGenerator[OpenFile]:
        with self._using():
            async with await self.local.files.open(path) as opened:
                try:
                    yield opened
                finally:
                    self._on_bytes("out", opened.given)

    async def read(self, path: str) -> AsyncGenerator[bytes]:
        async with self.open(path) as opened:
            async for chunk in opened.chunks():
                yield chunk

    async def give(self, paths: Sequence[str]) -> AsyncGenerator[bytes]:
        """`read_all`, as it travels."""
        with self._using():
            async with contextlib.aclosing(self.local.files.give(paths)) as pieces:
                async for piece in pieces:
                    self._on_bytes("out", len(piece))
                    yield piece

    async def read_all(self, paths: Sequence[str]) -> AsyncGenerator[Sequence[Content]]:
        answers = Answers(paths)
        async with contextlib.aclosing(self.give(paths)) as pieces:
            async for piece in pieces:
                yield answers.feed(piece)
        answers.end()

    async def write(
        self, path: str, content: bytes | AsyncIterable[bytes], *, executable: bool = False
    ) -> FileEntry:
        with self._using():
            entry = await self.local.files.write(path, content, executable=executable)
            self._on_bytes("in", entry.size)
            return entry

    async def receive(self, content: AsyncIterable[bytes]) -> Written:
        """`write_all`, as it travels."""
        with self._using():
            written = await self.local.files.receive(content)
            self._on_bytes("in", written.bytes)
            return written

    async def write_all(self, files: AsyncIterable[Sequence[WholeFile]]) -> Written:
        return await self.receive(bundled(files))

    async def delete(self, path: str) -> None:
        with self._using():
            await self.local.files.delete(path)

    async def unpack(
        self, content: bytes | AsyncIterable[bytes], *, kind: ArchiveFormat, into: str = ""
    ) -> Unpacked:
        with self._using():
            unpacked = await self.local.files.unpack(content, kind=kind, into=into)
            self._on_bytes("in", unpacked.bytes)
            return unpacked
