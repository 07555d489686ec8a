"""Ids of calls are unique within a conversation."""

from fumehood.protocol.openai.items import FunctionCall
from fumehood.testing import ScriptedModel, calls, says
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import ECHO, FUNCTION, EngineHarness


def list_exchange_ids(model: ScriptedModel) -> list[str]:
    """The ids of hosted calls in the last request to the model."""
    return [
        entry.exchange.call_id
        for segment in model.requests[-1].segments
        for entry in segment.entries
        if entry.exchange is not None
    ]


async def test_hosted_calls_of_one_response_and_of_the_next() -> None:
    again = calls("echo", {"text": "a"}, call_id="call_0")
    tool = EchoTool()
    async with ScriptedModel(again, again, says("a"), again, says("b")) as model:
        engine = EngineHarness(model, [tool])
        first = await engine.create(tools=[ECHO])
        await engine.create(tools=[ECHO], previous_response_id=first.id)
        ids = list_exchange_ids(model)
    assert ids[0] == "call_0"
    assert len(set(ids)) == 3
    assert ids == [context.call_id for context in tool.contexts]


async def test_calls_of_unknown_tools_count() -> None:
    """Nothing stores a call of an unknown tool; it is in the requests of this response."""
    unknown = calls("nobody", {}, call_id="call_0")
    async with ScriptedModel(unknown, calls("f", {}, call_id="call_0")) as model:
        response = await EngineHarness(model).create(tools=[FUNCTION])
        assert list_exchange_ids(model) == ["call_0"]
    (made,) = response.output
    assert isinstance(made, FunctionCall)
    assert made.call_id != "call_0"


async def test_a_stored_call_that_is_sent_back_by_reference() -> None:
    again = calls("echo", {"text": "a"}, call_id="call_0")
    async with ScriptedModel(again, says("a"), again, says("b"), says("c")) as model:
        engine = EngineHarness(model, [EchoTool()])
        responses = [await engine.create(tools=[ECHO]) for _ in range(2)]
        references = [
            {"type": "item_reference", "id": item.id}
            for response in responses
            for item in response.output
            if not isinstance(item, bytes)
        ]
        await engine.create(tools=[ECHO], input=[*references, {"role": "user", "content": "on"}])
        ids = list_exchange_ids(model)
    assert ids == ["call_0", "call_0_2"]
