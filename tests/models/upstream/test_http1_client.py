"""The HTTP client on real sockets, against servers good and bad."""

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
    address: UpstreamAddress | None = None
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
    made = FakeServer(behaviour)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    made.address = UpstreamAddress.parse(f"http{'s' if tls else ''}://localhost:{port}/v1/")
    async with server:
        try:
            yield made
        finally:
            for writer in made.writers:
                writer.transport.abort()


@asynccontextmanager
async def open_client(max_connections: int = 1024) -> AsyncGenerator[PooledHttpClient]:
    made = PooledHttpClient(max_connections)
    try:
        yield made
    finally:
        await made.close()


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


async def read_body(answer: Http1Connection) -> bytes:
    chunks: list[bytes] = []
    while chunk := await answer.read():
        chunks.append(chunk)
    return b"".join(chunks)


async def get(
    http: PooledHttpClient, server: FakeServer, timeouts: UpstreamTimeouts = TIMEOUTS
) -> tuple[int, bytes]:
    assert server.address is not None
    async with http.request(server.address, "/x", encode_headers({"A": "b"}), timeouts) as answer:
        return answer.status, await read_body(answer)


async def request_once(
    *chunks: bytes, stay: bool = False, timeouts: UpstreamTimeouts = TIMEOUTS
) -> tuple[int, bytes]:
    async with open_server(respond_with(*chunks, stay=stay)) as where, open_client() as http:
        return await get(http, where, timeouts)


# --- requests -----------------------------------------------------------------------------------------


async def test_what_is_sent() -> None:
    received: list[bytes] = []

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for length in (0, 5, 500_000):
            received.append(await reader.readuntil(b"\r\n\r\n"))
            received.append(await reader.readexactly(length))
            writer.write(OK + b"Content-Length: 0\r\n\r\n")

    async with open_server(behave) as where, open_client() as http:
        assert where.address is not None
        for body in (None, [b"he", b"llo"], [b"x" * 200_000, b"", b"y" * 300_000]):
            async with http.request(
                where.address, "/chat", encode_headers({"X-A": "b"}), TIMEOUTS, body
            ) as answer:
                assert await read_body(answer) == b""
    host = where.address.host_header.encode()
    assert received[:4] == [
        b"GET /v1/chat HTTP/1.1\r\nHost: " + host + b"\r\nX-A: b\r\n\r\n",
        b"",
        b"POST /v1/chat HTTP/1.1\r\nHost: " + host + b"\r\nX-A: b\r\nContent-Length: 5\r\n\r\n",
        b"hello",
    ]
    assert received[5] == b"x" * 200_000 + b"y" * 300_000
    assert where.connections == 1


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


# --- answers ------------------------------------------------------------------------------------------


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
    async with open_server(respond_with(head)) as where, open_client() as http:
        assert where.address is not None
        async with http.request(where.address, "", b"", TIMEOUTS) as answer:
            assert (answer.status, answer.get_header(b"retry-after"), answer.get_header(b"none")) == (
                429,
                "7",
                "",
            )


# --- what goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [b"X: y\r\n", b"y"], ids=["trailers", "one trailer"])
@pytest.mark.parametrize("body", [b"2\r\nhi\r\n", b""])
async def test_what_follows_a_body_has_an_end(body: bytes, chunk: bytes) -> None:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\nX: ")
        while True:
            writer.write(chunk * 10_000)
            await writer.drain()

    async with open_server(behave) as where, open_client() as http, asyncio.timeout(60):
        with pytest.raises(MalformedHttpResponse):
            await get(http, where)


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
async def test_what_is_not_http(response_bytes: bytes) -> None:
    with pytest.raises(MalformedHttpResponse):
        await request_once(response_bytes, stay=True)


@pytest.mark.parametrize(
    "response_bytes",
    [b"", b"HTTP/1.1 20", OK + b"Content-Length: 50\r\n\r\nhello", CHUNKED],
    ids=["nothing", "half a line", "length", "chunked"],
)
async def test_an_answer_that_is_cut_off(response_bytes: bytes) -> None:
    with pytest.raises(UpstreamDisconnected):
        await request_once(response_bytes)


async def test_what_came_before_the_break_is_read_first() -> None:
    async with (
        open_server(respond_with(OK + b"Content-Length: 50\r\n\r\nhello")) as where,
        open_client() as http,
    ):
        assert where.address is not None
        async with http.request(where.address, "", b"", TIMEOUTS) as answer:
            assert await answer.read() == b"hello"
            with pytest.raises(UpstreamDisconnected):
                await answer.read()


@pytest.mark.parametrize("response_bytes", [b"", OK, CHUNKED], ids=["nothing", "half a head", "half a body"])
async def test_silence(response_bytes: bytes) -> None:
    with pytest.raises(UpstreamReadTimeout):
        await request_once(response_bytes, stay=True, timeouts=UpstreamTimeouts(10.0, 0.05))


async def test_a_slow_reader_is_not_silence_of_the_server() -> None:
    go = asyncio.Event()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Content-Length: 10\r\n\r\nhello")
        await go.wait()
        writer.write(b"world")

    async with open_server(behave) as where, open_client() as http:
        assert where.address is not None
        async with http.request(where.address, "", b"", UpstreamTimeouts(10.0, 0.2)) as answer:
            assert await answer.read() == b"hello"
            await asyncio.sleep(0.5)
            asyncio.get_running_loop().call_later(0.05, go.set)
            assert await answer.read() == b"world"


async def test_a_slow_reader_holds_the_server_up() -> None:
    sent = 0

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Content-Length: 67108864\r\n\r\n")
        for _ in range(1024):
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with open_server(behave) as where, open_client() as http:
        assert where.address is not None
        async with http.request(where.address, "", b"", TIMEOUTS) as answer:
            before = -1
            while sent != before:  # until the server is stuck
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 32 << 20
            size = 0
            while chunk := await answer.read():
                size += len(chunk)
    assert size == 64 << 20


async def test_a_listener_hears_at_once_and_nobody_is_woken() -> None:
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

    def listen(chunk: bytes) -> bool:
        received.append(chunk)
        go.set()
        return chunk != b"2"

    async with open_server(behave) as where, open_client() as http:
        assert where.address is not None
        async with http.request(where.address, "", b"", TIMEOUTS) as answer:
            over = False
            while not over:
                over = await answer.stream_to(listen)
                woken += 1
    assert received == [b"0", b"1", b"2", b"3", b"4"]
    assert woken == 2  # when it had heard enough, and at the end


async def test_what_a_listener_raises() -> None:
    def listen(chunk: bytes) -> bool:
        raise KeyError(chunk)

    async with open_server(respond_with(IN_CHUNKS, b"1\r\na\r\n", stay=True)) as where, open_client() as http:
        assert where.address is not None
        async with http.request(where.address, "", b"", TIMEOUTS) as answer:
            with pytest.raises(KeyError):
                await answer.stream_to(listen)


@pytest.mark.parametrize("error_class", [UpstreamDisconnected, UpstreamReadTimeout])
async def test_a_listener_does_not_wait_for_ever(error_class: type[UpstreamTransportError]) -> None:
    received: list[bytes] = []

    def listen(chunk: bytes) -> bool:
        received.append(chunk)
        return True

    stay = error_class is UpstreamReadTimeout
    async with (
        open_server(respond_with(OK + b"Content-Length: 9\r\n\r\n", b"hello", stay=stay)) as where,
        open_client() as http,
    ):
        assert where.address is not None
        async with http.request(
            where.address, "", b"", UpstreamTimeouts(10.0, 0.1 if stay else 10.0)
        ) as answer:
            with pytest.raises(error_class):
                await answer.stream_to(listen)
    assert b"".join(received) == b"hello"


async def test_nobody_there() -> None:
    async with open_server(respond_with(b"")) as where:
        assert where.address is not None
    async with open_client() as http:
        for address, why in [
            (where.address, "Connection refused"),
            (UpstreamAddress.parse("http://nowhere.invalid"), "its host name cannot be resolved"),
        ]:
            with pytest.raises(UpstreamConnectError, match=why):
                async with http.request(address, "", b"", TIMEOUTS):
                    pass


# --- connections --------------------------------------------------------------------------------------

SHORT = OK + b"Content-Length: 2\r\n\r\nok"


async def test_connections_are_kept() -> None:
    async with open_server(respond_with(SHORT, repeat=True)) as where, open_client() as http:
        for _ in range(3):
            assert await get(http, where) == (200, b"ok")
        assert where.connections == 1
        await asyncio.gather(*(get(http, where) for _ in range(5)))
        assert 2 <= where.connections <= 5


@pytest.mark.parametrize(
    "response_bytes",
    [
        OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        SHORT + SHORT,
        SHORT + b"rubbish",
    ],
    ids=["close", "HTTP/1.0", "an answer too many", "rubbish after it"],
)
async def test_connections_that_are_not_kept(response_bytes: bytes) -> None:
    async with open_server(respond_with(response_bytes, repeat=True)) as where, open_client() as http:
        for number in (1, 2):
            assert await get(http, where) == (200, b"ok")
            assert where.connections == number


async def test_an_idle_connection_that_the_server_closed() -> None:
    async with open_server(respond_with(SHORT)) as where, open_client() as http:
        for number in (1, 2):
            assert await get(http, where) == (200, b"ok")
            assert where.connections == number
            await asyncio.sleep(0.02)


async def test_an_idle_connection_that_the_server_closes_right_now() -> None:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(SHORT)
        await reader.readuntil(b"\r\n\r\n")  # heard, and not answered

    async with open_server(behave) as where, open_client() as http:
        assert await get(http, where) == (200, b"ok")
        assert await get(http, where) == (200, b"ok")
        assert where.connections == 2


async def test_an_idle_connection_grows_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.models.upstream.http1_client._KEEP_ALIVE_SECONDS", 0.0)
    async with open_server(respond_with(SHORT, repeat=True)) as where, open_client() as http:
        await get(http, where)
        await get(http, where)
        assert where.connections == 2


async def test_leaving_closes_the_connection() -> None:
    gone = asyncio.Event()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        await reader.read()
        gone.set()

    async with open_server(behave) as where, open_client() as http:
        assert where.address is not None
        async with http.request(where.address, "", b"", TIMEOUTS) as answer:
            await answer.read()
        await asyncio.wait_for(gone.wait(), 10)


async def test_there_are_only_so_many() -> None:
    go = asyncio.Event()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            await go.wait()
            writer.write(SHORT)

    async with (
        open_server(behave) as where,
        open_server(respond_with(SHORT, repeat=True)) as other,
        open_client(max_connections=2) as http,
    ):
        assert await get(http, other) == (200, b"ok")
        busy = [asyncio.ensure_future(get(http, where)) for _ in range(2)]
        while where.connections < 2:  # one of them after what was idle has given way
            await asyncio.sleep(0.001)
        with pytest.raises(UpstreamConnectError, match=r"no connection within 0\.05 s"):
            await get(http, where, UpstreamTimeouts(0.05, 10.0))
        go.set()
        assert await asyncio.gather(*busy) == [(200, b"ok")] * 2
        assert await get(http, where) == (200, b"ok")


async def test_closing_ends_everything() -> None:
    async with open_server(respond_with(CHUNKED, stay=True)) as where:
        http = PooledHttpClient()
        assert where.address is not None
        async with http.request(where.address, "", b"", TIMEOUTS) as answer:
            await answer.read()
            await http.close()
            with pytest.raises(UpstreamDisconnected):
                await answer.read()
        with pytest.raises(UpstreamConnectError, match="closing its connections"):
            await get(http, where)


async def test_cancelling_while_the_answer_is_awaited() -> None:
    async with open_server(respond_with(b"", stay=True)) as where, open_client(max_connections=1) as http:
        for _ in range(2):  # the second would find no connection if the first were not given back
            task = asyncio.ensure_future(get(http, where))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert where.connections == 2


# --- TLS ----------------------------------------------------------------------------------------------


async def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = WebsiteAuthority(tmp_path)
    tls = authority.context("localhost")
    async with open_server(respond_with(SHORT, repeat=True), tls) as where:
        async with open_client() as http:
            with pytest.raises(UpstreamConnectError, match="its certificate is not trusted"):
                await get(http, where)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        async with open_client() as http:
            assert await get(http, where) == (200, b"ok")
            assert await get(http, where) == (200, b"ok")

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example\r\n")
        await writer.drain()

    async with open_server(greet) as plain, open_client() as http:
        assert plain.address is not None
        secure = plain.address._replace(secure=True)
        with pytest.raises(UpstreamConnectError, match="TLS handshake failed"):
            async with http.request(secure, "", b"", TIMEOUTS):
                pass
    assert issubclass(UpstreamConnectError, UpstreamTransportError)


# --- the event loop that servers run on ---------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        test_what_is_sent,
        test_headers_and_statuses,
        test_what_came_before_the_break_is_read_first,
        test_a_slow_reader_is_not_silence_of_the_server,
        test_a_slow_reader_holds_the_server_up,
        test_a_listener_hears_at_once_and_nobody_is_woken,
        test_what_a_listener_raises,
        test_nobody_there,
        test_connections_are_kept,
        test_an_idle_connection_that_the_server_closed,
        test_an_idle_connection_that_the_server_closes_right_now,
        test_leaving_closes_the_connection,
        test_there_are_only_so_many,
        test_closing_ends_everything,
        test_cancelling_while_the_answer_is_awaited,
    ],
)
def test_the_same_on_uvloop(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    assert uvloop.run(scenario()) is None
