"""The chat completions backend against a server on a real socket."""

import asyncio
import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import pytest
from inline_snapshot import snapshot
from msgspec import Raw

from fumehood.models.chat_completions.chat_backend import ChatCompletionsBackend
from fumehood.models.chat_completions.chat_stream_parser import ChatStreamParser
from fumehood.models.model_settings import ModelSettings
from fumehood.models.upstream.http1_client import PooledHttpClient
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    GenerationParameters,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import (
    InvalidRequest,
    ModelError,
    ModelRateLimited,
    ModelRejectedRequest,
    ModelTimeout,
    ModelUnreachable,
)
from fumehood.protocol.openai.responses import ReasoningConfig, TextConfig, TextFormat, Usage
from fumehood.protocol.openai.tool_specs import ModelToolDefinition
from tests.support.conversations import message, segment
from tests.support.raw_model_server import (
    BREAK_CONNECTION,
    DONE,
    UPSTREAM_KEY,
    Responder,
    chunk,
    data,
    document,
    error,
    open_backend,
    says,
    stream,
)

REQUEST = ModelRequest(model="small", segments=[segment(message("hi"))])
FUNCTION = ModelToolDefinition(name="f", description="Does f.", parameters=Raw(b'{"type":"object"}'))


upstream = partial(open_backend, ChatCompletionsBackend)


async def turn(backend: ChatCompletionsBackend, request: ModelRequest = REQUEST) -> list[AnyModelEvent]:
    return [event async for batch in backend.stream(request) for event in batch]


# --- what is sent -------------------------------------------------------------------------------------


async def test_minimal_request() -> None:
    async with upstream(stream(says("a")), headers={"x-team": "blue"}) as (backend, server):
        assert await turn(backend) == [ModelTextDelta("a"), ModelTurnEnded("stop")]
    (received,) = server.requests
    assert (received.method, received.path) == ("POST", "/v1/chat/completions")
    assert received.headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert received.headers["x-team"] == "blue"
    assert received.headers["content-type"] == "application/json"
    assert received.json == {
        "messages": [{"role": "user", "content": "hi"}],
        "model": "small",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_request_with_all_fields() -> None:
    schema = {"type": Raw(b'"object"')}
    request = ModelRequest(
        model="small",
        instructions="Be brief.",
        segments=[segment(message("hi"))],
        function_tools=[
            FUNCTION,
            ModelToolDefinition(name="g", description="", parameters=Raw(b"{}"), strict=True),
        ],
        tool_choice=FUNCTION,
        parallel_calls=False,
        sampling=GenerationParameters(
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            top_logprobs=3,
            max_output_tokens=100,
            text=TextConfig(
                format=TextFormat(
                    type="json_schema", name="out", description="d", schema=schema, strict=True
                ),
                verbosity="low",
            ),
            reasoning=ReasoningConfig(effort="high"),
            service_tier="flex",
            prompt_cache_key="k",
            safety_identifier="s",
            user="u",
        ),
    )
    settings = {"name": "org/small", "max_tokens_field": "max_completion_tokens"}
    extra = {"service_tier": None, "temperature": 0.7, "chat_template_kwargs": {"thinking": True}}
    async with upstream(stream(says("a")), **settings, extra_body=extra) as (backend, server):
        await turn(backend, request)
    assert server.requests[0].json == snapshot(
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
            "model": "org/small",
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "description": "Does f.", "parameters": {"type": "object"}},
                },
                {
                    "type": "function",
                    "function": {"name": "g", "description": "", "parameters": {}, "strict": True},
                },
            ],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "temperature": 0.7,
            "top_p": 0.9,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "user": "u",
            "max_completion_tokens": 100,
            "logprobs": True,
            "top_logprobs": 3,
            "reasoning_effort": "high",
            "verbosity": "low",
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "out",
                    "schema": {"type": "object"},
                    "description": "d",
                    "strict": True,
                },
            },
            "chat_template_kwargs": {"thinking": True},
        }
    )


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", None),
        ("none", "none"),
        ("required", "required"),
        (FUNCTION, {"type": "function", "function": {"name": "f"}}),
    ],
)
async def test_choices(choice: object, sent: object) -> None:
    request = ModelRequest(
        model="m",
        segments=REQUEST.segments,
        function_tools=[FUNCTION],
        tool_choice=choice,  # pyright: ignore[reportArgumentType]
    )
    async with upstream(stream(says("a"))) as (backend, server):
        await turn(backend, request)
    assert server.requests[0].json.get("tool_choice") == sent
    assert "parallel_tool_calls" not in server.requests[0].json


async def test_tool_fields_are_omitted_without_functions() -> None:
    request = ModelRequest(model="m", segments=REQUEST.segments, tool_choice="none", parallel_calls=False)
    async with upstream(stream(says("a"))) as (backend, server):
        await turn(backend, request)
    assert server.requests[0].json.keys() == {"messages", "model", "stream", "stream_options"}


async def test_other_formats_and_fields() -> None:
    sampling = GenerationParameters(
        max_output_tokens=5, text=TextConfig(format=TextFormat(type="json_object"))
    )
    plain = GenerationParameters(text=TextConfig(format=TextFormat(type="text")))
    requests = [
        ModelRequest(model="m", segments=REQUEST.segments, sampling=each) for each in (sampling, plain)
    ]
    async with upstream(stream(says("a")), stream(says("a")), extra_body={"stream_options": None}) as (
        backend,
        server,
    ):
        for request in requests:
            await turn(backend, request)
    first, second = (received.json for received in server.requests)
    assert (first["max_tokens"], first["response_format"]) == (5, {"type": "json_object"})
    assert "stream_options" not in first
    assert "response_format" not in second


async def test_requests_that_are_not_streamed() -> None:
    request = ModelRequest(model="m", segments=REQUEST.segments, streamed=False)
    answer = document(b'{"choices":[{"message":{"content":"a"},"finish_reason":"length"}]}')
    async with upstream(answer, extra_body={"stream_options": {"include_usage": True}}) as (backend, server):
        assert await turn(backend, request) == [ModelTextDelta("a"), ModelTurnEnded("length")]
    assert server.requests[0].json["stream"] is False
    assert "stream_options" not in server.requests[0].json


async def test_api_key_header() -> None:
    async with upstream(stream(says("a")), api_key_header="api-key") as (backend, server):
        await turn(backend)
    assert server.requests[0].headers["api-key"] == UPSTREAM_KEY
    assert "authorization" not in server.requests[0].headers


async def test_a_large_request_body() -> None:
    text = "x" * 3_000_000
    async with upstream(stream(says("a"))) as (backend, server):
        await turn(backend, ModelRequest(model="m", segments=[segment(message(text))]))
    assert server.requests[0].json["messages"][0]["content"] == text


async def test_content_that_cannot_be_rendered_is_not_sent() -> None:
    request = ModelRequest(model="m", segments=[segment(message([{"type": "input_hologram"}]))])
    async with upstream() as (backend, server):
        with pytest.raises(InvalidRequest, match="input_hologram"):
            backend.validate_request(request)
        with pytest.raises(InvalidRequest):
            await turn(backend, request)
    assert server.requests == []


# --- what comes ---------------------------------------------------------------------------------------


async def test_events_of_one_read_are_one_batch() -> None:
    go = asyncio.Event()
    chunks = [chunk({"content": "a"}) + chunk({"content": "b"}), go, chunk({"content": "c"}) + says("d")]
    async with upstream(stream(*chunks)) as (backend, _), aclosing(backend.stream(REQUEST)) as batches:
        assert await anext(batches) == [ModelTextDelta("a"), ModelTextDelta("b")]
        go.set()
        rest: list[Sequence[AnyModelEvent]] = [batch async for batch in batches]
        assert rest == [[ModelTextDelta("c"), ModelTextDelta("d"), ModelTurnEnded("stop")]]


async def test_accepted_batches_are_not_yielded() -> None:
    first, second = asyncio.Event(), asyncio.Event()
    offered: list[Sequence[AnyModelEvent]] = []

    def handle_event(batch: Sequence[AnyModelEvent]) -> bool:
        offered.append(batch)
        second.set()
        return batch == [ModelTextDelta("b")]

    chunks = [chunk({"content": "a"}), first, chunk({"content": "b"}), second, says("c")]
    async with (
        upstream(stream(*chunks)) as (backend, _),
        aclosing(backend.stream(REQUEST, handle_event)) as batches,
    ):
        assert await anext(batches) == [ModelTextDelta("a")]  # before which nothing is offered
        assert offered == []
        first.set()
        rest = [event async for batch in batches for event in batch]
    assert offered[0] == [ModelTextDelta("b")]
    assert (
        rest
        == [ModelTextDelta("c"), ModelTurnEnded("stop")]
        == [event for batch in offered[1:] for event in batch]
    )


async def test_connections_are_reused_between_turns() -> None:
    answers = [
        stream(says("a")),
        stream(says("b")),
        document(b'{"choices":[{"message":{"content":"c"}}]}'),
        error("400 Bad Request", {"error": "no"}),
        stream(says("d")),
    ]
    async with upstream(*answers) as (backend, server):
        for text in "abc":
            assert await turn(backend) == [ModelTextDelta(text), ModelTurnEnded("stop")]
        with pytest.raises(ModelRejectedRequest):
            await turn(backend)
        async with aclosing(backend.stream(REQUEST)) as batches:  # and by one who leaves at the end
            async for batch in batches:
                if isinstance(batch[-1], ModelTurnEnded):
                    break
    assert server.connections == 1


async def test_late_usage_and_a_body_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.models.upstream.http_backend._USAGE_TIMEOUT", 0.05)
    usage = data({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
    for more, expected in [(b"", None), (usage, Usage(input_tokens=1, output_tokens=2, total_tokens=3))]:
        never = asyncio.Event()
        async with upstream(stream(chunk({"content": "a"}, finish="stop"), more, never)) as (backend, server):
            assert await turn(backend) == [ModelTextDelta("a"), ModelTurnEnded("stop", expected)]
            await server.client_disconnected.wait()


async def test_a_connection_that_breaks_after_the_end_is_no_error() -> None:
    async with upstream(stream(chunk({"content": "a"}, finish="stop"), BREAK_CONNECTION)) as (backend, _):
        assert await turn(backend) == [ModelTextDelta("a"), ModelTurnEnded("stop")]


async def test_closing_the_stream_disconnects_from_the_server() -> None:
    async with upstream(stream(chunk({"content": "a"}), asyncio.Event())) as (backend, server):
        async with aclosing(backend.stream(REQUEST)) as batches:
            await anext(batches)
        await asyncio.wait_for(server.client_disconnected.wait(), 10)


# --- failures -----------------------------------------------------------------------------------------


async def failure(*answers: Responder, **settings: Any) -> ModelError:
    async with upstream(*answers, **settings) as (backend, _):
        with pytest.raises(ModelError) as caught:
            await turn(backend)
    assert UPSTREAM_KEY not in repr(caught.value) + str(caught.value.__cause__) + caught.value.message
    return caught.value


CREDENTIALS = {"error": {"message": f"Incorrect API key provided: {UPSTREAM_KEY}"}}
BUSY = {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}
TOO_LONG = {"status": 400, "wire_code": "context_length_exceeded", "param": "input"}


async def answer_with_smtp(_: object, writer: asyncio.StreamWriter) -> bool:
    writer.write(f"220 mail.example {UPSTREAM_KEY}\r\n\r\n".encode())
    await writer.drain()
    return False


def fail_with_bytes(status: str) -> Responder:
    return document(b"\xff" * 200_000, status, headers={"Location": "http://127.0.0.1:1/"})


@pytest.mark.parametrize(
    ("answer", "error_class", "words", "attributes"),
    [
        *(
            (
                error(status, CREDENTIALS),
                ModelError,
                (
                    f"The server of the model 'small' does not accept the gateway's credentials (HTTP {status[:3]}); "
                    "the operator of the gateway must check the model's api_key_env."
                ),
                {"status": 502},
            )
            for status in ("401 Unauthorized", "403 Forbidden")
        ),
        *(
            (error(status, body), ModelRejectedRequest, "rejected the request as too long", TOO_LONG)
            for status, body in (
                (
                    "400 Bad Request",
                    {
                        "error": {
                            "message": "This model's maximum context length is 8192 tokens.",
                            "code": "context_length_exceeded",
                        }
                    },
                ),
                ("400 Bad Request", {"object": "error", "message": "the prompt is too long", "code": 400}),
                ("413 Payload Too Large", {"error": "request too large"}),
                (
                    "500 Internal Server Error",
                    {"error": {"message": "exceeds the available context size", "code": 500}},
                ),
            )
        ),
        (
            error(
                "422 Unprocessable Entity",
                {"error": {"message": f"bad\nvalue for {UPSTREAM_KEY}", "code": "bad_value"}},
            ),
            ModelRejectedRequest,
            "The server of the model 'small' refused the request (HTTP 422): bad value for [hidden].",
            {"status": 400, "type": "invalid_request_error", "wire_code": "bad_value"},
        ),
        (
            error("400 Bad Request", {"detail": [{"msg": "field required", "loc": ["body"]}]}),
            ModelRejectedRequest,
            ": field required.",
            {},
        ),
        (
            error("404 Not Found", {"error": {"message": "no model small", "code": "model_not_found"}}),
            ModelRejectedRequest,
            "no model small",
            {"wire_code": "model_not_found"},
        ),
        (document(b"<html>Not here</html>", "404 Not Found"), ModelError, "base_url", {}),
        (
            error("429 Too Many Requests", BUSY, headers={"Retry-After": "7"}),
            ModelRateLimited,
            "slow down",
            {"status": 429, "retry_after": 7.0, "wire_code": "rate_limit_exceeded"},
        ),
        (
            error("429 Too Many Requests", BUSY, headers={"Retry-After": "Fri, 31 Dec 1999"}),
            ModelRateLimited,
            "slow down",
            {"retry_after": None},
        ),
        (
            error("429 Too Many Requests", {"error": {"message": "pay", "code": "insufficient_quota"}}),
            ModelRateLimited,
            "pay",
            {"wire_code": "insufficient_quota"},
        ),
        (fail_with_bytes("500 Internal Server Error"), ModelError, "500", {}),
        (fail_with_bytes("502 Bad Gateway"), ModelUnreachable, "502", {}),
        (fail_with_bytes("503 Service Unavailable"), ModelUnreachable, "503", {}),
        (fail_with_bytes("504 Gateway Timeout"), ModelUnreachable, "504", {}),
        (fail_with_bytes("408 Request Timeout"), ModelTimeout, "408", {}),
        (fail_with_bytes("307 Temporary Redirect"), ModelError, "307", {}),
        (answer_with_smtp, ModelError, "is not valid HTTP", {}),
    ],
)
async def test_failure(
    answer: Responder, error_class: type[ModelError], words: str, attributes: dict[str, object]
) -> None:
    raised = await failure(answer)
    assert type(raised) is error_class
    assert words in raised.message
    assert len(raised.message) < 500
    assert {name: getattr(raised, name) for name in attributes} == attributes


async def test_read_timeout() -> None:
    raised = await failure(stream(chunk({"content": "a"}), asyncio.Event()), read_timeout=0.05)
    assert isinstance(raised, ModelTimeout)
    assert (raised.status, raised.message) == (
        504,
        "The server of the model 'small' sent nothing for 0.05 seconds.",
    )


async def test_no_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = PooledHttpClient()
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        backend = ChatCompletionsBackend(ModelSettings(base_url=url), client)
        with pytest.raises(ModelUnreachable) as caught:
            await turn(backend)
        await client.close()
        with pytest.raises(ModelUnreachable, match="closing its connections"):
            await turn(backend)
    assert caught.value.message == "The server of the model 'small' cannot be reached: Connection refused."


async def test_nothing_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await failure(error("401 Unauthorized", {"error": UPSTREAM_KEY}))
    await failure(stream(chunk({"content": "a"}), data({"error": {"message": UPSTREAM_KEY}})))
    assert UPSTREAM_KEY not in caplog.text


async def test_keys_are_not_shown() -> None:
    async with upstream() as (backend, _):
        assert UPSTREAM_KEY not in repr(backend)
        assert UPSTREAM_KEY not in repr(vars(backend)["_settings"])


# --- counting -----------------------------------------------------------------------------------------


async def test_a_server_that_counts_is_asked() -> None:
    answers = [
        document(b'{"count": 77, "max_model_len": 4096, "tokens": [1, 2, 3]}'),
        document(b'{"count": -1}'),
        error("404 Not Found", {}),
    ]
    request = ModelRequest(
        model="small", instructions="Be brief.", segments=REQUEST.segments, function_tools=[FUNCTION]
    )
    extra = {"chat_template_kwargs": {"think": False}, "top_k": 1}
    async with upstream(*answers, tokenize_path="/tokenize", name="served", extra_body=extra) as (
        backend,
        server,
    ):
        assert backend.get_profile("small").counts_tokens
        assert await backend.count_tokens(request) == (77, True)
        for _ in range(2):
            with pytest.raises(ModelError):
                await backend.count_tokens(request)
    received = server.requests[0]
    assert received.path == "/v1/tokenize"
    assert received.headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert received.json == snapshot(
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
            "model": "served",
            "add_generation_prompt": True,
            "chat_template_kwargs": {"think": False},
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "description": "Does f.", "parameters": {"type": "object"}},
                }
            ],
        }
    )


async def test_the_count_uses_the_clients_template_arguments() -> None:
    passed = {"chat_template_kwargs": Raw(b'{"think":false}'), "seed": Raw(b"1"), "n": Raw(b"2")}
    request = msgspec.structs.replace(REQUEST, sampling=GenerationParameters(passthrough=passed))
    async with upstream(document(b'{"count": 7}'), tokenize_path="/tokenize") as (backend, server):
        assert await backend.count_tokens(request) == (7, True)
    received = server.requests[0].json
    assert received["chat_template_kwargs"] == {"think": False}
    assert not {"seed", "n"} & set(received)


async def test_the_count_is_an_estimate() -> None:
    async with upstream() as (backend, _):
        tokens, exact = await backend.count_tokens(REQUEST)
        assert not backend.get_profile("small").counts_tokens
    assert not exact
    assert 10 < tokens < 100


async def test_the_profile_is_as_configured() -> None:
    async with upstream(context_window=8192, takes_images=True) as (backend, _):
        profile = backend.get_profile("anything")
    assert (profile.context_window, profile.takes_images) == (8192, True)


# --- its list of models -------------------------------------------------------------------------------


async def test_cards() -> None:
    listed = {"object": "list", "data": [{"id": "a", "created": 5, "owned_by": "vllm"}, {"id": "b"}]}
    async with upstream(error("200 OK", listed)) as (backend, server):
        assert [(card.id, card.created, card.owned_by) for card in await backend.server.list_models()] == [
            ("a", 5, "vllm"),
            ("b", 0, "upstream"),
        ]
    assert (server.requests[0].method, server.requests[0].path) == ("GET", "/v1/models")
    assert server.requests[0].headers["authorization"] == f"Bearer {UPSTREAM_KEY}"


async def test_a_malformed_model_list() -> None:
    async with upstream(document(b"[]"), stream(DONE)) as (backend, _):
        for _ in range(2):
            with pytest.raises(ModelError, match="list of models"):
                await backend.server.list_models()


# --- much at once -------------------------------------------------------------------------------------

LONG = "é\n" * 300_000
WHOLE = msgspec.json.encode({"choices": [{"message": {"content": LONG}, "finish_reason": "stop"}]})


@pytest.mark.parametrize("answer", [stream(says(LONG)), document(WHOLE)], ids=["line", "document"])
async def test_a_long_answer_is_parsed_in_a_worker_and_split_into_deltas(
    answer: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.get_ident()
    read: list[bool] = []
    handle_event = ChatStreamParser._handle_event  # pyright: ignore[reportPrivateUsage]

    def record_thread(*arguments: Any) -> bool:
        read.append(threading.get_ident() != here)
        return handle_event(*arguments)

    monkeypatch.setattr(ChatStreamParser, "_handle_event", record_thread)
    async with upstream(answer) as (model, _):
        request = msgspec.structs.replace(REQUEST, streamed=False)
        batches = [batch async for batch in model.stream(request)]
    texts = [event.delta for batch in batches for event in batch if isinstance(event, ModelTextDelta)]
    assert "".join(texts) == LONG
    assert max(map(len, texts)) <= 1 << 16
    assert max(map(len, batches)) == 1
    assert read[0]
