"""Sandboxes that do what a test says, in memory; imports `interfaces`, `protocol` and the standard library."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self, cast

import msgspec

from fumehood.interfaces import SandboxRef
from fumehood.protocol.sandbox import (
    AnyOutput,
    ArchiveFormat,
    End,
    ExecuteRequest,
    FileEntry,
    FileListing,
    Language,
    Name,
    OutputEvent,
    Raised,
    SandboxInfo,
    SandboxSpec,
    Unpacked,
    Written,
)
from fumehood.protocol.sandbox_bundles import Content, WholeFile
from fumehood.protocol.sandbox_errors import (
    AtCapacity,
    Conflict,
    ExecutionNotFound,
    RequestRefused,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    Unreachable,
)
from fumehood.testing.memory_files import MemoryFiles

_PIECE = 1 << 16
_AT_ONCE = 16
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


# An event is told; an asyncio.Event is waited for, as is what a function returns, and told if it is an event; a
# SandboxError is raised to whoever reads the events, and ends them.
type Action = (
    AnyOutput
    | WriteFile
    | DeleteFile
    | asyncio.Event
    | SandboxError
    | Callable[["ScriptedSandbox"], Awaitable[object]]
)
type Expected = str | Callable[[ExecuteRequest], bool] | None


@dataclass(frozen=True, slots=True)
class Step:
    """One execution: what is expected to be asked (a code, a predicate, None for anything), and what then happens.

    Without an `End` among the actions one is added: `error` after a `Raised`, else `ok`.
    """

    code: Expected
    actions: Sequence[Action] = ()

    def fits(self, request: ExecuteRequest) -> bool:
        if callable(self.code):
            return self.code(request)
        return self.code is None or self.code == request.code

    def __str__(self) -> str:
        if callable(self.code):
            return f"a request that {getattr(self.code, '__name__', self.code)!r} accepts"
        return "any request" if self.code is None else f"the code {self.code!r}"


class ScriptedSandboxes:
    """A `SandboxProvider` whose executions follow the steps, in order, whichever sandbox they are asked of.

    always: steps that may be taken any number of times, when the next one of the script does not fit.
    capacity: how many sandboxes may live; the next `create` raises AtCapacity.
    trouble: while set, every method raises it, as if the server were unreachable, say.
    requests: what was executed so far, with the id of the sandbox; specs: the sandboxes that live.

    An execution that no step fits raises AssertionError, there and in `assert_done`, which also fails when steps are
    left over. As `async with` it closes itself, and asserts if nothing else went wrong.
    """

    def __init__(self, *steps: Step, always: Iterable[Step] = (), capacity: int = 256) -> None:
        self.trouble: SandboxError | None = None
        self.requests: list[tuple[str, ExecuteRequest]] = []
        self._steps = deque(steps)
        self._always = tuple(always)
        self._capacity = capacity
        self._closed = False
        self._live: dict[str, ScriptedSandbox] = {}
        self._ended: dict[str, str] = {}
        self._failures: list[str] = []
        self._names = itertools.count(1)
        self._clock = itertools.count(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close()
        if kind is None:
            self.assert_done()

    @property
    def specs(self) -> dict[str, SandboxSpec]:
        return {name: sandbox.spec for name, sandbox in self._live.items()}

    def expect(self, *steps: Step) -> None:
        """Add steps to the script."""
        self._steps.extend(steps)

    def assert_done(self) -> None:
        """Fail unless every step was taken and nothing else was asked."""
        problems = [*self._failures, *(f"Nobody asked for {step}." for step in self._steps)]
        if problems:
            raise AssertionError("\n".join(problems))

    # ---- SandboxProvider --------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec, name: str | None = None) -> SandboxRef:
        self.check()
        chosen = f"scripted-{next(self._names)}" if name is None else name
        try:
            msgspec.convert(chosen, Name)
        except msgspec.ValidationError as error:
            raise RequestRefused(f"{chosen!r} cannot be the name of a sandbox.", param="name") from error
        if chosen in self._live:
            if self._live[chosen].spec != spec:
                raise Conflict(f"The sandbox {chosen!r} lives with another spec.", param="id")
            return SandboxRef(chosen)
        if len(self._live) >= self._capacity:
            raise AtCapacity(f"There are {self._capacity} sandboxes already, as many as are allowed.")
        self._ended.pop(chosen, None)
        self._live[chosen] = ScriptedSandbox(self, chosen, spec)
        return SandboxRef(chosen)

    async def attach(self, ref: SandboxRef) -> "ScriptedSandbox":
        self.check()
        if ref.id not in self._live:
            raise self.missing(ref.id)
        return self._live[ref.id]

    async def destroy(self, ref: SandboxRef) -> None:
        self.check()
        await self.end(ref.id, "it was deleted")

    async def sandboxes(self) -> list[SandboxInfo]:
        self.check()
        return [sandbox.info() for sandbox in self._live.values()]

    async def close(self) -> None:
        self._closed = True
        for name in list(self._live):
            await self.end(name, "its server was closed")

    # ---- for the sandboxes ------------------------------------------------------------------------------------

    async def end(self, name: str, reason: str) -> None:
        """End a sandbox as if by itself: whoever asks for it then gets SandboxGone."""
        sandbox = self._live.pop(name, None)
        if sandbox is not None:
            self._ended[name] = reason
            await sandbox.stop(reason)

    def forget(self, name: str, reason: str) -> None:
        self._live.pop(name, None)
        self._ended[name] = reason

    def missing(self, name: str) -> SandboxError:
        error: SandboxError = SandboxNotFound(f"There is no sandbox {name!r}.")
        if name in self._ended:
            error = SandboxGone(f"The sandbox {name!r} is gone: {self._ended[name]}.")
        error.refused = True
        return error

    def check(self) -> None:
        if self._closed:
            raise Unreachable("These sandboxes have been closed.")
        if self.trouble is not None:
            raise self.trouble

    def take_step(self, name: str, request: ExecuteRequest) -> Step:
        self.requests.append((name, request))
        if self._steps and self._steps[0].fits(request):
            return self._steps.popleft()
        for step in self._always:
            if step.fits(request):
                return step
        expected = str(self._steps[0]) if self._steps else "nothing more"
        failure = f"The sandbox {name!r} was asked for {request.code!r}; expected was {expected}."
        self.fail(failure)
        raise AssertionError(failure)

    def fail(self, problem: str) -> None:
        """Have `assert_done` tell it, also if whoever asked does not."""
        self._failures.append(problem)

    def now(self) -> float:
        """A clock that ticks when it is looked at, so that tests see the same times every day."""
        return _EPOCH + next(self._clock)


@dataclass(slots=True, eq=False)
class _Execution:
    """A call's log, as long as it grows and after."""

    code: str
    language: Language
    actions: Sequence[Action]
    log: list[AnyOutput] = field(default_factory=list[AnyOutput])
    failure: Exception | None = None
    began: bool = False
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        return self.failure is not None or (bool(self.log) and isinstance(self.log[-1], End))

    def append(self, event: AnyOutput) -> None:
        self.log.append(event)
        self.wake()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.wake()

    def wake(self) -> None:
        grown, self.grown = self.grown, asyncio.Event()
        grown.set()


class ScriptedSandbox:
    """A `Sandbox` of `ScriptedSandboxes`; `files` is its /mnt/data, to be looked at and filled by tests."""

    def __init__(self, provider: ScriptedSandboxes, name: str, spec: SandboxSpec) -> None:
        self.spec = spec
        self.files = MemoryFiles()
        self._provider = provider
        self._id = name
        self._executions: dict[str, _Execution] = {}
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._created = self._used = provider.now()
        self._gone = False

    @property
    def id(self) -> str:
        return self._id

    def info(self) -> SandboxInfo:
        open_calls = [(name, call) for name, call in self._executions.items() if not call.over]
        return SandboxInfo(
            id=self._id,
            memory=self.spec.memory,
            tenant=self.spec.tenant,
            created_at=self._created,
            last_used_at=self._used,
            running=next((name for name, call in open_calls if call.began), None),
            waiting=sum(not call.began for _, call in open_calls),
        )

    async def stop(self, reason: str) -> None:
        """End every call; called when the sandbox has been ended."""
        self._gone = True
        for task in list(self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for call in self._executions.values():
            if not call.over:
                lost = f"The sandbox was lost: {reason}."
                call.append(End(status="lost", exit_code=-1, duration_ms=0, state_kept=False, reason=lost))

    def _check(self) -> None:
        self._provider.check()
        if self._gone:
            raise self._provider.missing(self._id)
        self._used = self._provider.now()

    # ---- calls ------------------------------------------------------------------------------------------------

    async def execute(self, request: ExecuteRequest) -> AsyncGenerator[AnyOutput]:
        self._check()
        name = request.execution_id or f"execution-{next(self._numbers)}"
        call = self._executions.get(name)
        if call is None:
            step = self._provider.take_step(self._id, request)
            call = self._executions[name] = _Execution(request.code, request.language, step.actions)
            task = asyncio.ensure_future(self._run(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (call.code, call.language) != (request.code, request.language):
            raise Conflict(f"The execution {name!r} was of another code.", param="execution_id")
        async for event in self._events(call, -1):
            yield event

    async def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[AnyOutput]:
        self._check()
        if execution_id not in self._executions:
            raise ExecutionNotFound(f"There is no execution {execution_id!r} of this sandbox.")
        async for event in self._events(self._executions[execution_id], after):
            yield event

    async def _events(self, call: _Execution, after: int) -> AsyncGenerator[AnyOutput]:
        number = after + 1
        while True:
            while number < len(call.log):
                yield call.log[number]
                number += 1
            if call.over:
                break
            await call.grown.wait()
        if call.failure is not None:
            raise call.failure

    async def interrupt(self, execution_id: str | None = None) -> bool:
        self._check()
        call = self._executions.get(execution_id or self.info().running or "")
        if call is None or call.over:
            return False
        call.interrupted.set()
        return True

    async def _run(self, call: _Execution) -> None:
        async with self._turn:
            call.began = True
            try:
                await self._perform_all(call)
            except Exception as error:
                self._provider.fail(f"The script of {call.code!r} cannot be followed: {error!r}")
                call.fail(error)
        last = call.log[-1] if call.log else None
        if isinstance(call.failure, SandboxGone):
            self._end(str(call.failure).rstrip("."))
        elif isinstance(last, End) and not last.state_kept:
            self._end(last.reason.rstrip(".") or last.status)

    async def _perform_all(self, call: _Execution) -> None:
        for action in call.actions:
            if call.over or call.interrupted.is_set() or not await self._perform(call, action):
                break
        if not call.over:
            call.append(_ending(call))

    def _end(self, reason: str) -> None:
        self._gone = True
        self._provider.forget(self._id, reason)

    async def _perform(self, call: _Execution, action: Action) -> bool:
        """Do one thing; False if an interrupt came before it was done."""
        match action:
            case OutputEvent():
                call.append(action)
            case SandboxError():
                call.fail(action)
            case WriteFile(path, content):
                self.files.write(path, content)
            case DeleteFile(path):
                self.files.delete(path)
            case asyncio.Event():
                return await _unless(call.interrupted, action.wait())
            case _:
                return await _unless(call.interrupted, self._ask(call, action))
        return True

    async def _ask(self, call: _Execution, action: "Callable[[ScriptedSandbox], Awaitable[object]]") -> None:
        said = await action(self)
        if isinstance(said, OutputEvent):
            call.append(cast("AnyOutput", said))

    # ---- files ------------------------------------------------------------------------------------------------

    async def list(self, since: str | None = None) -> FileListing:
        self._check()
        return self.files.listing(since)

    async def read(self, path: str) -> AsyncGenerator[bytes]:
        self._check()
        content = self.files.read(path)
        for start in range(0, len(content), _PIECE):
            yield content[start : start + _PIECE]

    async def read_all(self, paths: Sequence[str]) -> AsyncGenerator[Sequence[Content]]:
        self._check()
        for some in itertools.batched(paths, _AT_ONCE):
            yield [self.files.content(path) for path in some]

    async def write_all(self, files: AsyncIterable[Sequence[WholeFile]]) -> Written:
        self._check()
        return self.files.write_all([file async for some in files for file in some])

    async def write(
        self, path: str, content: bytes | AsyncIterable[bytes], *, executable: bool = False
    ) -> FileEntry:
        self._check()
        self.files.check_place(path)
        return self.files.write(path, await _gathered(content), executable=executable)

    async def delete(self, path: str) -> None:
        self._check()
        self.files.delete(path)

    async def unpack(
        self, content: bytes | AsyncIterable[bytes], *, kind: ArchiveFormat, into: str = ""
    ) -> Unpacked:
        self._check()
        return self.files.unpack(await _gathered(content), kind, into)


def _ending(call: _Execution) -> End:
    if call.interrupted.is_set():
        reason = "It was interrupted; variables and files are kept."
        if call.language == "python":
            call.append(Raised("KeyboardInterrupt", "", "KeyboardInterrupt\n"))
        return End(status="interrupted", exit_code=-1, duration_ms=0, state_kept=True, reason=reason)
    if any(isinstance(event, Raised) for event in call.log):
        return End(status="error", exit_code=1, duration_ms=0, state_kept=True)
    return End(status="ok", exit_code=0, duration_ms=0, state_kept=True)


async def _unless(interrupted: asyncio.Event, work: Awaitable[object]) -> bool:
    """Wait for the work; False if the interrupt came first."""
    doing = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            return False
        doing.result()
        return True
    finally:
        for task in (doing, stopping):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(task, return_exceptions=True)


async def _gathered(content: bytes | AsyncIterable[bytes]) -> bytes:
    if isinstance(content, bytes):
        return content
    return b"".join([piece async for piece in content])
