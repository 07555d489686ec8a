"""Calls followed over broken connections."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from fumehood.containers.execution_recovery import execute_with_recovery
from fumehood.protocol.sandbox.sandbox_errors import (
    ExecutionNotFound,
    SandboxConflict,
    SandboxError,
    SandboxGone,
    SandboxLimitExceeded,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    SandboxSpec,
    Stdout,
)
from fumehood.testing import ExecutionStep, FakeClock, ScriptedSandbox, ScriptedSandboxProvider

REQUEST = ExecuteRequest(code="x", execution_id="e1")
AWAY = SandboxServerUnreachable("http://10.0.0.1 is away")


class FlakySandbox(ScriptedSandbox):
    """A sandbox whose streams break: each opening gives as many events as the next number says, then the error."""

    def __init__(self, provider: ScriptedSandboxProvider, *failures: tuple[int, SandboxError]) -> None:
        super().__init__(provider, "flaky", SandboxSpec())
        self.failures = deque(failures)
        self.openings: list[str] = []

    async def execute(self, request: ExecuteRequest) -> AsyncGenerator[ExecutionEvent]:
        self.openings.append("execute")
        if self.failures and self.failures[0][0] < 0:  # it never arrives
            raise self.failures.popleft()[1]
        async for event in self._breaking(super().execute(request)):
            yield event

    async def follow(self, execution_id: str, *, after: int = -1) -> AsyncGenerator[ExecutionEvent]:
        self.openings.append(f"follow {after}")
        async for event in self._breaking(super().follow(execution_id, after=after)):
            yield event

    async def _breaking(self, events: AsyncGenerator[ExecutionEvent]) -> AsyncGenerator[ExecutionEvent]:
        left, error = self.failures.popleft() if self.failures else (1000, AWAY)
        async with aclosing(events):
            async for event in events:
                if not left:
                    raise error
                left -= 1
                yield event


async def run(clock: FakeClock, sandbox: ScriptedSandbox) -> list[ExecutionEvent]:
    async def everything() -> list[ExecutionEvent]:
        return [event async for event in execute_with_recovery(sandbox, REQUEST, "e1", clock)]

    running = asyncio.ensure_future(everything())
    while not running.done():
        for _ in range(10):
            await asyncio.sleep(0)
        clock.advance(1)
    return await running


STEP = ExecutionStep("x", [Stdout("a"), Stdout("b"), Stdout("c")])


@pytest.mark.parametrize(
    ("failures", "openings"),
    [
        ([], ["execute"]),
        ([(0, AWAY)], ["execute", "follow -1"]),
        ([(2, AWAY)], ["execute", "follow 1"]),
        ([(1, AWAY), (1, AWAY), (1, AWAY)], ["execute", "follow 0", "follow 1", "follow 2"]),
        ([(-1, AWAY)], ["execute", "follow -1", "execute"]),
        ([(2, AWAY), (0, AWAY), (0, AWAY), (0, AWAY)], ["execute", *["follow 1"] * 4]),
    ],
)
async def test_a_broken_connection_is_not_noticed(
    failures: list[tuple[int, SandboxError]], openings: list[str]
) -> None:
    async with ScriptedSandboxProvider(STEP) as provider:
        sandbox = FlakySandbox(provider, *failures)
        events = await run(FakeClock(), sandbox)
        assert events[:3] == [Stdout("a"), Stdout("b"), Stdout("c")]
        assert isinstance(events[3], ExecutionEnd)
        assert len(events) == 4
        assert sandbox.openings == openings
        assert len(provider.requests) == 1  # nothing outcome twice


async def test_a_server_that_stays_away_is_given_up() -> None:
    async with ScriptedSandboxProvider(STEP) as provider:
        sandbox = FlakySandbox(provider, (2, AWAY), *[(0, AWAY)] * 10)
        events = await run(FakeClock(), sandbox)
        end = events[-1]
        assert events[:-1] == [Stdout("a"), Stdout("b")]
        assert isinstance(end, ExecutionEnd)
        assert (end.status, end.exit_code, end.state_kept) == ("lost", -1, True)
        assert "10.0.0.1" not in end.reason
        assert len(sandbox.openings) == 5


@pytest.mark.parametrize(
    ("error", "state_kept", "reason"),
    [
        (SandboxGone("gone: somebody pulled the plug"), False, "The sandbox was lost."),
        (SandboxConflict("That was another code."), True, "The sandbox refused: That was another code."),
        (SandboxLimitExceeded("Too much code."), True, "The sandbox refused: Too much code."),
        (ExecutionNotFound("It was forgotten."), True, "The sandbox refused: It was forgotten."),
    ],
)
async def test_what_will_not_get_better_is_the_end(
    error: SandboxError, state_kept: bool, reason: str
) -> None:
    async with ScriptedSandboxProvider(STEP) as provider:
        sandbox = FlakySandbox(provider, (1, error))
        events = await run(FakeClock(), sandbox)
        end = events[-1]
        assert events[:-1] == [Stdout("a")]
        assert isinstance(end, ExecutionEnd)
        assert (end.status, end.state_kept) == ("lost", state_kept)
        assert end.reason == (
            f"{reason} The code may have run, in part or to its end: check what it did before you run it again."
        )
        assert sandbox.openings == ["execute"]


async def test_leaving_interrupts() -> None:
    async with ScriptedSandboxProvider(ExecutionStep("x", [Stdout("a"), asyncio.Event()])) as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec()))
        async with aclosing(execute_with_recovery(sandbox, REQUEST, "e1", FakeClock())) as events:
            assert await anext(events) == Stdout("a")
            assert sandbox.info().running == "e1"
        last = [event async for event in sandbox.follow("e1")][-1]
        assert isinstance(last, ExecutionEnd)
        assert last.status == "interrupted"


async def test_only_what_has_surely_not_begun_may_begin_elsewhere() -> None:
    clock = FakeClock()
    gone = SandboxGone("it is gone")
    gone.nothing_started = True
    refusing = FlakySandbox(ScriptedSandboxProvider(), (-1, gone))
    with pytest.raises(SandboxGone):
        await run(clock, refusing)
    assert refusing.openings == ["execute"]
    unsure = FlakySandbox(ScriptedSandboxProvider(), (-1, SandboxGone("its server died")))
    (end,) = await run(clock, unsure)
    assert isinstance(end, ExecutionEnd)
    assert (end.status, end.state_kept) == ("lost", False)
