"""Clients with unusual HTTP: upgrades, HTTP/1.0, HEAD, no Host."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fumehood.protocol.openai.responses import Response
from tests.support.http_clients import needs_curl, needs_java, post_from_curl, post_from_java
from tests.support.raw_http_connection import RawConnection, RawResponse, open_connection
from tests.support.scripted_gateway import ScriptedGateway, raw_items

pytestmark = pytest.mark.asyncio(loop_scope="module")

H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
REQUEST: dict[str, Any] = {"model": "small", "input": "hi " * 30_000}
CHANGING = {"date", "x-request-id", "openai-processing-ms"}


@pytest_asyncio.fixture(loop_scope="module")
async def connection(gateway: ScriptedGateway) -> AsyncIterator[RawConnection]:
    async with open_connection(gateway.port) as connection:
        yield connection


def post(body: dict[str, Any], headers: bytes = b"", version: bytes = b"1.1", host: bool = True) -> bytes:
    encoded = json.dumps(body).encode()
    return (
        b"POST /v1/responses HTTP/%b\r\n%bContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
        % (
            version,
            b"Host: localhost\r\n" if host else b"",
            headers,
            len(encoded),
            encoded,
        )
    )


def final_response(body: bytes, streamed: bool = True) -> Any:
    if not streamed:
        return json.loads(body)
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")][-1]["response"]


# --- upgrades -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("upgrade", [H2C, b"connection: upgrade\r\nupgrade: websocket\r\n"])
async def test_a_response_although_the_upgrade_is_declined(
    gateway: ScriptedGateway, connection: RawConnection, upgrade: bytes
) -> None:
    for streamed in (False, True, False):
        await connection.send(post({**REQUEST, "stream": streamed}, upgrade))
        answer = await connection.read_response()
        assert (answer.status, final_response(answer.body, streamed)["status"]) == (200, "completed")
    assert [request.input for request in gateway.runs.requests] == [REQUEST["input"]] * 3


async def test_a_websocket_is_still_opened_after_a_declined_upgrade(
    gateway: ScriptedGateway, connection: RawConnection
) -> None:
    await connection.send(post(REQUEST, H2C))
    assert (await connection.read_response()).status == 200
    await connection.send(
        b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert (await connection.read_response()).status == 101


@needs_java
@pytest.mark.parametrize("streamed", [False, True])
async def test_javas_own_client(gateway: ScriptedGateway, tmp_path: Path, streamed: bool) -> None:
    body = {**REQUEST, "stream": streamed}
    answers = await post_from_java(f"{gateway.base}/v1/responses", body, tmp_path)
    assert [*answers] == ["length", "chunks", "expect", "lines"]
    for status, answer in answers.values():
        lines = answer.replace("|", "\n") if streamed else answer
        assert (status, final_response(lines.encode(), streamed)["status"]) == (200, "completed")
    assert [request.input for request in gateway.runs.requests] == [REQUEST["input"]] * 4


@needs_curl
@pytest.mark.parametrize(
    "options", [(), ("--header", "transfer-encoding: chunked"), ("--header", "expect: 100-continue")]
)
async def test_curl_with_http2(gateway: ScriptedGateway, options: tuple[str, ...]) -> None:
    body = {"model": "small", "input": "hi " * 10_000}
    for streamed in (False, True):
        status, answer = await post_from_curl(
            f"{gateway.base}/v1/responses", {**body, "stream": streamed}, *options
        )
        assert (status, final_response(answer.encode(), streamed)["status"]) == (200, "completed")
    assert [request.input for request in gateway.runs.requests] == [body["input"]] * 2


# --- HTTP/1.0 and Host --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("headers", [b"", b"Connection: keep-alive\r\n"])
async def test_a_stream_for_http_10(connection: RawConnection, headers: bytes, host: bool) -> None:
    await connection.send(post({**REQUEST, "stream": True}, headers, b"1.0", host))
    answer = await connection.read_response()
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["connection"] == "close"
    assert not {"transfer-encoding", "content-length"} & set(answer.headers)
    assert answer.body.startswith(b"event: response.created\n")
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert final_response(answer.body)["status"] == "completed"
    assert connection.reader.at_eof()


async def test_a_request_without_a_host_is_refused(
    gateway: ScriptedGateway, connection: RawConnection
) -> None:
    await connection.send(post(REQUEST, host=False))
    answer = await connection.read_response()
    assert answer.status == 400
    error = json.loads(answer.body)["error"]
    assert error["type"] == "invalid_request_error"
    assert "Host" in error["message"]
    assert await connection.reader.read() == b""
    assert gateway.runs.requests == []


# --- HEAD ---------------------------------------------------------------------------------------------


async def create_objects(gateway: ScriptedGateway) -> dict[str, str]:
    """Something at every path; the ids to put into them."""
    response = Response(id="resp_1", created_at=1, model="m", status="completed")
    await gateway.store.delete_response("", "resp_1")
    items = raw_items({"type": "message", "id": "msg_1", "role": "user"})
    await gateway.store.commit_response(None, "", response, items)
    gateway.files.add("cfile_1", "/mnt/data/a.txt", b"a" * 100_000, b"b" * 1000, b"c")
    upload = await gateway.upload("a.txt", b"x" * 300_000)
    assert upload.status == 200, upload
    container = await gateway.request("POST", "/v1/containers", {"name": "c"})
    return {
        "response_id": "resp_1",
        "model": "small",
        "container_id": container.json["id"],
        "file_id": "cfile_1",
        "upload_id": upload.json["id"],
    }


async def test_head_is_served_where_get_is(gateway: ScriptedGateway, connection: RawConnection) -> None:
    """With the same headers, on one connection, so that a body where none belongs would be noticed."""
    ids = await create_objects(gateway)
    paths = [path for method, path in gateway.app.routes if method == "GET"]
    assert len(paths) > 12
    for path in paths:
        for name, value in ids.items():
            path = path.replace(f"{{{name}}}", value).replace(f"{{{name}:path}}", value)
        if "/files/cfile_1" in path:
            path = path.replace(ids["container_id"], "cntr_1")
        for headers in (b"", b"Range: bytes=0-9\r\n", b"Origin: http://localhost\r\n"):
            answers: dict[bytes, RawResponse] = {}
            for method in (b"GET", b"HEAD"):
                await connection.send(
                    b"%b %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (method, path.encode(), headers)
                )
                answers[method] = await connection.read_response(head=method == b"HEAD")
            get_answer, head_answer = answers[b"GET"], answers[b"HEAD"]
            assert head_answer.status == get_answer.status, path
            assert get_answer.status in ((426,) if path == "/v1/responses" else (200, 206)), (
                path,
                get_answer,
            )
            expected = {name: value for name, value in get_answer.headers.items() if name not in CHANGING}
            expected.pop("transfer-encoding", None)  # which says how a body comes, and there is none
            found = {name: value for name, value in head_answer.headers.items() if name not in CHANGING}
            if path == "/metrics":  # whose values change
                expected.pop("content-length")
                assert int(found.pop("content-length")) > 0
            assert found == expected, path
        assert answers[b"HEAD"].body == b""


async def test_head_reads_no_file(gateway: ScriptedGateway) -> None:
    """A download is counted by what was sent."""
    ids = await create_objects(gateway)
    downloaded = 'fumehood_file_bytes_total{direction="out"}'
    before = await read_metric(gateway, downloaded)
    path = f"/v1/files/{ids['upload_id']}/content"
    answer = await gateway.request("HEAD", path)
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "300000", b"")
    assert (await gateway.request("HEAD", "/v1/files/file_none/content")).status == 404
    assert await read_metric(gateway, downloaded) == before
    await gateway.request("GET", path)
    assert await read_metric(gateway, downloaded) == before + 300_000


async def read_metric(gateway: ScriptedGateway, name: str) -> float:
    lines = (await gateway.request("GET", "/metrics")).body.decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


async def test_head_where_only_post_is(gateway: ScriptedGateway) -> None:
    answer = await gateway.request("HEAD", "/v1/responses/compact")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


# --- unknown routes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/responses", "/v1/responses"),
        ("/v1/responses/", "/v1/responses"),
        ("/v1/v1/responses", "/v1/responses"),
        ("/v1/response/resp_1", "/v1/responses/{response_id}"),
        ("/v1/files/file_1/contents", "/v1/files/{upload_id}/content"),
        ("/v1/model", "/v1/models"),
        ("/v1/completions", "/v1/chat/completions"),
        ("/v1/images/generations", None),
        ("/", None),
        ("/" + "x" * 5000, None),
    ],
)
async def test_an_unknown_route_says_what_is_served(
    gateway: ScriptedGateway, path: str, meant: str | None
) -> None:
    answer = await gateway.request("POST", path, {})
    assert answer.status == 404
    message = answer.json["error"]["message"]
    assert message.startswith(f"Unknown request URL: POST {path[:200]}. ")
    assert (f"Did you mean {meant}? " in message) if meant else ("Did you mean" not in message)
    listed_paths = message.partition("Served here: ")[2].rstrip(".").split(", ")
    assert listed_paths == list(dict.fromkeys(path for _, path in gateway.app.routes if "{" not in path))
    assert ":path" not in message


async def test_route_syntax_is_not_shown(gateway: ScriptedGateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fumehood.gateway"):
        answer = await gateway.request("DELETE", "/v1/models/org/large")
        assert (await gateway.request("GET", "/v1/models/org/large")).status == 200
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    assert "/v1/models/{model};" in answer.json["error"]["message"]
    assert [getattr(record, "fields")["route"] for record in caplog.records] == ["/v1/models/{model}"] * 2  # noqa: B009
    metrics_page = (await gateway.request("GET", "/metrics")).body.decode()
    assert 'route="/v1/models/{model}"' in metrics_page
    assert ":path" not in metrics_page + (await gateway.request("GET", "/openapi.json")).body.decode()
