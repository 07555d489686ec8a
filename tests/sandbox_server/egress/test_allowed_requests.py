"""Requests that an allow-list permits, from real sandboxes."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from tests.sandbox_server.egress.conftest import (
    PLAIN,
    SECURE,
    EgressNetwork,
    TableResolver,
    fetch_through_proxy,
    send_raw_bytes,
)
from tests.support.sandbox_runs import run

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_urllib(net: EgressNetwork, box: SandboxInstance) -> None:
    assert await fetch_through_proxy(box, f"http://{PLAIN}:{net.plain.port}/a?b=1") == "GET /a?b=1"
    assert await fetch_through_proxy(box, f"https://{SECURE}:{net.secure.port}/s") == "GET /s"
    assert net.plain.seen[0].headers["host"] == f"{PLAIN}:{net.plain.port}"
    assert "connection" not in net.plain.seen[0].headers
    assert [(event.domain, event.port, event.verdict) for event in await net.wait_for_events(2)] == [
        (PLAIN, net.plain.port, "allowed"),
        (SECURE, net.secure.port, "allowed"),
    ]
    assert {event.sandbox for event in net.events} == {box.id}
    assert all(event.sent > 100 and event.received > 50 for event in net.events)


async def test_curl(net: EgressNetwork, box: SandboxInstance) -> None:
    outcome = await run(
        box,
        f"""
import subprocess
for arguments in (["http://{PLAIN.upper()}:{net.plain.port}/a"], ["https://{SECURE}:{net.secure.port}/s"],
                  ["-T", "/etc/hosts", "-H", "Expect: 100-continue", "http://{PLAIN}:{net.plain.port}/put"],
                  ["-d", "x=1", "-H", "Transfer-Encoding: chunked", "http://{PLAIN}:{net.plain.port}/chunks"],
                  ["-I", "http://{PLAIN}:{net.plain.port}/head"],
                  ["-0", "http://{PLAIN}:{net.plain.port}/old"],
                  ["-X", "OPTIONS", "http://{PLAIN}:{net.plain.port}"]):
    done = subprocess.run(["curl", "-sS", "--max-time", "30", *arguments], capture_output=True, text=True)
    print(done.stdout.replace(chr(10), " ") + done.stderr)
""",
    )
    lines = outcome.stdout.splitlines()
    assert lines[0] == "GET /a", outcome
    assert lines[1] == "GET /s"
    assert lines[2].startswith("PUT /put127.0.0.1 localhost")
    assert lines[3] == "POST /chunksx=1"
    assert lines[4].startswith("HTTP/1.1 200")
    assert lines[5] == "GET /old"
    assert lines[6] == "OPTIONS /"
    assert net.plain.seen[2].headers["transfer-encoding"] == "chunked"


@pytest.mark.parametrize("name", ["data.test.", "DATA.test"])
async def test_the_same_name_in_another_spelling(net: EgressNetwork, box: SandboxInstance, name: str) -> None:
    port = net.plain.port
    for line in (f"GET http://{name}:{port}/ HTTP/1.1", f"CONNECT {name}:{port} HTTP/1.1"):
        head = f"{line}\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n"
        assert (await send_raw_bytes(box, head.encode(), half_close=True)).startswith(b"HTTP/1.1 200")
    assert [seen.target for seen in net.plain.seen] == ["/"]


async def test_the_environment_tells_programs(box: SandboxInstance) -> None:
    outcome = await run(
        box, "import subprocess; print(subprocess.run(['env'], capture_output=True, text=True).stdout)"
    )
    lines = outcome.stdout.splitlines()
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        assert f"{name}=http://127.0.0.1:3128" in lines
    assert "no_proxy=localhost,127.0.0.1,::1" in lines
    assert "SSL_CERT_FILE=/home/user/.fumehood/ca.pem" in lines


async def test_a_server_of_the_sandbox_itself_needs_no_proxy(box: SandboxInstance) -> None:
    outcome = await run(
        box,
        """
import http.server, threading, urllib.request
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.handle_request, daemon=True).start()
print(urllib.request.urlopen(f"http://localhost:{server.server_port}/").status)
server.server_close()
""",
    )
    assert outcome.stdout == "200\n", outcome


async def test_a_fresh_interpreter_has_it_too(net: EgressNetwork) -> None:
    box = await net.create(PLAIN, SECURE, fresh_interpreter=True)
    assert await fetch_through_proxy(box, f"https://{SECURE}:{net.secure.port}/f") == "GET /f"
    await box.destroy()


async def test_each_request_of_a_connection_is_checked(net: EgressNetwork, box: SandboxInstance) -> None:
    """Keep-alive and pipelining: the first two are served over one connection, the third is not passed on."""
    port = net.plain.port
    before = net.plain.connections
    answer = await send_raw_bytes(
        box,
        b"".join(
            b"GET http://%s:%d/%d HTTP/1.1\r\nHost: %s:%d\r\n\r\n" % (name, port, number, name, port)
            for number, name in enumerate((b"data.test", b"data.test", b"other.test", b"data.test"))
        ),
    )
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.count(b"HTTP/1.1 403") == 1
    assert b"other.test is not on this sandbox's allow-list" in answer
    assert [seen.target for seen in net.plain.seen] == ["/0", "/1"]
    assert net.plain.connections == before + 1
    assert [event.verdict for event in await net.wait_for_events(3)] == ["allowed", "allowed", "refused"]


async def test_a_redirection_is_the_clients_to_follow(net: EgressNetwork, box: SandboxInstance) -> None:
    port = net.plain.port
    inside = f"http://{PLAIN}:{port}/redirect?http://{PLAIN}:{port}/there"
    outside = f"http://{PLAIN}:{port}/redirect?http://other.test:{port}/there"
    assert await fetch_through_proxy(box, inside) == "GET /there"
    assert "HTTPError 403" in await fetch_through_proxy(box, outside)
    assert "HTTPError 403" in await fetch_through_proxy(
        box, f"http://{PLAIN}:{port}/redirect?http://10.0.0.1:{port}/there"
    )
    assert [seen.target for seen in net.plain.seen if seen.target == "/there"] == ["/there"]


async def test_half_closed_connections(net: EgressNetwork, box: SandboxInstance) -> None:
    request = b"GET http://data.test:%d/half HTTP/1.0\r\n\r\n" % net.plain.port
    assert (await send_raw_bytes(box, request, half_close=True)).endswith(b"GET /half")


async def test_a_body_both_ways_at_once(
    net: EgressNetwork, box: SandboxInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers while it reads must not wait for us, nor we for it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        left = 24 << 20
        while left and (data := await reader.read(65536)):
            left -= len(data)
            writer.write(data)
            await writer.drain()

    monkeypatch.setattr(net.plain, "handler", echo)
    outcome = await run(
        box,
        f"""
import socket, threading
size = 24 << 20
s = socket.create_connection(("127.0.0.1", 3128), 60)
s.sendall(b"POST http://data.test:{net.plain.port}/ HTTP/1.1\\r\\nHost: data.test:{net.plain.port}\\r\\n"
          b"Connection: close\\r\\nContent-Length: %d\\r\\n\\r\\n" % size)
threading.Thread(target=s.sendall, args=(bytes(size),)).start()
count = 0
while data := s.recv(1 << 20):
    count += data.count(0)
print(count)
""",
        timeout=100,
    )
    assert outcome.stdout == f"{24 << 20}\n", outcome


async def test_a_response_without_a_length(
    net: EgressNetwork, box: SandboxInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def until_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\n\r\nall of it")
        await writer.drain()
        writer.write_eof()
        await reader.read()

    monkeypatch.setattr(net.plain, "handler", until_the_end)
    assert await fetch_through_proxy(box, f"http://{PLAIN}:{net.plain.port}/") == "all of it"


async def test_the_first_usable_address_is_taken(
    net: EgressNetwork,
    named_box: SandboxInstance,
    names: Callable[[dict[str, list[list[str]]]], TableResolver],
) -> None:
    """Bad ones in an answer are skipped, dead ones passed over; the name is looked up once."""
    table = names({PLAIN: [["10.0.0.1", "::1", "127.0.0.9", "127.0.0.1"]]})
    assert await fetch_through_proxy(named_box, f"http://{PLAIN}:{net.plain.port}/") == "GET /"
    assert table.asked == [PLAIN]


async def test_two_sandboxes_do_not_share(net: EgressNetwork) -> None:
    one, two = await net.create(PLAIN), await net.create(SECURE)
    plain, secure = f"http://{PLAIN}:{net.plain.port}/", f"https://{SECURE}:{net.secure.port}/"
    assert await fetch_through_proxy(one, plain) == "GET /"
    assert await fetch_through_proxy(two, secure) == "GET /"
    assert "Forbidden" in await fetch_through_proxy(one, secure)
    assert "HTTPError 403" in await fetch_through_proxy(two, plain)
    await asyncio.gather(one.destroy(), two.destroy())


async def test_logs_tell_domains_and_nothing_else(
    net: EgressNetwork, box: SandboxInstance, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "fumehood")
    await fetch_through_proxy(
        box, f"http://{PLAIN}:{net.plain.port}/private-path?q=1", Cookie="private-cookie"
    )
    await net.wait_for_events(1)
    record = next(record for record in caplog.records if record.msg == "egress_request")
    assert record.__dict__["fields"]["domain"] == PLAIN
    assert record.__dict__["fields"]["instance"] == box.id
    assert "private" not in caplog.text
    assert not any("private" in str(record.__dict__) for record in caplog.records)
