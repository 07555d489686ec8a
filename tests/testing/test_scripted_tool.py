"""The scripted tool finds out what was not expected; imports pytest and fumehood."""

import asyncio
from contextlib import aclosing

import pytest
from msgspec import Raw

from fumehood.interfaces import CallContext, Caller, ToolResult
from fumehood.protocol.items import ProducedFile
from fumehood.protocol.tools import read_tool
from fumehood.testing import Answer, ScriptedTool
from fumehood.testing.scripted_tool import ScriptedCall

FILE = ProducedFile(file_id="cfile_1", container_id="cntr_1", filename="a", path="/mnt/data/a", bytes=1)


async def begun(tool: ScriptedTool, arguments: str) -> ScriptedCall:
    offered = await tool.offer(read_tool(Raw(b'{"type": "scripted"}'), "tools[0]"), Caller(), [])
    session = offered.begin(
        CallContext(
            caller=Caller(), response_id="r", output_index=0, call_id="call_1", deadline=1, place=lambda: 1
        )
    )
    session.feed([arguments])
    return session


async def result(tool: ScriptedTool, arguments: str) -> ToolResult:
    (step,) = [step async for step in (await begun(tool, arguments)).run()]
    assert isinstance(step, ToolResult)
    return step


async def test_answers_in_order() -> None:
    tool = ScriptedTool(Answer("one", arguments="{}"), Answer("two", files=[FILE]), always=[Answer("always")])
    assert (await result(tool, "{}")).exchange.output == "one"
    assert (await result(tool, '{"x":1}')).files == [FILE]
    assert (await result(tool, "{}")).exchange.output == "always"
    assert tool.calls == ["{}", '{"x":1}', "{}"]
    tool.assert_done()


async def test_a_call_that_nobody_expected() -> None:
    tool = ScriptedTool(Answer("one", arguments="{}"))
    with pytest.raises(AssertionError, match=r"expected was '\{\}'"):
        await result(tool, "[]")
    with pytest.raises(AssertionError, match="Nobody asked for the answer 'one'"):
        tool.assert_done()


async def test_answers_that_nobody_asked_for() -> None:
    with pytest.raises(AssertionError, match="Nobody asked"):
        ScriptedTool(Answer("one")).assert_done()


async def test_a_tool_that_breaks() -> None:
    tool = ScriptedTool(Answer(error=RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        await result(tool, "{}")


async def test_a_call_that_is_left() -> None:
    tool = ScriptedTool(Answer(wait=asyncio.Event()))
    session = await begun(tool, "{}")
    async with aclosing(session.run()) as steps:
        running = asyncio.ensure_future(anext(steps))
        while not tool.calls:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert tool.interrupted == ["{}"]
