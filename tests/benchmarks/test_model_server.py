"""The benchmark's model server sends what a real one would."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.harness.model_server import TEXT_AFTER_TOOL, ModelConnection, make_code, make_query, make_text
from benchmarks.harness.raw_http_client import RawHttpClient

ASKED = {"role": "user", "content": "Go on."}
CALLED = {"role": "tool", "tool_call_id": "call_1", "content": "1"}


@asynccontextmanager
async def _serving() -> AsyncGenerator[RawHttpClient]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ModelConnection(chunks_a_second=500), "127.0.0.1", 0)
    client = RawHttpClient(port=server.sockets[0].getsockname()[1])
    async with server:
        try:
            yield client
        finally:
            client.close()


def _body(model: str, messages: list[dict[str, str]], **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": messages, **more}).encode()


async def _streamed(client: RawHttpClient, model: str, *messages: dict[str, str]) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should; every one came as an HTTP chunk of its own."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    pieces: list[bytes] = []
    body = _body(model, list(messages) or [ASKED], **options)
    response = await client.request("POST", "/v1/chat/completions", body, pieces.append)
    assert response.status == 200
    assert pieces.pop() == b"data: [DONE]\n\n"
    assert all(piece.startswith(b"data: {") and piece.endswith(b"}\n\n") for piece in pieces)
    return [json.loads(piece.removeprefix(b"data: ")) for piece in pieces]


async def _whole(client: RawHttpClient, model: str, *messages: dict[str, str]) -> dict[str, Any]:
    response = await client.request("POST", "/v1/chat/completions", _body(model, list(messages) or [ASKED]))
    assert response.status == 200
    return json.loads(response.body)["choices"][0]


def _deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


@pytest.mark.parametrize("model", ["burst-60", "paced-60"])
async def test_a_text_comes_in_as_many_chunks_as_the_model_is_called_after(model: str) -> None:
    async with _serving() as client:
        chunks = await _streamed(client, model)
        whole = await _whole(client, model)
    opening, *deltas, closing = _deltas(chunks)
    assert opening == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas] == make_text(60)
    assert closing == {}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == {"prompt_tokens": 20, "completion_tokens": 60, "total_tokens": 80}
    assert whole["message"] == {"role": "assistant", "content": "".join(make_text(60))}


async def test_usage_comes_only_to_who_asks_for_it() -> None:
    async with _serving() as client:
        response = await client.request(
            "POST", "/v1/chat/completions", _body("burst-1", [ASKED], stream=True)
        )
    assert b"usage" not in response.body


@pytest.mark.parametrize(
    ("model", "name", "arguments"),
    [
        ("code-8", "code_interpreter", {"code": "".join(make_code(8))}),
        ("function-8", "lookup", {"query": "".join(make_query(8))}),
    ],
)
async def test_a_call_streams_its_arguments_and_a_result_gets_a_text(
    model: str, name: str, arguments: dict[str, str]
) -> None:
    async with _serving() as client:
        chunks = await _streamed(client, model)
        other = await _streamed(client, model)
        whole = await _whole(client, model)
        after = await _streamed(client, model, ASKED, CALLED)
    opening, *deltas, _ = _deltas(chunks)
    call = opening["tool_calls"][0]
    assert call["function"] == {"name": name, "arguments": ""}
    assert call["id"] != _deltas(other)[0]["tool_calls"][0]["id"]
    fragments = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas]
    assert len(fragments) == 8 + 2  # what is around the string is no part of it
    assert json.loads("".join(fragments)) == arguments
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"]) == arguments
    assert [delta["content"] for delta in _deltas(after)[1:-1]] == make_text(TEXT_AFTER_TOOL)


def test_the_code_that_is_streamed_is_a_program() -> None:
    assert make_code(8) == ["total", " =", " 1", "\n", "print", "(", "total", ")"]
    compile("".join(make_code(400)), "streamed", "exec")
    with pytest.raises(ValueError, match="fours"):
        make_code(10)


async def test_a_paced_stream_comes_bit_by_bit() -> None:
    arrivals: list[float] = []
    loop = asyncio.get_running_loop()
    async with _serving() as client:
        body = _body("paced-20", [ASKED], stream=True)
        await client.request("POST", "/v1/chat/completions", body, lambda _: arrivals.append(loop.time()))
    assert arrivals[-1] - arrivals[0] >= 19 / 500


async def test_what_is_not_there_is_refused() -> None:
    async with _serving() as client:
        unknown = await client.request("POST", "/v1/chat/completions", _body("gpt-4", [ASKED]))
        elsewhere = await client.request("POST", "/v1/embeddings", b"{}")
        models = await client.request("GET", "/v1/models")
    assert unknown.status == 400
    assert b"there is no model 'gpt-4'" in unknown.body
    assert (elsewhere.status, models.status) == (404, 200)
