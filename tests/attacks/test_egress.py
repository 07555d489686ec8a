"""Attacks on and through the egress proxy, as root's and as an ordinary user's sandbox."""

import http.server
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

import pytest

from tests.attacks.conftest import PRELUDE, Residue, start_driver
from tests.support.driver_client import Driver, SandboxClient, Who
from tests.support.waiting import becomes_true

VALUE = f"sk-{secrets.token_hex(16)}-{secrets.token_hex(16)}"


@dataclass
class Outside:
    """A driver whose sandboxes may reach one server on loopback; `port` is its port."""

    driver: Driver
    port: int

    def create(self, **secret: str) -> SandboxClient:
        network: dict[str, Any] = {"type": "allowlist", "allowed_domains": ["site.test"]}
        if secret:
            network["domain_secrets"] = [{"domain": "site.test", **secret}]
        box = self.driver.create(network=network)
        assert box.run(PRELUDE).end.status == "ok"
        return box


@pytest.fixture(scope="module")
def outside(who: Who) -> Iterator[Outside]:
    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's word
            pass

    residue = Residue()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        port = site.server_port
        with start_driver(
            who,
            residue,
            pool=0,
            preload=[],
            egress="allowlist",
            egress_hosts={"site.test": "127.0.0.1"},
            egress_private_networks=["127.0.0.1/32"],
            egress_ports=[port],
        ) as driver:
            yield Outside(driver, port)
            residue.note(driver)
        site.shutdown()
    residue.assert_none()
    residue.close()


@pytest.fixture
def reaching(outside: Outside) -> Iterator[SandboxClient]:
    """A fresh sandbox with an allow-list; afterwards nothing of it is left in the supervisor."""
    files = outside.driver.info()["open_files"]
    box = outside.create()
    yield box
    box.destroy()
    assert becomes_true(lambda: outside.driver.info()["open_files"] <= files), (
        "descriptors outlived the sandbox"
    )


FETCH = """
    import urllib.request
    def fetch():
        return urllib.request.urlopen("http://site.test:PORT/", timeout=30).read().decode()
"""


def program(outside: Outside, text: str) -> str:
    return dedent(FETCH + text).replace("PORT", str(outside.port))


def test_a_flood_of_connections(outside: Outside, reaching: SandboxClient) -> None:
    """Opened and dropped, filled with noise, left open: the proxy serves on, here and next door."""
    neighbour = outside.create()
    text = """
    import threading
    stop = time.monotonic() + 3
    def flood(noise):
        while time.monotonic() < stop:
            try:
                s = socket.create_connection(("127.0.0.1", 3128), 1)
                s.sendall(noise)
                if noise:
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
                s.close()
            except OSError:
                pass
    rest = b" HTTP/1.1\\r\\nHost: site.test:PORT\\r\\n\\r\\n"
    noises = [b"", b"\\0" * 9000, b"GET ", (b"GET http://site.test:PORT/" + rest) * 50,
              b"CONNECT site.test:PORT" + rest + b"\\x16\\x03\\x01\\x40\\0" + bytes(5000)]
    threads = [threading.Thread(target=flood, args=(noise,)) for noise in noises]
    [t.start() for t in threads]
    [t.join() for t in threads]
    report(fetch())
    """
    running = reaching.start("import time\n" + program(outside, text), timeout=60)
    assert (
        neighbour.ask(program(outside, "    report([fetch() for _ in range(20)])"), timeout=60) == ["ok"] * 20
    )
    running.wait()
    assert '"ok"' in str(running.events), running.events[-3:]
    neighbour.destroy()


def test_more_connections_than_descriptors(outside: Outside, reaching: SandboxClient) -> None:
    text = """
    held = []
    try:
        for _ in range(1000):
            s = socket.socket(); s.setblocking(False); held.append(s)
            attempt(s.connect, ("127.0.0.1", 3128))
    except OSError:
        pass
    report(len(held))
    """
    assert reaching.ask(program(outside, text)) > 500
    assert outside.driver.info()["open_files"] < 200
    neighbour = outside.create()
    assert neighbour.ask(program(outside, "    report(fetch())")) == "ok"
    neighbour.destroy()


def test_a_neighbours_proxy_is_not_ones_own(outside: Outside, reaching: SandboxClient) -> None:
    closed = outside.driver.create()
    assert closed.run(PRELUDE).end.status == "ok"
    assert closed.ask('report(attempt(socket.create_connection, ("127.0.0.1", 3128), 5))') == "ECONNREFUSED"
    # Posing as the proxy harms the one who does.
    pose = 'listener = socket.create_server(("127.0.0.1", 3128)); report("posing")'
    assert closed.ask(pose) == "posing"
    assert reaching.ask(program(outside, "    report(fetch())")) == "ok"
    taken = 'report(attempt(socket.create_server, ("127.0.0.1", 3128)))'
    assert reaching.ask(taken) == "EADDRINUSE"
    closed.destroy()


def test_a_secret_is_in_no_sandbox(outside: Outside) -> None:
    """Neither in the one it is for nor in one that is forked after it."""
    text = """
    first, second = {first!r}.encode(), {second!r}.encode()
    found = 0
    memory = open("/proc/self/mem", "rb", 0)
    for line in open("/proc/self/maps").readlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if not line.split()[1].startswith("rw"):
            continue
        try:
            memory.seek(start)
            data = memory.read(end - start)
        except (OSError, OverflowError):
            continue
        at = data.find(first)
        while at >= 0:
            found += data[at + len(first):at + len(first) + len(second)] == second
            at = data.find(first, at + 1)
    report([found, os.environ.get("SITE_KEY")])
    """
    half = len(VALUE) // 2
    search = dedent(text.format(first=VALUE[:half], second=VALUE[half:]))
    box = outside.create(name="SITE_KEY", value=VALUE)
    later = outside.create()
    assert box.ask(search) == [0, "$SITE_KEY"]
    assert later.ask(search) == [0, None]
    box.destroy()
    later.destroy()
