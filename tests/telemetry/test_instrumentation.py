"""Records that listeners get of runs, turns and calls."""

import asyncio
from array import array
from collections.abc import Sequence
from contextvars import Context, copy_context
from itertools import accumulate
from typing import Any, override

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.engine.run_service import EngineRunService
from fumehood.gateway_stats import BucketHistogram
from fumehood.interfaces import Caller, HostedTool, RunService
from fumehood.protocol.model_turns import AnyModelEvent, ModelCallStarted, ModelRequest
from fumehood.protocol.openai.responses import CreateResponse, Response
from fumehood.telemetry.instrumentation import (
    InstrumentedHostedTool,
    InstrumentedModelProvider,
    InstrumentedRunService,
)
from fumehood.telemetry.operation_records import (
    RecordDispatcher,
    RecordListener,
    RunRecord,
    SpanRecord,
    ToolCallRecord,
    TurnRecord,
)
from fumehood.telemetry.semantic_conventions import DURATION_BUCKETS
from fumehood.testing import (
    FakeClock,
    MemoryStore,
    PlainSealer,
    ScriptedModel,
    SingleBackendProvider,
    calls,
    says,
)
from fumehood.timed_steps import start_timing
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import ECHO, make_usage, read_batches
from tests.support.turn_records import live_records, start_turn
from tests.support.waiting import wait_until


class RecordingListener(RecordListener):
    needs_chunk_times = True

    def __init__(self) -> None:
        self.started: list[SpanRecord] = []
        self.ended: list[SpanRecord] = []

    def on_start(self, record: SpanRecord) -> None:
        self.started.append(record)

    @override
    def on_end(self, record: SpanRecord) -> None:
        self.ended.append(record)


class FailingListener(RecordListener):
    def on_start(self, record: SpanRecord) -> None:
        raise RuntimeError("with a secret")

    @override
    def on_end(self, record: SpanRecord) -> None:
        raise RuntimeError("with a secret")


def create_runs(dispatcher: RecordDispatcher, model: ScriptedModel, *tools: HostedTool) -> RunService:
    """An engine of doubles, instrumented."""
    clock = FakeClock()
    runs = EngineRunService(
        InstrumentedModelProvider(SingleBackendProvider(model), dispatcher),
        [InstrumentedHostedTool(tool, dispatcher) for tool in tools],
        MemoryStore(clock),
        clock,
        sealer=PlainSealer(),
    )
    return InstrumentedRunService(runs, dispatcher)


def decode_request(**body: Any) -> CreateResponse:
    request = {"model": "scripted", "input": "Hi", "stream": True, **body}
    return msgspec.json.decode(msgspec.json.encode(request), type=CreateResponse)


async def run_instrumented(
    dispatcher: RecordDispatcher, tool: EchoTool | None = None, *, flush: bool = True, **body: Any
) -> str:
    """Return the status of a response with a call and an answer. flush: pass all records to the listeners."""
    model = ScriptedModel([*calls("echo", {"text": "x"})], says("Done"), usage=make_usage(3))
    runs = create_runs(dispatcher, model, tool or EchoTool())
    run = await runs.start(decode_request(**{"tools": [ECHO], **body}), Caller())
    async for _ in read_batches(run):
        pass
    response = await run.wait()
    await runs.drain(0)
    assert not dispatcher.running_count
    if flush:
        dispatcher.flush()
    return response.status


async def test_every_record_is_dispatched_at_start_and_end() -> None:
    listener = RecordingListener()
    assert await run_instrumented(RecordDispatcher([listener], on_start=listener.on_start)) == "completed"
    assert [type(record) for record in listener.started] == [
        RunRecord,
        TurnRecord,
        ToolCallRecord,
        TurnRecord,
    ]
    assert [type(record) for record in listener.ended] == [TurnRecord, ToolCallRecord, TurnRecord, RunRecord]
    run = listener.started[0]
    assert isinstance(run, RunRecord)
    assert run.response_summary is not None
    assert (run.turns, run.calls) == (2, 1)
    first, second = _turns(listener)
    assert first.time_to_first_chunk < run.time_to_first_token < run.duration_ns
    assert (
        run.generation_time
        == first.duration_ns - first.time_to_first_chunk + second.duration_ns - second.time_to_first_chunk
    )
    for turn in _turns(listener):
        assert turn.run is run
        assert 0 < turn.time_to_first_chunk < turn.duration_ns <= run.duration_ns
        assert turn.end is not None
        assert turn.events is None
    assert all(not record.error for record in listener.ended)


class CapturingListener(RecordingListener):
    """Sees things whole."""

    @override
    def on_end(self, record: SpanRecord) -> None:
        super().on_end(record)
        match record:
            case TurnRecord(request=ModelRequest(), events=list() as events):
                record.content["event_count"] = len(events)
                assert events[-1] == record.end
            case RunRecord(request=CreateResponse(), response=Response() as response):
                record.content["status"] = response.status
            case ToolCallRecord():
                record.content["output"] = record.output
            case _:
                raise AssertionError(record)


async def test_content_is_captured_at_the_end_and_released(caplog: pytest.LogCaptureFixture) -> None:
    listener, recorder = RecordingListener(), CapturingListener()
    await run_instrumented(RecordDispatcher([listener], recorder))
    assert [record.content for record in listener.ended] == [
        {"event_count": 5},
        {"output": '{"text":"x"}'},
        {"event_count": 4},
        {"status": "completed"},
    ]
    assert recorder.ended == listener.ended
    assert not caplog.records
    for record in listener.ended:
        match record:
            case RunRecord():
                assert (record.request, record.response) == (None, None)
                assert record.response_summary is not None
            case TurnRecord():
                assert (record.request, record.events) == (None, None)
            case _:
                assert isinstance(record, ToolCallRecord)
                assert (record.arguments, record.output) == ("", "")


class CallIdListener(RecordingListener):
    """Collects the ids of calls as the model's turns and as the tool's spans have them."""

    def __init__(self) -> None:
        super().__init__()
        self.announced_ids: list[str] = []
        self.run_ids: list[str] = []

    @override
    def on_end(self, record: SpanRecord) -> None:
        if isinstance(record, TurnRecord):
            events = record.events or ()
            self.announced_ids += [event.call_id for event in events if isinstance(event, ModelCallStarted)]
        elif isinstance(record, ToolCallRecord):
            self.run_ids.append(record.call_id)


async def test_calls_have_the_ids_of_the_conversation() -> None:
    again = calls("echo", {"text": "x"}, call_id="call_0")
    recorder = CallIdListener()
    dispatcher = RecordDispatcher([], recorder)
    runs = create_runs(dispatcher, ScriptedModel(again, again, says("Done")), EchoTool())
    run = await runs.start(decode_request(tools=[ECHO]), Caller())
    async for _ in read_batches(run):
        pass
    await runs.drain(0)
    dispatcher.flush()
    assert recorder.run_ids == recorder.announced_ids
    assert len(set(recorder.run_ids)) == 2


async def test_ended_records_are_dispatched_in_batches_or_after_a_delay() -> None:
    listener = RecordingListener()
    dispatcher = RecordDispatcher([listener])
    for number in range(100):
        dispatcher.end(ToolCallRecord(name="f", call_id=str(number), duration_ns=1))
        assert len(listener.ended) == (0 if number < 63 else 64)
    await wait_until(lambda: len(listener.ended) >= 100)
    assert [record.call_id for record in listener.ended if isinstance(record, ToolCallRecord)] == [
        *map(str, range(100))
    ]
    dispatcher.flush()
    assert len(listener.ended) == 100


async def test_connections_opened_in_a_run_keep_no_records() -> None:
    """They keep the variables of whoever made them, as long as they are open."""
    gate = asyncio.Event()
    gate.set()
    contexts: list[Context] = []

    def connecting(_: str) -> asyncio.Event:
        contexts.append(copy_context())
        return gate

    before = {id(record) for record in live_records()}
    assert await run_instrumented(RecordDispatcher([]), EchoTool(gate=connecting)) == "completed"
    assert len(contexts) == 1
    assert [record for record in live_records() if id(record) not in before] == []
    with contexts[0].run(start_timing, "late") as late:
        assert late.name == "late"


def _turns(listener: RecordingListener) -> list[TurnRecord]:
    return [record for record in listener.ended if isinstance(record, TurnRecord)]


async def test_an_abandoned_turn_is_recorded_once_as_cancelled() -> None:
    listener = RecordingListener()
    dispatcher = RecordDispatcher([listener])
    model = ScriptedModel([*says("a", deltas=1), asyncio.Event()])
    batches = (
        InstrumentedModelProvider(SingleBackendProvider(model), dispatcher)
        .get_backend("m")
        .stream(ModelRequest(model="m"))
    )
    assert await anext(batches)
    await batches.aclose()
    await batches.aclose()
    dispatcher.flush()
    assert [request.model for request in model.aborted_requests] == ["m"]
    (turn,) = _turns(listener)
    assert (turn.error, turn.end) == ("cancelled", None)
    assert 0 < turn.time_to_first_chunk < turn.duration_ns


async def test_a_failing_listener_is_logged_and_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    broken, listener = FailingListener(), RecordingListener()
    assert (
        await run_instrumented(RecordDispatcher([broken, listener], on_start=broken.on_start)) == "completed"
    )
    assert len(listener.ended) == 4
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "fumehood.telemetry.operation_records"
    ]
    assert len(lines) == 8
    assert all("RuntimeError at " in line and "secret" not in line for line in lines)


@pytest.mark.parametrize("events", [None, []])
def test_chunk_intervals_are_recorded(events: list[AnyModelEvent] | None) -> None:
    turn = start_turn(ModelRequest(model="m"))
    turn.events = events
    take = turn.timestamp_events(lambda events: events == [*says("x")])
    turn.add_events(())
    turn.add_events(says("x"))
    assert take([*says("x")])
    assert not take([*says("y")])
    assert take([*says("x")])
    gaps = turn.take_chunk_intervals()
    assert (gaps.count, gaps.sum > 0, turn.time_to_first_chunk > 0) == (2, True, True)
    assert turn.chunk_times is None
    assert events is None or events == [*says("x")] * 3


def test_chunk_times_are_recorded_only_if_needed() -> None:
    turn = start_turn(ModelRequest(model="m", streamed=False))

    def take(events: Sequence[AnyModelEvent]) -> bool:
        return bool(events)

    assert turn.timestamp_events(take) is take


@given(st.lists(st.integers(0, 100_000_000_000)))
def test_chunk_intervals_match_single_observations(pauses: list[int]) -> None:
    turn = start_turn(ModelRequest(model="m"))
    turn.chunk_times = array("q", accumulate(pauses, initial=0))
    expected = BucketHistogram(DURATION_BUCKETS)
    for pause in pauses:
        expected.observe(pause / 1e9)
    found = turn.take_chunk_intervals()
    assert found.counts == expected.counts
    assert found.sum == pytest.approx(expected.sum)
