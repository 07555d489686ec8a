"""What the loop does between the model's turns; imports the engine over doubles."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from fumehood.engine.citations import find_links
from fumehood.engine.log import LagLimits
from fumehood.engine.loop import LoopLimits
from fumehood.engine.runs import EngineRun
from fumehood.interfaces import Lease
from fumehood.protocol.errors import (
    ApiError,
    InvalidRequest,
    ModelRateLimited,
    ModelUnreachable,
    ServerFault,
    Unavailable,
)
from fumehood.protocol.events import ErrorOccurred, ItemAdded, ItemDone, StreamEvent, TextDelta
from fumehood.protocol.items import (
    CodeInterpreterCall,
    ContainerFileCitation,
    FunctionCall,
    Message,
    OutputText,
    ProducedFile,
    Refusal,
)
from fumehood.protocol.models import Refused, Text, TurnEnded
from fumehood.protocol.responses import Usage
from fumehood.testing import ScriptedModel, calls, says
from tests.support.engines import Engine
from tests.support.streams import check_invariants, types
from tests.support.tools import Echo

ECHO: dict[str, Any] = {"type": "echo"}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {}},
}


def tokens(output: int) -> Usage:
    return Usage(input_tokens=10, output_tokens=output, total_tokens=10 + output)


def text_of(message: object) -> str:
    assert isinstance(message, Message)
    part = message.content[0]
    assert isinstance(part, OutputText)
    return part.text


async def collected(run: EngineRun) -> list[StreamEvent]:
    return [event async for batch in run.subscribe() for event in batch]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


async def test_a_hosted_call_and_the_answer() -> None:
    async with ScriptedModel(calls("echo", {"text": "x"}), says("Done")) as model:
        engine = Engine(model, [Echo()])
        response = check_invariants(await engine.stream(tools=[ECHO]))
    assert response.status == "completed"
    call, message = response.output
    assert isinstance(call, CodeInterpreterCall)
    assert call.status == "completed"
    assert text_of(message) == "Done"
    first, second = model.requests
    assert [function.name for function in first.functions] == ["echo"]
    entry = second.segments[-1].entries[0]
    assert entry.turn == 1
    assert entry.exchange is not None
    assert entry.exchange.output == '{"text":"x"}'
    assert entry.exchange.call_id == "call_1"


async def test_blocking_and_streaming_are_the_same_run() -> None:
    def script() -> ScriptedModel:
        return ScriptedModel([*says("a"), calls("echo", {"text": "x"})[0]], says("Done"), usage=tokens(3))

    streamed = check_invariants(await Engine(script(), [Echo()]).stream(tools=[ECHO]))
    blocked = await Engine(script(), [Echo()]).block(tools=[ECHO])
    assert [item.__class__ for item in blocked.output] == [item.__class__ for item in streamed.output]
    assert blocked.usage == streamed.usage == tokens(3) + tokens(3)


async def test_parallel_calls_interleave_and_the_model_reads_them_in_order() -> None:
    gates = {'{"text":"a"}': asyncio.Event(), '{"text":"b"}': asyncio.Event()}
    echo = Echo(gate=lambda text: gates[text])
    async with ScriptedModel(
        [*calls("echo", {"text": "a"}), *calls("echo", {"text": "b"})], says("ok")
    ) as model:
        run = await Engine(model, [echo]).start(tools=[ECHO])
        events: list[StreamEvent] = []
        async for batch in run.subscribe():
            events += batch
            if len([line for line in echo.log if line.startswith("began")]) == 2:
                gates['{"text":"b"}'].set()
            if any(isinstance(event, ItemDone) and event.output_index == 1 for event in events):
                gates['{"text":"a"}'].set()
    check_invariants(events)
    assert [event.output_index for event in events if isinstance(event, ItemDone)] == [1, 0, 2]
    outputs = [entry.exchange.output for entry in model.requests[1].segments[-1].entries if entry.exchange]
    assert outputs == ['{"text":"a"}', '{"text":"b"}']


async def test_parallel_tool_calls_false_keeps_the_first() -> None:
    async with ScriptedModel(
        [*calls("echo", {"text": "a"}), *calls("echo", {"text": "b"})], says("ok")
    ) as model:
        response = check_invariants(
            await Engine(model, [Echo()]).stream(tools=[ECHO], parallel_tool_calls=False)
        )
    assert len(response.output) == 2
    assert not model.requests[0].parallel_calls
    assert not response.parallel_tool_calls


async def test_hosted_and_client_calls_in_one_turn() -> None:
    async with ScriptedModel([*calls("f", {}), *calls("echo", {"text": "a"})]) as model:
        engine = Engine(model, [Echo()])
        response = check_invariants(await engine.stream(tools=[ECHO, FUNCTION]))
    assert response.status == "completed"
    function, hosted = response.output
    assert isinstance(function, FunctionCall)
    assert isinstance(hosted, CodeInterpreterCall)
    assert hosted.status == "completed"
    model.expect(says("Both"))
    answer = {"type": "function_call_output", "call_id": function.call_id, "output": "1"}
    again = await engine.block(tools=[ECHO, FUNCTION], previous_response_id=response.id, input=[answer])
    assert text_of(again.output[0]) == "Both"
    assert [entry.type for segment in model.requests[1].segments for entry in segment.entries] == [
        "message",
        "function_call",
        "code_interpreter_call",
        "function_call_output",
    ]


async def test_max_tool_calls() -> None:
    turn = [*calls("echo", {"text": "a"}), *calls("echo", {"text": "b"}), *calls("echo", {"text": "c"})]
    async with ScriptedModel(turn, says("Enough")) as model:
        response = check_invariants(await Engine(model, [Echo()]).stream(tools=[ECHO], max_tool_calls=2))
    assert [type(item).__name__ for item in response.output] == ["CodeInterpreterCall"] * 2 + ["Message"]
    assert model.requests[1].functions == []


async def test_the_last_turn_has_no_hosted_tools() -> None:
    async with ScriptedModel(calls("echo", {}), calls("echo", {}), says("Over")) as model:
        engine = Engine(model, [Echo()], limits=LoopLimits(turns=3))
        response = check_invariants(await engine.stream(tools=[ECHO]))
    assert text_of(response.output[-1]) == "Over"
    assert [len(request.functions) for request in model.requests] == [1, 1, 0]


async def test_a_forced_tool_is_forced_once() -> None:
    async with ScriptedModel(calls("echo", {}), says("ok")) as model:
        await Engine(model, [Echo()]).block(tools=[ECHO, FUNCTION], tool_choice={"type": "echo"})
    forced = model.requests[0].choice
    assert not isinstance(forced, str)
    assert forced.name == "echo"
    assert model.requests[1].choice == "auto"


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
        response = await Engine(model, [Echo()]).block(tools=[ECHO, FUNCTION], tool_choice=choice)
    request = model.requests[0]
    assert [function.name for function in request.functions] == names
    assert (request.choice if isinstance(request.choice, str) else request.choice.name) == mode
    assert msgspec.json.decode(response.tool_choice) == choice


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": {"type": "function", "name": "g"}, "tools": [FUNCTION]},
        {"tool_choice": {"type": "echo"}},
        {"tool_choice": "required"},
        {"tool_choice": "sometimes"},
        {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "nothing"}]}},
        {"tool_choice": {"type": "web_search"}, "tools": [FUNCTION, {"type": "web_search"}]},
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}, "tools": [FUNCTION]},
    ],
)
async def test_a_choice_of_what_is_not_there(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await Engine(ScriptedModel()).start(**body)
    assert refused.value.param == "tool_choice"


async def test_a_tool_that_is_not_there_is_told_to_the_model_alone() -> None:
    async with ScriptedModel(calls("python", {"code": "1"}), says("Sorry")) as model:
        engine = Engine(model, [Echo()])
        response = check_invariants(await engine.stream(tools=[ECHO]))
    assert [type(item) for item in response.output] == [Message]
    exchange = model.requests[1].segments[-1].entries[0].exchange
    assert exchange is not None
    assert "no tool named 'python'" in exchange.output


async def test_a_broken_tool_fails_its_own_call(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedModel(calls("echo", {}), says("Pity")) as model:
        engine = Engine(model, [Echo(broken=ValueError("secret"))])
        response = check_invariants(await engine.stream(tools=[ECHO]))
    assert response.status == "completed"
    assert text_of(response.output[1]) == "Pity"
    assert b"secret" not in msgspec.json.encode(response)


# --- limits and ends ----------------------------------------------------------------------------------


async def test_length_is_incomplete() -> None:
    turn = [Text("Hal"), TurnEnded("length", tokens(3))]
    response = check_invariants(await Engine(ScriptedModel(turn)).stream(max_output_tokens=20))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert isinstance(response.output[0], Message)
    assert response.output[0].status == "incomplete"


async def test_a_hosted_call_that_was_cut_off_does_not_run() -> None:
    echo = Echo()
    turn = [*calls("echo", '{"text": "ab'), TurnEnded("length", None)]
    response = check_invariants(await Engine(ScriptedModel(turn), [echo]).stream(tools=[ECHO]))
    call = response.output[0]
    assert isinstance(call, CodeInterpreterCall)
    assert call.status == "incomplete"
    assert not any(line.startswith("began") for line in echo.log)


async def test_a_function_call_that_was_cut_off_needs_no_answer() -> None:
    turn = [*calls("f", '{"a'), TurnEnded("length", None)]
    async with ScriptedModel(turn, says("Again")) as model:
        engine = Engine(model)
        response = await engine.block(tools=[FUNCTION])
        assert response.status == "incomplete"
        after = await engine.block(input="Go on", previous_response_id=response.id)
    assert text_of(after.output[0]) == "Again"


async def test_the_content_filter() -> None:
    turn = [Text("Hm"), TurnEnded("content_filter", None)]
    response = check_invariants(await Engine(ScriptedModel(turn)).stream())
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "content_filter"


async def test_output_tokens_are_counted_over_all_turns() -> None:
    async with ScriptedModel(calls("echo", {}), says("x"), usage=tokens(30)) as model:
        await Engine(model, [Echo()]).block(tools=[ECHO], max_output_tokens=100)
    assert [request.sampling.max_output_tokens for request in model.requests] == [100, 70]


async def test_no_turn_without_tokens() -> None:
    async with ScriptedModel(calls("echo", {}), usage=tokens(100)) as model:
        response = await Engine(model, [Echo()]).block(tools=[ECHO], max_output_tokens=100)
    assert response.status == "incomplete"


@pytest.mark.parametrize("error", [ModelRateLimited("busy"), ModelUnreachable("gone")])
async def test_a_model_that_fails_at_once(error: ApiError) -> None:
    events = await Engine(ScriptedModel(error)).stream()
    response = check_invariants(events)
    assert types(events) == ["response.created", "response.in_progress", "error", "response.failed"]
    assert response.error is not None
    told = events[2]
    assert isinstance(told, ErrorOccurred)
    assert told.error.message == error.message
    engine = Engine(ScriptedModel(error))
    run = await engine.start(stream=False)
    with pytest.raises(type(error)):
        await run.wait()
    assert await engine.store.response("", run.id) is None


async def test_a_model_that_fails_in_the_middle() -> None:
    events = await Engine(ScriptedModel([Text("Hel"), ModelUnreachable("gone")])).stream()
    response = check_invariants(events)
    assert types(events)[-3:] == ["response.output_item.done", "error", "response.failed"]
    assert text_of(response.output[0]) == "Hel"


async def test_a_fault_of_ours_says_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    response = check_invariants(await Engine(ScriptedModel(ValueError("secret"))).stream())
    assert response.error is not None
    assert "secret" not in response.error.message
    assert "secret" in caplog.text


async def test_a_deadline_for_everything() -> None:
    echo = Echo(gate=lambda _: asyncio.Event())
    engine = Engine(ScriptedModel(calls("echo", {})), [echo], limits=LoopLimits(seconds=0.05))
    response = check_invariants(await engine.stream(tools=[ECHO]))
    assert response.status == "failed"
    assert response.error is not None
    assert "0.05 seconds" in response.error.message
    assert echo.log[-1].startswith("ended")


async def test_cancelled_while_the_model_writes() -> None:
    model = ScriptedModel([Text("Hel"), asyncio.Event()])
    engine = Engine(model)
    run = await engine.start()
    events: list[StreamEvent] = []
    async for batch in run.subscribe():
        events += batch
        if any(isinstance(event, TextDelta) for event in batch):
            run.cancel("the client has gone")
    response = check_invariants(events)
    assert response.status == "cancelled"
    assert text_of(response.output[0]) == "Hel"
    assert len(model.aborted) == 1
    kept = await engine.store.response("", run.id)
    assert kept == response


async def test_cancelled_while_code_runs() -> None:
    echo = Echo(gate=lambda _: asyncio.Event())
    run = await Engine(ScriptedModel(calls("echo", {"text": "x"})), [echo]).start(tools=[ECHO])
    events: list[StreamEvent] = []
    async for batch in run.subscribe():
        events += batch
        if any(line.startswith("began") for line in echo.log):
            run.cancel("the client has gone")
    response = check_invariants(events)
    assert response.status == "cancelled"
    assert echo.log[-1].startswith("ended")
    call = response.output[0]
    assert isinstance(call, CodeInterpreterCall)
    assert call.status == "incomplete"


async def test_cancelled_while_files_are_looked_up() -> None:
    looking = asyncio.Event()

    class Slow(Echo):
        async def find(self) -> None:
            looking.set()
            await asyncio.Event().wait()

    text = "See sandbox:/mnt/data/old.txt"
    engine = Engine(ScriptedModel(says(text)), [Slow(known=[produced("old.txt")])])
    run = await engine.start(tools=[ECHO])
    reading = asyncio.ensure_future(collected(run))
    await looking.wait()
    run.cancel("the client has gone")
    response = check_invariants(await reading)
    assert response.status == "cancelled"
    assert text_of(response.output[0]) == text
    assert await engine.store.response("", run.id) == response


async def test_cancelled_twice_the_tool_is_interrupted_once_and_in_peace() -> None:
    """A client that has gone, and then a server that stops: what is being ended ends."""

    class Patient(Echo):
        async def leave(self) -> None:
            self.log.append("leaving")
            left.set()
            await go_on.wait()
            self.log.append("has left")

    left, go_on = asyncio.Event(), asyncio.Event()
    echo = Patient(gate=lambda _: asyncio.Event())
    run = await Engine(ScriptedModel(calls("echo", {"text": "x"})), [echo]).start(tools=[ECHO])
    reading = asyncio.ensure_future(collected(run))
    await until(lambda: any(line.startswith("began") for line in echo.log))
    run.cancel("the client has gone")
    await left.wait()
    run.cancel("the server is shutting down")
    await asyncio.sleep(0)
    go_on.set()
    assert check_invariants(await reading).status == "cancelled"
    assert echo.log[-1] == "has left"


async def test_a_refusal_that_is_cut_off_is_kept() -> None:
    model = ScriptedModel([Refused("I ca"), ModelUnreachable("gone")])
    response = check_invariants(await Engine(model).stream())
    message = response.output[0]
    assert isinstance(message, Message)
    assert message.content == [Refusal(refusal="I ca")]


async def test_a_text_full_of_links_without_an_end_holds_up_nobody() -> None:
    """Each was searched to the end of the text: half a minute, in which nobody else was served."""
    text = "(sandbox:/mnt/data/x " * 20_000
    began = time.thread_time()
    assert len(find_links(text)) == 1_000
    assert time.thread_time() - began < 1.0


@pytest.mark.parametrize("piece", ["x" * 70, "x"])
async def test_a_model_that_never_ends_is_cut_off(piece: str) -> None:
    """By its characters or by its pieces, whichever is too much first: neither may fill the memory."""
    model = ScriptedModel([*(Text(piece) for _ in range(1_000)), asyncio.Event()])
    events = await Engine(model, limits=LoopLimits(characters=1_600)).stream()
    response = check_invariants(events)
    assert response.status == "failed"
    assert response.error is not None
    assert "without end" in response.error.message
    assert 70 < len(text_of(response.output[0])) < 2_000
    assert len(model.aborted) == 1


async def test_cancelled_before_it_began() -> None:
    run = await Engine(ScriptedModel()).start()
    run.cancel("at once")
    response = check_invariants([event async for batch in run.subscribe() for event in batch])
    assert response.status == "cancelled"


async def test_a_reader_far_behind_ends_the_run() -> None:
    go_on = asyncio.Event()
    model = ScriptedModel([Text("x"), go_on, *(Text("x") for _ in range(100)), asyncio.Event()])
    run = await Engine(model, lag=LagLimits(events=10, seconds=1.0, hard_events=50)).start()
    reader = run.subscribe()
    await anext(reader)
    go_on.set()
    assert (await run.wait()).status == "cancelled"
    with pytest.raises(ServerFault, match="not read fast enough"):
        await anext(reader)


async def test_a_reader_a_little_behind_for_long_ends_the_run() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    never = asyncio.Event()
    model = ScriptedModel([*(Text("x") for _ in range(20)), gates[0], Text("y"), gates[1], Text("z"), never])
    engine = Engine(model, lag=LagLimits(events=10, seconds=30.0, hard_events=1000))
    run = await engine.start()
    gates[0].set()
    await asyncio.sleep(0)
    engine.clock.advance(31)
    gates[1].set()
    assert (await run.wait()).status == "cancelled"


async def test_a_reader_that_catches_up_is_forgiven() -> None:
    gate = asyncio.Event()
    model = ScriptedModel([*(Text("x") for _ in range(20)), gate, *(Text("y") for _ in range(20))])
    engine = Engine(model, lag=LagLimits(events=10, seconds=30.0, hard_events=1000))
    run = await engine.start()
    await asyncio.sleep(0)
    events: list[StreamEvent] = []
    async for batch in run.subscribe():
        events += batch
        engine.clock.advance(31)
        gate.set()
    assert check_invariants(events).status == "completed"


async def test_a_renewal_that_breaks_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(ScriptedModel([Text("x"), asyncio.Event()]))
    run = await engine.start()
    reader = run.subscribe()
    while not any(isinstance(event, TextDelta) for event in await anext(reader)):
        pass
    renew, renewed = engine.store.renew, asyncio.Event()

    async def broken(leases: Sequence[Lease]) -> Sequence[Lease]:
        monkeypatch.setattr(engine.store, "renew", mended)
        raise RuntimeError("a mistake of ours")

    async def mended(leases: Sequence[Lease]) -> Sequence[Lease]:
        renewed.set()
        return await renew(leases)

    monkeypatch.setattr(engine.store, "renew", broken)
    engine.clock.advance(10)
    await until(lambda: "could not be renewed" in caplog.text)
    await until(lambda: engine.clock.advance(10) is None and renewed.is_set())
    run.cancel("enough")
    assert (await run.wait()).status == "cancelled"


async def test_a_run_whose_lease_is_lost_ends() -> None:
    engine = Engine(ScriptedModel([Text("x"), asyncio.Event()]))
    run = await engine.start()
    reader = run.subscribe()
    while not any(isinstance(event, TextDelta) for event in await anext(reader)):
        pass
    engine.clock.advance(10)
    await asyncio.sleep(0)
    engine.clock.advance(25)
    assert await engine.store.recover() == 0  # it was renewed in between
    await engine.store.delete_response("", run.id)
    engine.clock.advance(10)
    response = await run.wait()
    assert response.status == "failed"
    assert response.error is not None
    assert "taken over" in response.error.message
    assert await engine.store.response("", run.id) is None


async def test_draining() -> None:
    model = ScriptedModel([Text("x"), asyncio.Event()])
    engine = Engine(model)
    run = await engine.start()
    await engine.runs.drain(0.01)
    assert (await run.wait()).status == "cancelled"
    with pytest.raises(Unavailable):
        await engine.start()


# --- files --------------------------------------------------------------------------------------------


def produced(name: str) -> ProducedFile:
    return ProducedFile(
        file_id=f"cfile_{name}", container_id="cntr_1", filename=name, path=f"/mnt/data/{name}", bytes=1
    )


async def test_citations() -> None:
    echo = Echo(files=[produced("a b.csv"), produced("c.png")], known=[produced("old.txt")])
    text = "é [t](sandbox:/mnt/data/a%20b.csv) and sandbox:/mnt/data/old.txt, not sandbox:/mnt/data/no."
    async with ScriptedModel(calls("echo", {}), says(text, pieces=5)) as model:
        events = await Engine(model, [echo]).stream(tools=[ECHO])
    message = check_invariants(events).output[-1]
    assert isinstance(message, Message)
    part = message.content[0]
    assert isinstance(part, OutputText)
    found = [
        (note.filename, text[note.start_index : note.end_index], note.start_index)
        for note in part.annotations
        if isinstance(note, ContainerFileCitation)
    ]
    assert found == [
        ("a b.csv", "sandbox:/mnt/data/a%20b.csv", 6),
        ("old.txt", "sandbox:/mnt/data/old.txt", 39),
        ("c.png", "", len(text)),
    ]


# --- what is kept -------------------------------------------------------------------------------------


async def test_a_conversation_goes_on() -> None:
    async with ScriptedModel(says("One"), says("Two"), says("Three")) as model:
        engine = Engine(model)
        first = await engine.block(input="1", instructions="Be brief")
        second = await engine.block(input="2", previous_response_id=first.id)
        await engine.block(input="3", previous_response_id=second.id)
    assert len(model.requests[2].segments) == 3
    assert model.requests[1].instructions is None
    assert [len(segment.entries) for segment in model.requests[2].segments] == [2, 2, 1]


async def test_store_false_keeps_nothing() -> None:
    engine = Engine(ScriptedModel(says("x"), says("y")))
    run = await engine.start(store=False)
    response = await run.wait()
    assert response.store is False
    assert await engine.store.response("", run.id) is None
    with pytest.raises(InvalidRequest, match=run.id):
        await engine.start(previous_response_id=run.id)


async def test_another_tenants_response_is_not_there() -> None:
    engine = Engine(ScriptedModel(says("x")))
    response = await engine.block(tenant="a")
    with pytest.raises(InvalidRequest) as refused:
        await engine.start(tenant="b", previous_response_id=response.id)
    assert refused.value.wire_code == "previous_response_not_found"


async def test_items_that_a_client_gives_back() -> None:
    async with ScriptedModel(
        calls("echo", {"text": "x"}), says("ok"), says("again"), says("once more")
    ) as model:
        engine = Engine(model, [Echo()])
        first = await engine.block(tools=[ECHO])
        call = msgspec.to_builtins(first.output[0]) | {"outputs": None}
        await engine.block(input=[call, {"role": "user", "content": "and?"}], tools=[ECHO])
        await engine.block(input=[{"type": "item_reference", "id": call["id"]}], tools=[ECHO])
    for request in model.requests[2:]:
        exchange = request.segments[0].entries[0].exchange
        assert exchange is not None
        assert exchange.output == '{"text":"x"}'


async def test_items_that_nobody_here_made() -> None:
    async with ScriptedModel(says("ok")) as model:
        item = {"type": "code_interpreter_call", "id": "ci_elsewhere", "code": "1"}
        await Engine(model, [Echo()]).block(input=[item])
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
        ({"include": ["everything"]}, "include", "everything"),
        ({"background": True}, "background", "not served"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "name"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools", "named 'f'"),
        ({"tools": [{"name": "x"}]}, "tools[0]", "type"),
        ({"tools": [{"type": "off"}]}, "tools", "off is not enabled"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "name"),
    ],
)
async def test_what_is_refused_before_anything_begins(body: dict[str, Any], param: str, words: str) -> None:
    engine = Engine(ScriptedModel(), disabled=frozenset({"off"}))
    with pytest.raises(InvalidRequest, match=words) as refused:
        await engine.start(**body)
    assert refused.value.param == param


async def test_unknown_tools_are_tolerated_and_shown() -> None:
    tools = [
        {"type": "namespace", "name": "n", "x": [1]},
        {"type": "web_search", "external_web_access": False},
    ]
    async with ScriptedModel(says("ok")) as model:
        response = await Engine(model, [Echo()]).block(tools=[*tools, ECHO])
    assert [msgspec.json.decode(tool) for tool in response.tools] == [*tools, {"type": "echo", "shown": True}]
    assert [function.name for function in model.requests[0].functions] == ["echo"]


async def test_unknown_tools_may_be_allowed() -> None:
    search = {"type": "web_search"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [search, ECHO]}
    async with ScriptedModel(says("ok")) as model:
        await Engine(model, [Echo()]).block(tools=[search, ECHO, FUNCTION], tool_choice=allowed)
    assert [function.name for function in model.requests[0].functions] == ["echo"]


async def test_logprobs_are_asked_for_by_whoever_includes_them() -> None:
    async with ScriptedModel(says("a"), says("b")) as model:
        engine = Engine(model)
        await engine.block(include=["message.output_text.logprobs"])
        await engine.block()
    assert [request.sampling.logprobs for request in model.requests] == [True, False]


async def test_a_tier_that_nobody_knows_is_not_promised() -> None:
    async with ScriptedModel(says("a"), says("b")) as model:
        engine = Engine(model)
        tiers = [(await engine.block(service_tier=tier)).service_tier for tier in ("flex", "golden")]
    assert tiers == ["flex", "default"]


async def test_an_id_alone_is_a_reference() -> None:
    async with ScriptedModel(says("a"), says("b")) as model:
        engine = Engine(model)
        first = await engine.block()
        message = first.output[0]
        assert isinstance(message, Message)
        await engine.block(input=[{"id": message.id}, {"role": "user", "content": "again"}])
    assert model.requests[1].segments[0].entries[0].id == message.id


async def test_structured_output_goes_to_the_model() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    async with ScriptedModel(says("{}")) as model:
        response = await Engine(model, [Echo()]).block(text={"format": form}, tools=[ECHO])
    sent = model.requests[0].sampling.text
    assert sent is not None
    assert msgspec.json.decode(msgspec.json.encode(sent.format)) == form
    assert msgspec.json.decode(msgspec.json.encode(response.text.format)) == form


async def test_an_item_is_in_the_log_before_the_code_runs() -> None:
    gate = asyncio.Event()
    run = await Engine(ScriptedModel(calls("echo", {}), says("ok")), [Echo(gate=lambda _: gate)]).start(
        tools=[ECHO]
    )
    seen: list[str] = []
    async for batch in run.subscribe():
        seen += types(batch)
        if "response.code_interpreter_call.interpreting" in seen:
            assert any(isinstance(event, ItemAdded) for event in batch) or seen.count(
                "response.output_item.added"
            )
            gate.set()
    assert seen[-1] == "response.completed"
