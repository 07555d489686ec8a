"""Unusual model servers, as a client of the gateway sees them."""

import asyncio
from collections.abc import Callable

import pytest

from tests.support import raw_model_server, responses_events
from tests.support.model_server_gateway import run_gateway_before
from tests.support.raw_model_server import (
    BREAK_CONNECTION,
    ReceivedRequest,
    Responder,
    chunk,
    document,
    error,
    says,
    stream,
)
from tests.support.sse_parsing import parse_events


def flood() -> Responder:
    """Words for as long as anybody listens."""

    async def answer(_: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        try:
            while True:
                writer.write(chunk({"content": "and on "}) * 100)
                await writer.drain()
        except ConnectionError:
            return False

    return answer


@pytest.mark.parametrize(
    ("answer", "words", "text"),
    [
        (lambda: document(b'{"error":"oh"}'), "failed: oh", ""),
        (lambda: stream(asyncio.Event()), "sent nothing for 0.1 seconds", ""),
        (lambda: stream(chunk({"content": "Hel"}), BREAK_CONNECTION), "broke before its response", "Hel"),
        (lambda: stream(chunk({"content": "Hel"}), asyncio.Event()), "sent nothing for 0.1", "Hel"),
        (flood, "wrote without end", "and on and on "),
    ],
    ids=["an error and 200", "silent", "cut off", "stuck", "flood"],
)
async def test_what_came_then_the_error_then_failed(
    answer: Callable[[], Responder], words: str, text: str
) -> None:
    async with run_gateway_before(answer(), read_timeout=0.1, retries=0) as (gateway, _):
        events = parse_events((await gateway.create_response(stream=True)).body)
        assert [kind for kind, _ in events[-2:]] == ["error", "response.failed"]
        failed = events[-1][1]["response"]
        assert failed["status"] == "failed"
        assert words in failed["error"]["message"] == events[-2][1]["error"]["message"]
        written = "".join(event["delta"] for kind, event in events if kind == "response.output_text.delta")
        assert written.startswith(text)
        kept = (await gateway.request("GET", f"/v1/responses/{failed['id']}")).json
        assert (kept["status"], kept["output"]) == ("failed", failed["output"])


async def test_before_anything_came_it_is_a_status() -> None:
    busy = error("429 Too Many", {"error": {"message": "later"}}, headers={"Retry-After": "600"})
    async with run_gateway_before(busy, document(b'{"error":"oh"}')) as (gateway, _):
        answer = await gateway.create_response()
        assert answer.error == (429, "rate_limit_exceeded", None)
        assert answer.headers["retry-after"] == "600"
        assert (await gateway.create_response()).error == (502, "server_error", None)


async def test_down_then_good_is_good() -> None:
    down = error("503 Unavailable", {})
    async with run_gateway_before(down, raw_model_server.disconnect(), stream(says("Hel", "lo"))) as (
        gateway,
        _,
    ):
        answer = await gateway.create_response(stream=True)
    assert parse_events(answer.body)[-1][1]["response"]["output"][0]["content"][0]["text"] == "Hello"


async def test_sealed_reasoning_and_summaries_through_the_gateway() -> None:
    """Shown to those who ask for it, kept for the next turn in any case, and given back under the server's own id."""
    reasoning = {
        "type": "reasoning",
        "id": "rs_theirs",
        "summary": [{"type": "summary_text", "text": "gist"}],
    }
    first = stream(
        responses_events.created(),
        responses_events.done(0, **reasoning, encrypted_content="gAAA"),
        responses_events.message("Hi", index=1),
        responses_events.ended(),
    )
    more = [stream(responses_events.says("on"))] * 3
    async with run_gateway_before(first, first, *more, backend="responses") as (gateway, server):
        shown = await gateway.create_response(stream=True, include=["reasoning.encrypted_content"])
        response = parse_events(shown.body)[-1][1]["response"]
        assert response["output"][0]["encrypted_content"].endswith(":gAAA")
        assert response["output"][0]["summary"] == reasoning["summary"]
        assert b"msg_theirs" not in shown.body
        assert b"resp_theirs" not in shown.body
        hidden = parse_events((await gateway.create_response(stream=True)).body)[-1][1]["response"]
        assert "encrypted_content" not in hidden["output"][0]
        again = {"role": "user", "content": "on"}
        await gateway.create_response(stream=True, input=[again], previous_response_id=hidden["id"])
        await gateway.create_response(stream=True, input=[*response["output"], again], store=False)
        await gateway.create_response(stream=True, input=[*hidden["output"], again])
    for asked in server.requests[2:]:
        assert asked.json["input"][-3] == reasoning | {"encrypted_content": "gAAA"}


def hang(*pieces: bytes) -> Responder:
    """Send these bytes as they are, then nothing, and keep the connection."""

    async def answer(_: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        await asyncio.Event().wait()
        return False

    return answer


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize("backend", ["chat_completions", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["blocking", "streamed"])
@pytest.mark.parametrize(
    "pieces", [(), (HEAD,), (HEAD, b'{"choices": [')], ids=["no head", "no body", "half a body"]
)
async def test_read_timeout_ends_a_request_whose_server_hangs(
    backend: str, stream: bool, pieces: tuple[bytes, ...]
) -> None:
    async with (
        asyncio.timeout(60),
        run_gateway_before(hang(*pieces), backend=backend, read_timeout=0.2, retries=0) as (gateway, _),
    ):
        answer = await gateway.create_response(stream=stream)
    if stream:
        failed = parse_events(answer.body)[-1][1]["response"]
        assert (failed["status"], "sent nothing for 0.2 seconds" in failed["error"]["message"]) == (
            "failed",
            True,
        )
    else:
        assert answer.error == (504, "server_error", None)
        assert "sent nothing for 0.2 seconds" in answer.json["error"]["message"]
