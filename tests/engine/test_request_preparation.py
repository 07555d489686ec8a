"""What requests may say, what is refused, and what is kept."""

import asyncio
from typing import Any

import msgspec
import pytest

from fumehood.protocol.model_turns import ModelProfile, ModelReasoningEnded
from fumehood.protocol.openai.api_errors import (
    InvalidRequest,
)
from fumehood.protocol.openai.items import (
    OutputMessage,
)
from fumehood.protocol.openai.stream_events import OutputItemAdded
from fumehood.testing import ScriptedModel, calls, says
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import ECHO, FUNCTION, EngineHarness, read_batches
from tests.support.stream_checks import event_types


async def test_a_conversation_goes_on() -> None:
    async with ScriptedModel(says("One"), says("Two"), says("Three")) as model:
        engine = EngineHarness(model)
        first = await engine.create(input="1", instructions="Be brief")
        second = await engine.create(input="2", previous_response_id=first.id)
        await engine.create(input="3", previous_response_id=second.id)
    assert len(model.requests[2].segments) == 3
    assert model.requests[1].instructions is None
    assert [len(segment.entries) for segment in model.requests[2].segments] == [2, 2, 1]


async def test_store_false_keeps_nothing() -> None:
    engine = EngineHarness(ScriptedModel(says("x"), says("y")))
    run = await engine.start(store=False)
    response = await run.wait()
    assert response.store is False
    assert await engine.store.get_response("", run.id) is None
    with pytest.raises(InvalidRequest, match=run.id):
        await engine.start(previous_response_id=run.id)


async def test_another_tenants_response_is_not_there() -> None:
    engine = EngineHarness(ScriptedModel(says("x")))
    response = await engine.create(tenant="a")
    with pytest.raises(InvalidRequest) as refused:
        await engine.start(tenant="b", previous_response_id=response.id)
    assert refused.value.wire_code == "previous_response_not_found"


async def test_what_a_small_request_refers_to_is_bounded() -> None:
    async with ScriptedModel(says("ok"), says("twice")) as model:
        engine = EngineHarness(model)
        large = {"type": "message", "role": "user", "id": "msg_x", "content": "x" * (2 << 20)}
        first = await engine.create(input=[large])
        reference = {"type": "item_reference", "id": "msg_x"}
        await engine.create(input=[reference] * 2)
        for times, previous in ((10_000, None), (63, first.id)):
            with pytest.raises(InvalidRequest, match="at most 134,217,728 can be served") as refused:
                await engine.start(input=[reference] * times, previous_response_id=previous)
            assert refused.value.param == "input"
    assert [entry.id for entry in model.requests[1].segments[0].entries] == ["msg_x", "msg_x"]


async def test_a_conversation_that_grows_without_a_model_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.engine.conversation_loader._MAX_BYTES", 4096)
    engine = EngineHarness(ScriptedModel())
    first = await engine.create(input="x" * 1800, generate=False)
    second = await engine.create(input="y" * 1800, generate=False, previous_response_id=first.id)
    for said in ("z" * 1800, [{"role": "user", "content": "z" * 1800}]):
        with pytest.raises(InvalidRequest, match="begin a new conversation"):
            await engine.start(input=said, generate=False, previous_response_id=second.id)


async def test_items_that_a_client_gives_back() -> None:
    async with ScriptedModel(
        calls("echo", {"text": "x"}), says("ok"), says("again"), says("once more")
    ) as model:
        engine = EngineHarness(model, [EchoTool()])
        first = await engine.create(tools=[ECHO])
        call = msgspec.to_builtins(first.output[0]) | {"outputs": None}
        await engine.create(input=[call, {"role": "user", "content": "and?"}], tools=[ECHO])
        await engine.create(input=[{"type": "item_reference", "id": call["id"]}], tools=[ECHO])
    for request in model.requests[2:]:
        exchange = request.segments[0].entries[0].exchange
        assert exchange is not None
        assert exchange.output == '{"text":"x"}'


async def test_items_that_nobody_here_made() -> None:
    async with ScriptedModel(says("ok")) as model:
        item = {"type": "code_interpreter_call", "id": "ci_elsewhere", "code": "1"}
        await EngineHarness(model, [EchoTool()]).create(input=[item])
    exchange = model.requests[0].segments[0].entries[0].exchange
    assert exchange is not None
    assert exchange.output == "recalled"


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "1"}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": None}, "input", "Missing"),
        ({"model": None}, "model", "Missing"),
        ({"input": [CALL]}, "input", "No tool output found for function call c1"),
        ({"input": [RESULT]}, "input", "No tool call found"),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, "input[0]", "call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0]", "msg_x"),
        ({"input": [{"content": "x"}]}, "input[0]", "type"),
        ({"input": ["x"]}, "input[0]", "object"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "resp_x"),
        ({"input": [{"type": "item_reference"}]}, "input[0]", "needs an id"),
        ({"background": True}, "background", "not served"),
        ({"conversation": {}}, "conversation", "not served"),
        ({"prompt": {}}, "prompt", "not served"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name", "name"),
        ({"tools": [{"type": "custom", "name": "x" * 129}]}, "tools[0].name", "name"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools", "named 'f'"),
        ({"tools": [{"name": "x"}]}, "tools[0]", "type"),
        ({"tools": [{"type": "off"}]}, "tools", "off is not enabled"),
        ({"tools": [ECHO, {"type": "fumehood:dize"}]}, "tools[1].type", "'fumehood:dize'; .* are echo"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "name"),
    ],
)
async def test_what_is_refused_before_anything_begins(body: dict[str, Any], param: str, words: str) -> None:
    engine = EngineHarness(ScriptedModel(), [EchoTool()], disabled_tools=frozenset({"off"}))
    with pytest.raises(InvalidRequest, match=words) as refused:
        await engine.start(**body)
    assert refused.value.param == param


async def test_unknown_tools_are_tolerated_and_shown() -> None:
    tools = [
        {"type": "namespace", "name": "n", "x": [1]},
        {"type": "web_search", "external_web_access": False},
    ]
    async with ScriptedModel(says("ok"), profile=ModelProfile(passed_tools=("*",))) as model:
        response = await EngineHarness(model, [EchoTool()]).create(tools=[*tools, ECHO])
    assert [msgspec.json.decode(tool) for tool in response.tools] == [*tools, {"type": "echo", "shown": True}]
    assert [function.name for function in model.requests[0].function_tools] == ["echo"]
    assert [msgspec.json.decode(tool.raw) for tool in model.requests[0].server_tools] == tools


async def test_unknown_tools_may_be_allowed() -> None:
    search, other = {"type": "web_search"}, {"type": "namespace", "name": "n"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [search, ECHO]}
    async with ScriptedModel(says("ok"), profile=ModelProfile(passed_tools=("*",))) as model:
        await EngineHarness(model, [EchoTool()]).create(
            tools=[search, other, ECHO, FUNCTION], tool_choice=allowed
        )
    assert [function.name for function in model.requests[0].function_tools] == ["echo"]
    assert [tool.type for tool in model.requests[0].server_tools] == ["web_search"]


async def test_sealed_reasoning_is_found_again_by_its_id() -> None:
    async with ScriptedModel([ModelReasoningEnded("sealed"), *says("a")], says("b")) as model:
        engine = EngineHarness(model)
        first = await engine.create()
        thoughts = msgspec.to_builtins(first.output[0])
        del thoughts["encrypted_content"]
        await engine.create(input=[thoughts, {"role": "user", "content": "and?"}])
    assert b'"sealed"' in model.requests[1].segments[0].entries[0].raw


async def test_logprobs_are_asked_for_by_whoever_includes_them() -> None:
    async with ScriptedModel(says("a"), says("b")) as model:
        engine = EngineHarness(model)
        await engine.create(include=["message.output_text.logprobs"])
        await engine.create()
    assert [request.sampling.logprobs for request in model.requests] == [True, False]


async def test_a_tier_that_nobody_knows_is_not_promised() -> None:
    async with ScriptedModel(says("a"), says("b")) as model:
        engine = EngineHarness(model)
        tiers = [(await engine.create(service_tier=tier)).service_tier for tier in ("flex", "golden")]
    assert tiers == ["flex", "default"]


async def test_an_id_alone_is_a_reference() -> None:
    async with ScriptedModel(says("a"), says("b")) as model:
        engine = EngineHarness(model)
        first = await engine.create()
        message = first.output[0]
        assert isinstance(message, OutputMessage)
        await engine.create(input=[{"id": message.id}, {"role": "user", "content": "again"}])
    assert model.requests[1].segments[0].entries[0].id == message.id


async def test_structured_output_goes_to_the_model() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    async with ScriptedModel(says("{}")) as model:
        response = await EngineHarness(model, [EchoTool()]).create(text={"format": form}, tools=[ECHO])
    sent = model.requests[0].sampling.text
    assert sent is not None
    assert msgspec.json.decode(msgspec.json.encode(sent.format)) == form
    assert msgspec.json.decode(msgspec.json.encode(response.text.format)) == form


async def test_an_item_is_in_the_log_before_the_code_runs() -> None:
    gate = asyncio.Event()
    run = await EngineHarness(
        ScriptedModel(calls("echo", {}), says("ok")), [EchoTool(gate=lambda _: gate)]
    ).start(tools=[ECHO])
    seen: list[str] = []
    async for batch in read_batches(run):
        seen += event_types(batch)
        if "response.code_interpreter_call.interpreting" in seen:
            assert any(isinstance(event, OutputItemAdded) for event in batch) or seen.count(
                "response.output_item.added"
            )
            gate.set()
    assert seen[-1] == "response.completed"
