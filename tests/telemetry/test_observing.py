"""What an observer is told of runs, turns and calls; imports the engine, its doubles and `telemetry`."""

import asyncio
import gc
from array import array
from collections.abc import Sequence
from contextvars import Context, copy_context
from itertools import accumulate
from typing import Any, override

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.engine.runs import EngineRuns
from fumehood.figures import Distribution
from fumehood.interfaces import Caller
from fumehood.phases import phase
from fumehood.protocol.models import AnyModelEvent, ModelRequest
from fumehood.protocol.responses import CreateResponse, Response
from fumehood.telemetry.conventions import SECONDS
from fumehood.telemetry.observing import ObservedModels, ObservedRuns, ObservedTool
from fumehood.telemetry.seen import CallSeen, Listener, Observer, RunSeen, Seen, TurnSeen
from fumehood.testing import FakeClock, MemoryStore, PlainSealer, ScriptedModel, ScriptedModels, calls, says
from tests.support.engines import ECHO, tokens
from tests.support.tools import Echo
from tests.support.turns import turn_of


class Notes(Listener):
    wants_moments = True

    def __init__(self) -> None:
        self.begun: list[Seen] = []
        self.over: list[Seen] = []

    def began(self, seen: Seen) -> None:
        self.begun.append(seen)

    @override
    def ended(self, seen: Seen) -> None:
        self.over.append(seen)


class Broken(Listener):
    def began(self, seen: Seen) -> None:
        raise RuntimeError("with a secret")

    @override
    def ended(self, seen: Seen) -> None:
        raise RuntimeError("with a secret")


async def observed(observer: Observer, tool: Echo | None = None, *, told: bool = True, **body: Any) -> str:
    """The status of a response with a call and an answer. told: whether listeners are told of all of it by then."""
    clock = FakeClock()
    model = ScriptedModel([*calls("echo", {"text": "x"})], says("Done"), usage=tokens(3))
    runs = ObservedRuns(
        EngineRuns(
            ObservedModels(ScriptedModels(model), observer),
            [ObservedTool(tool or Echo(), observer)],
            MemoryStore(clock),
            clock,
            sealer=PlainSealer(),
        ),
        observer,
    )
    written = msgspec.json.encode(
        {"model": "scripted", "input": "Hi", "stream": True, "tools": [ECHO]} | body
    )
    run = await runs.start(msgspec.json.decode(written, type=CreateResponse), Caller())
    async for _ in run.subscribe():
        pass
    response = await run.wait()
    await runs.drain(0)
    assert not observer.running
    if told:
        observer.tell()
    return response.status


async def test_everything_is_told_when_it_begins_and_when_it_has_ended() -> None:
    notes = Notes()
    assert await observed(Observer([notes], begins=notes.began)) == "completed"
    assert [type(seen) for seen in notes.begun] == [RunSeen, TurnSeen, CallSeen, TurnSeen]
    assert [type(seen) for seen in notes.over] == [TurnSeen, CallSeen, TurnSeen, RunSeen]
    run = notes.begun[0]
    assert isinstance(run, RunSeen)
    assert run.answer is not None
    assert (run.turns, run.calls) == (2, 1)
    first, second = _turns(notes)
    assert first.first < run.first < run.took
    assert run.writing == first.took - first.first + second.took - second.first
    for turn in _turns(notes):
        assert turn.run is run
        assert 0 < turn.first < turn.took <= run.took
        assert turn.end is not None
        assert turn.pieces is None
    assert all(not seen.error for seen in notes.over)


class Recorder(Notes):
    """Sees things whole."""

    @override
    def ended(self, seen: Seen) -> None:
        super().ended(seen)
        match seen:
            case TurnSeen(request=ModelRequest(), pieces=list() as pieces):
                seen.content["said"] = len(pieces)
                assert pieces[-1] == seen.end
            case RunSeen(request=CreateResponse(), response=Response() as response):
                seen.content["status"] = response.status
            case CallSeen():
                seen.content["heard"] = seen.output
            case _:
                raise AssertionError(seen)


async def test_what_was_said_is_seen_at_once_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    notes, recorder = Notes(), Recorder()
    await observed(Observer([notes], recorder))
    assert [seen.content for seen in notes.over] == [
        {"said": 5},
        {"heard": '{"text":"x"}'},
        {"said": 4},
        {"status": "completed"},
    ]
    assert recorder.over == notes.over
    assert not caplog.records
    for seen in notes.over:
        match seen:
            case RunSeen():
                assert (seen.request, seen.response) == (None, None)
                assert seen.answer is not None
            case TurnSeen():
                assert (seen.request, seen.pieces) == (None, None)
            case _:
                assert isinstance(seen, CallSeen)
                assert (seen.arguments, seen.output) == ("", "")


async def test_ends_are_told_together_and_soon() -> None:
    notes = Notes()
    observer = Observer([notes])
    for number in range(100):
        observer.ended(CallSeen(name="f", call_id=str(number), took=1))
        assert len(notes.over) == (0 if number < 63 else 64)
    async with asyncio.timeout(30):
        while len(notes.over) < 100:
            await asyncio.sleep(0.05)
    assert [seen.call_id for seen in notes.over if isinstance(seen, CallSeen)] == [*map(str, range(100))]
    observer.tell()
    assert len(notes.over) == 100


async def test_connections_made_meanwhile_keep_nothing_of_what_was_seen() -> None:
    """They keep the variables of whoever made them, as long as they are open."""
    gate = asyncio.Event()
    gate.set()
    kept: list[Context] = []

    def connecting(_: str) -> asyncio.Event:
        kept.append(copy_context())
        return gate

    before = {id(seen) for seen in _all_seen()}
    assert await observed(Observer([]), Echo(gate=connecting)) == "completed"
    assert len(kept) == 1
    assert [seen for seen in _all_seen() if id(seen) not in before] == []
    with kept[0].run(phase, "late") as late:
        assert late.name == "late"


def _all_seen() -> list[Seen]:
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, Seen)]


def _turns(notes: Notes) -> list[TurnSeen]:
    return [seen for seen in notes.over if isinstance(seen, TurnSeen)]


async def test_a_turn_that_is_left_is_told_once_and_as_cancelled() -> None:
    notes = Notes()
    observer = Observer([notes])
    model = ScriptedModel([*says("a", pieces=1), asyncio.Event()])
    batches = ObservedModels(ScriptedModels(model), observer).backend("m").stream(ModelRequest(model="m"))
    assert await anext(batches)
    await batches.aclose()
    await batches.aclose()
    observer.tell()
    assert [request.model for request in model.aborted] == ["m"]
    (turn,) = _turns(notes)
    assert (turn.error, turn.end) == ("cancelled", None)
    assert 0 < turn.first < turn.took


async def test_a_listener_that_breaks_is_nobodys_trouble(caplog: pytest.LogCaptureFixture) -> None:
    broken, notes = Broken(), Notes()
    assert await observed(Observer([broken, notes], begins=broken.began)) == "completed"
    assert len(notes.over) == 4
    said = [record.getMessage() for record in caplog.records if record.name == "fumehood.telemetry.seen"]
    assert len(said) == 8
    assert all("RuntimeError at " in line and "secret" not in line for line in said)


@pytest.mark.parametrize("pieces", [None, []])
def test_pauses_between_pieces_are_counted(pieces: list[AnyModelEvent] | None) -> None:
    turn = turn_of(ModelRequest(model="m"))
    turn.pieces = pieces
    take = turn.noting(lambda events: events == [*says("x")])
    turn.note(())
    turn.note(says("x"))
    assert take([*says("x")])
    assert not take([*says("y")])
    assert take([*says("x")])
    gaps = turn.gaps()
    assert (gaps.number, gaps.total > 0, turn.first > 0) == (2, True, True)
    assert turn.moments is None
    assert pieces is None or pieces == [*says("x")] * 3


def test_where_nobody_watches_there_are_no_pauses() -> None:
    turn = turn_of(ModelRequest(model="m", streamed=False))

    def take(events: Sequence[AnyModelEvent]) -> bool:
        return bool(events)

    assert turn.noting(take) is take


@given(st.lists(st.integers(0, 100_000_000_000)))
def test_pauses_are_counted_as_one_by_one(pauses: list[int]) -> None:
    turn = turn_of(ModelRequest(model="m"))
    turn.moments = array("q", accumulate(pauses, initial=0))
    expected = Distribution(SECONDS)
    for pause in pauses:
        expected.add(pause / 1e9)
    found = turn.gaps()
    assert found.numbers == expected.numbers
    assert found.total == pytest.approx(expected.total)
