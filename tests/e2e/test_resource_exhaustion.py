"""A gateway that is short of memory or of descriptors: it says so, and goes on when there are some again."""

import contextlib
import http.client
import json
import resource
import socket
from collections.abc import Generator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import gateway_process
from tests.support.descriptor_exhaustion import ask, exhaust_descriptors
from tests.support.gateway_process import GatewayProcess
from tests.support.waiting import becomes_true

SECONDS = 60
MEGABYTE = 1 << 20


@pytest.fixture
def running(tmp_path: Path) -> Iterator[GatewayProcess]:
    settings = {
        "models": [{"match": "direct", "backend": "direct"}],
        "providers": {"code_interpreter": {"enabled": False}},
    }
    with gateway_process.run_gateway(tmp_path, settings) as gateway:
        yield gateway
    assert not [line for line in gateway.output if "Traceback" in line]


def connect(running: GatewayProcess) -> socket.socket:
    parts = urlsplit(running.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=SECONDS)


def find_refusals(running: GatewayProcess) -> list[str]:
    return [line for line in running.output if "Rejecting connections" in line]


def test_without_descriptors_connections_are_refused_and_that_is_logged_once(running: GatewayProcess) -> None:
    with contextlib.ExitStack() as stack:
        with exhaust_descriptors(running.process.pid, 20):
            connections = [stack.enter_context(connect(running)) for _ in range(60)]
            answers = [ask(connection, b"/healthz") for connection in connections]
            statuses = [answer[9:12] for answer in answers]
            served_, refused = statuses.count(b"200"), statuses.count(b"503")
            assert served_ >= 10
            assert refused > 0
            assert served_ + refused + statuses.count(b"") == 60  # uvloop closes some without a word
            assert b"\r\nretry-after: " in answers[statuses.index(b"503")]
            # Those that are connected are served.
            assert ask(connections[0], b"/healthz")[9:12] == b"200"
        assert ask(stack.enter_context(connect(running)), b"/healthz")[9:12] == b"200"
    assert becomes_true(lambda: find_refusals(running), SECONDS)
    assert len(find_refusals(running)) == 1


def test_listening_goes_on_when_connections_have_ended(running: GatewayProcess) -> None:
    with exhaust_descriptors(running.process.pid, 20):
        for _ in range(3):
            with contextlib.ExitStack() as stack:
                connections = [stack.enter_context(connect(running)) for _ in range(60)]
                assert {ask(connection, b"/healthz")[9:12] for connection in connections} <= {
                    *(b"200", b"503", b"")
                }
            with contextlib.ExitStack() as stack:
                assert becomes_true(
                    lambda stack=stack: (
                        ask(stack.enter_context(connect(running)), b"/healthz")[9:12] == b"200"
                    ),
                    SECONDS,
                )
    assert len(find_refusals(running)) == 1


@contextlib.contextmanager
def limit_memory(pid: int, spare: int) -> Generator[None]:
    """A process may have so many bytes more than it has."""
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(pid, resource.RLIMIT_AS, (size + spare, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, unlimited)


def create(running: GatewayProcess, body: bytes) -> tuple[int, str | None]:
    """Status and Retry-After of a request; 0 if the connection broke."""
    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=SECONDS)
    try:
        connection.request("POST", "/v1/responses", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers["retry-after"]
    except (ConnectionError, http.client.RemoteDisconnected):
        return 0, None
    finally:
        connection.close()


def test_without_memory_a_valid_request_is_not_called_invalid(running: GatewayProcess) -> None:
    request = {"model": "direct", "input": "ä" * (4 * MEGABYTE)}
    body = json.dumps(request, ensure_ascii=False).encode()
    assert create(running, body)[0] == 200
    answers: list[tuple[int, str | None]] = []
    for spare in (0, 1, 2, 3, 4, 6, 8, 10, 12, 16):
        with limit_memory(running.process.pid, spare * MEGABYTE):
            answers.append(create(running, body))
        assert create(running, b'{"model":"direct","input":"hi"}')[0] == 200
    assert {status for status, _ in answers} <= {0, 200, 503}
    assert (503, "5") in answers
    assert create(running, body)[0] == 200
