"""What an execution takes from a sandbox and what it refuses; imports `fumehood.sandboxd.executions`."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol.sandbox import Display, End, Raised, Result, Stderr, Stdout
from fumehood.sandboxd.executions import Execution, ProtocolBroken
from fumehood.sandboxd.inside import batches, bounds
from fumehood.sandboxd.inside.wire import CALL_ID_BYTES, MAX_BODY, Kind, Message


def execution(output_bytes: int = 1 << 20, display_bytes: int = 1 << 20) -> Execution:
    made = Execution("1", 1.0, output_bytes=output_bytes, display_bytes=display_bytes)
    made.begin()
    return made


def say(running: Execution, kind: Kind, body: object) -> None:
    raw = body.encode() if isinstance(body, str) else body
    raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
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


async def test_a_batch_becomes_an_event_for_each_piece() -> None:
    running = execution()
    say(running, Kind.OUTPUT, b"\1\0\0\0\3out\2\0\0\0\2\xc3\xa9\1\0\0\0\1x")
    assert running.log == [Stdout("out"), Stderr("é"), Stdout("x")]


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


@pytest.mark.parametrize("kind", [Kind.JAILED, Kind.CONFIGURED, Kind.FAILED, Kind.EXECUTE])
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
        (Kind.OUTPUT, b""),
        (Kind.OUTPUT, [[1, "a"], [2, "b"]]),
        (Kind.OUTPUT, b"\1\0\0\0\1a"),
        (Kind.OUTPUT, b"\1\0\0\0\1a\2\0\0\0\0"),
        (Kind.OUTPUT, b"\1\0\0\0\1a\0\0\0\0\1b"),
        (Kind.OUTPUT, b"\1\0\0\0\1a\3\0\0\0\1b"),
        (Kind.OUTPUT, b"\1\0\0\0\1a\2\0\0\0\2b"),
        (Kind.OUTPUT, b"\1\0\0\0\1a\2\0\0\0\1b\1"),
        (Kind.OUTPUT, b"\1\0\0\0\1a\2\xff\xff\xff\xffb"),
        (Kind.OUTPUT, b"\1\0\0\0\1a\2\0\0\0\1\xc3"),
        (Kind.OUTPUT, b"\1\0\0\0\1a\2\0\1\0\0" + b"x" * MAX_BODY),
    ],
)
async def test_malformed_bodies_are_refused(kind: Kind, body: object) -> None:
    with pytest.raises(ProtocolBroken):
        say(execution(), kind, body)


async def test_more_than_the_budget_is_refused() -> None:
    running = execution()
    most = bounds.body_bytes(1 << 20, 1 << 20)
    say(running, Kind.STDOUT, "x" * most)
    with pytest.raises(ProtocolBroken, match="more output"):
        say(running, Kind.STDOUT, "x")


async def test_a_flood_of_small_messages_is_refused() -> None:
    running = execution()

    def flood() -> None:
        for _ in range(20_000):
            say(running, Kind.STDOUT, "")

    with pytest.raises(ProtocolBroken, match="more messages"):
        flood()


async def test_a_flood_of_pieces_in_batches_is_refused() -> None:
    running = execution()
    batch = b"\1\0\0\0\1o\2\0\0\0\1e" * 5000

    def flood() -> None:
        while True:
            say(running, Kind.OUTPUT, batch)

    with pytest.raises(ProtocolBroken, match="more pieces"):
        flood()
    assert len(running.log) <= bounds.batched_events(1 << 20)


@pytest.mark.parametrize("per_flush", [2, 3, 4096])
@pytest.mark.parametrize("size", [1, 2, 40])
@pytest.mark.parametrize("output_bytes", [0, 1000, 1 << 20])
async def test_the_bounds_leave_room_for_whatever_the_runner_sends(
    output_bytes: int, size: int, per_flush: int
) -> None:
    """The worst that its accounts allow: a switch at every piece, and flushes as small as a batch can be."""
    running = execution(output_bytes, display_bytes=0)
    room, pieces = output_bytes, list[tuple[Kind, bytes]]()
    while (room := room - size - bounds.SWITCH_COST) >= 0:
        pieces.append((Kind.STDERR if len(pieces) % 2 else Kind.STDOUT, b"x" * size))
    # Small flushes are paced: one for each of the second's hundredths, at most.
    running._began -= len(pieces) / per_flush * bounds.QUIET_SECONDS  # pyright: ignore[reportPrivateUsage]
    for _ in range(bounds.FLUSHES):
        say(running, Kind.STDOUT, "")
    for start in range(0, len(pieces), per_flush):
        for message in batches.messages(running.call, pieces[start : start + per_flush]):
            running.accept(message)
    value, text = "😀" * bounds.VALUE_CHARS, "😀" * bounds.TRACEBACK_CHARS
    say(running, Kind.ERROR, {"name": "N" * bounds.NAME_CHARS, "value": value, "traceback": text})
    say(running, Kind.END, {"exit_code": 1, "interrupted": False})
    assert sum(len(event.text) for event in running.log[:-1] if isinstance(event, Stdout | Stderr)) == (
        len(pieces) * size
    )


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
