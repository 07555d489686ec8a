"""Both servers: stalled clients and the connection limit."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from fumehood.http_server.asgi_exchange import Application, AsgiExchange, Headers, Receive, Scope, Send
from fumehood.http_server.listening_sockets import ListenAddress, listen
from fumehood.http_server.uvicorn_websocket import make_websocket_protocol
from fumehood.http_server.web_server import FileDescriptorGuard, WebServer, render_error_response

PATIENCE = 30
REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
PLAIN: Headers = [(b"content-type", b"text/plain")]


class EchoApp:
    """Answers at once with the names of the headers it sees once the body has been read, or without reading it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = AsgiExchange(scope, receive, send)
        if scope["path"] == "/read":
            async for _ in exchange.iter_chunks(1 << 20):
                pass
        names = b",".join(name for name, _ in scope["headers"])
        await exchange.start_response(200, [*PLAIN, (b"content-length", b"%d" % len(names))])
        await exchange.send(names, more=False)


def render_status(status: int, _: str) -> bytes:
    return render_error_response([], b"%d" % status)


@asynccontextmanager
async def run_server(
    app: Application, connections: int | None = None, *, websockets: bool = False
) -> AsyncGenerator[int]:
    """A server until the block is left, and its port."""
    listener = listen(ListenAddress(port=0))
    server = WebServer(
        app,
        listener.sock,
        render_status,
        max_connections=connections,
        websocket_protocol=make_websocket_protocol(render_status) if websockets else None,
    )
    ready = asyncio.Event()
    task = asyncio.ensure_future(server.serve(ready.set))
    await ready.wait()
    try:
        yield listener.sock.getsockname()[1]
    finally:
        server.stop()
        server.stop()
        await task
        listener.close()


async def test_who_comes_when_all_places_are_taken_is_told_so() -> None:
    async with run_server(EchoApp(), connections=1) as port, asyncio.timeout(PATIENCE):
        first, holder = await asyncio.open_connection("127.0.0.1", port)
        second, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await second.readline()) == b"HTTP/1.1 429 Too Many Requests\r\n"
        assert (await second.read()).endswith(
            b"retry-after: 1\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: 3\r\n\r\n429"
        )
        writer.close()
        assert not first.at_eof()
        holder.close()


@pytest.mark.parametrize("path", ["/", "/read"])
async def test_what_follows_a_body_is_no_header(path: str) -> None:
    """Whoever stands in front of the server has looked at the headers, and not at these."""
    request = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    async with run_server(EchoApp()) as port, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # the connection can go on
            writer.write(request.encode() + b"1\r\nx\r\n0\r\nauthorization: Bearer x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            names = b"host,transfer-encoding"
            assert await reader.readexactly(len(names)) == names
        writer.close()


@pytest.mark.parametrize("path", ["/", "/read"])
@pytest.mark.parametrize("trailers", [b"a:b\r\n" * 2000, b"a" * 10000], ids=["many", "one"])
async def test_what_follows_a_body_is_bounded(path: str, trailers: bytes) -> None:
    """Also after the answer, and for whoever may see nothing but it: every line of these was kept."""
    request = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    async with run_server(EchoApp()) as port, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request.encode() + b"1\r\nx\r\n0\r\nfirst: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and sent < 64 << 20:
                writer.write(trailers)
                await writer.drain()
                await asyncio.sleep(0)
                sent += len(trailers)
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 " if path == "/read" else b"HTTP/1.1 200 ")
        assert sent < 64 << 20
        writer.close()


async def test_a_machine_that_confirms_nothing_is_noticed_by_the_kernel() -> None:
    listener = listen(ListenAddress(port=0))
    try:
        _, writer = await asyncio.open_connection(*listener.sock.getsockname())
        connection, _ = listener.sock.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000
        writer.close()
    finally:
        listener.close()


# --- file descriptors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "last"), [(-1, 1 << 20), (64, 55), (1024, 959), (1 << 20, (1 << 20) - 65), (44, 35)]
)
def test_some_descriptors_are_reserved(limit: int, last: int) -> None:
    descriptors = FileDescriptorGuard(lambda: limit)
    assert not descriptors.rejects(last)
    assert descriptors.rejects(last + 1) == (limit > 0)


def test_rejections_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    descriptors = FileDescriptorGuard(lambda: 64, lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
            assert descriptors.rejects(60)
    assert [record.args for record in caplog.records] == [(64, 1), (64, 3)]
