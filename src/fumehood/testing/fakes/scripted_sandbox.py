"""A `SandboxProvider` that follows a script."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import msgspec

from fumehood.interfaces import SandboxRef
from fumehood.protocol.sandbox.bundle_encoding import BundleContent, BundledFile
from fumehood.protocol.sandbox.sandbox_errors import (
    ExecutionNotFound,
    InvalidSandboxRequest,
    SandboxConflict,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxServerAtCapacity,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    BaseExecutionEvent,
    ExceptionRaised,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    ExecutionLanguage,
    FileEntry,
    FileListing,
    ResourceName,
    SandboxInfo,
    SandboxSpec,
    UnpackSummary,
    WriteFilesSummary,
)
from fumehood.testing.fakes.memory_sandbox_files import MemorySandboxFiles
from fumehood.testing.fakes.scripted_fake import ScriptedFake

_CHUNK_BYTES = 1 << 16
_BATCH_SIZE = 16
_EPOCH = 1_700_000_000.0


@dataclass(frozen=True, slots=True)
class WriteFile:
    """The code writes a file."""

    path: str
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class DeleteFile:
    """The code removes a file."""

    path: str


type SandboxAction = (
    ExecutionEvent
    | WriteFile
    | DeleteFile
    | asyncio.Event
    | SandboxError
    | Callable[["ScriptedSandbox"], Awaitable[object]]
)
"""An event is sent. An asyncio.Event is waited for. A function is awaited; an event that it returns is sent. A
SandboxError is raised to the reader and ends the execution."""

type ExpectedCode = str | Callable[[ExecuteRequest], bool] | None


@dataclass(frozen=True, slots=True)
class ScriptedExecution:
    """One expected execution and its actions.

    code: expected; a string, a predicate on the request, or None for any.
    actions: performed in order. An `ExecutionEnd` is added if there is none: `error` after an `ExceptionRaised`, else
        `ok`.
    """

    code: ExpectedCode
    actions: Sequence[SandboxAction] = ()

    def matches(self, request: ExecuteRequest) -> bool:
        if callable(self.code):
            return self.code(request)
        return self.code is None or self.code == request.code

    def __str__(self) -> str:
        if callable(self.code):
            return f"a request that {getattr(self.code, '__name__', self.code)!r} accepts"
        return "any request" if self.code is None else f"the code {self.code!r}"


class ScriptedSandboxProvider(ScriptedFake[ScriptedExecution]):
    """A `SandboxProvider` whose executions consume the steps in order, across all sandboxes.

    capacity: number of sandboxes beyond which `create` raises SandboxServerAtCapacity.
    error: while set, every method raises it.
    requests: all executions, each with the id of its sandbox.
    specs: of the running sandboxes.
    """

    def __init__(
        self, *steps: ScriptedExecution, repeatable: Iterable[ScriptedExecution] = (), capacity: int = 256
    ) -> None:
        super().__init__(steps, repeatable)
        self.error: SandboxError | None = None
        self.requests: list[tuple[str, ExecuteRequest]] = []
        self._capacity = capacity
        self._closed = False
        self._live: dict[str, ScriptedSandbox] = {}
        self._ended: dict[str, str] = {}
        self._names = itertools.count(1)
        self.lifetimes: dict[str, float] = {}
        self._clock = itertools.count(1)

    @property
    def specs(self) -> dict[str, SandboxSpec]:
        return {name: sandbox.spec for name, sandbox in self._live.items()}

    # ---- SandboxProvider --------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec, name: str | None = None) -> SandboxRef:
        self.check_available()
        chosen = f"scripted-{next(self._names)}" if name is None else name
        try:
            msgspec.convert(chosen, ResourceName)
        except msgspec.ValidationError as error:
            raise InvalidSandboxRequest(f"Invalid name of a sandbox: {chosen!r}.", param="name") from error
        if chosen in self._live:
            if self._live[chosen].spec != spec:
                raise SandboxConflict(f"The sandbox {chosen!r} exists with another spec.", param="id")
            return SandboxRef(chosen)
        if len(self._live) >= self._capacity:
            raise SandboxServerAtCapacity(f"Sandbox limit reached ({self._capacity}).")
        self._ended.pop(chosen, None)
        self._live[chosen] = ScriptedSandbox(self, chosen, spec)
        return SandboxRef(chosen)

    async def attach(self, ref: SandboxRef) -> "ScriptedSandbox":
        self.check_available()
        if ref.id not in self._live:
            raise self.make_missing_error(ref.id)
        return self._live[ref.id]

    async def destroy(self, ref: SandboxRef) -> None:
        self.check_available()
        await self.end_sandbox(ref.id, "it was deleted")

    async def extend_lifetime(self, ref: SandboxRef, until: float) -> None:
        self.check_available()
        if ref.id in self._live:
            self.lifetimes[ref.id] = until

    async def list_sandboxes(self) -> list[SandboxInfo]:
        self.check_available()
        return [sandbox.info() for sandbox in self._live.values()]

    async def close(self) -> None:
        self._closed = True
        for name in list(self._live):
            await self.end_sandbox(name, "its server was closed")

    # ---- for the sandboxes ------------------------------------------------------------------------------------

    async def end_sandbox(self, name: str, reason: str) -> None:
        """End a sandbox as if it had crashed: later calls raise SandboxGone."""
        sandbox = self._live.pop(name, None)
        if sandbox is not None:
            self._ended[name] = reason
            await sandbox.stop(reason)

    def mark_ended(self, name: str, reason: str) -> None:
        self._live.pop(name, None)
        self._ended[name] = reason

    def make_missing_error(self, name: str) -> SandboxError:
        error: SandboxError = SandboxNotFound(f"There is no sandbox {name!r}.")
        if name in self._ended:
            error = SandboxGone(f"The sandbox {name!r} is gone: {self._ended[name]}.")
        error.nothing_started = True
        return error

    def check_available(self) -> None:
        if self._closed:
            raise SandboxServerUnreachable("The provider is closed.")
        if self.error is not None:
            raise self.error

    def next_step(self, name: str, request: ExecuteRequest) -> ScriptedExecution:
        self.requests.append((name, request))
        call = f"The sandbox {name!r} was asked to run {request.code!r}"
        return self.take_step(call, lambda step: step.matches(request))

    def now(self) -> float:
        """Return a time that advances with every call, so that times are deterministic."""
        return _EPOCH + next(self._clock)


@dataclass(slots=True, eq=False)
class _ScriptedExecution:
    """An execution with its event log, running or ended."""

    code: str
    language: ExecutionLanguage
    actions: Sequence[SandboxAction]
    log: list[ExecutionEvent] = field(default_factory=list[ExecutionEvent])
    failure: Exception | None = None
    has_begun: bool = False
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_ended(self) -> bool:
        return self.failure is not None or (bool(self.log) and isinstance(self.log[-1], ExecutionEnd))

    def append(self, event: ExecutionEvent) -> None:
        self.log.append(event)
        self.notify()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.notify()

    def notify(self) -> None:
        grown, self.changed = self.changed, asyncio.Event()
        grown.set()


class ScriptedSandbox:
    """A `Sandbox` of `ScriptedSandboxProvider`. Tests may read and fill its `files`."""

    def __init__(self, provider: ScriptedSandboxProvider, name: str, spec: SandboxSpec) -> None:
        self.spec = spec
        self.files = MemorySandboxFiles()
        self._provider = provider
        self._id = name
        self._executions: dict[str, _ScriptedExecution] = {}
        self._numbers = itertools.count(1)
        self._execution_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._created_at = self._last_used_at = provider.now()
        self._is_gone = False

    @property
    def id(self) -> str:
        return self._id

    def info(self) -> SandboxInfo:
        open_calls = [(name, call) for name, call in self._executions.items() if not call.has_ended]
        return SandboxInfo(
            id=self._id,
            memory=self.spec.memory,
            tenant=self.spec.tenant,
            created_at=self._created_at,
            last_used_at=self._last_used_at,
            running=next((name for name, call in open_calls if call.has_begun), None),
            waiting=sum(not call.has_begun for _, call in open_calls),
        )

    async def stop(self, reason: str) -> None:
        """End all executions."""
        self._is_gone = True
        for task in list(self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for call in self._executions.values():
            if not call.has_ended:
                lost = f"The sandbox was lost: {reason}."
                call.append(
                    ExecutionEnd(status="lost", exit_code=-1, duration_ms=0, state_kept=False, reason=lost)
                )

    def _check_available(self) -> None:
        self._provider.check_available()
        if self._is_gone:
            raise self._provider.make_missing_error(self._id)
        self._last_used_at = self._provider.now()

    # ---- calls ------------------------------------------------------------------------------------------------

    async def execute(self, request: ExecuteRequest) -> AsyncGenerator[ExecutionEvent]:
        self._check_available()
        name = request.execution_id or f"execution-{next(self._numbers)}"
        call = self._executions.get(name)
        if call is None:
            step = self._provider.next_step(self._id, request)
            call = self._executions[name] = _ScriptedExecution(request.code, request.language, step.actions)
            task = asyncio.ensure_future(self._run(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (call.code, call.language) != (request.code, request.language):
            raise SandboxConflict(f"The execution {name!r} has other code.", param="execution_id")
        async for event in self._read_events(call, -1):
            yield event

    async def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[ExecutionEvent]:
        self._check_available()
        if execution_id not in self._executions:
            raise ExecutionNotFound(f"There is no execution {execution_id!r} in this sandbox.")
        async for event in self._read_events(self._executions[execution_id], after):
            yield event

    async def _read_events(self, call: _ScriptedExecution, after: int) -> AsyncGenerator[ExecutionEvent]:
        number = after + 1
        while True:
            while number < len(call.log):
                yield call.log[number]
                number += 1
            if call.has_ended:
                break
            await call.changed.wait()
        if call.failure is not None:
            raise call.failure

    async def interrupt(self, execution_id: str | None = None) -> bool:
        self._check_available()
        call = self._executions.get(execution_id or self.info().running or "")
        if call is None or call.has_ended:
            return False
        call.interrupted.set()
        return True

    async def _run(self, call: _ScriptedExecution) -> None:
        async with self._execution_lock:
            call.has_begun = True
            try:
                await self._perform_all(call)
            except Exception as error:
                self._provider.record_failure(f"The actions of {call.code!r} failed: {error!r}")
                call.fail(error)
        last = call.log[-1] if call.log else None
        if isinstance(call.failure, SandboxGone):
            self._mark_gone(str(call.failure).rstrip("."))
        elif isinstance(last, ExecutionEnd) and not last.state_kept:
            self._mark_gone(last.reason.rstrip(".") or last.status)

    async def _perform_all(self, call: _ScriptedExecution) -> None:
        for action in call.actions:
            if call.has_ended or call.interrupted.is_set() or not await self._perform(call, action):
                break
        if not call.has_ended:
            call.append(_make_end(call))

    def _mark_gone(self, reason: str) -> None:
        self._is_gone = True
        self._provider.mark_ended(self._id, reason)

    async def _perform(self, call: _ScriptedExecution, action: SandboxAction) -> bool:
        """Perform one action; False if it was interrupted."""
        match action:
            case BaseExecutionEvent():
                call.append(action)
            case SandboxError():
                call.fail(action)
            case WriteFile(path, content):
                self.files.write_file(path, content)
            case DeleteFile(path):
                self.files.delete_file(path)
            case asyncio.Event():
                return await _wait_unless_interrupted(call.interrupted, action.wait())
            case _:
                return await _wait_unless_interrupted(call.interrupted, self._call_action(call, action))
        return True

    async def _call_action(
        self, call: _ScriptedExecution, action: "Callable[[ScriptedSandbox], Awaitable[object]]"
    ) -> None:
        event = await action(self)
        if isinstance(event, BaseExecutionEvent):
            call.append(cast("ExecutionEvent", event))

    # ---- files ------------------------------------------------------------------------------------------------

    async def list_files(self, since: str | None = None) -> FileListing:
        self._check_available()
        return self.files.list_files(since)

    async def read_file(self, path: str) -> AsyncGenerator[bytes]:
        self._check_available()
        content = self.files.read_file(path)
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]

    async def read_files(self, paths: Sequence[str]) -> AsyncGenerator[Sequence[BundleContent]]:
        self._check_available()
        for batch in itertools.batched(paths, _BATCH_SIZE):
            yield [self.files.read_small_file(path) for path in batch]

    async def write_files(
        self, files: Callable[[], AsyncIterable[Sequence[BundledFile]]]
    ) -> WriteFilesSummary:
        self._check_available()
        return self.files.write_files([file async for batch in files() for file in batch])

    async def write_file(
        self, path: str, content: bytes | AsyncIterable[bytes], *, executable: bool = False
    ) -> FileEntry:
        self._check_available()
        self.files.check_path(path)
        return self.files.write_file(path, await _read_content(content), executable=executable)

    async def delete_file(self, path: str) -> None:
        self._check_available()
        self.files.delete_file(path)

    async def unpack_archive(
        self, content: bytes | AsyncIterable[bytes], *, kind: ArchiveFormat, into: str = ""
    ) -> UnpackSummary:
        self._check_available()
        return self.files.unpack_archive(await _read_content(content), kind, into)


def _make_end(call: _ScriptedExecution) -> ExecutionEnd:
    if call.interrupted.is_set():
        reason = "The execution was interrupted; variables and files are kept."
        if call.language == "python":
            call.append(ExceptionRaised("KeyboardInterrupt", "", "KeyboardInterrupt\n"))
        return ExecutionEnd(status="interrupted", exit_code=-1, duration_ms=0, state_kept=True, reason=reason)
    if any(isinstance(event, ExceptionRaised) for event in call.log):
        return ExecutionEnd(status="error", exit_code=1, duration_ms=0, state_kept=True)
    return ExecutionEnd(status="ok", exit_code=0, duration_ms=0, state_kept=True)


async def _wait_unless_interrupted(interrupted: asyncio.Event, work: Awaitable[object]) -> bool:
    """Wait for the work; False if it was interrupted before."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        for task in (working, stopping):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(task, return_exceptions=True)


async def _read_content(content: bytes | AsyncIterable[bytes]) -> bytes:
    if isinstance(content, bytes):
        return content
    return b"".join([chunk async for chunk in content])
