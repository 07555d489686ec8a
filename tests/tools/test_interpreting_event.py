"""When `response.code_interpreter_call.interpreting` is sent."""

import asyncio

from fumehood.interfaces import ToolCallResult
from fumehood.protocol.sandbox.sandbox_errors import SandboxServerAtCapacity
from fumehood.protocol.sandbox.sandbox_messages import Stdout
from fumehood.testing import ScriptedExecution, ScriptedSandboxProvider
from fumehood.tools.interpreter_call import InterpreterCallSession
from tests.support.interpreter_harness import (
    InterpreterHarness,
    outline,
    run_scripted,
)


class Following:
    """A call and the events that it has sent so far."""

    def __init__(self, session: InterpreterCallSession, code: str) -> None:
        self.sent: list[str] = []
        session.feed([f'{{"code": "{code}"}}'])
        self.task = asyncio.ensure_future(self._follow(session))

    async def _follow(self, session: InterpreterCallSession) -> None:
        async for step in session.run():
            self.sent += outline(step.events if isinstance(step, ToolCallResult) else step)


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def two_calls(interpreter: InterpreterHarness) -> tuple[InterpreterCallSession, InterpreterCallSession]:
    offered = await interpreter.configure()
    return offered.start_call(interpreter.make_context(0)), offered.start_call(interpreter.make_context(1))


async def test_a_call_that_waits_for_another_is_not_interpreted_yet() -> None:
    release = asyncio.Event()
    steps = (ScriptedExecution("first", [Stdout("1"), release]), ScriptedExecution("second", [Stdout("2")]))
    async with run_scripted(*steps) as interpreter:
        one, other = await two_calls(interpreter)
        first = Following(one, "first")
        await settle()
        second = Following(other, "second")
        await settle()
        assert first.sent == ["ci_code.done first", "ci.interpreting"]
        assert second.sent == ["ci_code.done second"]
        release.set()
        await asyncio.gather(first.task, second.task)
        assert second.sent == [
            "ci_code.done second",
            "ci.interpreting",
            "ci.completed",
            "output_item.done completed",
        ]


async def test_a_call_that_waits_for_a_sandbox_is_not_interpreted_yet() -> None:
    async with run_scripted(ScriptedExecution("x")) as interpreter:
        assert isinstance(interpreter.provider, ScriptedSandboxProvider)
        interpreter.provider.error = SandboxServerAtCapacity("There are as many as may be.")
        one, _ = await two_calls(interpreter)
        call = Following(one, "x")
        await settle()
        assert call.sent == ["ci_code.done x"]
        interpreter.provider.error = None
        interpreter.clock.advance(1)
        await call.task
        assert call.sent[1:3] == ["ci.interpreting", "ci.completed"]


async def test_a_call_that_never_runs_is_never_interpreted() -> None:
    async with run_scripted(capacity=0) as interpreter:
        one, _ = await two_calls(interpreter)
        call = Following(one, "x")
        while not call.task.done():
            await settle()
            interpreter.clock.advance(10)
        await call.task
        assert call.sent == ["ci_code.done x", "ci.failed", "output_item.done failed"]
