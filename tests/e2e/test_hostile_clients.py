"""Clients that send small things without end: nobody else waits for them."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess
from tests.support.health_probe import HealthProbe

SECONDS = 60
_MASK = b"\0\0\0\0"
_UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
_CHUNKED = (
    b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_FORM = (
    b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=BOUND\r\n"
    b"content-length: 500000000\r\n\r\n--BOUND\r\n"
    b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n'
)

WAYS = {
    "requests": (b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"),
    "chunks": (_CHUNKED, b"1\r\nx\r\n"),
    "almost boundaries": (_FORM, b"\r\n--BOUN"),
    "pings": (_UPGRADE, b"\x89\x80" + _MASK),
    "fragments": (_UPGRADE, b"\x00\x81" + _MASK + b"x"),
    "empty fragments": (_UPGRADE, b"\x00\x80" + _MASK),
    "messages": (_UPGRADE, b"\x81\x82" + _MASK + b"{}"),
}
"""By name: what is sent first, and what again and again."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    settings = {
        "models": [{"match": "direct", "backend": "direct"}],
        "providers": {"code_interpreter": {"enabled": False}},
    }
    with gateway_process.run_gateway(tmp_path_factory.mktemp("gateway"), settings) as gateway:
        yield gateway
    assert not [line for line in gateway.output if "Traceback" in line]


def flood(running: GatewayProcess, way: str, stopped: threading.Event) -> Callable[[], None]:
    """Begin to send; what ends it."""
    first, again = WAYS[way]
    parts = urlsplit(running.url)
    sock = socket.create_connection((parts.hostname, parts.port), timeout=SECONDS)
    sock.sendall(first)
    if first is _UPGRADE:
        assert sock.recv(4096).startswith(b"HTTP/1.1 101 ")
        if "fragments" in way:
            sock.sendall(b"\x01\x80" + _MASK)
    block = again * ((256 << 10) // len(again))

    def send() -> None:
        with contextlib.suppress(OSError):
            while not stopped.is_set():
                sock.sendall(block)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()

    def end() -> None:
        stopped.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        thread.join()
        sock.close()

    return end


@pytest.mark.parametrize("way", WAYS)
def test_nobody_waits_for_a_client_that_sends_without_end(running: GatewayProcess, way: str) -> None:
    probe = HealthProbe(running.url, running.process.pid)
    probe.probe()
    probe.seconds.clear()
    ends = [flood(running, way, threading.Event()) for _ in range(2)]
    try:
        for _ in range(40):
            probe.probe()
            time.sleep(0.005)
    finally:
        for end in ends:
            end()
        probe.close()
    assert probe.percentile(0.99) < 0.1
    assert probe.percentile(0.5) < 0.05
