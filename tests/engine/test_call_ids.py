"""Ids of calls are unique within a conversation."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

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


@st.composite
def repeated_turns(draw: st.DrawFn) -> list[dict[str, str]]:
    """Turns of a server with few ids: calls, then their outputs, of which those with one id are in order."""
    items: list[dict[str, str]] = []
    count = 0
    for _ in range(draw(st.integers(1, 4))):
        ids = draw(st.lists(st.sampled_from(["call_0", "call_1", "call_0_2"]), min_size=1, max_size=4))
        numbered = [(call_id, count + number) for number, call_id in enumerate(ids)]
        count += len(ids)
        items += [
            {"type": "function_call", "call_id": call_id, "name": "f", "arguments": f'{{"n":{number}}}'}
            for call_id, number in numbered
        ]
        for call_id in draw(st.permutations(sorted(set(ids)))):
            items += [
                {"type": "function_call_output", "call_id": call_id, "output": str(number)}
                for same_id, number in numbered
                if same_id == call_id
            ]
    return items


@given(repeated_turns())
@settings(max_examples=100, deadline=None)
async def test_results_stay_with_their_calls(items: list[dict[str, str]]) -> None:
    async with ScriptedModel(says("a")) as model:
        await EngineHarness(model).create(input=[*items, {"role": "user", "content": "on"}])
    sent = [
        msgspec.json.decode(entry.raw) for segment in model.requests[0].segments for entry in segment.entries
    ]
    called = {item["call_id"]: item["arguments"] for item in sent if item.get("type") == "function_call"}
    results = [item for item in sent if item.get("type") == "function_call_output"]
    assert len(called) == len(results) == len(items) // 2
    assert all(called[item["call_id"]] == f'{{"n":{item["output"]}}}' for item in results)
