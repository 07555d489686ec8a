"""How runs end: limits, failures, cancels, readers that stay behind."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

from fumehood.engine.agent_loop import LoopLimits
from fumehood.engine.citations import find_links
from fumehood.engine.run_event_log import ReaderLagLimits
from fumehood.engine.run_service import EngineRun
from fumehood.interfaces import ResponseLease
from fumehood.protocol.model_turns import ModelRefusalDelta, ModelTextDelta, ModelTurnEnded
from fumehood.protocol.openai.api_errors import (
    ApiError,
    InternalServerError,
    InvalidRequest,
    ModelRateLimited,
    ModelUnreachable,
    ServiceUnavailable,
)
from fumehood.protocol.openai.items import (
    CodeInterpreterCall,
    OutputMessage,
    OutputText,
    Refusal,
)
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import ErrorEvent, OutputTextDelta, StreamEvent
from fumehood.testing import ScriptedModel, calls, says
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import (
    ECHO,
    FUNCTION,
    EngineHarness,
    collect_events,
    make_produced_file,
    make_usage,
    message_text,
    read_batches,
    wait_until,
)
from tests.support.stream_checks import check_invariants, event_types


def failure_message(response: Response) -> str:
    assert response.status == "failed"
    assert response.error is not None
    return response.error.message


async def start_writing(engine: EngineHarness) -> EngineRun:
    """Start a run and wait until its model has written something."""
    run = await engine.start()
    reader = read_batches(run)
    while not any(isinstance(event, OutputTextDelta) for event in await anext(reader)):
        pass
    return run


async def cancel_when(run: EngineRun, holds: Callable[[Sequence[StreamEvent]], bool]) -> Response:
    """Cancel the run after the first batch for which that holds; return the response."""
    events: list[StreamEvent] = []
    async for batch in read_batches(run):
        events += batch
        if holds(batch):
            run.cancel("the client has gone")
    response = check_invariants(events)
    assert response.status == "cancelled"
    return response


@pytest.mark.parametrize(
    ("end", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
async def test_what_the_model_server_cuts_off_is_incomplete(
    end: Literal["length", "content_filter"], reason: str
) -> None:
    turn = [ModelTextDelta("Hal"), ModelTurnEnded(end, make_usage(3))]
    response = check_invariants(await EngineHarness(ScriptedModel(turn)).stream(max_output_tokens=20))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == reason
    assert isinstance(response.output[0], OutputMessage)
    assert response.output[0].status == "incomplete"


async def test_a_hosted_call_that_was_cut_off_does_not_run() -> None:
    echo = EchoTool()
    turn = [*calls("echo", '{"text": "ab'), ModelTurnEnded("length", None)]
    response = check_invariants(await EngineHarness(ScriptedModel(turn), [echo]).stream(tools=[ECHO]))
    call = response.output[0]
    assert isinstance(call, CodeInterpreterCall)
    assert call.status == "incomplete"
    assert not any(line.startswith("began") for line in echo.log)


async def test_a_function_call_that_was_cut_off_needs_no_answer() -> None:
    turn = [*calls("f", '{"a'), ModelTurnEnded("length", None)]
    async with ScriptedModel(turn, says("Again")) as model:
        engine = EngineHarness(model)
        response = await engine.create(tools=[FUNCTION])
        assert response.status == "incomplete"
        answer = {"type": "function_call_output", "call_id": "call_1", "output": "1"}
        with pytest.raises(InvalidRequest, match="call_1 was cut off") as refused:
            await engine.create(input=[answer], previous_response_id=response.id)
        assert refused.value.param == "input"
        after = await engine.create(input="Go on", previous_response_id=response.id)
    assert message_text(after.output[0]) == "Again"


async def test_a_response_that_is_deleted_while_it_runs_says_so() -> None:
    go = asyncio.Event()
    engine = EngineHarness(ScriptedModel([ModelTextDelta("Hal"), go, ModelTextDelta("lo")]))
    run = await engine.start()
    await wait_until(lambda: bool(engine.model.requests))
    assert await engine.store.delete_response("", run.id)
    go.set()
    response = check_invariants(await collect_events(run))
    assert "deleted" in failure_message(response)
    assert await engine.store.get_response("", run.id) is None


async def test_output_tokens_are_counted_over_all_turns() -> None:
    async with ScriptedModel(calls("echo", {}), says("x"), usage=make_usage(30)) as model:
        await EngineHarness(model, [EchoTool()]).create(tools=[ECHO], max_output_tokens=100)
    assert [request.sampling.max_output_tokens for request in model.requests] == [100, 70]


async def test_no_turn_without_tokens() -> None:
    async with ScriptedModel(calls("echo", {}), usage=make_usage(100)) as model:
        response = await EngineHarness(model, [EchoTool()]).create(tools=[ECHO], max_output_tokens=100)
    assert response.status == "incomplete"


@pytest.mark.parametrize("error", [ModelRateLimited("busy"), ModelUnreachable("gone")])
async def test_a_model_that_fails_at_once(error: ApiError) -> None:
    events = await EngineHarness(ScriptedModel(error)).stream()
    response = check_invariants(events)
    assert event_types(events) == ["response.created", "response.in_progress", "error", "response.failed"]
    assert failure_message(response) == error.message
    assert isinstance(events[2], ErrorEvent)
    assert events[2].error.message == error.message
    engine = EngineHarness(ScriptedModel(error))
    run = await engine.start(stream=False)
    with pytest.raises(type(error)):
        await run.wait()
    assert await engine.store.get_response("", run.id) is None


@pytest.mark.parametrize("step", [says("x"), ModelUnreachable("gone"), ValueError("ours")])
async def test_whoever_cannot_wait_is_told_what_others_wait_for(step: Any) -> None:
    engine = EngineHarness(ScriptedModel(step))
    run = await engine.start(stream=False)
    told: list[object] = []
    run.add_done_callback(told.append)
    assert told == []
    (waited,) = await asyncio.gather(run.wait(), return_exceptions=True)
    await engine.runs.drain(0)
    assert told == [waited]
    run.add_done_callback(told.append)
    assert told == [waited, waited]


@pytest.mark.parametrize(
    ("steps", "status"),
    [
        ([calls("echo", {"text": "x"}), says("done")], "completed"),
        ([calls("echo", {"text": "x"}), ModelUnreachable("gone")], "failed"),
    ],
)
async def test_tools_are_told_that_the_request_is_over(steps: list[Any], status: str) -> None:
    echo = EchoTool()
    run = await EngineHarness(ScriptedModel(*steps), [echo]).start(tools=[ECHO])
    assert (await run.wait()).status == status
    assert echo.closed == 1


@pytest.mark.parametrize(
    ("delta", "part"),
    [
        (ModelTextDelta("Hel"), OutputText(text="Hel")),
        (ModelRefusalDelta("I ca"), Refusal(refusal="I ca")),
    ],
)
async def test_what_was_written_before_the_model_fails_is_kept(
    delta: Any, part: OutputText | Refusal
) -> None:
    events = await EngineHarness(ScriptedModel([delta, ModelUnreachable("gone")])).stream()
    message = check_invariants(events).output[0]
    assert event_types(events)[-3:] == ["response.output_item.done", "error", "response.failed"]
    assert isinstance(message, OutputMessage)
    assert message.content == [part]


async def test_a_fault_of_ours_says_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    response = check_invariants(await EngineHarness(ScriptedModel(ValueError("secret"))).stream())
    assert "secret" not in failure_message(response)
    assert "secret" in caplog.text


async def test_a_deadline_for_everything() -> None:
    echo = EchoTool(gate=lambda _: asyncio.Event())
    engine = EngineHarness(ScriptedModel(calls("echo", {})), [echo], limits=LoopLimits(seconds=0.05))
    response = check_invariants(await engine.stream(tools=[ECHO]))
    assert "0.05 seconds" in failure_message(response)
    assert echo.log[-1].startswith("ended")


async def test_cancelled_while_the_model_writes() -> None:
    model = ScriptedModel([ModelTextDelta("Hel"), asyncio.Event()])
    engine = EngineHarness(model)
    run = await engine.start()
    response = await cancel_when(
        run, lambda batch: any(isinstance(event, OutputTextDelta) for event in batch)
    )
    assert message_text(response.output[0]) == "Hel"
    assert len(model.aborted_requests) == 1
    assert await engine.store.get_response("", run.id) == response


async def test_cancelled_while_code_runs() -> None:
    echo = EchoTool(gate=lambda _: asyncio.Event())
    run = await EngineHarness(ScriptedModel(calls("echo", {"text": "x"})), [echo]).start(tools=[ECHO])
    response = await cancel_when(run, lambda _: any(line.startswith("began") for line in echo.log))
    assert echo.log[-1].startswith("ended")
    assert echo.closed == 1
    call = response.output[0]
    assert isinstance(call, CodeInterpreterCall)
    assert call.status == "incomplete"


async def test_cancelled_while_files_are_looked_up() -> None:
    looking = asyncio.Event()

    class Slow(EchoTool):
        async def before_find_files(self) -> None:
            looking.set()
            await asyncio.Event().wait()

    text = "See sandbox:/mnt/data/old.txt"
    engine = EngineHarness(ScriptedModel(says(text)), [Slow(known_files=[make_produced_file("old.txt")])])
    run = await engine.start(tools=[ECHO])
    reading = asyncio.ensure_future(collect_events(run))
    await looking.wait()
    run.cancel("the client has gone")
    response = check_invariants(await reading)
    assert response.status == "cancelled"
    assert message_text(response.output[0]) == text
    assert await engine.store.get_response("", run.id) == response


async def test_cancelled_twice_the_tool_is_interrupted_once_and_in_peace() -> None:
    """A client that has gone, and then a server that stops: what is being ended ends."""

    class Patient(EchoTool):
        async def after_call(self) -> None:
            self.log.append("leaving")
            left.set()
            await go_on.wait()
            self.log.append("has left")

    left, go_on = asyncio.Event(), asyncio.Event()
    echo = Patient(gate=lambda _: asyncio.Event())
    run = await EngineHarness(ScriptedModel(calls("echo", {"text": "x"})), [echo]).start(tools=[ECHO])
    reading = asyncio.ensure_future(collect_events(run))
    await wait_until(lambda: any(line.startswith("began") for line in echo.log))
    run.cancel("the client has gone")
    await left.wait()
    run.cancel("the server is shutting down")
    await asyncio.sleep(0)
    go_on.set()
    assert check_invariants(await reading).status == "cancelled"
    assert echo.log[-1] == "has left"


async def test_a_text_full_of_links_without_an_end_holds_up_nobody() -> None:
    """Each was searched to the end of the text: half a minute, in which nobody else was served."""
    text = "(sandbox:/mnt/data/x " * 20_000
    began = time.thread_time()
    assert len(find_links(text)) == 1_000
    assert time.thread_time() - began < 1.0


@pytest.mark.parametrize("piece", ["x" * 70, "x"])
async def test_a_model_that_never_ends_is_cut_off(piece: str) -> None:
    """By its characters or by its pieces, whichever is too much first: neither may fill the memory."""
    model = ScriptedModel([*(ModelTextDelta(piece) for _ in range(1_000)), asyncio.Event()])
    events = await EngineHarness(model, limits=LoopLimits(characters=1_600)).stream()
    response = check_invariants(events)
    assert "without end" in failure_message(response)
    assert 70 < len(message_text(response.output[0])) < 2_000
    assert len(model.aborted_requests) == 1


async def test_cancelled_before_it_began() -> None:
    run = await EngineHarness(ScriptedModel()).start()
    run.cancel("at once")
    response = check_invariants(await collect_events(run))
    assert response.status == "cancelled"


async def test_a_reader_far_behind_ends_the_run() -> None:
    go_on = asyncio.Event()
    model = ScriptedModel(
        [ModelTextDelta("x"), go_on, *(ModelTextDelta("x") for _ in range(100)), asyncio.Event()]
    )
    engine = EngineHarness(model, lag_limits=ReaderLagLimits(events=10, seconds=1.0, hard_events=50))
    run = await engine.start()
    reader = read_batches(run)
    await anext(reader)
    go_on.set()
    assert (await run.wait()).status == "cancelled"
    with pytest.raises(InternalServerError, match="not read fast enough"):
        await anext(reader)
    assert engine.stats.dropped_readers == {"behind": 1}


async def test_a_reader_a_little_behind_for_long_ends_the_run() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    never = asyncio.Event()
    model = ScriptedModel(
        [
            *(ModelTextDelta("x") for _ in range(20)),
            gates[0],
            ModelTextDelta("y"),
            gates[1],
            ModelTextDelta("z"),
            never,
        ]
    )
    engine = EngineHarness(model, lag_limits=ReaderLagLimits(events=10, seconds=30.0, hard_events=1000))
    run = await engine.start()
    gates[0].set()
    await asyncio.sleep(0)
    engine.clock.advance(31)
    gates[1].set()
    assert (await run.wait()).status == "cancelled"


async def test_a_reader_that_catches_up_is_forgiven() -> None:
    gate = asyncio.Event()
    model = ScriptedModel(
        [*(ModelTextDelta("x") for _ in range(20)), gate, *(ModelTextDelta("y") for _ in range(20))]
    )
    engine = EngineHarness(model, lag_limits=ReaderLagLimits(events=10, seconds=30.0, hard_events=1000))
    run = await engine.start()
    await asyncio.sleep(0)
    events: list[StreamEvent] = []
    async for batch in read_batches(run):
        events += batch
        engine.clock.advance(31)
        gate.set()
    assert check_invariants(events).status == "completed"


async def test_a_renewal_that_breaks_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineHarness(ScriptedModel([ModelTextDelta("x"), asyncio.Event()]))
    run = await start_writing(engine)
    renew, renewed = engine.store.renew_leases, asyncio.Event()

    async def broken(leases: Sequence[ResponseLease]) -> Sequence[ResponseLease]:
        monkeypatch.setattr(engine.store, "renew_leases", mended)
        raise RuntimeError("a mistake of ours")

    async def mended(leases: Sequence[ResponseLease]) -> Sequence[ResponseLease]:
        renewed.set()
        return await renew(leases)

    monkeypatch.setattr(engine.store, "renew_leases", broken)
    engine.clock.advance(10)
    await wait_until(lambda: "could not be renewed" in caplog.text)
    await wait_until(lambda: engine.clock.advance(10) is None and renewed.is_set())
    run.cancel("enough")
    assert (await run.wait()).status == "cancelled"


async def test_a_response_whose_end_was_not_written_has_failed_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineHarness(ScriptedModel([ModelTextDelta("x")]))

    async def full(*_: object) -> None:
        raise ServiceUnavailable("The disk is full.")

    monkeypatch.setattr(engine.store, "commit_response", full)
    run = await engine.start()
    told = await run.wait()
    kept = await engine.store.get_response("", run.id)
    assert kept is not None
    assert (told.status, kept.status) == ("failed", "in_progress")
    async with asyncio.timeout(60):
        await wait_until(
            lambda: engine.clock.advance(10) is None and "marked 1 responses as failed" in caplog.text
        )
    kept = await engine.store.get_response("", run.id)
    assert kept is not None
    assert kept.status == "failed"
    await engine.runs.drain(0)


async def test_a_run_whose_lease_is_lost_ends() -> None:
    engine = EngineHarness(ScriptedModel([ModelTextDelta("x"), asyncio.Event()]))
    run = await start_writing(engine)
    engine.clock.advance(10)
    await asyncio.sleep(0)
    engine.clock.advance(25)
    assert await engine.store.fail_orphaned_responses() == 0  # it was renewed in between
    await engine.store.delete_response("", run.id)
    engine.clock.advance(10)
    response = await run.wait()
    assert "taken over" in failure_message(response)
    assert await engine.store.get_response("", run.id) is None


async def test_draining() -> None:
    model = ScriptedModel([ModelTextDelta("x"), asyncio.Event()])
    engine = EngineHarness(model)
    run = await engine.start()
    await engine.runs.drain(0.01)
    assert (await run.wait()).status == "cancelled"
    with pytest.raises(ServiceUnavailable):
        await engine.start()
