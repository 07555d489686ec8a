"""What the loop does between the model's turns."""

import asyncio
from typing import Any

import msgspec
import pytest

from fumehood.engine.agent_loop import LoopLimits
from fumehood.protocol.openai.api_errors import (
    InvalidRequest,
)
from fumehood.protocol.openai.items import (
    CodeInterpreterCall,
    ContainerFileCitationAnnotation,
    FunctionCall,
    OutputMessage,
    OutputText,
)
from fumehood.protocol.openai.stream_events import OutputItemDone, StreamEvent
from fumehood.testing import ScriptedModel, calls, says
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import (
    ECHO,
    FUNCTION,
    EngineHarness,
    make_produced_file,
    make_usage,
    message_text,
    read_batches,
)
from tests.support.stream_checks import check_invariants


async def test_a_hosted_call_and_the_answer() -> None:
    async with ScriptedModel(calls("echo", {"text": "x"}), says("Done")) as model:
        engine = EngineHarness(model, [EchoTool()])
        response = check_invariants(await engine.stream(tools=[ECHO]))
    assert response.status == "completed"
    call, message = response.output
    assert isinstance(call, CodeInterpreterCall)
    assert call.status == "completed"
    assert message_text(message) == "Done"
    first, second = model.requests
    assert [function.name for function in first.function_tools] == ["echo"]
    entry = second.segments[-1].entries[0]
    assert entry.turn == 1
    assert entry.exchange is not None
    assert entry.exchange.output == '{"text":"x"}'
    assert entry.exchange.call_id == "call_1"


async def test_blocking_and_streaming_are_the_same_run() -> None:
    def script() -> ScriptedModel:
        return ScriptedModel([*says("a"), calls("echo", {"text": "x"})[0]], says("Done"), usage=make_usage(3))

    streamed = check_invariants(await EngineHarness(script(), [EchoTool()]).stream(tools=[ECHO]))
    blocked = await EngineHarness(script(), [EchoTool()]).create(tools=[ECHO])
    assert [item.__class__ for item in blocked.output] == [item.__class__ for item in streamed.output]
    assert blocked.usage == streamed.usage == make_usage(3) + make_usage(3)


async def test_parallel_calls_interleave_and_the_model_reads_them_in_order() -> None:
    gates = {'{"text":"a"}': asyncio.Event(), '{"text":"b"}': asyncio.Event()}
    echo = EchoTool(gate=lambda text: gates[text])
    async with ScriptedModel(
        [*calls("echo", {"text": "a"}), *calls("echo", {"text": "b"})], says("ok")
    ) as model:
        run = await EngineHarness(model, [echo]).start(tools=[ECHO])
        events: list[StreamEvent] = []
        async for batch in read_batches(run):
            events += batch
            if len([line for line in echo.log if line.startswith("began")]) == 2:
                gates['{"text":"b"}'].set()
            if any(isinstance(event, OutputItemDone) and event.output_index == 1 for event in events):
                gates['{"text":"a"}'].set()
    check_invariants(events)
    assert [event.output_index for event in events if isinstance(event, OutputItemDone)] == [1, 0, 2]
    outputs = [entry.exchange.output for entry in model.requests[1].segments[-1].entries if entry.exchange]
    assert outputs == ['{"text":"a"}', '{"text":"b"}']


async def test_parallel_tool_calls_false_keeps_the_first() -> None:
    async with ScriptedModel(
        [*calls("echo", {"text": "a"}), *calls("echo", {"text": "b"})], says("ok")
    ) as model:
        response = check_invariants(
            await EngineHarness(model, [EchoTool()]).stream(tools=[ECHO], parallel_tool_calls=False)
        )
    assert len(response.output) == 2
    assert not model.requests[0].parallel_calls
    assert not response.parallel_tool_calls


async def test_hosted_and_client_calls_in_one_turn() -> None:
    async with ScriptedModel([*calls("f", {}), *calls("echo", {"text": "a"})]) as model:
        engine = EngineHarness(model, [EchoTool()])
        response = check_invariants(await engine.stream(tools=[ECHO, FUNCTION]))
    assert response.status == "completed"
    function, hosted = response.output
    assert isinstance(function, FunctionCall)
    assert isinstance(hosted, CodeInterpreterCall)
    assert hosted.status == "completed"
    model.expect(says("Both"))
    answer = {"type": "function_call_output", "call_id": function.call_id, "output": "1"}
    again = await engine.create(tools=[ECHO, FUNCTION], previous_response_id=response.id, input=[answer])
    assert message_text(again.output[0]) == "Both"
    assert [entry.type for segment in model.requests[1].segments for entry in segment.entries] == [
        "message",
        "function_call",
        "code_interpreter_call",
        "function_call_output",
    ]


async def test_max_tool_calls() -> None:
    turn = [*calls("echo", {"text": "a"}), *calls("echo", {"text": "b"}), *calls("echo", {"text": "c"})]
    async with ScriptedModel(turn, says("Enough")) as model:
        response = check_invariants(
            await EngineHarness(model, [EchoTool()]).stream(tools=[ECHO], max_tool_calls=2)
        )
    assert [type(item).__name__ for item in response.output] == ["CodeInterpreterCall"] * 2 + [
        "OutputMessage"
    ]
    assert model.requests[1].function_tools == []


async def test_the_last_turn_has_no_hosted_tools() -> None:
    async with ScriptedModel(calls("echo", {}), calls("echo", {}), says("Over")) as model:
        engine = EngineHarness(model, [EchoTool()], limits=LoopLimits(turns=3))
        response = check_invariants(await engine.stream(tools=[ECHO]))
    assert message_text(response.output[-1]) == "Over"
    assert [len(request.function_tools) for request in model.requests] == [1, 1, 0]


async def test_a_forced_tool_is_forced_once() -> None:
    async with ScriptedModel(calls("echo", {}), says("ok")) as model:
        await EngineHarness(model, [EchoTool()]).create(tools=[ECHO, FUNCTION], tool_choice={"type": "echo"})
    forced = model.requests[0].tool_choice
    assert not isinstance(forced, str)
    assert forced.name == "echo"
    assert model.requests[1].tool_choice == "auto"


@pytest.mark.parametrize(
    ("choice", "names", "mode"),
    [
        ("none", ["echo", "f"], "none"),
        ("auto", ["echo", "f"], "auto"),
        ("required", ["echo", "f"], "required"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            ["f"],
            "auto",
        ),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "echo"}]}, ["echo", "f"], "echo"),
        ({"type": "function", "name": "f"}, ["echo", "f"], "f"),
    ],
)
async def test_tool_choice(choice: Any, names: list[str], mode: str) -> None:
    async with ScriptedModel(says("ok")) as model:
        response = await EngineHarness(model, [EchoTool()]).create(tools=[ECHO, FUNCTION], tool_choice=choice)
    request = model.requests[0]
    assert [function.name for function in request.function_tools] == names
    assert (request.tool_choice if isinstance(request.tool_choice, str) else request.tool_choice.name) == mode
    assert msgspec.json.decode(response.tool_choice) == choice


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": {"type": "function", "name": "g"}, "tools": [FUNCTION]},
        {"tool_choice": {"type": "echo"}},
        {"tool_choice": "required"},
        {"tool_choice": "sometimes"},
        {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "nothing"}]}},
        {"tool_choice": {"type": "allowed_tools"}, "tools": [FUNCTION]},
        {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function"}]}, "tools": [FUNCTION]},
        {"tool_choice": {"type": "function"}, "tools": [FUNCTION]},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [FUNCTION]},
        {"tool_choice": {"type": "web_search"}, "tools": [FUNCTION, {"type": "web_search"}]},
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}, "tools": [FUNCTION]},
    ],
)
async def test_a_choice_of_what_is_not_there(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await EngineHarness(ScriptedModel()).start(**body)
    assert refused.value.param == "tool_choice"


async def test_a_choice_without_a_mode_is_shown_with_one() -> None:
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]}
    async with ScriptedModel(says("ok")) as model:
        response = await EngineHarness(model).create(tools=[FUNCTION], tool_choice=allowed)
    assert msgspec.json.decode(response.tool_choice) == {**allowed, "mode": "auto"}


async def test_a_tool_that_is_not_there_is_told_to_the_model_alone() -> None:
    async with ScriptedModel(calls("python", {"code": "1"}), says("Sorry")) as model:
        engine = EngineHarness(model, [EchoTool()])
        response = check_invariants(await engine.stream(tools=[ECHO]))
    assert [type(item) for item in response.output] == [OutputMessage]
    exchange = model.requests[1].segments[-1].entries[0].exchange
    assert exchange is not None
    assert "no tool named 'python'" in exchange.output


async def test_a_broken_tool_fails_its_own_call(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedModel(calls("echo", {}), says("Pity")) as model:
        engine = EngineHarness(model, [EchoTool(error=ValueError("secret"))])
        response = check_invariants(await engine.stream(tools=[ECHO]))
    assert response.status == "completed"
    assert message_text(response.output[1]) == "Pity"
    assert b"secret" not in msgspec.json.encode(response)


async def test_citations() -> None:
    echo = EchoTool(
        files=[make_produced_file("a b.csv"), make_produced_file("c.png")],
        known_files=[make_produced_file("old.txt")],
    )
    text = "é [t](sandbox:/mnt/data/a%20b.csv) and sandbox:/mnt/data/old.txt, not sandbox:/mnt/data/no."
    async with ScriptedModel(calls("echo", {}), says(text, deltas=5)) as model:
        events = await EngineHarness(model, [echo]).stream(tools=[ECHO])
    message = check_invariants(events).output[-1]
    assert isinstance(message, OutputMessage)
    part = message.content[0]
    assert isinstance(part, OutputText)
    found = [
        (note.filename, text[note.start_index : note.end_index], note.start_index)
        for note in part.annotations
        if isinstance(note, ContainerFileCitationAnnotation)
    ]
    assert found == [
        ("a b.csv", "sandbox:/mnt/data/a%20b.csv", 6),
        ("old.txt", "sandbox:/mnt/data/old.txt", 39),
        ("c.png", "", len(text)),
    ]
