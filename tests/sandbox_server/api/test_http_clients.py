"""Clients that speak HTTP in other ways: upgrades, HTTP/1.0, HEAD, no Host."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fumehood.sandbox_server.api.http_operations import OPERATIONS
from tests.support.http_clients import needs_curl, needs_java, post_from_curl, post_from_java
from tests.support.raw_http_connection import RawConnection, RawResponse, open_connection
from tests.support.sandbox_runs import settings
from tests.support.sandbox_server import RunningServer, run_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
CODE: dict[str, Any] = {"code": f"print(len({'x' * 50_000!r}))"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[RunningServer]:
    async with run_server(settings(preload=(), capacity=4)) as server:
        await server.client.create_sandbox("box")
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def connection(running: RunningServer) -> AsyncIterator[RawConnection]:
    async with open_connection(int(running.where.rpartition(":")[2])) as connection:
        yield connection


def post(path: str, body: dict[str, Any], headers: bytes = b"", version: str = "1.1") -> bytes:
    encoded = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    return head + headers + b"Content-Length: %d\r\n\r\n%b" % (len(encoded), encoded)


def collect_printed(body: str | bytes) -> str:
    """What the code printed, of a stream of events."""
    events = [json.loads(line) for line in body.splitlines() if line]
    assert events[-1]["status"] == "ok"
    return "".join(event["text"] for event in events if event["type"] == "stdout")


@pytest.mark.parametrize("upgrade", [H2C, b"connection: upgrade\r\nupgrade: websocket\r\n"])
async def test_code_runs_although_the_upgrade_is_declined(connection: RawConnection, upgrade: bytes) -> None:
    for _ in range(2):
        await connection.send(post("/sandboxes/box/execute", CODE, upgrade))
        answer = await connection.read_response()
        assert (answer.status, collect_printed(answer.body)) == (200, "50000\n")


@needs_java
async def test_javas_own_client(running: RunningServer, tmp_path: Path) -> None:
    answers = await post_from_java(f"{running.where}/sandboxes/box/execute", CODE, tmp_path)
    assert [*answers] == ["length", "chunks", "expect", "lines"]
    for status, body in answers.values():
        assert (status, collect_printed(body.replace("|", "\n"))) == (200, "50000\n")


@needs_curl
async def test_curl_with_http2(running: RunningServer) -> None:
    for options in ((), ("--header", "transfer-encoding: chunked"), ("--header", "expect: 100-continue")):
        status, body = await post_from_curl(f"{running.where}/sandboxes/box/execute", CODE, *options)
        assert (status, collect_printed(body)) == (200, "50000\n")


@pytest.mark.parametrize("headers", [b"", b"Connection: keep-alive\r\n"])
async def test_events_for_http_10(connection: RawConnection, headers: bytes) -> None:
    await connection.send(post("/sandboxes/box/execute", CODE, headers, "1.0"))
    answer = await connection.read_response()
    assert (answer.status, collect_printed(answer.body)) == (200, "50000\n")
    assert answer.headers["connection"] == "close"
    assert not {"transfer-encoding", "content-length"} & set(answer.headers)
    assert connection.reader.at_eof()


async def test_a_request_without_a_host_is_refused(connection: RawConnection) -> None:
    await connection.send(b"GET /health HTTP/1.1\r\n\r\n")
    answer = await connection.read_response()
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_request")
    assert b"Host" in answer.body
    assert await connection.reader.read() == b""


async def test_head_is_served_where_get_is(running: RunningServer, connection: RawConnection) -> None:
    """With the same headers, on one connection, so that a body where none belongs would be noticed."""
    await running.client.request("PUT", "/sandboxes/box/files/a.txt", b"a" * 200_000)
    await running.client.run_code("box", "print(1)", execution_id="ran")
    paths = [operation.path for operation in OPERATIONS if operation.method == "GET"]
    assert len(paths) > 6
    for path in paths:
        path = path.replace("{id}", "box").replace("{execution_id}", "ran").replace("{path}", "a.txt")
        answers: dict[str, RawResponse] = {}
        for method in ("GET", "HEAD"):
            await connection.send(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answers[method] = await connection.read_response(head=method == "HEAD")
        asked, told = answers["GET"], answers["HEAD"]
        assert told.status == asked.status == 200, path
        asked.headers.pop("transfer-encoding", None)  # which says how a body comes, and there is none
        if path in (
            "/metrics",
            "/health",
            "/sandboxes",
            "/sandboxes/box",
            "/sandboxes/box/files",
        ):  # contain times
            asked.headers.pop("content-length")
            assert int(told.headers.pop("content-length")) > 0
        assert told.headers == asked.headers, path
    assert (await running.client.request("HEAD", "/sandboxes/none")).status == 404


async def test_head_does_not_wait_for_the_end_of_an_execution(
    running: RunningServer, connection: RawConnection
) -> None:
    body = {"code": "print('begun', flush=True)\nimport time\ntime.sleep(600)", "execution_id": "long"}
    await connection.send(post("/sandboxes/box/execute", body))
    assert (await connection.read_head())[0] == 200
    answer = await running.client.request("HEAD", "/sandboxes/box/executions/long")
    assert (answer.status, answer.headers["fumehood-execution-id"]) == (200, "long")
    assert (await running.client.request("POST", "/sandboxes/box/interrupt")).json == {"interrupted": True}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/sandbox/box", "/sandboxes/{id}"),
        ("/healthz", "/health"),
        ("/sandboxes/box/file/a", "/sandboxes/{id}/files/{path}"),
        ("/nothing", None),
    ],
)
async def test_an_unknown_route_says_what_is_served(
    running: RunningServer, path: str, meant: str | None
) -> None:
    answer = await running.client.request("GET", path)
    assert answer.error == (404, "not_found", None)
    message = answer.json["error"]["message"]
    assert message.startswith(f"Unknown request URL: GET {path}. ")
    assert (f"Did you mean {meant}? " in message) if meant else ("Did you mean" not in message)
    served = message.partition("Served here: ")[2].rstrip(".").split(", ")
    paths = dict.fromkeys(operation.path for operation in OPERATIONS if "{" not in operation.path)
    assert served == list(paths)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "The body is empty"),
        (b" \n", "The body is empty"),
        (rb'{"code":"\ud800"}', "lone surrogate at byte 9 "),
        (rb'{"code":"1 \udc00 and so on and on"}', "lone surrogate at byte 11 "),
        (b'{"code":"\xed\xa0\x80"}', "lone surrogate at byte 9 "),
    ],
)
@pytest.mark.parametrize("path", ["/execute", "/sandboxes/box/execute"])
async def test_what_is_wrong_with_a_body_is_named(
    running: RunningServer, path: str, body: bytes, told: str
) -> None:
    answer = await running.client.request("POST", path, body, headers={"content-type": "application/json"})
    assert answer.error == (400, "invalid_request", "body")
    assert told in answer.json["error"]["message"]
