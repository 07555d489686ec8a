"""Incomplete WebSocket messages count towards the memory limit."""

import json
from collections.abc import Callable

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.http_server import uvicorn_websocket
from fumehood.interfaces import Caller
from fumehood.protocol.api_keys import ApiKeyLimits
from fumehood.protocol.openai.api_errors import ApiError
from tests.support.scripted_gateway import run_gateway
from tests.support.waiting import wait_until
from tests.support.websocket_client import WebSocketClient, connect_websocket, error_of

PATIENCE = 60
TOTAL = 1_000_000
BIG = "x" * 700_000
MOST = 600_000


def message(**request: object) -> bytes:
    return json.dumps({"type": "response.create", "model": "small", "input": BIG, **request}).encode()


def frame(payload: bytes, opcode: Opcode = Opcode.TEXT, *, fin: bool = True) -> bytes:
    return Frame(opcode, payload, fin).serialize(mask=True)


def held(limits: RequestLimiter, caller: Caller) -> int:
    """How much of all there is."""
    size = 0
    with limits.memory_budget(caller) as budget:
        for step in (1 << bit for bit in reversed(range(20))):
            try:
                budget.reserve(step)
                size += step
            except ApiError:
                continue
    return TOTAL - size


async def until(limits: RequestLimiter, true: Callable[[int], bool]) -> None:
    await wait_until(lambda: true(held(limits, Caller())), PATIENCE)


def write(socket: WebSocketClient, content: bytes) -> None:
    socket.raw.transport.write(content)


async def test_what_has_come_of_a_message_is_held_and_what_finds_no_room_is_refused() -> None:
    limits = RequestLimiter(max_memory_bytes=TOTAL)
    whole = frame(message())
    async with run_gateway(limits=limits) as gateway, connect_websocket(gateway.port) as first:
        write(first, whole[:MOST])
        await until(limits, lambda size: size > MOST - 100)
        async with connect_websocket(gateway.port) as second:
            write(second, whole[:MOST])
            rejection = await second.read_event()
            # All that came of it is gone already, and what is still to come is not kept either.
            await until(limits, lambda size: size < MOST + 100)
            over_http = await gateway.create_response(input=BIG)
            write(second, whole[MOST:])
            small = await second.create_and_read(input="hi")
        write(first, whole[MOST:])
        assert (await first.read_response())[-1]["type"] == "response.completed"
        await until(limits, lambda size: size == 0)
        write(first, whole[:MOST])
        await until(limits, lambda size: size > MOST - 100)
        first.raw.transport.abort()
        await until(limits, lambda size: size == 0)
    assert error_of(rejection) == (503, "server_error", None)
    assert rejection["headers"] == {"retry-after": "1"}
    assert over_http.status == 503
    assert small["status"] == "completed"
    assert [len(str(request.input)) for request in gateway.runs.requests] == [2, len(BIG)]


async def test_pieces_of_a_message_are_held_together_however_small() -> None:
    limits = RequestLimiter(max_memory_bytes=TOTAL)
    content = message()
    fragments = [frame(content[:MOST], fin=False), *[frame(b"", Opcode.CONT, fin=False)] * 1000]
    rest = [frame(content[at : at + 1000], Opcode.CONT, fin=False) for at in range(MOST, len(content), 1000)]
    ending = frame(b"", Opcode.CONT)
    async with run_gateway(limits=limits) as gateway, connect_websocket(gateway.port) as first:
        write(first, b"".join(fragments))
        await until(limits, lambda size: size > MOST - 100)
        async with connect_websocket(gateway.port) as second:
            write(second, b"".join(fragments))
            assert error_of(await second.read_event()) == (503, "server_error", None)
            write(second, b"".join(rest) + frame(b"still there?", Opcode.PING) + ending)
            assert (await second.create_and_read())["status"] == "completed"
        assert held(limits, Caller()) > MOST - 100
        write(first, b"".join(rest) + ending)
        assert (await first.read_response())[-1]["type"] == "response.completed"
        await until(limits, lambda size: size == 0)
    assert gateway.runs.requests[-1].input == BIG


class SingleKeyAuthenticator:
    """Callers, who all have the same."""

    def authenticate(self, authorization: bytes | None, host: bytes) -> Caller:
        return Caller(tenant="one", key_id="key_1")

    async def refresh_if_stale(self) -> bool:
        return False


async def test_one_key_has_half_of_all() -> None:
    limits = RequestLimiter(ApiKeyLimits(body_bytes=TOTAL // 2), max_memory_bytes=TOTAL)
    part = frame(message(input="x" * 400_000))[:300_000]
    async with (
        run_gateway(limits=limits, authenticator=SingleKeyAuthenticator()) as gateway,
        connect_websocket(gateway.port) as first,
        connect_websocket(gateway.port) as second,
    ):
        write(first, part)
        await until(limits, lambda size: size > len(part) - 100)
        write(second, part)
        assert error_of(await second.read_event()) == (429, "rate_limit_exceeded", None)
        for socket in (first, second):  # neither could say goodbye within a message
            socket.raw.transport.abort()


async def test_a_message_that_was_refused_must_end_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_websocket, "_MESSAGE_TIMEOUT", 0.2)
    limits = RequestLimiter(max_memory_bytes=1000)
    async with run_gateway(limits=limits) as gateway, connect_websocket(gateway.port) as socket:
        write(socket, frame(message())[:MOST])
        assert error_of(await socket.read_event()) == (413, "request_too_large", None)
        with pytest.raises(ConnectionClosed):
            await socket.read_event()
