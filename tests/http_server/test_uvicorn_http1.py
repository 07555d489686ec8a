"""Declined upgrades, Host and HTTP/1.0, on raw sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from random import Random

import pytest
import pytest_asyncio

from fumehood.http_server.asgi_exchange import AsgiExchange, Receive, Scope, Send
from tests.http_server.test_web_server import run_server
from tests.support.raw_http_connection import RawResponse, open_connection

pytestmark = pytest.mark.asyncio(loop_scope="module")

UPGRADES = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",
    b"connection: keep-alive\r\nCONNECTION: UPGRADE\r\nUPGRADE: TLS/1.0, h2c\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n",  # a server without WebSockets
    b"Upgrade: h2c\r\nConnection: upgrade\r\nUpgrade: foo/2\r\n",
]
LARGE = b"0123456789" * 30_000


async def mirror(scope: Scope, receive: Receive, send: Send) -> None:
    """Says what it got: by its length, in chunks at /stream, and never at /ignore."""
    exchange = AsgiExchange(scope, receive, send)
    body = b""
    if scope["path"] != "/ignore":
        async for piece in exchange.iter_chunks(1 << 20):
            body += piece
    mirrored = json.dumps([scope["method"], scope["path"], body.decode()]).encode()
    if scope["path"] == "/stream":
        await exchange.start_response(200, [])
        for start in range(0, len(mirrored), 1000):
            await exchange.send(mirrored[start : start + 1000])
        await exchange.send(b"", more=False)
    else:
        await exchange.send_and_discard_body(200, [], mirrored)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port() -> AsyncIterator[int]:
    async with run_server(mirror) as port:
        yield port


def request(method: bytes, path: bytes, headers: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    return b"%b %b HTTP/%b\r\nHost: localhost\r\n%b%b\r\n%b" % (method, path, version, headers, length, body)


def mirrored(response: RawResponse) -> list[str]:
    assert response.status == 200, response
    return json.loads(response.body)


# --- upgrades -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("body", [b"hello", LARGE], ids=["small", "large"])
async def test_a_request_whose_upgrade_is_declined_keeps_its_body(
    port: int, upgrade: bytes, body: bytes
) -> None:
    """On a connection that goes on, with requests before and behind it in the same packet."""
    async with open_connection(port) as connection:
        await connection.send(
            request(b"POST", b"/first", b"", b"1")
            + request(b"POST", b"/a", upgrade, body)
            + request(b"PUT", b"/b", upgrade, b"2")
            + request(b"GET", b"/c", upgrade)
            + request(b"POST", b"/d", b"", b"3")
        )
        assert mirrored(await connection.read_response()) == ["POST", "/first", "1"]
        assert mirrored(await connection.read_response()) == ["POST", "/a", body.decode()]
        assert mirrored(await connection.read_response()) == ["PUT", "/b", "2"]
        assert mirrored(await connection.read_response()) == ["GET", "/c", ""]
        assert mirrored(await connection.read_response()) == ["POST", "/d", "3"]


@pytest.mark.parametrize("upgrade", UPGRADES)
async def test_chunked_bodies_behind_a_declined_upgrade(port: int, upgrade: bytes) -> None:
    head = b"POST /x HTTP/1.1\r\nHost: localhost\r\n%bTransfer-Encoding: chunked\r\n\r\n" % upgrade
    async with open_connection(port) as connection:
        for _ in range(3):
            await connection.send(head + b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nTrailer: x\r\n\r\n")
            assert mirrored(await connection.read_response()) == ["POST", "/x", "hello world"]


@pytest.mark.parametrize("upgrade", UPGRADES[:2])
async def test_a_declined_upgrade_that_comes_byte_by_byte(port: int, upgrade: bytes) -> None:
    async with open_connection(port) as connection:
        whole = request(b"POST", b"/x", upgrade, b"hello") + request(b"GET", b"/y", upgrade)
        await connection.send(*(bytes([byte]) for byte in whole))
        assert mirrored(await connection.read_response()) == ["POST", "/x", "hello"]
        assert mirrored(await connection.read_response()) == ["GET", "/y", ""]


@pytest.mark.parametrize("upgrade", UPGRADES[:2])
async def test_expect_continue_with_a_declined_upgrade(port: int, upgrade: bytes) -> None:
    async with open_connection(port) as connection:
        for _ in range(2):
            await connection.send(
                b"POST /x HTTP/1.1\r\nHost: localhost\r\n%bExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
                % upgrade
            )
            assert (await connection.read_response()).status == 100
            await connection.send(b"hello")
            assert mirrored(await connection.read_response()) == ["POST", "/x", "hello"]


async def test_a_declined_upgrade_may_ask_to_close(port: int) -> None:
    async with open_connection(port) as connection:
        await connection.send(
            request(b"POST", b"/x", b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n", b"hello")
        )
        response = await connection.read_response()
        assert mirrored(response) == ["POST", "/x", "hello"]
        assert response.headers["connection"] == "close"
        assert await connection.reader.read() == b""


async def test_an_answer_before_the_body_of_a_declined_upgrade_is_not_mixed_up(port: int) -> None:
    """The body is none of the next request, although nobody has read it."""
    async with open_connection(port) as connection:
        hidden = request(b"GET", b"/hidden", b"")
        await connection.send(request(b"POST", b"/ignore", UPGRADES[0], hidden))
        assert mirrored(await connection.read_response()) == ["POST", "/ignore", ""]
        assert await connection.reader.read() == b""


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: -1\r\n",
    ],
)
async def test_a_declined_upgrade_hides_no_bad_framing(port: int, framing: bytes) -> None:
    async with open_connection(port) as connection:
        await connection.send(b"POST / HTTP/1.1\r\nHost: localhost\r\n%b%b\r\nhello" % (UPGRADES[0], framing))
        assert (await connection.read_response()).status == 400
        assert await connection.reader.read() == b""


async def test_no_proxy(port: int) -> None:
    for target in (b"example.com:443", b"/"):
        async with open_connection(port) as connection:
            await connection.send(request(b"CONNECT", target, b"") + request(b"GET", b"/hidden", b""))
            assert (await connection.read_response()).status == 400
            assert await connection.reader.read() == b""


# --- Host ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        ("1.1", [], 400),
        ("1.1", ["a"], 200),
        ("1.1", [""], 200),
        ("1.1", ["a", "a"], 400),
        ("1.1", ["a", "b"], 400),
        ("1.0", [], 200),
        ("1.0", ["a"], 200),
        ("1.0", ["a", "b"], 400),
        ("2.0", ["a"], 400),
        ("0.9", [], 400),
    ],
)
@pytest.mark.parametrize("upgrade", [b"", UPGRADES[0]], ids=["plain", "upgrade"])
async def test_host(port: int, version: str, hosts: list[str], status: int, upgrade: bytes) -> None:
    lines = "".join(f"hOsT: {host}\r\n" for host in hosts)
    async with open_connection(port) as connection:
        await connection.send(f"GET / HTTP/{version}\r\n{lines}".encode() + upgrade + b"\r\n")
        response = await connection.read_response()
        assert response.status == status
        if status == 400:
            assert response.headers["connection"] == "close"
            assert await connection.reader.read() == b""


# --- HTTP/1.0 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [b"", b"Connection: keep-alive\r\n", UPGRADES[0], UPGRADES[2]])
@pytest.mark.parametrize("body", [b"hello", LARGE], ids=["small", "large"])
async def test_an_old_client_gets_no_chunks(port: int, header: bytes, body: bytes) -> None:
    async with open_connection(port) as connection:
        await connection.send(request(b"POST", b"/stream", header, body, b"1.0"))
        response = await connection.read_response()
        assert "transfer-encoding" not in response.headers
        assert "content-length" not in response.headers
        assert response.headers["connection"] == "close"
        assert mirrored(response) == ["POST", "/stream", body.decode()]
        assert connection.reader.at_eof()


async def test_an_old_client_is_told_a_length_that_is_known(port: int) -> None:
    async with open_connection(port) as connection:
        await connection.send(request(b"GET", b"/", b"Connection: keep-alive\r\n", version=b"1.0"))
        response = await connection.read_response()
        assert mirrored(response) == ["GET", "/", ""]
        assert response.headers["content-length"] == str(len(response.body))
        assert response.headers["connection"] == "close"
        assert await connection.reader.read() == b""


async def test_an_old_client_is_not_told_to_continue(port: int) -> None:
    async with open_connection(port) as connection:
        await connection.send(request(b"POST", b"/x", b"Expect: 100-continue\r\n", b"hello", b"1.0"))
        assert mirrored(await connection.read_response()) == ["POST", "/x", "hello"]


async def test_an_old_client_that_reads_slowly_gets_everything(port: int) -> None:
    async with open_connection(port) as connection:
        await connection.send(request(b"POST", b"/stream", b"", b"x" * 1_000_000, b"1.0"))
        await asyncio.sleep(0.2)
        assert mirrored(await connection.read_response())[2] == "x" * 1_000_000


# --- many of them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_stands_in_the_heads_answers_come_in_order(port: int, seed: int) -> None:
    """Names in any case, upgrades, chunks, in packets of any size: each request is served with its own body."""
    random = Random(seed)
    expected: list[list[str]] = []
    sent = b""
    for number in range(12):
        method, path = random.choice(["GET", "POST", "PUT"]), random.choice(["/stream", "/x"])
        body = "" if method == "GET" else f"{number}:" + "y" * random.choice([0, 5, 70_000])
        lines = [b"Host: localhost", random.choice([*UPGRADES, b"X-Plain: 1"]).removesuffix(b"\r\n")]
        wire = body.encode()
        if body and random.random() < 0.5:
            lines.append(b"Transfer-Encoding: chunked")
            pieces = [piece for piece in (wire[:1], wire[1:]) if piece]
            wire = b"".join(b"%X\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        elif body:
            lines.append(b"Content-Length: %d" % len(wire))
        random.shuffle(lines)
        lines = [_in_any_case(line, random) for block in lines for line in block.split(b"\r\n")]
        sent += b"%b %b HTTP/1.1\r\n%b\r\n\r\n%b" % (
            method.encode(),
            path.encode(),
            b"\r\n".join(lines),
            wire,
        )
        expected.append([method, path, body])
    async with open_connection(port) as connection:
        sending = asyncio.ensure_future(connection.send(*_in_packets(sent, random)))
        for told_of in expected:
            assert mirrored(await connection.read_response()) == told_of
        await sending


def _in_any_case(line: bytes, random: Random) -> bytes:
    name, colon, value = line.partition(b":")
    return random.choice([name.lower(), name.upper(), name.swapcase()]) + colon + value


def _in_packets(sent: bytes, random: Random) -> list[bytes]:
    """At most 60 of them, some of one byte."""
    cuts = sorted(random.sample(range(1, len(sent)), 20))
    cuts += [cut + 1 for cut in cuts]
    places = [0, *sorted(set(cuts)), len(sent)]
    return [sent[start:end] for start, end in pairwise(places)]
