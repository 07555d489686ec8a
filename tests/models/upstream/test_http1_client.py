"""The HTTP client on real sockets, against correct and faulty servers."""

import asyncio
import itertools
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.models.upstream.http1_client import (
    Http1Connection,
    MalformedHttpResponse,
    PooledHttpClient,
    UpstreamAddress,
    UpstreamConnectError,
    UpstreamDisconnected,
    UpstreamReadTimeout,
    UpstreamTimeouts,
    UpstreamTransportError,
    encode_headers,
)
from tests.support.websites import WebsiteAuthority

TIMEOUTS = UpstreamTimeouts(connect=10.0, read=10.0)
OK = b"HTTP/1.1 200 OK\r\n"


type Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


@dataclass(slots=True)
class FakeServer:
    """A server of one behaviour: what it does with a connection from its first request on."""

    behaviour: Behaviour
    address: UpstreamAddress = field(default_factory=lambda: UpstreamAddress.parse(""))
    connections: int = 0
    writers: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        try:
            await self.behaviour(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()


@asynccontextmanager
async def open_server(behaviour: Behaviour, tls: ssl.SSLContext | None = None) -> AsyncGenerator[FakeServer]:
    server = FakeServer(behaviour)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    server.address = UpstreamAddress.parse(f"http{'s' if tls else ''}://localhost:{port}/v1/")
    async with listener:
        try:
            yield server
        finally:
            for writer in server.writers:
                writer.transport.abort()


@asynccontextmanager
async def open_client(max_connections: int = 1024) -> AsyncGenerator[PooledHttpClient]:
    client = PooledHttpClient(max_connections)
    try:
        yield client
    finally:
        await client.close()


def respond_with(*chunks: bytes, repeat: bool = False, stay: bool = False) -> Behaviour:
    """After each request the same bytes, in so many writes; then the connection ends, or the next request comes."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(0)
            if stay:
                await reader.read()
            if not repeat:
                return

    return behave


async def get(
    client: PooledHttpClient, server: FakeServer, timeouts: UpstreamTimeouts = TIMEOUTS
) -> tuple[int, bytes]:
    async with client.request(server.address, "/x", encode_headers({"A": "b"}), timeouts) as response:
        return response.status, await response.read_all(1 << 30)


@asynccontextmanager
async def open_response(
    behaviour: Behaviour, timeouts: UpstreamTimeouts = TIMEOUTS
) -> AsyncGenerator[Http1Connection]:
    async with (
        open_server(behaviour) as server,
        open_client() as client,
        client.request(server.address, "", b"", timeouts) as response,
    ):
        yield response


async def request_once(
    *chunks: bytes, stay: bool = False, timeouts: UpstreamTimeouts = TIMEOUTS
) -> tuple[int, bytes]:
    async with open_server(respond_with(*chunks, stay=stay)) as server, open_client() as client:
        return await get(client, server, timeouts)


# --- requests -----------------------------------------------------------------------------------------


async def test_requests() -> None:
    received: list[bytes] = []

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for length in (0, 5, 500_000):
            received.append(await reader.readuntil(b"\r\n\r\n"))
            received.append(await reader.readexactly(length))
            writer.write(OK + b"Content-Length: 0\r\n\r\n")

    async with open_server(behave) as server, open_client() as client:
        for body in (None, [b"he", b"llo"], [b"x" * 200_000, b"", b"y" * 300_000]):
            async with client.request(
                server.address, "/chat", encode_headers({"X-A": "b"}), TIMEOUTS, body
            ) as response:
                assert await response.read_all(1 << 30) == b""
    host = server.address.host_header.encode()
    assert received[:4] == [
        b"GET /v1/chat HTTP/1.1\r\nHost: " + host + b"\r\nX-A: b\r\n\r\n",
        b"",
        b"POST /v1/chat HTTP/1.1\r\nHost: " + host + b"\r\nX-A: b\r\nContent-Length: 5\r\n\r\n",
        b"hello",
    ]
    assert received[5] == b"x" * 200_000 + b"y" * 300_000
    assert server.connections == 1


def test_addresses() -> None:
    assert UpstreamAddress.parse("http://127.0.0.1:8000/v1") == (
        False,
        "127.0.0.1",
        8000,
        "127.0.0.1:8000",
        "/v1",
    )
    assert UpstreamAddress.parse("https://api.example") == (True, "api.example", 443, "api.example", "")
    assert UpstreamAddress.parse("http://[::1]:8000/v1/") == (False, "::1", 8000, "[::1]:8000", "/v1")


# --- responses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head_and_body",
    [
        b"Content-Length: 5\r\n\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nTrailer: z\r\n\r\n",
        b"\r\nhello",
        b"Connection: close\r\nContent-Length: 5\r\n\r\nhello",
    ],
    ids=["length", "chunked", "until the end", "close"],
)
async def test_bodies(head_and_body: bytes) -> None:
    whole = OK + head_and_body
    assert await request_once(whole) == (200, b"hello")
    assert await request_once(*(bytes([byte]) for byte in whole)) == (200, b"hello")
    assert await request_once(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + whole) == (200, b"hello")


IN_CHUNKS = OK + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKED = IN_CHUNKS + b"".join(
    b"%x\r\n%b\r\n" % (len(part), part) for part in (b"data: one\n\n", b"data: two\n\n", b"x" * 300)
)  # fmt: skip


@settings(max_examples=25)
@given(st.lists(st.integers(0, len(CHUNKED) + 5), max_size=6).map(sorted))
async def test_any_split_gives_the_same_body(cuts: list[int]) -> None:
    whole = CHUNKED + b"0\r\n\r\n"
    chunks = [whole[start:end] for start, end in itertools.pairwise([0, *cuts, len(whole)])]
    assert await request_once(*chunks) == (200, b"data: one\n\ndata: two\n\n" + b"x" * 300)


async def test_headers_and_statuses() -> None:
    head = b"HTTP/1.1 429 Too Many\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"
    async with open_response(respond_with(head)) as response:
        assert (response.status, response.get_header(b"retry-after"), response.get_header(b"none")) == (
            429,
            "7",
            "",
        )


# --- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [b"X: y\r\n", b"y"], ids=["trailers", "one trailer"])
@pytest.mark.parametrize("body", [b"2\r\nhi\r\n", b""])
async def test_endless_trailers(body: bytes, chunk: bytes) -> None:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\nX: ")
        while True:
            writer.write(chunk * 10_000)
            await writer.drain()

    async with open_server(behave) as server, open_client() as client, asyncio.timeout(60):
        with pytest.raises(MalformedHttpResponse):
            await get(client, server)


@pytest.mark.parametrize(
    "response_bytes",
    [
        b"220 mail.example ready\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        OK + b"X: " + b"y" * 100_000,
    ],
    ids=["another protocol", "no status", "length", "chunk", "upgrade", "endless head"],
)
async def test_malformed_responses(response_bytes: bytes) -> None:
    with pytest.raises(MalformedHttpResponse):
        await request_once(response_bytes, stay=True)


@pytest.mark.parametrize(
    "response_bytes",
    [b"", b"HTTP/1.1 20", OK + b"Content-Length: 50\r\n\r\nhello", CHUNKED],
    ids=["nothing", "half a line", "length", "chunked"],
)
async def test_truncated_responses(response_bytes: bytes) -> None:
    with pytest.raises(UpstreamDisconnected):
        await request_once(response_bytes)


async def test_data_before_a_disconnect_is_read_first() -> None:
    async with open_response(respond_with(OK + b"Content-Length: 50\r\n\r\nhello")) as response:
        assert await response.read() == b"hello"
        with pytest.raises(UpstreamDisconnected):
            await response.read()


@pytest.mark.parametrize("response_bytes", [b"", OK, CHUNKED], ids=["nothing", "half a head", "half a body"])
async def test_read_timeout(response_bytes: bytes) -> None:
    with pytest.raises(UpstreamReadTimeout):
        await request_once(response_bytes, stay=True, timeouts=UpstreamTimeouts(10.0, 0.05))


async def test_a_slow_reader_does_not_cause_a_read_timeout() -> None:
    go = asyncio.Event()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Content-Length: 10\r\n\r\nhello")
        await go.wait()
        writer.write(b"world")

    async with open_response(behave, UpstreamTimeouts(10.0, 0.2)) as response:
        assert await response.read() == b"hello"
        await asyncio.sleep(0.5)
        asyncio.get_running_loop().call_later(0.05, go.set)
        assert await response.read() == b"world"


async def test_a_slow_reader_pauses_the_server() -> None:
    sent = 0

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Content-Length: 67108864\r\n\r\n")
        for _ in range(1024):
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with open_response(behave) as response:
        before = -1
        while sent != before:  # until the server is stuck
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 32 << 20
        size = 0
        while chunk := await response.read():
            size += len(chunk)
    assert size == 64 << 20


async def test_a_consumer_gets_chunks_without_waking_the_task() -> None:
    go = asyncio.Event()
    received: list[bytes] = []
    woken = 0

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(IN_CHUNKS)
        for number in range(5):
            go.clear()
            writer.write(b"1\r\n%d\r\n" % number)
            await go.wait()
        writer.write(b"0\r\n\r\n")

    def consume(chunk: bytes) -> bool:
        received.append(chunk)
        go.set()
        return chunk != b"2"

    async with open_response(behave) as response:
        over = False
        while not over:
            over = await response.stream_to(consume)
            woken += 1
    assert received == [b"0", b"1", b"2", b"3", b"4"]
    assert woken == 2  # when it returned False, and at the end


async def test_an_exception_of_a_consumer_is_raised() -> None:
    def consume(chunk: bytes) -> bool:
        raise KeyError(chunk)

    async with open_response(respond_with(IN_CHUNKS, b"1\r\na\r\n", stay=True)) as response:
        with pytest.raises(KeyError):
            await response.stream_to(consume)


@pytest.mark.parametrize("error_class", [UpstreamDisconnected, UpstreamReadTimeout])
async def test_a_consumer_sees_disconnects_and_timeouts(error_class: type[UpstreamTransportError]) -> None:
    received: list[bytes] = []

    def consume(chunk: bytes) -> bool:
        received.append(chunk)
        return True

    stay = error_class is UpstreamReadTimeout
    async with open_response(
        respond_with(OK + b"Content-Length: 9\r\n\r\n", b"hello", stay=stay),
        UpstreamTimeouts(10.0, 0.1 if stay else 10.0),
    ) as response:
        with pytest.raises(error_class):
            await response.stream_to(consume)
    assert b"".join(received) == b"hello"


async def test_connect_errors() -> None:
    async with open_server(respond_with(b"")) as server:
        pass
    async with open_client() as client:
        for address, why in [
            (server.address, "Connection refused"),
            (UpstreamAddress.parse("http://nowhere.invalid"), "its host name cannot be resolved"),
        ]:
            with pytest.raises(UpstreamConnectError, match=why):
                async with client.request(address, "", b"", TIMEOUTS):
                    pass


# --- connections --------------------------------------------------------------------------------------

SHORT = OK + b"Content-Length: 2\r\n\r\nok"


async def test_connections_are_reused() -> None:
    async with open_server(respond_with(SHORT, repeat=True)) as server, open_client() as client:
        for _ in range(3):
            assert await get(client, server) == (200, b"ok")
        assert server.connections == 1
        await asyncio.gather(*(get(client, server) for _ in range(5)))
        assert 2 <= server.connections <= 5


@pytest.mark.parametrize(
    "response_bytes",
    [
        OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        SHORT + SHORT,
        SHORT + b"rubbish",
    ],
    ids=["close", "HTTP/1.0", "a response too many", "rubbish after it"],
)
async def test_connections_that_are_not_reused(response_bytes: bytes) -> None:
    async with open_server(respond_with(response_bytes, repeat=True)) as server, open_client() as client:
        for number in (1, 2):
            assert await get(client, server) == (200, b"ok")
            assert server.connections == number


async def test_an_idle_connection_that_the_server_closed() -> None:
    async with open_server(respond_with(SHORT)) as server, open_client() as client:
        for number in (1, 2):
            assert await get(client, server) == (200, b"ok")
            assert server.connections == number
            await asyncio.sleep(0.02)


async def test_an_idle_connection_that_the_server_closes_right_now() -> None:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(SHORT)
        await reader.readuntil(b"\r\n\r\n")  # read, and not answered

    async with open_server(behave) as server, open_client() as client:
        assert await get(client, server) == (200, b"ok")
        assert await get(client, server) == (200, b"ok")
        assert server.connections == 2


async def test_an_idle_connection_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.models.upstream.http1_client._KEEP_ALIVE_SECONDS", 0.0)
    async with open_server(respond_with(SHORT, repeat=True)) as server, open_client() as client:
        await get(client, server)
        await get(client, server)
        assert server.connections == 2


async def test_leaving_closes_the_connection() -> None:
    gone = asyncio.Event()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        await reader.read()
        gone.set()

    async with open_server(behave) as server, open_client() as client:
        async with client.request(server.address, "", b"", TIMEOUTS) as response:
            await response.read()
        await asyncio.wait_for(gone.wait(), 10)


async def test_connection_limit() -> None:
    go = asyncio.Event()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            await go.wait()
            writer.write(SHORT)

    async with (
        open_server(behave) as server,
        open_server(respond_with(SHORT, repeat=True)) as other,
        open_client(max_connections=2) as client,
    ):
        assert await get(client, other) == (200, b"ok")
        busy = [asyncio.ensure_future(get(client, server)) for _ in range(2)]
        while server.connections < 2:  # one of them after what was idle has given way
            await asyncio.sleep(0.001)
        with pytest.raises(UpstreamConnectError, match=r"no connection within 0\.05 s"):
            await get(client, server, UpstreamTimeouts(0.05, 10.0))
        go.set()
        assert await asyncio.gather(*busy) == [(200, b"ok")] * 2
        assert await get(client, server) == (200, b"ok")


async def test_closing_the_client() -> None:
    async with open_server(respond_with(CHUNKED, stay=True)) as server:
        client = PooledHttpClient()
        async with client.request(server.address, "", b"", TIMEOUTS) as response:
            await response.read()
            await client.close()
            with pytest.raises(UpstreamDisconnected):
                await response.read()
        with pytest.raises(UpstreamConnectError, match="closing its connections"):
            await get(client, server)


async def test_cancelling_a_request_releases_its_connection() -> None:
    async with open_server(respond_with(b"", stay=True)) as server, open_client(max_connections=1) as client:
        for _ in range(2):  # the second would find no connection if the first were not given back
            task = asyncio.ensure_future(get(client, server))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert server.connections == 2


# --- TLS ----------------------------------------------------------------------------------------------


async def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = WebsiteAuthority(tmp_path)
    tls = authority.context("localhost")
    async with open_server(respond_with(SHORT, repeat=True), tls) as server:
        async with open_client() as client:
            with pytest.raises(UpstreamConnectError, match="its certificate is not trusted"):
                await get(client, server)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        async with open_client() as client:
            assert await get(client, server) == (200, b"ok")
            assert await get(client, server) == (200, b"ok")

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example\r\n")
        await writer.drain()

    async with open_server(greet) as plain, open_client() as client:
        secure = plain.address._replace(secure=True)
        with pytest.raises(UpstreamConnectError, match="TLS handshake failed"):
            async with client.request(secure, "", b"", TIMEOUTS):
                pass
    assert issubclass(UpstreamConnectError, UpstreamTransportError)


# --- the event loop that servers run on ---------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        test_requests,
        test_headers_and_statuses,
        test_data_before_a_disconnect_is_read_first,
        test_a_slow_reader_does_not_cause_a_read_timeout,
        test_a_slow_reader_pauses_the_server,
        test_a_consumer_gets_chunks_without_waking_the_task,
        test_an_exception_of_a_consumer_is_raised,
        test_connect_errors,
        test_connections_are_reused,
        test_an_idle_connection_that_the_server_closed,
        test_an_idle_connection_that_the_server_closes_right_now,
        test_leaving_closes_the_connection,
        test_connection_limit,
        test_closing_the_client,
        test_cancelling_a_request_releases_its_connection,
    ],
)
def test_the_same_on_uvloop(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    assert uvloop.run(scenario()) is None
