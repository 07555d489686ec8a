"""Events and sessions."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from fumehood.client import (
    InProcessDispatcher,
    InProcessEventBus,
    NullEventBus,
    Session,
    ToolInvoked,
    ToolResult,
)
from fumehood.client.errors import PromptValidationError
from fumehood.client.runtime.events import FanOutEventBus


@dataclass(frozen=True)
class Note:
    text: str


@dataclass(frozen=True)
class Count:
    value: int


def invoked(name: str) -> ToolInvoked:
    return ToolInvoked(
        prompt_name="p", adapter="a", name=name, params=None, result=ToolResult.error(""), session_id=None
    )


def test_every_handler_is_called_even_if_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    bus = InProcessDispatcher()
    events: list[str] = []

    def fails(event: ToolInvoked) -> None:
        raise RuntimeError("oops")

    def record_name(event: ToolInvoked) -> None:
        events.append(event.name)

    bus.subscribe(ToolInvoked, fails)
    bus.subscribe(ToolInvoked, record_name)
    with caplog.at_level(logging.ERROR):
        bus.publish(invoked("one"))
    assert events == ["one"]
    assert "A handler of ToolInvoked failed." in caplog.text
    bus.unsubscribe(ToolInvoked, fails)
    caplog.clear()
    bus.publish(invoked("two"))
    assert (events, caplog.text) == (["one", "two"], "")


def test_a_bus_that_is_given_twice_publishes_once() -> None:
    bus, other = InProcessEventBus(), InProcessDispatcher()
    events: list[str] = []
    for one in (bus, other):
        one.subscribe(ToolInvoked, lambda event: events.append(event.name))
    FanOutEventBus(bus, bus, None, NullEventBus(), other).publish(invoked("x"))
    assert events == ["x", "x"]


def test_events_have_an_id_and_a_time() -> None:
    one, other = invoked("x"), invoked("x")
    assert one.event_id != other.event_id
    assert one.created_at.tzinfo is not None


def test_slices_are_typed_and_apart() -> None:
    session = Session()
    notes = session[Note]
    assert notes.latest() is None
    notes.append(Note("a"))
    notes.append(Note("b"))
    assert (notes.all(), notes.latest()) == ((Note("a"), Note("b")), Note("b"))
    assert notes.where(lambda note: note.text == "a") == (Note("a"),)
    assert session[Count].all() == ()
    notes.seed(Note("c"))
    assert session[Note].all() == (Note("c"),)
    notes.clear()
    assert notes.all() == ()


def test_reducers_decide_what_becomes_of_a_value() -> None:
    session = Session(dispatcher=InProcessDispatcher())
    session[Note].register(lambda notes, note: (*notes, note)[-2:])
    session[Count].register(
        lambda counts, event: (Count(counts[-1].value + 1 if counts else 1),), on=ToolInvoked
    )
    session[Count].register(lambda counts, note: (*counts, Count(len(note.text))), on=Note)
    for text in ("a", "bb", "ccc"):
        session[Note].append(Note(text))
    assert session[Note].all() == (Note("bb"), Note("ccc"))
    assert session[Count].all() == (Count(1), Count(2), Count(3))
    session.bus.publish(invoked("x"))
    assert session[Count].all() == (Count(4),)
    assert session[ToolInvoked].all() == ()


def test_a_session_can_be_restored() -> None:
    session = Session()
    session[Note].append(Note("a"))
    snapshot = session.snapshot()
    session[Note].append(Note("b"))
    session[Count].append(Count(1))
    session.restore(snapshot)
    assert (session[Note].all(), session[Count].all()) == ((Note("a"),), ())


def test_threads_can_share_a_session() -> None:
    session = Session()
    with ThreadPoolExecutor(4) as pool:
        for number in range(800):
            pool.submit(session[Count].append, Count(number))
    assert len(session[Count].all()) == 800


def test_a_session_has_one_bus() -> None:
    bus = InProcessDispatcher()
    assert Session(bus).bus is Session(bus=bus).bus is Session(dispatcher=bus).dispatcher is bus
    with pytest.raises(PromptValidationError, match="two names for one thing"):
        Session(bus=bus, dispatcher=InProcessDispatcher())
    assert Session().session_id != Session().session_id
