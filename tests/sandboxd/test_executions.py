"""What an execution takes from a sandbox and what it refuses; imports `fumehood.sandboxd.executions`."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol.sandbox import Display, End, Raised, Result, Stderr, Stdout
from fumehood.sandboxd.executions import Execution, ProtocolBroken
from fumehood.sandboxd.inside.wire import CALL_ID_BYTES, Kind, Message


def execution(budget: int = 1 << 20) -> Execution:
    made = Execution("1", 1.0, budget=budget)
    made.begin()
    return made


def say(running: Execution, kind: Kind, body: object) -> None:
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    running.accept(Message(kind, running.call, raw))


async def test_messages_become_events() -> None:
    running = execution()
    say(running, Kind.STDOUT, "out")
    say(running, Kind.STDERR, "err")
    say(running, Kind.DISPLAY, {"text/plain": "d"})
    say(running, Kind.RESULT, {"text/plain": "r"})
    say(running, Kind.ERROR, {"name": "N", "value": "v", "traceback": "t"})
    say(running, Kind.END, {"exit_code": 1, "interrupted": False})
    assert running.log == [
        Stdout("out"),
        Stderr("err"),
        Display({"text/plain": "d"}),
        Result({"text/plain": "r"}),
        Raised("N", "v", "t"),
    ]
    assert running.claimed_end.result().exit_code == 1


async def test_calls_cannot_be_guessed() -> None:
    calls = {execution().call for _ in range(50)}
    assert len(calls) == 50
    assert all(len(call) == CALL_ID_BYTES for call in calls)


async def test_another_call_and_a_late_message_are_refused() -> None:
    running = execution()
    with pytest.raises(ProtocolBroken, match="not running"):
        running.accept(Message(Kind.STDOUT, b"x" * CALL_ID_BYTES, b""))
    say(running, Kind.END, {"exit_code": 0, "interrupted": False})
    with pytest.raises(ProtocolBroken, match="after the end"):
        say(running, Kind.STDOUT, "late")


@pytest.mark.parametrize("kind", [Kind.READY, Kind.JAILED, Kind.CONFIGURED, Kind.FAILED, Kind.EXECUTE])
async def test_kinds_that_have_no_place_in_a_call_are_refused(kind: Kind) -> None:
    with pytest.raises(ProtocolBroken, match=kind.name):
        say(execution(), kind, {})


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.END, {"exit_code": "0", "interrupted": False}),
        (Kind.END, {"exit_code": 1e400, "interrupted": False}),
        (Kind.END, {}),
        (Kind.END, {"exit_code": -1, "interrupted": False}),
        (Kind.END, {"exit_code": 10**30, "interrupted": False}),
        (Kind.END, '{"exit_code":0,"interrupted":false,"x":' + "[" * 100_000),
        (Kind.DISPLAY, {f"x/{number}": "" for number in range(1000)}),
        (Kind.END, []),
        (Kind.ERROR, {"name": 1, "value": "", "traceback": ""}),
        (Kind.DISPLAY, {"text/plain": 5}),
        (Kind.DISPLAY, "not json"),
        (Kind.DISPLAY, "[" * 100_000),
    ],
)
async def test_malformed_bodies_are_refused(kind: Kind, body: object) -> None:
    with pytest.raises(ProtocolBroken):
        say(execution(), kind, body)


async def test_more_than_the_budget_is_refused() -> None:
    running = execution(budget=10)
    say(running, Kind.STDOUT, "12345")
    with pytest.raises(ProtocolBroken, match="more output"):
        say(running, Kind.STDOUT, "123456")


async def test_a_flood_of_small_messages_is_refused() -> None:
    running = execution()

    def flood() -> None:
        for _ in range(20_000):
            say(running, Kind.STDOUT, "")

    with pytest.raises(ProtocolBroken, match="more messages"):
        flood()


@given(kind=st.sampled_from(Kind), call=st.binary(min_size=16, max_size=16), body=st.binary(max_size=200))
def test_whatever_comes_is_taken_or_refused(kind: Kind, call: bytes, body: bytes) -> None:
    async def feed() -> None:
        running = execution()
        for mine in (call, running.call):
            try:
                running.accept(Message(kind, mine, body))
            except ProtocolBroken:
                continue
        assert not running.ended

    asyncio.run(feed())


async def test_readers_follow_from_any_point_to_the_end() -> None:
    running = execution()
    readers = [asyncio.create_task(_read(running, after)) for after in (-1, 0)]
    await asyncio.sleep(0)
    say(running, Kind.STDOUT, "a")
    await asyncio.sleep(0)
    say(running, Kind.STDOUT, "b")
    end = End(status="ok", exit_code=0, duration_ms=1, state_kept=True)
    running.append(end)
    assert await asyncio.gather(*readers) == [[Stdout("a"), Stdout("b"), end], [Stdout("b"), end]]


async def _read(running: Execution, after: int) -> list[object]:
    return [event async for event in running.events(after)]
