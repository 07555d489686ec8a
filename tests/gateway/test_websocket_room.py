"""Messages that have begun and are not whole: what they hold is counted as bodies are; imports `fumehood.gateway`."""

import asyncio
import json
from collections.abc import Callable

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from fumehood.gateway.limits import Limits
from fumehood.interfaces import Caller
from fumehood.protocol.errors import ApiError
from fumehood.protocol.keys import KeyLimits
from fumehood.serving import websocket
from tests.support.gateway import serving_gateway
from tests.support.websocket import Socket, connected, refused

PATIENCE = 60
TOTAL = 1_000_000
BIG = "x" * 700_000
MOST = 600_000


def message(**request: object) -> bytes:
    return json.dumps({"type": "response.create", "model": "small", "input": BIG, **request}).encode()


def frame(payload: bytes, opcode: Opcode = Opcode.TEXT, *, fin: bool = True) -> bytes:
    return Frame(opcode, payload, fin).serialize(mask=True)


def held(limits: Limits, caller: Caller) -> int:
    """How much of all there is."""
    size = 0
    with limits.room(caller) as room:
        for step in (1 << bit for bit in reversed(range(20))):
            try:
                room.take(step)
                size += step
            except ApiError:
                continue
    return TOTAL - size


async def until(limits: Limits, true: Callable[[int], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true(held(limits, Caller())):
            await asyncio.sleep(0.001)


def write(socket: Socket, content: bytes) -> None:
    socket.raw.transport.write(content)


async def test_what_has_come_of_a_message_is_held_and_what_finds_no_room_is_refused() -> None:
    limits = Limits(body_bytes_total=TOTAL)
    whole = frame(message())
    async with serving_gateway(limits=limits) as served, connected(served.port) as first:
        write(first, whole[:MOST])
        await until(limits, lambda size: size > MOST - 100)
        async with connected(served.port) as second:
            write(second, whole[:MOST])
            refusal = await second.next()
            # All that came of it is gone already, and what is still to come is not kept either.
            await until(limits, lambda size: size < MOST + 100)
            over_http = await served.create(input=BIG)
            write(second, whole[MOST:])
            small = await second.turn(input="hi")
        write(first, whole[MOST:])
        assert (await first.answer())[-1]["type"] == "response.completed"
        await until(limits, lambda size: size == 0)
        write(first, whole[:MOST])
        await until(limits, lambda size: size > MOST - 100)
        first.raw.transport.abort()
        await until(limits, lambda size: size == 0)
    assert refused(refusal) == (503, "server_error", None)
    assert refusal["headers"] == {"retry-after": "1"}
    assert over_http.status == 503
    assert small["status"] == "completed"
    assert [len(str(request.input)) for request in served.runs.requests] == [2, len(BIG)]


async def test_pieces_of_a_message_are_held_together_however_small() -> None:
    limits = Limits(body_bytes_total=TOTAL)
    content = message()
    fragments = [frame(content[:MOST], fin=False), *[frame(b"", Opcode.CONT, fin=False)] * 1000]
    rest = [frame(content[at : at + 1000], Opcode.CONT, fin=False) for at in range(MOST, len(content), 1000)]
    ending = frame(b"", Opcode.CONT)
    async with serving_gateway(limits=limits) as served, connected(served.port) as first:
        write(first, b"".join(fragments))
        await until(limits, lambda size: size > MOST - 100)
        async with connected(served.port) as second:
            write(second, b"".join(fragments))
            assert refused(await second.next()) == (503, "server_error", None)
            write(second, b"".join(rest) + frame(b"still there?", Opcode.PING) + ending)
            assert (await second.turn())["status"] == "completed"
        assert held(limits, Caller()) > MOST - 100
        write(first, b"".join(rest) + ending)
        assert (await first.answer())[-1]["type"] == "response.completed"
        await until(limits, lambda size: size == 0)
    assert served.runs.requests[-1].input == BIG


class OneKey:
    """Callers, who all have the same."""

    def identify(self, authorization: bytes | None, host: bytes) -> Caller:
        return Caller(tenant="one", key="key_1")

    async def look_again(self) -> bool:
        return False


async def test_one_key_has_half_of_all() -> None:
    limits = Limits(KeyLimits(body_bytes=TOTAL // 2), body_bytes_total=TOTAL)
    part = frame(message(input="x" * 400_000))[:300_000]
    async with (
        serving_gateway(limits=limits, callers=OneKey()) as served,
        connected(served.port) as first,
        connected(served.port) as second,
    ):
        write(first, part)
        await until(limits, lambda size: size > len(part) - 100)
        write(second, part)
        assert refused(await second.next()) == (429, "rate_limit_exceeded", None)
        for socket in (first, second):  # neither could say goodbye within a message
            socket.raw.transport.abort()


async def test_a_message_that_was_refused_must_end_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_MESSAGE_SECONDS", 0.2)
    limits = Limits(body_bytes_total=1000)
    async with serving_gateway(limits=limits) as served, connected(served.port) as socket:
        write(socket, frame(message())[:MOST])
        assert refused(await socket.next()) == (413, "request_too_large", None)
        with pytest.raises(ConnectionClosed):
            await socket.next()
