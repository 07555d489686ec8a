"""Reasoning of real backends' servers, as a client of the gateway sees it and sends it back."""

from typing import Any

import pytest

from tests.support import responses_events
from tests.support.model_server_gateway import run_gateway_before
from tests.support.raw_model_server import Responder, chunk, says, stream
from tests.support.sse_parsing import parse_events

ENCRYPTED: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "store": False}
AUTO: dict[str, Any] = {"reasoning": {"summary": "auto"}}


def raw_reasoning() -> Responder:
    """A server of the Responses API that writes reasoning text and no summary."""
    item: dict[str, Any] = {"type": "reasoning", "id": "rs_theirs", "summary": []}
    return stream(
        responses_events.created(),
        responses_events.added(0, **item),
        responses_events.delta("reasoning_text", 0, "Let me ", content_index=0),
        responses_events.delta("reasoning_text", 0, "think.", content_index=0),
        responses_events.done(0, **item, content=[{"type": "reasoning_text", "text": "Let me think."}]),
        responses_events.message("Yes", index=1),
        responses_events.ended(),
    )


def chat(*deltas: dict[str, str]) -> Responder:
    return stream(*map(chunk, deltas), chunk({"content": "Yes"}), chunk(finish="stop"))


SERVERS: dict[str, tuple[Responder, str]] = {
    "reasoning_content": (
        chat({"reasoning_content": "Let me "}, {"reasoning_content": "think."}),
        "chat_completions",
    ),
    "reasoning": (chat({"reasoning": "Let me "}, {"reasoning": "think."}), "chat_completions"),
    "think tags": (chat({"content": "<think>Let me "}, {"content": "think.</think>"}), "chat_completions"),
    "Responses API": (raw_reasoning(), "responses"),
}


def read_deltas(events: list[tuple[str, Any]], kind: str) -> str:
    return "".join(event["delta"] for name, event in events if name == f"response.{kind}.delta")


@pytest.mark.parametrize("server", SERVERS)
async def test_reasoning_arrives_as_summary(server: str) -> None:
    answer, backend = SERVERS[server]
    async with run_gateway_before(answer, answer, backend=backend) as (gateway, _):
        events = parse_events((await gateway.create_response(stream=True, **AUTO)).body)
        blocking = (await gateway.create_response(**AUTO)).json
    assert read_deltas(events, "reasoning_summary_text") == "Let me think."
    assert read_deltas(events, "reasoning_text") == "Let me think."
    for response in (events[-1][1]["response"], blocking):
        assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "Let me think."}]
        assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me think."}]


async def test_a_repeated_request_gets_the_same_reasoning() -> None:
    """A replay has each text in one delta, and adds up to the same response."""
    answer, _ = SERVERS["reasoning_content"]
    async with run_gateway_before(answer) as (gateway, _):
        first, again = [
            await gateway.create_response({"idempotency-key": "once"}, stream=True, **AUTO, **ENCRYPTED)
            for _ in range(2)
        ]
    events, replayed = parse_events(first.body), parse_events(again.body)
    assert events[-1][1]["response"]["output"][0]["encrypted_content"]
    assert replayed[-1][1]["response"] == events[-1][1]["response"]
    assert [event["sequence_number"] for _, event in replayed] == [*range(len(replayed))]
    for kind in ("reasoning_summary_text", "reasoning_text"):
        assert read_deltas(replayed, kind) == read_deltas(events, kind) == "Let me think."


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("asked", [{}, AUTO], ids=["plain", "with a summary"])
async def test_carried_reasoning_reaches_a_server_that_takes_it(server: str, asked: dict[str, Any]) -> None:
    answer, backend = SERVERS[server]
    follow_up = stream(responses_events.says("Sure") if backend == "responses" else says("Sure"))
    async with run_gateway_before(answer, follow_up, backend=backend, replay_reasoning=True) as (
        gateway,
        upstream,
    ):
        first = (await gateway.create_response(stream=True, **ENCRYPTED, **asked)).body
        reasoning, message = parse_events(first)[-1][1]["response"]["output"]
        del reasoning["content"]
        question = {"role": "user", "content": "Sure?"}
        again = await gateway.create_response(stream=True, input=[reasoning, message, question], **ENCRYPTED)
        assert again.status == 200
    sent = upstream.requests[1].json
    if backend == "responses":
        assert sent["input"][0] == {
            "type": "reasoning",
            "id": reasoning["id"],
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Let me think."}],
        }
    else:
        expected = {"role": "assistant", "content": "Yes", "reasoning_content": "Let me think."}
        assert sent["messages"][0] == expected


async def test_carried_reasoning_is_not_sent_to_a_server_that_does_not_take_it() -> None:
    answer, _ = SERVERS["reasoning_content"]
    async with run_gateway_before(answer, stream(says("Sure"))) as (gateway, upstream):
        first = (await gateway.create_response(**ENCRYPTED)).json
        await gateway.create_response(
            stream=True, input=[*first["output"], {"role": "user", "content": "Sure?"}], **ENCRYPTED
        )
    assert upstream.requests[1].json["messages"][0] == {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize("backend", ["chat_completions", "responses"])
async def test_foreign_encrypted_content_is_a_400_that_names_it(backend: str) -> None:
    items: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAA"},
    ]
    async with run_gateway_before(backend=backend) as (gateway, _):
        answer = await gateway.create_response(input=items)
    assert answer.error == (400, "invalid_encrypted_content", "input[1].encrypted_content")
