"""Hostile HTTP against a real server: generated from its OpenAPI document, and by hand.

Whatever comes, the answer is no 5xx, the server lives, and the connection is not left hanging.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig

from fumehood.sandbox_server.api.openapi import build_document
from fumehood.sandbox_server.settings import SandboxServerSettings
from tests.support import sandbox_runs
from tests.support.sandbox_server import RunningServer, run_server

EXAMPLES = 20
bounded = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
)
LIMITS: dict[str, Any] = {"preload": (), "capacity": 6, "request_bytes": 100_000, "output_bytes": 100_000}


def _schema() -> Any:
    generation = GenerationConfig(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    config = SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(generation=generation)))
    return schemathesis.openapi.from_dict(
        build_document(SandboxServerSettings(), protected=False), config=config
    )


schema = _schema()


class Server:
    """A server on a loop of its own: what attacks it here is blocking code."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._done: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.running: RunningServer | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        async with run_server(sandbox_runs.settings(**LIMITS)) as self.running:
            await self.running.client.create_sandbox("box")
            self._ready.set()
            await self._done.wait()

    @property
    def where(self) -> str:
        assert self.running is not None
        return self.running.where

    def close(self) -> None:
        assert self._loop is not None
        assert self._done is not None
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(60)

    def raw(self, request: bytes, *, half_close: bool = True) -> bytes:
        """What comes back for bytes that may be anything."""
        host, port = self.where.removeprefix("http://").split(":")
        answer = b""
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            try:
                sock.sendall(request)
                if half_close:
                    sock.shutdown(socket.SHUT_WR)
                while chunk := sock.recv(65536):
                    answer += chunk
            except OSError:  # the server has hung up
                pass
        return answer

    def alive(self) -> bool:
        request = (
            b"POST /sandboxes/box/execute HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: 14\r\n\r\n"
        )
        return b'"status":"ok"' in self.raw(request + b'{"code":"6*7"}', half_close=False)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def check_answer(answer: bytes) -> int | None:
    """The status of the first answer, which is one that the contract knows; None for a closed connection."""
    if not answer:
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    status = int(lines[0].split()[1])
    assert status < 500, answer
    assert b"fumehood-sandbox-protocol: 1" in lines, head
    if status >= 400 and b"content-type: application/json" in lines and body:
        assert json.loads(body.partition(b"HTTP/1.1 ")[0])["error"]["message"]
    return status


@schema.parametrize()
@bounded
def test_what_the_description_allows_and_what_it_does_not(case: Any, server: Server) -> None:
    given: object = case.body
    if isinstance(given, dict):
        body = cast("dict[str, Any]", given)
        body.pop("requirements", None)  # packages come from a network
        if "timeout_seconds" in body:
            body["timeout_seconds"] = 1
    wanted = case.path_parameters.get("id") if case.path_parameters else None
    if (
        wanted is not None
        and len(str(wanted)) % 2
        and (case.method, len(case.path_parameters)) != ("DELETE", 1)
    ):
        case.path_parameters["id"] = "box"  # half of the time one that lives
    response = case.call(base_url=server.where, timeout=30)
    assert response.status_code < 500, (case, response.text)
    assert response.headers["fumehood-sandbox-protocol"][0] == "1"
    described = case.operation.definition.raw["responses"]
    assert str(response.status_code) in {*described, "405"}, (response.status_code, response.text)
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


tokens = st.sampled_from(
    [b"GET", b"POST", b"PUT", b"/health", b"/sandboxes/box", b"/sandboxes/box/files/x", b"/execute", b" ", b"\r\n",
     b"\r\n\r\n", b"\n", b"\0", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"host: localhost", b"content-length: 5",
     b"hello", b"content-type: application/json",
     b"content-length: -1", b"content-length: 99999999999999999999", b"transfer-encoding: chunked", b"0\r\n\r\n",
     b"5\r\nhello\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"zz\r\n", b"expect: 100-continue", b"upgrade: websocket",
     b"connection: upgrade", b"connection: close", b"authorization: Bearer \xff", b"\xff\xfe", b"%ff", b"%00", b"?",
     b"#", b"..", b"{", b'{"code":"1"}', b"content-type: text/plain;charset=\x00", b": empty", b"x" * 300]
)  # fmt: skip


@bounded
@given(parts=st.lists(tokens | st.binary(max_size=20), max_size=30))
def test_bytes_that_are_hardly_http(server: Server, parts: list[bytes]) -> None:
    check_answer(server.raw(b"".join(parts)))


paths = st.sampled_from(["/sandboxes/box/execute", "/execute", "/sandboxes/box", "/sandboxes/box/files/x"])
jsonish = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["\0", "\ud800", "\u202e", "a" * 5000, 10**400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from(
    ["code", "timeout_seconds", "execution_id", "files", "memory", "tenant", "network", "requirements", "x"]
)


@bounded
@given(
    path=paths,
    body=st.dictionaries(fields, jsonish, max_size=6).map(lambda found: json.dumps(found).encode())
    | jsonish.map(lambda found: json.dumps(found).encode())
    | st.binary(max_size=200),
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                ["authorization", "x-y", "fumehood-sandbox-protocol", "content-type", "cookie", "accept"]
            ),
            st.binary(max_size=30).map(lambda raw: raw.translate(None, b"\r\n\0")),
        ),
        max_size=4,
    ),
)
def test_odd_bodies_and_headers(
    server: Server, path: str, body: bytes, headers: list[tuple[str, bytes]]
) -> None:
    method = "POST" if path.endswith("execute") else "PUT"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n".encode()
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n".encode()
    head += b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers)
    assert check_answer(server.raw(head + b"\r\n" + body, half_close=False)) is not None


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 300 + b"\r\n", {400}),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 200_000, {400, None}),
        (b"GET /" + b"x" * 200_000, {400, None}),
        (
            b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
            {400},
        ),
        (
            (
                b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
                b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
            ),
            {400},
        ),
        (
            b"PUT /sandboxes/box/files/x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            {400, None},
        ),
        (
            b"PUT /sandboxes/box/files/x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\nzz\r\n",
            {400, None},
        ),
        (b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", {400}),
        (b"GET http://[::1/health HTTP/1.1\r\nhost: localhost\r\n\r\n", {400}),
        (b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n", {400, 404, None}),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", {400, 404, None}),
        (
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
            {200},
        ),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50, {200}),
        (b"GET /health?" + b"a&" * 1000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", {200}),
        (b"GET /sandboxes?" + b"a&" * 1000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", {400}),
        (b"PUT /sandboxes/box/files/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nhalf", {None}),
    ],
    ids=range(16),
)
def test_by_hand(server: Server, request_bytes: bytes, expected: set[int | None]) -> None:
    assert check_answer(server.raw(request_bytes)) in expected
    assert server.alive()
