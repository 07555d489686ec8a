"""Requests that an allow-list refuses, from real sandboxes."""

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.sandbox_server.egress.conftest import (
    METADATA,
    PLAIN,
    SECURE,
    EgressNetwork,
    TableResolver,
    fetch_through_proxy,
    send_raw_bytes,
)
from tests.sandbox_server.egress.test_tls_client_hello import (
    extension,
    hello,
    name_extension,
    real_hello,
    records,
)
from tests.support.sandbox_runs import run, settings
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

type InstallNames = Callable[[dict[str, list[list[str]]]], TableResolver]


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _nothing_arrives(net: EgressNetwork, _forget: None) -> AsyncIterator[None]:
    """Whatever is tried here, no server hears of it."""
    yield
    assert net.plain.seen == []
    assert net.secure.seen == []
    assert [event for event in net.events if event.verdict == "allowed"] == []


@pytest.mark.parametrize(
    "host",
    [
        *("other.test", "sub.data.test", "data.test.other.test", "test", "xdata.test", "data.testx"),
        *("10.0.0.1", "169.254.169.254", "127.1.2.3", "2130706433", "0x7f000001", "0177.0.0.1", "127.1"),
        *("[::1]", "[::ffff:127.0.0.1]", "[fd00:ec2::254]", "0", "data.test%00", "data.test%2eother.test"),
        *("127.0.0.1", "localhost", "017700000001", "data.test%00.x", "data.test@127.0.0.1", METADATA),
        *("x@data.test", "data.test@other.test", "data.test#.other.test", "data_test", "*", "data.test.."),
    ],
)
async def test_other_names_and_addresses(net: EgressNetwork, box: SandboxInstance, host: str) -> None:
    port = net.plain.port
    plain = await send_raw_bytes(
        box, f"GET http://{host}:{port}/ HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
    )
    tunnel = await send_raw_bytes(
        box, f"CONNECT {host}:{net.secure.port} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    )
    assert plain[:12] in (b"HTTP/1.1 403", b"HTTP/1.1 400"), plain
    assert tunnel[:12] in (b"HTTP/1.1 403", b"HTTP/1.1 400"), tunnel


async def test_a_refusal_says_what_and_why(net: EgressNetwork, box: SandboxInstance) -> None:
    port = net.plain.port
    answer = await fetch_through_proxy(box, f"http://other.test:{port}/")
    assert answer == (
        "HTTPError 403: The sandbox's proxy refused the request: the domain other.test is not on this sandbox's "
        "allow-list."
    )
    assert "Forbidden" in await fetch_through_proxy(box, f"https://other.test:{port}/")


async def test_other_ports(net: EgressNetwork, box: SandboxInstance) -> None:
    for port in (22, 25, 80, 443, 3128, 65535):
        answer = await send_raw_bytes(
            box, f"CONNECT {PLAIN}:{port} HTTP/1.1\r\nHost: {PLAIN}:{port}\r\n\r\n".encode()
        )
        assert f"port {port} of {PLAIN} is not open".encode() in answer
    assert "not open" in await fetch_through_proxy(box, f"http://{PLAIN}:1/")
    for port in ("0", "65536", "-1", "4 4", "443x", ""):
        answer = await send_raw_bytes(
            box, f"CONNECT {PLAIN}:{port} HTTP/1.1\r\nHost: {PLAIN}\r\n\r\n".encode()
        )
        assert answer[:12] in (b"HTTP/1.1 403", b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "addresses",
    [
        ["10.0.0.1"],
        ["169.254.169.254"],
        ["::1", "fd00:ec2::254"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        [],
    ],
)
async def test_names_of_private_addresses(
    net: EgressNetwork, named_box: SandboxInstance, names: InstallNames, addresses: list[str]
) -> None:
    names({PLAIN: [addresses], SECURE: [addresses]})
    plain = await fetch_through_proxy(named_box, f"http://{PLAIN}:{net.plain.port}/")
    assert "HTTPError 403" in plain
    assert "has no address that sandboxes may be connected to" in plain
    assert not any(address in plain for address in addresses)
    tunnel = await fetch_through_proxy(named_box, f"https://{SECURE}:{net.secure.port}/")
    assert "Forbidden" in tunnel


async def test_names_without_an_address(
    net: EgressNetwork, named_box: SandboxInstance, names: InstallNames
) -> None:
    names({})
    assert "HTTPError 502" in await fetch_through_proxy(named_box, f"http://{PLAIN}:{net.plain.port}/")


async def test_a_name_that_changes_its_address(
    net: EgressNetwork, named_box: SandboxInstance, names: InstallNames
) -> None:
    """DNS rebinding: what is checked is what is connected to, and the next connection is checked again."""
    table = names({PLAIN: [["10.0.0.1"], ["127.0.0.1"]]})
    assert "HTTPError 403" in await fetch_through_proxy(named_box, f"http://{PLAIN}:{net.plain.port}/")
    assert table.asked == [PLAIN]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(real_hello("other.test"), id="another name"),
        pytest.param(real_hello(f"sub.{SECURE}"), id="a subdomain"),
        pytest.param(real_hello(None), id="no name"),
        pytest.param(records(hello(name_extension(SECURE.encode() + b"."))), id="a dot at its end"),
        pytest.param(records(hello(name_extension(SECURE.encode(), b"other.test"))), id="two names"),
        pytest.param(
            records(hello(name_extension(SECURE.encode()) + extension(0xFE0D, b"\0"))), id="encrypted hello"
        ),
        pytest.param(b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n", id="HTTP"),
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", id="SSH"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2"),
        pytest.param(b"\x80\x2e\x01\x03\x01" + bytes(60), id="SSL 2"),
        pytest.param(b"\x16\x03\x01\xff\xff" + bytes(200), id="an impossible record"),
    ],
)
async def test_what_begins_in_a_tunnel(net: EgressNetwork, box: SandboxInstance, first: bytes) -> None:
    head = f"CONNECT {SECURE}:{net.secure.port} HTTP/1.1\r\nHost: {SECURE}:{net.secure.port}\r\n\r\n".encode()
    for pieces in ((head, first), (head + first,)):
        answer = await send_raw_bytes(box, *pieces)
        status, _, rest = answer.partition(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200")
        assert rest in (b"", b"\x15\x03\x03\x00\x02\x02\x31")
    assert {event.verdict for event in await net.wait_for_events(1)} == {"refused"}
    assert "within the tunnel" in net.events[0].reason


HEAD = "GET http://data.test:PORT/ HTTP/1.1\r\nHost: data.test:PORT\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param("GET http://data.test:PORT/ HTTP/1.1\r\nHost: other.test\r\n\r\n", id="another Host"),
        pytest.param(
            "GET http://data.test:PORT/ HTTP/1.1\r\nHost: data.test\r\n\r\n", id="Host without port"
        ),
        pytest.param("GET http://data.test:PORT/ HTTP/1.1\r\n\r\n", id="no Host"),
        pytest.param(HEAD + "Host: other.test\r\n\r\n", id="two Hosts"),
        pytest.param(HEAD + "Host : other.test\r\n\r\n", id="white space before the colon"),
        pytest.param(HEAD + "X: a\r\n b\r\n\r\n", id="folded line"),
        pytest.param(HEAD + "X: a\rHost: other.test\r\n\r\n", id="bare CR"),
        pytest.param(HEAD + "X: a\nHost: other.test\r\n\r\n", id="bare LF"),
        pytest.param(HEAD + "X: a\0b\r\n\r\n", id="NUL"),
        pytest.param(
            HEAD + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="CL and TE"
        ),
        pytest.param(HEAD + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", id="two lengths"),
        pytest.param(HEAD + "Content-Length: +5\r\n\r\nhello", id="odd length"),
        pytest.param(HEAD + "Transfer-Encoding: chunked, identity\r\n\r\n", id="odd coding"),
        pytest.param(HEAD + "Transfer-Encoding: xchunked\r\n\r\n", id="unknown coding"),
        pytest.param(
            HEAD + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", id="coded twice"
        ),
        pytest.param(HEAD + "Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n", id="websocket"),
        pytest.param(HEAD + "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n", id="h2c"),
        pytest.param(HEAD + "Connection: Host\r\n\r\n", id="Host for this hop only"),
        pytest.param(
            HEAD + "Connection: content-length\r\nContent-Length: 0\r\n\r\n", id="length for this hop"
        ),
        pytest.param(HEAD.replace("GET", "TRACE") + "\r\n", id="TRACE"),
        pytest.param(HEAD.replace("http:", "https:") + "\r\n", id="absolute https"),
        pytest.param(HEAD.replace("http:", "ftp:") + "\r\n", id="absolute ftp"),
        pytest.param(HEAD.replace("http:", "file:") + "\r\n", id="absolute file"),
        pytest.param(HEAD.replace("http://data.test:PORT/", "/") + "\r\n", id="a path only"),
        pytest.param(HEAD.replace("http://data.test:PORT/", "*") + "\r\n", id="asterisk"),
        pytest.param(HEAD.replace("http://data.test:PORT/", "//data.test:PORT/") + "\r\n", id="no scheme"),
        pytest.param(HEAD.replace("/ HTTP", "/#other HTTP") + "\r\n", id="fragment"),
        pytest.param(HEAD.replace("/ HTTP", "/ a HTTP") + "\r\n", id="a space in the address"),
        pytest.param(HEAD.replace("HTTP/1.1", "HTTP/2.0") + "\r\n", id="HTTP/2.0"),
        pytest.param(HEAD.replace("HTTP/1.1", "HTTP/1.1 x") + "\r\n", id="odd version"),
        pytest.param("GET http://data.test:PORT/\r\n\r\n", id="HTTP/0.9"),
        pytest.param("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2 preface"),
        pytest.param(
            "GET http://data.test:PORT/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            id="1.0 and TE",
        ),
        pytest.param("\r\n\r\n", id="nothing"),
        pytest.param("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", id="TLS"),
        pytest.param(
            "CONNECT data.test:PORT HTTP/1.1\r\nHost: data.test:PORT\r\nContent-Length: 3\r\n\r\nabc",
            id="CONNECT with a body",
        ),
        pytest.param(
            "CONNECT data.test:PORT HTTP/1.1\r\nHost: other.test\r\n\r\n", id="CONNECT, another Host"
        ),
        pytest.param(
            "CONNECT http://data.test:PORT/ HTTP/1.1\r\nHost: data.test\r\n\r\n", id="CONNECT an address"
        ),
        pytest.param("CONNECT data.test HTTP/1.1\r\nHost: data.test\r\n\r\n", id="CONNECT without port"),
    ],
)
async def test_requests_that_could_be_read_in_two_ways(
    net: EgressNetwork, box: SandboxInstance, request_: str
) -> None:
    answer = await send_raw_bytes(box, request_.replace("PORT", str(net.plain.port)).encode("latin-1"))
    assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 403"), answer
    assert answer.count(b"Connection: close") == 1


async def test_heads_that_are_too_long(net: EgressNetwork, box: SandboxInstance) -> None:
    head = HEAD.replace("PORT", str(net.plain.port)).encode()
    for endless in (head + b"X: " + b"a" * 70_000, head + b"X: a\r\n" * 20_000, b"G" * 100_000):
        assert (await send_raw_bytes(box, endless)).startswith(b"HTTP/1.1 431")


async def test_directly_there_is_nothing(net: EgressNetwork, box: SandboxInstance) -> None:
    outcome = await run(
        box,
        f"""
import socket
def attempt(function, *args):
    try:
        return function(*args)
    except OSError as error:
        return type(error).__name__ + " " + str(error.errno)
print(attempt(socket.create_connection, ("127.0.0.1", {net.plain.port}), 5))
print(attempt(socket.create_connection, ("1.1.1.1", 80), 5))
print(attempt(socket.create_connection, ("169.254.169.254", 80), 5))
print(attempt(socket.getaddrinfo, "data.test", 80))
print(attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM))
""",
    )
    refused, public, metadata, name, datagrams = outcome.stdout.splitlines()
    assert refused == "ConnectionRefusedError 111"
    assert (public, metadata) == ("OSError 101", "OSError 101")
    assert name.startswith("gaierror")
    assert "Error" in datagrams


async def test_without_an_allow_list_nobody_listens(net: EgressNetwork) -> None:
    box = await net.supervisor.create()
    outcome = await run(
        box,
        """
import os, socket
print([name for name in os.environ if "proxy" in name.lower()])
try:
    socket.create_connection(("127.0.0.1", 3128), 5)
except ConnectionRefusedError:
    print("refused")
listener = socket.create_server(("127.0.0.1", 3128))  # the port is the code's own
print("free")
""",
    )
    assert outcome.stdout.splitlines() == ["[]", "refused", "free"], outcome
    await box.destroy()


async def test_parked_sandboxes_serve_either(net: EgressNetwork, authority: object) -> None:
    """One pool for all policies: what is parked has a listener, and nobody accepts there."""
    pooled = settings(pool=1, preload=(), egress="allowlist")
    async with Supervisor(pooled) as supervisor:
        await wait_until(lambda: supervisor._pool)  # pyright: ignore[reportPrivateUsage]
        parked = supervisor._pool[0]  # pyright: ignore[reportPrivateUsage]
        assert parked._listener_fds  # pyright: ignore[reportPrivateUsage]
        assert parked._network_access is None  # pyright: ignore[reportPrivateUsage]
        box = await supervisor.create(SandboxSpec())
        assert box is parked
        assert len(box._listener_fds) == 0  # pyright: ignore[reportPrivateUsage]
        assert supervisor.egress.connections == 0
        outcome = await run(box, "import socket; socket.create_connection(('127.0.0.1', 3128), 5)")
        assert outcome.raised is not None
        assert outcome.raised.name == "ConnectionRefusedError"


async def test_bad_chunks_end_the_exchange(net: EgressNetwork, box: SandboxInstance) -> None:
    """The head is on its way by then; a server never sees an end of the body that was not there."""
    head = (
        HEAD.replace("PORT", str(net.plain.port)).replace("GET", "POST")
        + "Transfer-Encoding: chunked\r\n\r\n"
    )
    for chunks in (
        "zz\r\nhello\r\n0\r\n\r\n",
        "5\r\nhelloXX0\r\n\r\n",
        "-1\r\n\r\n",
        "5;\n\r\nhello\r\n0\r\n\r\n",
    ):
        answer = await send_raw_bytes(box, (head + chunks).encode())
        assert b" 200 " not in answer
    cut = await send_raw_bytes(box, (head + "5\r\nhel").encode(), half_close=True)
    assert b" 200 " not in cut
