"""Clients that leave at any point: one line of the log each, no traceback, nothing goes on without them."""

import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support import gateway_process
from tests.support.disconnecting_clients import DisconnectingClient
from tests.support.gateway_process import GatewayProcess
from tests.support.hostile_models import HostileModels

CLIENTS, EACH = 4, 50
SECONDS = 60
MODELS = ["deltas", "bare-deltas", "direct"]
STARTUP_EVENTS = ("serving", "model_server_degraded")  # logged whenever the start is done with them


UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with HostileModels() as models:
        direct = {"match": "direct", "backend": "direct"}
        off = {"code_interpreter": {"enabled": False}}
        settings = {"models": [*models.settings(), direct], "providers": off}
        with gateway_process.run_gateway(tmp_path_factory.mktemp("gateway"), settings) as gateway:
            yield gateway


def address(running: GatewayProcess) -> tuple[str, int]:
    parts = urlsplit(running.url)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


def get(running: GatewayProcess, path: str) -> bytes:
    with socket.create_connection(address(running), timeout=SECONDS) as sock:
        sock.sendall(b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path.encode())
        return b"".join(iter(lambda: sock.recv(65536), b""))


class Log:
    """What the gateway writes from now on."""

    def __init__(self, running: GatewayProcess) -> None:
        self._running = running
        self._start = len(running.output)

    def lines(self, least: int = 1) -> list[dict[str, Any]]:
        """Once nobody is being answered any more, and there are that many."""
        deadline = time.monotonic() + SECONDS
        while not _is_idle(page := get(self._running, "/metrics")) or len(found := self._found()) < least:
            assert time.monotonic() < deadline, page
            time.sleep(0.05)
        marker = re.search(rb"x-request-id: (\w+)", get(self._running, "/v1/models/none"))
        assert marker is not None
        while not any(marker[1].decode() in line for line in self._running.output[self._start :]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = self._found()
        others = [
            line for line in found if line.get("event") != "model_server_degraded"
        ]  # at the start, by itself
        assert {line["level"] for line in others} <= {"info"}
        assert not [line for line in found if line.get("status", 0) >= 500]
        return found

    def _found(self) -> list[dict[str, Any]]:
        lines = self._running.output[self._start :]
        assert not [line for line in lines if "Traceback" in line]
        found = [json.loads(line) for line in lines if line.startswith("{")]
        found = [line for line in found if line["event"] not in STARTUP_EVENTS]
        return [line for line in found if not line.get("route", "").startswith(("/metrics", "/v1/models"))]


def _is_idle(page: bytes) -> bool:
    running = re.findall(
        rb"\nfumehood_(?:open_streams|open_websockets|model_turns_running)(?:\{.*\})? (.*)", page
    )
    return {float(number) for number in running} == {0.0}


def test_the_log_of_many_who_leave_at_any_point(running: GatewayProcess) -> None:
    log, done = Log(running), list[str]()

    def leave_again_and_again(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(EACH):
            done.append(DisconnectingClient(address(running), dice, MODELS).run())

    threads = [threading.Thread(target=leave_again_and_again, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == CLIENTS * EACH
    assert len(set(done)) == 9
    lines = log.lines(CLIENTS * EACH // 4)
    ids = [line["request_id"] for line in lines if line["event"] == "request"]
    assert len(set(ids)) == len(ids)
    assert [line for line in lines if line["event"] != "request"] == []


def post(model: str, *, stream: bool = True) -> bytes:
    body = json.dumps({"model": model, "input": "hi", "stream": stream}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "blocking"])
def test_a_request_ends_with_its_connection_though_others_wait_behind_it(
    running: GatewayProcess, stream: bool
) -> None:
    log = Log(running)
    with socket.create_connection(address(running), timeout=SECONDS) as sock:
        sock.sendall(post("deltas", stream=stream) + post("direct") + post("direct"))
        if stream:
            assert sock.recv(12) == b"HTTP/1.1 200"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    first, *others = log.lines()
    assert first["model"] == "deltas"
    assert first["outcome"] in ("client disconnected", "cancelled", "failed")
    assert others == []


@pytest.mark.parametrize("after", [b"rubbish\r\n\r\n", UPGRADE], ids=["rubbish", "an upgrade"])
def test_what_cannot_be_served_does_not_get_into_the_answer_before_it(
    running: GatewayProcess, after: bytes
) -> None:
    log = Log(running)
    with socket.create_connection(address(running), timeout=SECONDS) as sock:
        sock.sendall(post("deltas"))
        answer = sock.recv(4096)
        sock.sendall(after)
        while piece := sock.recv(65536):
            answer += piece
    assert answer.count(b"HTTP/1.1") == 1
    assert [line["outcome"] for line in log.lines()] == ["client disconnected"]


@pytest.mark.parametrize(
    "frames",
    [b"\x81\x82\0\0\0\0\xff\xfe", b"\x01\x81\0\0\0\0\xc3\x80\x81\0\0\0\0("],
    ids=["whole", "in fragments"],
)
def test_a_message_that_is_not_text_is_one_line(running: GatewayProcess, frames: bytes) -> None:
    log = Log(running)
    with socket.create_connection(address(running), timeout=SECONDS) as sock:
        sock.sendall(UPGRADE)
        assert sock.recv(4096).startswith(b"HTTP/1.1 101 ")
        sock.sendall(frames)
        closing = b"".join(iter(lambda: sock.recv(4096), b""))
    assert closing[0] == 0x88
    assert closing[2:4] == struct.pack("!H", 1007)
    (line,) = log.lines()
    assert (line["status"], line["close_code"]) == (101, 1007)
