"""All endpoints except streams: responses, headers, errors, pages, files."""

import asyncio
import json
import logging
import re
from typing import Any

import pytest
from inline_snapshot import snapshot

from fumehood import __version__
from fumehood.gateway import gateway_exchange
from fumehood.protocol.openai.api_errors import (
    ModelRateLimited,
    ModelUnreachable,
    PreviousResponseNotFound,
    RateLimited,
)
from tests.support.multipart_bodies import form, form_type, part
from tests.support.raw_http_connection import open_connection
from tests.support.scripted_gateway import ScriptedGateway, run_gateway, send_slowly, text_events
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON_TYPE = {"content-type": "application/json"}
POST = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


# --- making a response --------------------------------------------------------------------------------


async def test_a_response_comes_whole(gateway: ScriptedGateway) -> None:
    answer = await gateway.create_response()
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["output"][0]["content"][0]["text"] == "Hello, world"
    assert answer.json["text"] == {"format": {"type": "text"}, "verbosity": None}
    request = gateway.runs.requests[0]
    assert (request.model, request.input, request.stream) == ("small", "hi", None)


@pytest.mark.parametrize("path", ["/v1/models", "/healthz", "/nowhere", "/v1/responses"])
async def test_every_answer_says_who_made_it(gateway: ScriptedGateway, path: str) -> None:
    answers = [await gateway.request("GET", path) for _ in range(2)]
    for answer in answers:
        assert answer.headers["fumehood-version"] == __version__
        assert answer.headers["openai-processing-ms"].isdecimal()
    assert answers[0].headers["x-request-id"] != answers[1].headers["x-request-id"]


async def test_a_key_is_accepted_and_ignored(gateway: ScriptedGateway) -> None:
    answer = await gateway.request("GET", "/v1/models", headers={"authorization": "Bearer whatever"})
    assert answer.status == 200


async def test_what_newer_clients_send_is_tolerated(gateway: ScriptedGateway) -> None:
    answer = await gateway.create_response(
        client_metadata={"a": 1},
        metadata=None,
        tools=[{"type": "namespace", "x": []}],
        stream=None,
        user=None,
    )
    assert answer.status == 200


# --- what cannot be served ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"model": 1}, "invalid_type", "model"),
        ({"model": ""}, "invalid_value", "model"),
        ({"input": 3}, "invalid_type", "input"),
        ({"include": ["nonsense"]}, "invalid_value", "include[0]"),
        ({"include": ["code_interpreter_call.outputs", 7]}, "invalid_type", "include[1]"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"max_tool_calls": 0}, "invalid_value", "max_tool_calls"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "invalid_value", "metadata"),
        ({"metadata": {"a": "\0"}}, "invalid_value", "metadata"),
        ({"model": "a\0b"}, "invalid_value", "model"),
        ([], "invalid_type", None),
        ("text", "invalid_type", None),
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"{} {}", "invalid_json", None),
        (b'{"input":"\xff"}', "invalid_json", None),
        (b'{"tools":[{"type":"x","a":"\xff"}]}', "invalid_json", None),
        (b'{"input":"\\ud800"}', "invalid_json", None),
        (b'{"tools":["\\ud800 "]}', "invalid_json", None),
        (b'{"input":"\x00"}', "invalid_json", None),
        (b'{"input":' + b"[" * 20_000 + b"]" * 20_000 + b"}", "invalid_json", None),
        (b'{"other":' + b'{"a":' * 15_000, "invalid_json", None),
    ],
)
async def test_a_bad_body_is_refused_with_the_name_of_what_is_wrong(
    gateway: ScriptedGateway, body: Any, code: str, param: str | None
) -> None:
    answer = await gateway.request("POST", "/v1/responses", body)
    assert answer.error == (400, code, param)
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert gateway.runs.requests == []


async def test_a_refusal_reads_like_openais(gateway: ScriptedGateway) -> None:
    answer = await gateway.request("POST", "/v1/responses", {"model": "m", "input": 3})
    assert answer.json == snapshot(
        {
            "error": {
                "message": "Invalid type for 'input': expected str or array, but got int instead.",
                "type": "invalid_request_error",
                "param": "input",
                "code": "invalid_type",
            }
        }
    )


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_a_body_that_a_web_page_could_send_unasked_is_refused(
    gateway: ScriptedGateway, kind: str
) -> None:
    answer = await gateway.request("POST", "/v1/responses", {"model": "m"}, headers={"content-type": kind})
    assert answer.status == 400
    assert "Content-Type: application/json" in answer.json["error"]["message"]


async def test_a_compressed_body_is_refused(gateway: ScriptedGateway) -> None:
    answer = await gateway.request("POST", "/v1/responses", b"x", headers={"content-encoding": "zstd"})
    assert answer.error == (400, None, None)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("a.localhost", 200),
        ("Known.Example:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:8080", 403),
        ("[::1]", 200),
        ("[::1]evil.example", 403),
        ("[::1]evil.localhost", 403),
        ("[::1]:80evil.example", 403),
        ("[evil.example]", 403),
        ("[::1", 403),
        ("localhost:80@evil.example", 403),
        ("localhost:evil", 403),
        ("::1", 403),
    ],
)
async def test_a_name_that_is_not_ours_is_refused(host: str, status: int) -> None:
    from fumehood.gateway.authentication import AnonymousAuthenticator

    async with run_gateway(authenticator=AnonymousAuthenticator(("known.example",))) as gateway:
        for _ in range(2):
            assert (await gateway.request("GET", "/v1/models", headers={"host": host})).status == status


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"transfer-encoding: chunked", 200),
        (b"transfer-encoding: Chunked ", 200),
        (b"transfer-encoding: gzip, chunked", 400),
        (b"transfer-encoding: chunked, chunked", 400),
        (b"transfer-encoding: gzip\r\ntransfer-encoding: chunked", 400),
        (b"transfer-encoding: identity\r\ntransfer-encoding: chunked", 400),
        (b"transfer-encoding: chunked\r\nte: trailers", 200),
        (b"transfer-encoding: chunked\r\nte: gzip, chunked", 400),
        (b"transfer-encoding: gzip", 400),
    ],
)
async def test_a_body_comes_in_chunks_or_as_it_is(
    gateway: ScriptedGateway, header: bytes, status: int
) -> None:
    async with gateway.open_connection() as (reader, writer):
        writer.write(POST + header + b'\r\n\r\n20\r\n{"model": "small", "input": "x"}\r\n0\r\n\r\n')
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), head
        if status == 400:
            body = await reader.read()  # and nothing that follows on this connection is a request
            assert (
                json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["error"]["type"]
                == "invalid_request_error"
            )
    assert bool(gateway.runs.requests) == (status == 200)


async def test_whole_answers_come_in_order_and_the_last_one_closes(gateway: ScriptedGateway) -> None:
    async with gateway.open_connection() as (reader, writer):
        one = b"GET %s HTTP/1.1\r\nhost: localhost\r\n%s\r\n"
        writer.write(one % (b"/healthz", b"") + one % (b"/readyz", b"connection: close\r\n"))
        found = await reader.read()
    first, second = re.split(rb"(?<=\})(?=HTTP)", found)
    assert first.endswith(b'\r\n\r\n{"status":"ok"}')
    assert second.endswith(b'\r\n\r\n{"status":"ready"}')
    assert b"content-length: 15\r\n" in first
    assert b"\r\ndate: " in first
    assert b"connection: close" not in first
    assert b"\r\nconnection: close\r\n" in second


async def test_a_large_body_is_refused_while_it_comes(gateway: ScriptedGateway) -> None:
    async def endless() -> Any:
        for _ in range(1000):
            yield b" " * 10_000

    answer = await gateway.session.post(gateway.url("/v1/responses"), data=endless(), headers=JSON_TYPE)
    assert answer.status == 413
    assert json.loads(await answer.read())["error"]["code"] == "request_too_large"
    answer.close()


async def test_a_caller_who_leaves_early_is_no_error(
    gateway: ScriptedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fumehood.gateway"):
        async with gateway.open_connection() as (_, writer):
            writer.write(POST + b"content-length: 10\r\n\r\n{")
            await writer.drain()
        await wait_until(
            lambda: "disconnected before" in str([getattr(record, "fields", "") for record in caplog.records])
        )
    assert {record.levelno for record in caplog.records} == {logging.INFO}


@pytest.mark.parametrize(
    ("rejection", "expected", "retry"),
    [
        (PreviousResponseNotFound("no", param="x"), (400, "previous_response_not_found", "x"), None),
        (RateLimited("later", retry_after=7), (429, "rate_limit_exceeded", None), "7"),
        (ModelRateLimited("busy"), (429, "rate_limit_exceeded", None), None),
        (ModelUnreachable("gone"), (502, "server_error", None), None),
    ],
)  # fmt: skip
async def test_what_the_engine_refuses(
    gateway: ScriptedGateway, rejection: Exception, expected: Any, retry: str | None
) -> None:
    gateway.runs.rejection = rejection
    for streamed in (False, True):
        answer = await gateway.create_response(stream=streamed)
        assert answer.error == expected
        assert answer.headers.get("retry-after") == retry


async def test_a_fault_of_ours_is_a_500_that_tells_nothing_and_is_logged_once(
    gateway: ScriptedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.runs.rejection = RuntimeError("a secret")
    answer = await gateway.create_response()
    assert answer.error == (500, "server_error", None)
    assert b"secret" not in answer.body
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert answer.headers["x-request-id"] in errors[0].getMessage()


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/", 404, None),
        ("GET", "/responses", 404, None),
        ("POST", "/v1/responses/", 404, None),
        ("PUT", "/v1/responses", 405, "GET, HEAD, POST"),
        ("PUT", "/v1/responses/resp_1", 405, "DELETE, GET, HEAD"),
        ("POST", "/v1/models", 405, "GET, HEAD"),
        ("OPTIONS", "/v1/responses", 405, "GET, HEAD, POST"),
        ("GET", "/v1/responses/{response_id}", 404, None),
        ("GET", "/%ff", 404, None),
        ("GET", "/v1/responses/%00", 404, None),
    ],
)
async def test_where_nothing_is(
    gateway: ScriptedGateway, method: str, path: str, status: int, allow: str | None
) -> None:
    answer = await gateway.request(method, path)
    assert answer.status == status
    assert answer.headers.get("allow") == allow
    assert answer.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)), 400),
        (POST + b"content-length: 100001\r\n\r\n", 413),
    ],
    ids=["not HTTP", "endless head", "large body"],
)
async def test_what_is_refused_by_its_head(gateway: ScriptedGateway, sent: bytes, status: int) -> None:
    async with open_connection(gateway.port) as connection:
        await connection.send(sent)
        answer = await connection.read_response()
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"


# --- the server itself --------------------------------------------------------------------------------


async def test_health_readiness_and_figures() -> None:
    reason: str | None = "It still starts."

    async def unready() -> str | None:
        return reason

    async with run_gateway(readiness_problem=unready) as gateway:
        assert (await gateway.request("GET", "/healthz")).json == {"status": "ok"}
        refused = await gateway.request("GET", "/readyz")
        assert (refused.status, refused.json["error"]["message"]) == (503, reason)
        reason = None
        assert (await gateway.request("GET", "/readyz")).json == {"status": "ready"}
        await gateway.create_response()
        await gateway.request("GET", "/v1/responses/resp_very_secret")
        figures = await gateway.request("GET", "/metrics")
    text = figures.body.decode()
    assert figures.headers["content-type"].startswith("text/plain")
    assert 'fumehood_requests_total{route="/v1/responses",status="200"} 1.0' in text
    assert 'fumehood_requests_total{route="/v1/responses/{response_id}",status="404"} 1.0' in text
    assert 'fumehood_responses_total{status="completed"} 1.0' in text
    assert 'fumehood_tokens_total{direction="output"} 3.0' in text
    assert "very_secret" not in text


async def test_one_line_a_request_without_content(
    gateway: ScriptedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fumehood.gateway"):
        for streamed in (False, True):
            answer = await gateway.create_response(input="the secret plan", stream=streamed)
            fields: dict[str, Any] = getattr(caplog.records[-1], "fields")  # noqa: B009
            assert fields.pop("ms") > 0
            assert fields.pop("request_id") == answer.headers["x-request-id"]
            assert fields.pop("response_id") == gateway.runs.runs[-1].id
            assert fields == {
                "method": "POST",
                "route": "/v1/responses",
                "status": 200,
                "model": "small",
                "outcome": "completed",
                "input_tokens": 0,
                "output_tokens": 3,
            } | ({"events": 11} if streamed else {})
    assert len(caplog.records) == 2
    assert "secret" not in caplog.text


async def test_a_stopped_server_lets_streams_end() -> None:
    async with run_gateway() as gateway:
        gateway.runs.script = lambda response: [text_events(response)[:2]]
        async with gateway.post_response(stream=True) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
            gateway.server.stop()
            body = await reader.readuntil(b"0\r\n\r\n")
        await gateway.task
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert gateway.runs.drained == 1.0
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", gateway.port)


async def test_a_second_stop_is_at_once() -> None:
    async with run_gateway() as gateway:
        gateway.runs.script = lambda response: [text_events(response)[:2]]
        gateway.runs.stubborn = True
        async with gateway.post_response(stream=True) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
            gateway.server.stop()
            await gateway.runs.draining.wait()
            assert not gateway.task.done()
            gateway.server.stop()
            async with asyncio.timeout(4):  # less than connections are waited for otherwise
                await gateway.task


@pytest.mark.parametrize("size", [1, 10_000], ids=["stops", "drips"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/files"])
async def test_a_body_that_stops_or_drips(path: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_exchange, "_BODY_TIMEOUT", 0.2)
    kind = "application/json" if path == "/v1/responses" else form_type()["content-type"]
    async with run_gateway() as gateway, gateway.open_connection() as (reader, writer):
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n"
            "content-length: 100000\r\n\r\n".encode()
        )
        dripping = asyncio.ensure_future(
            send_slowly(writer, form([part("file", b"x" * 10_000, "x.txt")])[:size])
        )
        head = await reader.readuntil(b"\r\n\r\n")
        dripping.cancel()
        body = await reader.readuntil(b"}}")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert b"1024 bytes per second" in body


async def test_figures_may_be_hidden() -> None:
    async with run_gateway(serve_metrics=False) as gateway:
        assert (await gateway.request("GET", "/metrics")).status == 404
