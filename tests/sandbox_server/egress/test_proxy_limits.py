"""Limits of a sandbox in the proxy, and the clean-up after it."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from fumehood.sandbox_server.egress.control_messages import ProxyLimits
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.sandbox_server.egress.conftest import (
    PLAIN,
    SECURE,
    EgressNetwork,
    fetch_through_proxy,
    net_settings,
    send_raw_bytes,
)
from tests.sandbox_server.egress.test_tls_client_hello import real_hello
from tests.support.sandbox_runs import run
from tests.support.waiting import wait_until
from tests.support.websites import Website, WebsiteAuthority

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def fresh_sandbox(net: EgressNetwork) -> AsyncIterator[SandboxInstance]:
    made = await net.create(PLAIN, SECURE)
    yield made
    await made.destroy()


@pytest.fixture
def short_limits(net: EgressNetwork, monkeypatch: pytest.MonkeyPatch) -> ProxyLimits:
    """For sandboxes that are made afterwards."""
    limits = ProxyLimits(head_seconds=0.4, keepalive_seconds=0.4, idle_seconds=0.4, total_seconds=30)
    monkeypatch.setattr(net.supervisor.egress, "limits", limits)
    return limits


async def send_forever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1099511627776\r\n\r\n")
    while True:
        writer.write(bytes(65536))
        await writer.drain()


async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads and says nothing."""
    while await reader.read(65536):
        pass


HOLD = """
import socket
held = []
for _ in range({count}):
    s = socket.create_connection(("127.0.0.1", 3128), 10)
    s.sendall(b"GET http://data.test:{port}/ HTTP/1.1\\r\\nHost: data.test:{port}\\r\\n\\r\\n")
    held.append(s)
"""


async def test_many_connections_wait_for_their_turn(
    net: EgressNetwork, fresh_sandbox: SandboxInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net.plain, "handler", never_answer)
    start = net.plain.open_now
    outcome = await run(fresh_sandbox, HOLD.format(count=60, port=net.plain.port))
    assert outcome.end.status == "ok", outcome
    await wait_until(lambda: net.plain.open_now - start == 32)
    await wait_until(lambda: net.supervisor.egress.connections >= 32)  # the proxy tells it now and then
    # A neighbour is not affected.
    neighbour = await net.create(SECURE)
    assert await fetch_through_proxy(neighbour, f"https://{SECURE}:{net.secure.port}/") == "GET /"
    await neighbour.destroy()
    monkeypatch.undo()
    await run(fresh_sandbox, "for s in held: s.close()")
    await fresh_sandbox.destroy()
    await wait_until(lambda: net.plain.open_now == start)


async def test_more_than_the_bound_at_once_all_get_through(
    net: EgressNetwork, fresh_sandbox: SandboxInstance
) -> None:
    outcome = await run(
        fresh_sandbox,
        f"""
import concurrent.futures, urllib.request
def get(number):
    return urllib.request.urlopen("http://{PLAIN}:{net.plain.port}/%d" % number, timeout=60).read().decode()
with concurrent.futures.ThreadPoolExecutor(60) as pool:
    print(sorted(pool.map(get, range(150))) == sorted("GET /%d" % number for number in range(150)))
""",
    )
    assert outcome.stdout == "True\n", outcome


async def test_the_bound_of_all_sandboxes_together(authority: WebsiteAuthority) -> None:
    async with (
        Website(handler=never_answer) as site,
        Supervisor(net_settings(authority, site, egress_connections_total=3)) as supervisor,
    ):
        net = EgressNetwork(supervisor, site, site, authority)
        one, two = await net.create(PLAIN), await net.create(PLAIN)
        await run(one, HOLD.format(count=3, port=site.port))
        await wait_until(lambda: supervisor.egress.connections == 3)
        assert (await send_raw_bytes(two, b"")).startswith(b"HTTP/1.1 503")
        await one.destroy()
        await wait_until(lambda: supervisor.egress.connections == 0)
        assert (await send_raw_bytes(two, b"x\r\n\r\n")).startswith(b"HTTP/1.1 400")


async def test_slow_heads(net: EgressNetwork, short_limits: ProxyLimits) -> None:
    box = await net.create(PLAIN, SECURE)
    assert await send_raw_bytes(box) == b""
    assert (await send_raw_bytes(box, b"GET http://data.test/ HT")).startswith(b"HTTP/1.1 408")
    tunnel = (
        f"CONNECT {SECURE}:{net.secure.port} HTTP/1.1\r\nHost: {SECURE}:{net.secure.port}\r\n\r\n".encode()
    )
    assert (await send_raw_bytes(box, tunnel)).endswith(b"\r\n\r\n")
    assert (await send_raw_bytes(box, tunnel, real_hello(SECURE)[:50])).endswith(b"\r\n\r\n")
    outcome = await run(
        box,
        """
import socket, time
s = socket.create_connection(("127.0.0.1", 3128), 10)
began = time.monotonic()
try:
    while True:
        s.sendall(b"x")
        time.sleep(0.05)
except OSError:
    print(time.monotonic() - began < 5)
""",
    )
    assert outcome.stdout == "True\n", outcome
    await box.destroy()


async def test_silent_servers(
    net: EgressNetwork, short_limits: ProxyLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net.plain, "handler", never_answer)
    box = await net.create(PLAIN, SECURE)
    assert "HTTPError 504" in await fetch_through_proxy(box, f"http://{PLAIN}:{net.plain.port}/")
    await wait_until(lambda: net.plain.open_now == 0)
    await box.destroy()


ASK = "s.sendall(b'GET http://data.test:{plain}/ HTTP/1.1\\r\\nHost: data.test:{plain}\\r\\n\\r\\n')"
TUNNEL = """
import ssl
s.sendall(b'CONNECT secure.test:{secure} HTTP/1.1\\r\\nHost: secure.test:{secure}\\r\\n\\r\\n')
s.recv(999)
s = ssl.create_default_context().wrap_socket(s, server_hostname='secure.test')
"""


@pytest.mark.parametrize(
    ("asks", "gives_up"),
    [(ASK, "s.close()"), (ASK, "s.shutdown(socket.SHUT_WR)"), (TUNNEL, "s.close()")],
    ids=["plain", "half", "tunnel"],
)
async def test_a_client_that_gave_up_holds_nothing(
    net: EgressNetwork, short_limits: ProxyLimits, monkeypatch: pytest.MonkeyPatch, asks: str, gives_up: str
) -> None:
    """Long before the silence of a server that somebody waits for is too long."""
    monkeypatch.setattr(
        net.supervisor.egress, "limits", replace(short_limits, idle_seconds=60, half_closed_seconds=0.1)
    )
    deaf = asyncio.Event()

    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await deaf.wait()
        writer.close()

    monkeypatch.setattr(net.plain, "handler", handler)
    monkeypatch.setattr(net.secure, "handler", handler)
    box = await net.create(PLAIN, SECURE)
    asked = asks.format(plain=net.plain.port, secure=net.secure.port)
    outcome = await run(box, f"import socket\ns = socket.create_connection(('127.0.0.1', 3128), 10)\n{asked}")
    assert outcome.end.status == "ok", outcome
    await asyncio.sleep(0.5)
    assert net.supervisor.egress.connections == 1, "who waits is not hurried"
    await run(box, gives_up)
    await wait_until(lambda: net.supervisor.egress.connections == 0, 10)
    await box.destroy()
    deaf.set()


async def test_how_long_a_silence_may_be_is_a_setting(authority: WebsiteAuthority) -> None:
    async with (
        Website(handler=never_answer) as site,
        Supervisor(net_settings(authority, site, egress_idle_seconds=0.4)) as supervisor,
    ):
        box = await EgressNetwork(supervisor, site, site, authority).create(PLAIN)
        assert "HTTPError 504" in await fetch_through_proxy(box, f"http://{PLAIN}:{site.port}/")


async def test_a_life_is_bounded(
    net: EgressNetwork, short_limits: ProxyLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net.supervisor.egress, "limits", replace(short_limits, total_seconds=0.5))
    monkeypatch.setattr(net.plain, "handler", send_forever)
    box = await net.create(PLAIN)
    outcome = await run(
        box,
        f"""
import urllib.request, http.client
try:
    response = urllib.request.urlopen("http://{PLAIN}:{net.plain.port}/")
    while response.read(1 << 20):
        pass
except (http.client.IncompleteRead, ConnectionResetError) as error:
    print("ended")
""",
    )
    assert outcome.stdout == "ended\n", outcome
    await box.destroy()


async def test_bytes_are_bounded_where_the_operator_says_so(authority: WebsiteAuthority) -> None:
    async with (
        Website(handler=send_forever) as site,
        Supervisor(net_settings(authority, site, egress_bytes=1 << 20)) as supervisor,
    ):
        net = EgressNetwork(supervisor, site, site, authority)
        box = await net.create(PLAIN)
        outcome = await run(
            box,
            f"""
import subprocess
done = subprocess.run(["curl", "-sS", "http://{PLAIN}:{site.port}/"], capture_output=True)
print(0 < len(done.stdout) <= 1 << 20)
""",
        )
        assert outcome.stdout == "True\n", outcome
        answer = await send_raw_bytes(box, f"GET http://{PLAIN}:{site.port}/ HTTP/1.0\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 403")
        assert b"used up its network bytes" in answer


async def test_a_slow_reader_costs_no_memory(
    net: EgressNetwork, fresh_sandbox: SandboxInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads, so nobody sends: what is under way fits into a few buffers."""
    sent = 0

    async def counting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1099511627776\r\n\r\n")
        while True:
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    monkeypatch.setattr(net.plain, "handler", counting)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await run(fresh_sandbox, HOLD.format(count=4, port=net.plain.port))
    last, still = -1, 0
    while still < 10:
        await asyncio.sleep(0.05)
        still = still + 1 if sent == last else 0
        last = sent
    assert 0 < sent < 4 * (16 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


async def test_nothing_is_left_of_a_sandbox(net: EgressNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections in every state: accepted, waiting, half a head, a tunnel, a response under way."""
    egress = net.supervisor.egress
    await wait_until(lambda: egress.connections == 0)
    await wait_until(lambda: net.plain.open_now == net.secure.open_now == 0)
    before = len(os.listdir("/proc/self/fd"))
    box = await net.create(PLAIN, SECURE)
    monkeypatch.setattr(net.plain, "handler", send_forever)
    tunnel = f"CONNECT {SECURE}:{net.secure.port} HTTP/1.1\\r\\nHost: {SECURE}:{net.secure.port}\\r\\n\\r\\n"
    outcome = await run(
        box,
        HOLD.format(count=5, port=net.plain.port)
        + f"""
import ssl
for data in (b"", b"GET http://da", b"{tunnel}"):
    for _ in range(5):
        s = socket.create_connection(("127.0.0.1", 3128), 10)
        s.sendall(data)
        held.append(s)
    s.recv(1000) if data.startswith(b"CONN") else None
held.append(ssl.create_default_context().wrap_socket(s, server_hostname="{SECURE}"))
for _ in range(40):
    held.append(socket.create_connection(("127.0.0.1", 3128), 10))
""",
    )
    assert outcome.end.status == "ok", outcome
    await wait_until(lambda: egress.connections == 32)
    await box.destroy()
    await wait_until(lambda: egress.connections == 0)
    await wait_until(lambda: net.plain.open_now == net.secure.open_now == 0)
    await wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_sandbox_that_dies_by_itself_leaves_nothing_either(net: EgressNetwork) -> None:
    box = await net.create(PLAIN)
    await run(box, "import socket; s = [socket.create_connection(('127.0.0.1', 3128)) for _ in range(9)]")
    await wait_until(lambda: net.supervisor.egress.connections >= 9)
    await run(box, "import os; os._exit(1)")
    await wait_until(lambda: net.supervisor.egress.connections == 0)


async def test_the_supervisor_ends_with_connections_open(authority: WebsiteAuthority) -> None:
    async with Website(handler=send_forever) as site:
        before = len(os.listdir("/proc/self/fd"))
        async with Supervisor(net_settings(authority, site)) as supervisor:
            box = await EgressNetwork(supervisor, site, site, authority).create(PLAIN)
            await run(box, HOLD.format(count=8, port=site.port))
            await wait_until(lambda: site.open_now == 8)
        assert supervisor.egress.connections == 0
        await wait_until(lambda: site.open_now == 0)
        await wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_name_server_that_hangs(net: EgressNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up that takes too long is given up; who asks meanwhile shares the one that is under way."""
    import threading

    from fumehood.http_server import dns_resolver

    answer = threading.Event()
    asked: list[str] = []

    def hanging(name: str) -> list[str]:
        asked.append(name)
        answer.wait(20)
        return ["127.0.0.1"]

    monkeypatch.setattr(dns_resolver, "look_up", hanging)
    names = dns_resolver.DnsResolver({}, timeout=0.2)
    with pytest.raises(dns_resolver.DnsResolutionFailed):
        await names.resolve("slow.test")
    waiting = [asyncio.ensure_future(names.resolve("slow.test")) for _ in range(20)]
    await asyncio.sleep(0)
    answer.set()
    assert {tuple(found) for found in await asyncio.gather(*waiting)} == {("127.0.0.1",)}
    assert asked == ["slow.test"]
    names.close()


async def test_names_are_looked_up_whole() -> None:
    """With the dot: no search domain of this host is tried."""
    from fumehood.http_server import dns_resolver

    names = dns_resolver.DnsResolver({}, timeout=20)
    with pytest.raises(dns_resolver.DnsResolutionFailed):
        await names.resolve("no-such-name.invalid")
    names.close()


async def test_a_slow_reader_gets_the_last_bytes_too(
    net: EgressNetwork, fresh_sandbox: SandboxInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server gone, everything in the proxy's hands: it waits for the reader."""

    async def all_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 3_000_000)
        await writer.drain()
        writer.transport.set_write_buffer_limits(0)
        await writer.drain()

    monkeypatch.setattr(net.plain, "handler", all_at_once)
    outcome = await run(
        fresh_sandbox,
        f"""
import socket, time
s = socket.create_connection(("127.0.0.1", 3128), 10)
s.sendall(b"GET http://data.test:{net.plain.port}/ HTTP/1.0\\r\\n\\r\\n")
time.sleep(2.5)
count = 0
while data := s.recv(65536):
    count += data.count(b"x")
print(count)
""",
    )
    assert outcome.stdout == "3000000\n", outcome
