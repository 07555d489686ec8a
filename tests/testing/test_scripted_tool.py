"""`ScriptedTool` follows its script and reports deviations."""

import asyncio
from contextlib import aclosing

import pytest
from msgspec import Raw

from fumehood.interfaces import Caller, ToolCallContext, ToolCallResult
from fumehood.protocol.openai.items import ProducedFile
from fumehood.protocol.openai.tool_specs import parse_tool
from fumehood.testing import ScriptedTool, ScriptedToolAnswer
from fumehood.testing.fakes.scripted_tool import ScriptedToolCallSession

FILE = ProducedFile(file_id="cfile_1", container_id="cntr_1", filename="a", path="/mnt/data/a", bytes=1)


async def start_call(tool: ScriptedTool, arguments: str) -> ScriptedToolCallSession:
    offered = await tool.configure(parse_tool(Raw(b'{"type": "scripted"}'), "tools[0]"), Caller(), [])
    session = offered.start_call(
        ToolCallContext(
            caller=Caller(),
            response_id="r",
            output_index=0,
            call_id="call_1",
            deadline=1,
            allocate_output_index=lambda: 1,
        )
    )
    session.feed([arguments])
    return session


async def run_call(tool: ScriptedTool, arguments: str) -> ToolCallResult:
    (step,) = [step async for step in (await start_call(tool, arguments)).run()]
    assert isinstance(step, ToolCallResult)
    return step


async def test_answers_in_order() -> None:
    tool = ScriptedTool(
        ScriptedToolAnswer("one", arguments="{}"),
        ScriptedToolAnswer("two", files=[FILE]),
        repeatable=[ScriptedToolAnswer("always")],
    )
    assert (await run_call(tool, "{}")).exchange.output == "one"
    assert (await run_call(tool, '{"x":1}')).files == [FILE]
    assert (await run_call(tool, "{}")).exchange.output == "always"
    assert tool.calls == ["{}", '{"x":1}', "{}"]
    tool.assert_consumed()


async def test_an_unexpected_call() -> None:
    tool = ScriptedTool(ScriptedToolAnswer("one", arguments="{}"))
    with pytest.raises(AssertionError, match=r"with '\[\]'; expected the answer 'one' to '\{\}'"):
        await run_call(tool, "[]")
    with pytest.raises(AssertionError, match="Not used: the answer 'one'"):
        tool.assert_consumed()


async def test_a_tool_that_breaks() -> None:
    tool = ScriptedTool(ScriptedToolAnswer(error=RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        await run_call(tool, "{}")


async def test_a_call_that_is_left() -> None:
    tool = ScriptedTool(ScriptedToolAnswer(wait_for=asyncio.Event()))
    session = await start_call(tool, "{}")
    async with aclosing(session.run()) as steps:
        running = asyncio.ensure_future(anext(steps))
        while not tool.calls:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert tool.interrupted_calls == ["{}"]
