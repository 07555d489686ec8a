"""Fair scheduling of unparsed data."""

import asyncio
import base64
from contextlib import suppress
from typing import Any, override

import pytest

from fumehood.http_server import fair_parse_scheduler
from fumehood.http_server.asgi_exchange import AsgiExchange, Receive, Scope, Send
from fumehood.http_server.fair_parse_scheduler import FairParseScheduler, SlicedReadProtocol
from tests.http_server.test_web_server import run_server

ONE_READ = 256 << 10  # as much as uvloop or asyncio reads at once
PATIENCE = 30


class FailingConnection:
    def parse_slice(self) -> bool:
        raise MemoryError


class WorkingConnection:
    def __init__(self) -> None:
        self.parsed = 0

    def parse_slice(self) -> bool:
        self.parsed += 1
        return self.parsed % 3 != 0


async def test_a_connection_that_raises_keeps_no_other_waiting() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    share, before, after = FairParseScheduler(), WorkingConnection(), WorkingConnection()
    share.schedule(FailingConnection())
    share.schedule(before)
    await asyncio.sleep(0.05)
    share.schedule(after)
    await asyncio.sleep(0.05)
    assert (before.parsed, after.parsed) == (3, 3)
    assert [type(error) for error in told] == [MemoryError]


class FakeTransport(asyncio.Transport):
    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self.aborted = False
        self._protocol = protocol

    @override
    def is_closing(self) -> bool:
        return self.aborted

    @override
    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    @override
    def pause_reading(self) -> None:
        pass

    @override
    def abort(self) -> None:
        self.aborted = True


class FailingProtocol(asyncio.Protocol):
    @override
    def data_received(self, data: bytes) -> None:
        raise MemoryError


class SlicedFailingProtocol(SlicedReadProtocol, FailingProtocol):
    def __init__(self) -> None:
        self.scheduler = FairParseScheduler()
        self.transport: FakeTransport = FakeTransport(self)  # pyright: ignore[reportIncompatibleVariableOverride]


async def test_a_connection_whose_bytes_cannot_be_parsed_is_closed() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
    protocol = SlicedFailingProtocol()
    protocol.data_received(bytes(100_000))
    assert protocol.has_unparsed
    await asyncio.sleep(0.05)
    assert protocol.transport.aborted
    assert not protocol.has_unparsed


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] == "websocket.receive":
            pass
        return
    exchange = AsgiExchange(scope, receive, send)
    await exchange.start_response(200, [(b"content-length", b"2")])
    await exchange.send(b"ok", more=False)


def frame(kind: int, payload: bytes = b"") -> bytes:
    return bytes([0x80 | kind, 0x80 | len(payload), 0, 0, 0, 0]) + payload


GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000\r\n\r\n" + bytes(60_000)
UPGRADE = (
    b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: " + base64.b64encode(bytes(16)) + b"\r\n\r\n"
)


@pytest.mark.parametrize(
    ("first", "flood"),
    [(b"", (GET * 2 + POST) * 300), (UPGRADE, (frame(1, b"x") + frame(9, bytes(100)) * 40) * 600)],
    ids=["pipelined requests", "messages among pings"],
)
async def test_what_waits_to_be_parsed_is_bounded(
    first: bytes, flood: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_parse_scheduler, "_PARSE_SECONDS_PER_ROUND", 0.0)  # one slice in each round
    most = 0
    receive = SlicedReadProtocol.data_received

    def watch(protocol: SlicedReadProtocol, data: bytes) -> None:
        nonlocal most
        receive(protocol, data)
        waiting: Any = protocol.__dict__.get("_unparsed") or ()
        most = max(most, sum(map(len, waiting)))

    monkeypatch.setattr(SlicedReadProtocol, "data_received", watch)
    async with run_server(answer, websockets=True) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if first:
            writer.write(first)
            await reader.readuntil(b"\r\n\r\n")

        async def read_all() -> None:
            while await reader.read(1 << 16):
                pass

        reading = asyncio.ensure_future(read_all())
        async with asyncio.timeout(PATIENCE):
            writer.write(flood)
            await writer.drain()
        writer.transport.abort()
        with suppress(OSError):
            await reading
    assert 0 < most <= ONE_READ
