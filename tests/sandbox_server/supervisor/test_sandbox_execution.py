"""Which messages of a sandbox an execution accepts."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol.sandbox.sandbox_messages import (
    DisplayData,
    ExceptionRaised,
    ExecuteRequest,
    ExecutionEnd,
    ExpressionResult,
    Stderr,
    Stdout,
)
from fumehood.sandbox_server.inside import output_packets
from fumehood.sandbox_server.inside.framing import CALL_ID_BYTES, MAX_BODY, ChannelMessage, MessageKind
from fumehood.sandbox_server.inside.runner import output_limits
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.in_process_sandbox import iter_events
from fumehood.sandbox_server.supervisor.sandbox_execution import ProtocolViolation, SandboxExecution


def new_execution(output_bytes: int = 1 << 20, display_bytes: int = 1 << 20) -> SandboxExecution:
    limits = SandboxServerSettings(output_bytes=output_bytes, display_bytes=display_bytes)
    made = SandboxExecution(ExecuteRequest(code="1", timeout_seconds=1.0), limits)
    made.start_clock()
    return made


def send(running: SandboxExecution, kind: MessageKind, body: object) -> None:
    raw = body.encode() if isinstance(body, str) else body
    raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    running.accept(ChannelMessage(kind, running.call_id, raw))


async def test_messages_become_events() -> None:
    running = new_execution()
    send(running, MessageKind.STDOUT, "out")
    send(running, MessageKind.STDERR, "err")
    send(running, MessageKind.DISPLAY, {"text/plain": "d"})
    send(running, MessageKind.RESULT, {"text/plain": "r"})
    send(running, MessageKind.ERROR, {"name": "N", "value": "v", "traceback": "t"})
    send(running, MessageKind.END, {"exit_code": 1, "interrupted": False})
    assert running.event_log == [
        Stdout("out"),
        Stderr("err"),
        DisplayData({"text/plain": "d"}),
        ExpressionResult({"text/plain": "r"}),
        ExceptionRaised("N", "v", "t"),
    ]
    assert running.reported_end.result().exit_code == 1


async def test_a_batch_becomes_an_event_for_each_piece() -> None:
    running = new_execution()
    send(running, MessageKind.OUTPUT, b"\1\0\0\0\3out\2\0\0\0\2\xc3\xa9\1\0\0\0\1x")
    assert running.event_log == [Stdout("out"), Stderr("é"), Stdout("x")]


async def test_calls_cannot_be_guessed() -> None:
    calls = {new_execution().call_id for _ in range(50)}
    assert len(calls) == 50
    assert all(len(call) == CALL_ID_BYTES for call in calls)


async def test_another_call_and_a_late_message_are_refused() -> None:
    running = new_execution()
    with pytest.raises(ProtocolViolation, match="not running"):
        running.accept(ChannelMessage(MessageKind.STDOUT, b"x" * CALL_ID_BYTES, b""))
    send(running, MessageKind.END, {"exit_code": 0, "interrupted": False})
    with pytest.raises(ProtocolViolation, match="after the end"):
        send(running, MessageKind.STDOUT, "late")


@pytest.mark.parametrize(
    "kind", [MessageKind.JAILED, MessageKind.CONFIGURED, MessageKind.FAILED, MessageKind.EXECUTE]
)
async def test_kinds_that_have_no_place_in_a_call_are_refused(kind: MessageKind) -> None:
    with pytest.raises(ProtocolViolation, match=kind.name):
        send(new_execution(), kind, {})


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MessageKind.END, {"exit_code": "0", "interrupted": False}),
        (MessageKind.END, {"exit_code": 1e400, "interrupted": False}),
        (MessageKind.END, {}),
        (MessageKind.END, {"exit_code": -1, "interrupted": False}),
        (MessageKind.END, {"exit_code": 10**30, "interrupted": False}),
        (MessageKind.END, '{"exit_code":0,"interrupted":false,"x":' + "[" * 100_000),
        (MessageKind.DISPLAY, {f"x/{number}": "" for number in range(1000)}),
        (MessageKind.END, []),
        (MessageKind.ERROR, {"name": 1, "value": "", "traceback": ""}),
        (MessageKind.DISPLAY, {"text/plain": 5}),
        (MessageKind.DISPLAY, "not json"),
        (MessageKind.DISPLAY, "[" * 100_000),
        (MessageKind.OUTPUT, b""),
        (MessageKind.OUTPUT, [[1, "a"], [2, "b"]]),
        (MessageKind.OUTPUT, b"\1\0\0\0\1a"),
        (MessageKind.OUTPUT, b"\1\0\0\0\1a\2\0\0\0\0"),
        (MessageKind.OUTPUT, b"\1\0\0\0\1a\0\0\0\0\1b"),
        (MessageKind.OUTPUT, b"\1\0\0\0\1a\3\0\0\0\1b"),
        (MessageKind.OUTPUT, b"\1\0\0\0\1a\2\0\0\0\2b"),
        (MessageKind.OUTPUT, b"\1\0\0\0\1a\2\0\0\0\1b\1"),
        (MessageKind.OUTPUT, b"\1\0\0\0\1a\2\xff\xff\xff\xffb"),
        (MessageKind.OUTPUT, b"\1\0\0\0\1a\2\0\0\0\1\xc3"),
        (MessageKind.OUTPUT, b"\1\0\0\0\1a\2\0\1\0\0" + b"x" * MAX_BODY),
    ],
)
async def test_malformed_bodies_are_refused(kind: MessageKind, body: object) -> None:
    with pytest.raises(ProtocolViolation):
        send(new_execution(), kind, body)


async def test_more_than_the_budget_is_refused() -> None:
    running = new_execution()
    most = output_limits.max_body_bytes(1 << 20, 1 << 20)
    send(running, MessageKind.STDOUT, "x" * most)
    with pytest.raises(ProtocolViolation, match="more output"):
        send(running, MessageKind.STDOUT, "x")


async def test_a_flood_of_small_messages_is_refused() -> None:
    running = new_execution()

    def flood() -> None:
        for _ in range(20_000):
            send(running, MessageKind.STDOUT, "")

    with pytest.raises(ProtocolViolation, match="more messages"):
        flood()


async def test_a_flood_of_pieces_in_batches_is_refused() -> None:
    running = new_execution()
    batch = b"\1\0\0\0\1o\2\0\0\0\1e" * 5000

    def flood() -> None:
        while True:
            send(running, MessageKind.OUTPUT, batch)

    with pytest.raises(ProtocolViolation, match="more output events"):
        flood()
    assert len(running.event_log) <= output_limits.max_batched_events(1 << 20)


@pytest.mark.parametrize("per_flush", [2, 3, 4096])
@pytest.mark.parametrize("size", [1, 2, 40])
@pytest.mark.parametrize("output_bytes", [0, 1000, 1 << 20])
async def test_the_bounds_leave_room_for_whatever_the_runner_sends(
    output_bytes: int, size: int, per_flush: int
) -> None:
    """The worst that its accounts allow: a switch at every piece, and flushes as small as a batch can be."""
    running = new_execution(output_bytes, display_bytes=0)
    room, pieces = output_bytes, list[tuple[MessageKind, bytes]]()
    while (room := room - size - output_limits.SWITCH_COST) >= 0:
        pieces.append((MessageKind.STDERR if len(pieces) % 2 else MessageKind.STDOUT, b"x" * size))
    # Small flushes are paced: one for each of the second's hundredths, at most.
    running._started_at -= len(pieces) / per_flush * output_limits.QUIET_SECONDS  # pyright: ignore[reportPrivateUsage]
    for _ in range(output_limits.MAX_FLUSHES):
        send(running, MessageKind.STDOUT, "")
    for start in range(0, len(pieces), per_flush):
        for message in output_packets.pack_output(running.call_id, pieces[start : start + per_flush]):
            running.accept(message)
    value, text = "😀" * output_limits.MAX_VALUE_CHARS, "😀" * output_limits.MAX_TRACEBACK_CHARS
    send(
        running,
        MessageKind.ERROR,
        {"name": "N" * output_limits.MAX_NAME_CHARS, "value": value, "traceback": text},
    )
    send(running, MessageKind.END, {"exit_code": 1, "interrupted": False})
    assert sum(len(event.text) for event in running.event_log[:-1] if isinstance(event, Stdout | Stderr)) == (
        len(pieces) * size
    )


@given(
    kind=st.sampled_from(MessageKind), call=st.binary(min_size=16, max_size=16), body=st.binary(max_size=200)
)
def test_whatever_comes_is_taken_or_refused(kind: MessageKind, call: bytes, body: bytes) -> None:
    async def feed() -> None:
        running = new_execution()
        for mine in (call, running.call_id):
            try:
                running.accept(ChannelMessage(kind, mine, body))
            except ProtocolViolation:
                continue
        assert not running.has_ended

    asyncio.run(feed())


async def test_readers_follow_from_any_point_to_the_end() -> None:
    running = new_execution()
    readers = [asyncio.create_task(_read(running, after)) for after in (-1, 0)]
    await asyncio.sleep(0)
    send(running, MessageKind.STDOUT, "a")
    await asyncio.sleep(0)
    send(running, MessageKind.STDOUT, "b")
    end = ExecutionEnd(status="ok", exit_code=0, duration_ms=1, state_kept=True)
    running.append(end)
    assert await asyncio.gather(*readers) == [[Stdout("a"), Stdout("b"), end], [Stdout("b"), end]]


async def _read(running: SandboxExecution, after: int) -> list[object]:
    return [event async for event in iter_events(running, after)]
