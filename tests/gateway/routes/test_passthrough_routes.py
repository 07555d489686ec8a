"""Chat completions and embeddings that the gateway passes through to a model server."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fumehood.gateway.authentication import AnonymousAuthenticator, ApiKeyAuthenticator
from fumehood.gateway.gateway_metrics import GatewayMetrics
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.gateway.request_log import BufferedRequestLog, logger
from fumehood.gateway_stats import GatewayStats
from fumehood.models.model_settings import ModelSettings
from fumehood.models.registry import open_model_registry
from fumehood.protocol.api_keys import ApiKeyLimits
from fumehood.testing import FakeClock, MemoryStore
from tests.support import raw_model_server
from tests.support.prometheus_page import MetricsPage
from tests.support.raw_model_server import (
    BREAK_CONNECTION,
    DONE,
    UPSTREAM_KEY,
    RawModelServer,
    ReceivedRequest,
    Responder,
    chunk,
    data,
    document,
    error,
    says,
    stream,
)
from tests.support.recording_clock import RecordingClock
from tests.support.scripted_gateway import HttpResponse, ScriptedGateway, run_gateway
from tests.support.two_tenant_gateway import TenantClient, put_key
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
COMPLETION = {"id": "x", "object": "chat.completion", "choices": [{"index": 0}], "usage": USAGE}
CALLERS_KEY = "fh-the-key-of-the-caller"


@asynccontextmanager
async def run_before(
    *answers: Responder, options: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncGenerator[tuple[ScriptedGateway, RawModelServer]]:
    """A gateway whose model server answers with these, and that server."""
    async with raw_model_server.open_raw_model_server(*answers) as server:
        chosen: dict[str, Any] = {"api_key_env": "KEY", "match": "chat*", "retries": 0, **settings}
        entry = ModelSettings(base_url=server.url, **chosen)
        stats = GatewayStats()
        routes = [entry, ModelSettings(match="direct", backend="direct")]
        models = open_model_registry(routes, RecordingClock(), {"KEY": UPSTREAM_KEY}, stats.models)
        behind: dict[str, Any] = {"passthrough": models, "metrics": GatewayMetrics(stats), **(options or {})}
        async with run_gateway(**behind) as gateway:
            yield gateway, server
        await models.close()


async def chat(gateway: ScriptedGateway, **fields: Any) -> HttpResponse:
    return await gateway.request("POST", CHAT, {"model": "chat", "messages": MESSAGES, **fields})


def read_stream(body: bytes) -> list[Any]:
    """The payloads of a stream; [DONE] as it is."""
    events = body.decode().strip().split("\n\n")
    payloads = [event.removeprefix("data:").strip() for event in events if event.startswith("data:")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


# --- what the server is sent ---------------------------------------------------------------------------


async def test_the_server_gets_every_field_as_it_was_and_its_own_model_name() -> None:
    fields: dict[str, Any] = {
        "messages": MESSAGES,
        "temperature": 0.1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "n": 2,
        "nobody_knows": {"x": [1, None]},
    }
    async with run_before(error("200 OK", COMPLETION), name="org/model") as (gateway, server):
        answer = await chat(gateway, **fields)
    (asked,) = server.requests
    assert (asked.method, asked.path) == ("POST", "/v1/chat/completions")
    assert asked.json == {**fields, "model": "org/model"}
    assert (answer.status, answer.json) == (200, COMPLETION)
    assert answer.headers["content-type"] == "application/json"


async def test_numbers_are_passed_on_digit_by_digit() -> None:
    body = b'{"model":"chat","messages":[],"seed":123456789012345678901234567890,"temperature":1.0}'
    async with run_before(error("200 OK", COMPLETION)) as (gateway, server):
        await gateway.request("POST", CHAT, body)
    assert b'"seed":123456789012345678901234567890,"temperature":1.0' in server.requests[0].body


async def test_the_gateways_key_is_sent_and_never_the_callers() -> None:
    async with run_before(error("200 OK", COMPLETION)) as (gateway, server):
        headers = {"authorization": f"Bearer {CALLERS_KEY}", "openai-organization": "org", "cookie": "c=1"}
        await gateway.request("POST", CHAT, {"model": "chat", "messages": []}, headers=headers)
    (asked,) = server.requests
    assert asked.headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert CALLERS_KEY not in str(asked)
    assert not {"cookie", "openai-organization"} & set(asked.headers)


async def test_extra_body_overrides_chat_completions_and_not_embeddings() -> None:
    answers = [error("200 OK", COMPLETION), error("200 OK", {"data": []})]
    async with run_before(*answers, extra_body={"top_k": 20, "user": None}) as (gateway, server):
        await chat(gateway, top_k=5, user="u")
        await gateway.request("POST", "/v1/embeddings", {"model": "chat", "input": "a", "user": "u"})
    assert server.requests[0].json == {"model": "chat", "messages": MESSAGES, "top_k": 20}
    assert server.requests[1].json == {"model": "chat", "input": "a", "user": "u"}
    assert server.requests[1].path == "/v1/embeddings"


# --- bodies that are not passed on ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {"messages": MESSAGES}, (400, "missing_required_parameter", "model")),
        (CHAT, {"model": "chat"}, (400, "missing_required_parameter", "messages")),
        (CHAT, {"model": "chat", "messages": "hi"}, (400, "invalid_type", "messages")),
        (CHAT, {"model": "chat", "messages": [], "stream": "yes"}, (400, "invalid_type", "stream")),
        (CHAT, {"model": "nobody", "messages": []}, (400, "model_not_found", "model")),
        (CHAT, {"model": "direct", "messages": []}, (400, "unsupported_model", "model")),
        ("/v1/embeddings", {"model": "direct", "input": "a"}, (400, "unsupported_model", "model")),
        (CHAT, b"{", (400, "invalid_json", None)),
        (CHAT, b'{"model":"chat","messages":[{"content":["\xff"]}]}', (400, "invalid_json", None)),
    ],
)
async def test_invalid_bodies_name_the_parameter(
    path: str, body: Any, expected: tuple[int, str, str | None]
) -> None:
    async with run_before() as (gateway, server):
        assert (await gateway.request("POST", path, body)).error == expected
    assert server.requests == []


async def test_the_direct_model_says_where_it_works() -> None:
    async with run_before() as (gateway, _):
        answer = await chat(gateway, model="direct")
    assert "POST /v1/responses" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
        {"type": "image_url", "image_url": "file:/etc/passwd"},
        {"type": "video_url", "video_url": {"url": "HTTPS://example.com/a.mp4"}},
        {"type": "audio", "deep": [{"er": "gopher://x"}]},
    ],
)
async def test_urls_are_not_passed_on_unless_the_operator_allows_it(part: dict[str, Any]) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text"}, part]}]
    async with run_before(error("200 OK", COMPLETION)) as (gateway, server):
        answer = await chat(gateway, messages=messages)
        assert answer.error == (400, "invalid_value", "messages[1].content[1]")
        assert "inputs.pass_urls" in answer.json["error"]["message"]
        alone = await chat(gateway, messages=[{"role": "user", "content": part}])
        assert alone.error == (400, "invalid_value", "messages[0].content")
    async with run_before(error("200 OK", COMPLETION), options={"find_url_problem": allow_every_url}) as (
        gateway,
        server,
    ):
        assert (await chat(gateway, messages=messages)).status == 200
    assert server.requests[0].json["messages"] == messages


def allow_every_url(_url: str) -> None:
    return None


async def test_text_and_inline_content_may_look_like_urls() -> None:
    content = [
        {"type": "text", "text": "https://example.com/"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
        {"type": "file", "file": {"filename": "a: b.pdf", "file_data": "data:application/pdf;base64,AA"}},
    ]
    async with run_before(error("200 OK", COMPLETION)) as (gateway, _):
        assert (await chat(gateway, messages=[{"role": "user", "content": content}])).status == 200


async def test_inputs_of_embeddings_have_no_urls_either() -> None:
    async with run_before(error("200 OK", {"data": []})) as (gateway, _):
        inputs: list[Any] = ["http://fine.example", [1, 2], {"image": "http://10.0.0.1/"}]
        body = {"model": "chat", "input": inputs}
        answer = await gateway.request("POST", "/v1/embeddings", body)
        assert answer.error == (400, "invalid_value", "input[2]")
        answer = await gateway.request("POST", "/v1/embeddings", {**body, "input": inputs.pop()})
        assert answer.error == (400, "invalid_value", "input")
        assert (await gateway.request("POST", "/v1/embeddings", body)).status == 200


# --- streams -------------------------------------------------------------------------------------------


async def test_events_arrive_whole_and_while_the_model_writes() -> None:
    goes_on = asyncio.Event()
    second = chunk({"content": "wörld"})
    answer = stream(chunk({"content": "Hel"}), second[:9], goes_on, second[9:], says("!"))
    body = {"model": "chat", "messages": MESSAGES, "stream": True}
    async with (
        run_before(answer) as (gateway, _),
        gateway.session.post(gateway.url(CHAT), json=body) as response,
    ):
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        first = await response.content.readany()
        assert first == chunk({"content": "Hel"}), "half an event was sent"
        goes_on.set()
        rest = await response.content.read()
    assert rest == second + says("!")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
async def test_any_split_of_the_bytes_gives_the_same_events(size: int, line_end: bytes) -> None:
    whole = b": comment\n\n" + says("Hel", "lö") + b"data: after the end\n\n"
    sent = whole.replace(b"\n", line_end)
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    async with run_before(stream(*pieces)) as (gateway, _):
        answer = await chat(gateway, stream=True)
    assert answer.body == b": comment\n\n" + says("Hel", "lö")


@pytest.mark.parametrize("end", [b"", b"data: [DONE]", b"data: [DONE]\n"], ids=["none", "cut", "short"])
async def test_a_finished_stream_ends_with_done(end: bytes) -> None:
    async with run_before(stream(chunk({"content": "a"}), chunk(finish="stop"), end)) as (gateway, _):
        answer = await chat(gateway, stream=True)
    assert read_stream(answer.body)[-1] == "[DONE]"
    assert answer.body.count(DONE) == 1


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((chunk({"content": "Hel"}), BREAK_CONNECTION), "broke before its response was complete"),
        ((chunk({"content": "Hel"}),), "broke before its response was complete"),
        (
            (chunk({"content": "Hel"}), b'data: {"choices": [{"delta"'),
            "broke before its response was complete",
        ),
        ((chunk({"content": "Hel"}), asyncio.Event()), "sent nothing for 0.2 seconds"),
        ((b"<html>hello</html>",), "no stream of events"),
        ((DONE,), "no events"),
        ((chunk({"content": "Hel"}), data({"error": {"message": f"key {UPSTREAM_KEY}"}})), "[hidden]"),
        ((data({"error": {"message": "overloaded", "code": 503}}),), "is unavailable"),
        ((b'data: {"error": {"message": "cut', b"\n\n"), "cannot be decoded"),
    ],
    ids=["cut", "no end", "half an event", "silent", "html", "nothing", "error", "first", "broken error"],
)
async def test_a_stream_that_fails_ends_with_an_error_event(pieces: tuple[Any, ...], words: str) -> None:
    async with run_before(stream(*pieces), read_timeout=0.2) as (gateway, _):
        answer = await chat(gateway, stream=True)
    payloads = read_stream(answer.body)
    assert set(payloads[-1]) == {"error"}
    assert set(payloads[-1]["error"]) == {"message", "type", "code", "param"}
    assert words in payloads[-1]["error"]["message"]
    assert "[DONE]" not in payloads
    assert UPSTREAM_KEY.encode() not in answer.body
    if pieces[0] == chunk({"content": "Hel"}):
        assert payloads[0]["choices"][0]["delta"] == {"content": "Hel"}


async def test_a_document_instead_of_a_stream_is_an_error() -> None:
    answers = [error("200 OK", COMPLETION), error("200 OK", {"error": {"message": "no stream here"}})]
    async with run_before(*answers) as (gateway, _):
        first, second = await chat(gateway, stream=True), await chat(gateway, stream=True)
    assert "sent no stream" in read_stream(first.body)[-1]["error"]["message"]
    assert "no stream here" in read_stream(second.body)[-1]["error"]["message"]


async def test_a_client_that_leaves_ends_the_request_to_the_server() -> None:
    for is_streamed in (True, False):
        pieces = [chunk({"content": "Hel"})] if is_streamed else []
        written: list[str] = []
        lines = BufferedRequestLog(written.append, "json")
        async with run_before(stream(*pieces, asyncio.Event()), options={"request_log": lines}) as (
            gateway,
            server,
        ):
            body = json.dumps({"model": "chat", "messages": [], "stream": is_streamed}).encode()
            async with gateway.open_connection() as (_, writer):
                head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                writer.write(head % CHAT.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body))
                await wait_until(lambda: len(server.requests) == 1)
            await asyncio.wait_for(server.client_disconnected.wait(), 30)


async def test_a_silent_stream_gets_keepalives() -> None:
    goes_on = asyncio.Event()
    body = {"model": "chat", "messages": MESSAGES, "stream": True}
    async with (
        run_before(
            stream(chunk({"content": "a"}), goes_on, says("b")), options={"keepalive_seconds": 0.05}
        ) as (gateway, _),
        gateway.session.post(gateway.url(CHAT), json=body) as response,
    ):
        received = b""
        while b": still here\n\n" not in received:
            received += await response.content.readany()
        goes_on.set()
        received += await response.content.read()
    assert read_stream(received)[-1] == "[DONE]"


# --- documents -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
async def test_a_large_document_is_passed_on_in_pieces(is_chunked: bool) -> None:
    vectors = {"data": [{"embedding": "A" * 3_000_000}], "usage": {"prompt_tokens": 5, "total_tokens": 5}}
    body = json.dumps(vectors).encode()
    answer = (
        stream(body[:2_000_000], body[2_000_000:], kind="application/json") if is_chunked else document(body)
    )
    async with run_before(answer) as (gateway, _):
        response = await gateway.request("POST", "/v1/embeddings", {"model": "chat", "input": ["a"]})
        assert response.body == body
        assert response.headers.get("content-length") == (None if is_chunked else str(len(body)))
        metrics = await read_metrics(gateway)
    assert metrics.value("fumehood_tokens_total", direction="input") == 5


async def test_a_large_document_that_breaks_off_breaks_off_here(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n{" + b" " * 2_000_000)
        await writer.drain()
        writer.transport.abort()
        return False

    async with run_before(answer) as (gateway, _):
        body = json.dumps({"model": "chat", "input": "a"}).encode()
        async with gateway.open_connection() as (reader, writer):
            writer.write(
                b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            received = await reader.read()
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert len(received) < 3_000_000
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "broke off: The connection to the server of this model broke" in said.getMessage()
    assert said.exc_info is None


@pytest.mark.parametrize(
    ("answer", "expected", "words"),
    [
        (document(b"<html>"), (502, "server_error", None), "no JSON document"),
        (document(b""), (502, "server_error", None), "no JSON document"),
        (document(b'{"a":'), (502, "server_error", None), "cannot be decoded"),
        (stream(says("a")), (502, "server_error", None), "no JSON document"),
        (error("200 OK", {"error": "oh"}), (502, "server_error", None), "failed: oh"),
        (raw_model_server.disconnect(), (502, "server_error", None), "broke before"),
        (
            error("401 No", {"error": {"message": f"bad {UPSTREAM_KEY}"}}),
            (502, "server_error", None),
            "credentials",
        ),
        (error("400 Bad", {"error": {"message": "bad", "code": "x_y"}}), (400, "x_y", None), "bad"),
        (
            error("400 Bad", {"error": {"message": "maximum context length is 10"}}),
            (400, "context_length_exceeded", "messages"),
            "too long",
        ),
        (
            error("500 Oh", {"error": {"message": f"at {UPSTREAM_KEY}"}}),
            (502, "server_error", None),
            "[hidden]",
        ),
        (document(b"", "302 Found"), (502, "server_error", None), "has moved"),
        (
            document(b"{}", headers={"Content-Encoding": "gzip"}),
            (502, "server_error", None),
            "compressed",
        ),
    ],
)
async def test_errors_of_the_server_have_openais_form_and_no_secret(
    answer: Responder, expected: tuple[int, str, str | None], words: str
) -> None:
    async with run_before(answer) as (gateway, _):
        response = await chat(gateway)
    assert response.error == expected
    assert words in response.json["error"]["message"]
    assert UPSTREAM_KEY.encode() not in response.body


async def test_a_busy_server_is_asked_again_and_then_passed_on() -> None:
    busy = error("429 Busy", {"error": {"message": "later"}}, headers={"Retry-After": "600"})
    down = error("503 Down", {})
    async with run_before(down, error("200 OK", COMPLETION), busy, retries=1) as (gateway, server):
        assert (await chat(gateway)).status == 200
        answer = await chat(gateway)
    assert answer.error == (429, "rate_limit_exceeded", None)
    assert answer.headers["retry-after"] == "600"
    assert len(server.requests) == 3


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_has_a_deadline(is_streamed: bool) -> None:
    pieces = [chunk({"content": "a"})] if is_streamed else []
    async with run_before(stream(*pieces, asyncio.Event()), options={"max_passthrough_seconds": 0.2}) as (
        gateway,
        server,
    ):
        answer = await chat(gateway, stream=is_streamed)
        await asyncio.wait_for(server.client_disconnected.wait(), 30)
    if is_streamed:
        assert "within 0.2 seconds" in read_stream(answer.body)[-1]["error"]["message"]
    else:
        assert answer.error == (504, "server_error", None)


# --- keys, limits, log and metrics ---------------------------------------------------------------------


async def read_metrics(gateway: ScriptedGateway) -> MetricsPage:
    return MetricsPage.parse((await gateway.request("GET", "/metrics")).body.decode())


async def test_keys_and_scopes_are_required() -> None:
    store = MemoryStore()
    with_scope = await put_key(store, "ann", scopes=["responses"])
    without = await put_key(store, "ben", scopes=["files"])
    async with (
        ApiKeyAuthenticator(store, FakeClock(), AnonymousAuthenticator()) as keys,
        run_before(error("200 OK", COMPLETION), options={"authenticator": keys}) as (gateway, server),
    ):
        for path in (CHAT, "/v1/embeddings"):
            body: dict[str, Any] = {"model": "chat", "messages": [], "input": "a"}
            assert (await gateway.request("POST", path, body)).status == 401
            assert (await TenantClient(gateway, without).ask("POST", path, body)).status == 403
        assert server.requests == []
        assert (await TenantClient(gateway, with_scope).ask("POST", CHAT, body)).status == 200


async def test_rate_body_and_concurrency_limits_hold() -> None:
    limits = RequestLimiter(ApiKeyLimits(requests_per_minute=3, body_bytes=1000), max_concurrent=1)
    waits = stream(chunk({"content": "a"}), asyncio.Event())
    async with run_before(waits, options={"limits": limits}) as (gateway, server):
        body = {"model": "chat", "messages": MESSAGES, "stream": True}
        async with gateway.session.post(gateway.url(CHAT), json=body) as running:
            await running.content.readany()
            busy = await chat(gateway)
            large = await gateway.request("POST", "/v1/embeddings", {"model": "chat", "input": "a" * 1000})
            often = await chat(gateway)
    assert busy.error == (429, "rate_limit_exceeded", None)
    assert "Concurrency limit" in busy.json["error"]["message"]
    assert busy.headers["x-ratelimit-limit-requests"] == "3"
    assert large.error == (413, "request_too_large", None)
    assert "Rate limit reached" in often.json["error"]["message"]
    assert len(server.requests) == 1


async def test_log_and_metrics_count_streams_and_documents(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger.name)
    written: list[str] = []
    lines = BufferedRequestLog(written.append, "json")
    answers = [
        error("200 OK", COMPLETION),
        stream(
            chunk({"content": "secret plan"}),
            chunk(finish="stop"),
            data({"choices": [], "usage": USAGE}),
            DONE,
        ),
        stream(chunk({"content": "a"}), BREAK_CONNECTION),
        error("200 OK", {"data": [], "usage": {"prompt_tokens": 4, "total_tokens": 4}}),
    ]
    async with run_before(*answers, options={"request_log": lines}) as (gateway, _):
        await chat(gateway)
        await chat(gateway, stream=True)
        await chat(gateway, stream=True)
        await gateway.request("POST", "/v1/embeddings", {"model": "chat-embed", "input": "secret plan"})
        metrics = await read_metrics(gateway)
    lines.flush()
    logged = [json.loads(line) for line in "".join(written).splitlines()][:4]
    assert "secret" not in "".join(written)
    assert [(line["route"], line["status"], line["model"], line["outcome"]) for line in logged] == [
        (CHAT, 200, "chat", "completed"),
        (CHAT, 200, "chat", "completed"),
        (CHAT, 200, "chat", "failed"),
        ("/v1/embeddings", 200, "chat-embed", "completed"),
    ]
    assert [line.get("events") for line in logged] == [None, 4, 1, None]
    assert [line.get("output_tokens") for line in logged] == [7, 7, None, 0]
    assert logged[2]["error"] == "server_error"
    assert metrics.value("fumehood_requests_total", route=CHAT, status="200") == 3
    assert metrics.value("fumehood_tokens_total", direction="input") == 11 + 11 + 4
    assert metrics.value("fumehood_stream_events_total") == 5
    assert metrics.value("fumehood_open_streams") == 0
    assert metrics.value("fumehood_model_turns_total", model="chat*", outcome="ended") == 3
    assert metrics.value("fumehood_model_turns_total", model="chat*", outcome="unreachable") == 1
    assert metrics.value("fumehood_model_turns_running", model="chat*") == 0


@pytest.mark.parametrize("path", ["/v1/chat/completion", "/chat/completions", "/v1/embedding"])
async def test_a_path_that_is_almost_right_gets_a_suggestion(path: str) -> None:
    async with run_before() as (gateway, _):
        message: str = (await gateway.request("POST", path, {})).json["error"]["message"]
    expected = "/v1/embeddings" if "embedding" in path else CHAT
    assert f"Did you mean {expected}?" in message


async def test_messages_for_responses_are_sent_to_the_right_path() -> None:
    async with run_before() as (gateway, _):
        answer = await gateway.request("POST", "/v1/responses", {"model": "chat", "messages": MESSAGES})
    assert CHAT in answer.json["error"]["message"]
