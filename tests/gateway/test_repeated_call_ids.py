"""Model servers that number the calls of each turn anew, as a client of the gateway sees them."""

from typing import Any

import pytest

from tests.support import responses_events
from tests.support.model_server_gateway import run_gateway_before
from tests.support.raw_model_server import DONE, RawModelServer, Responder, chunk, says, stream
from tests.support.scripted_gateway import ScriptedGateway
from tests.support.sse_parsing import parse_events

TOOLS: list[Any] = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
BACKENDS = ["chat_completions", "responses"]


def call(backend: str, number: int) -> Responder:
    """A turn with one call, `call_0`."""
    arguments = f'{{"n":{number}}}'
    if backend == "responses":
        return stream(
            responses_events.created(),
            responses_events.call("f", arguments, call_id="call_0"),
            responses_events.ended(),
        )
    return chat_calls({"index": 0, "id": "call_0", "function": {"name": "f", "arguments": arguments}})


def chat_calls(*deltas: dict[str, Any]) -> Responder:
    chunks = [chunk({"tool_calls": [delta]}) for delta in deltas]
    return stream(*chunks, chunk(finish="tool_calls"), DONE)


def answer(backend: str) -> Responder:
    return stream(responses_events.says("Done") if backend == "responses" else says("Done"))


def output(call_id: str, number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": f"result {number}"}


def read_pairs(server: RawModelServer) -> list[tuple[str, str, str]]:
    """The calls of the last request in order: id, arguments, and the result that follows under that id."""
    sent = server.requests[-1].json
    if "messages" in sent:
        calls = [
            (one["id"], one["function"]["arguments"])
            for message in sent["messages"]
            for one in message.get("tool_calls", ())
        ]
        results = [
            (message["tool_call_id"], message["content"])
            for message in sent["messages"]
            if message["role"] == "tool"
        ]
    else:
        items = sent["input"]
        calls = [(item["call_id"], item["arguments"]) for item in items if item["type"] == "function_call"]
        results = [
            (item["call_id"], item["output"]) for item in items if item["type"] == "function_call_output"
        ]
    ids = [call_id for call_id, _ in calls]
    assert len(set(ids)) == len(ids)
    assert [call_id for call_id, _ in results] == ids
    return [(call_id, arguments, dict(results)[call_id]) for call_id, arguments in calls]


def expect_pairs(ids: list[str]) -> list[tuple[str, str, str]]:
    return [(call_id, f'{{"n":{number}}}', f"result {number}") for number, call_id in enumerate(ids)]


async def ask(gateway: ScriptedGateway, **request: Any) -> dict[str, Any]:
    response = await gateway.create_response(stream=True, tools=TOOLS, **request)
    assert response.status == 200, response.body
    return parse_events(response.body)[-1][1]["response"]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_by_previous_response_id(backend: str) -> None:
    script = [*(call(backend, number) for number in range(3)), answer(backend)]
    async with run_gateway_before(*script, backend=backend) as (gateway, server):
        response = await ask(gateway, input="go")
        ids: list[str] = []
        for number in range(3):
            ids.append(response["output"][0]["call_id"])
            response = await ask(
                gateway, input=[output(ids[-1], number)], previous_response_id=response["id"]
            )
        assert ids[0] == "call_0"
        assert len(set(ids)) == 3
        assert read_pairs(server) == expect_pairs(ids)
        listed = (await gateway.request("GET", f"/v1/responses/{response['id']}/input_items")).json["data"]
        kept = [item["call_id"] for item in reversed(listed) if item["type"] == "function_call"]
        assert kept == ids


@pytest.mark.parametrize("backend", BACKENDS)
async def test_by_items_that_are_sent_back(backend: str) -> None:
    script = [*(call(backend, number) for number in range(3)), answer(backend)]
    async with run_gateway_before(*script, backend=backend) as (gateway, server):
        items: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        ids: list[str] = []
        for number in range(3):
            (made,) = (await ask(gateway, input=items, store=False))["output"]
            ids.append(made["call_id"])
            items += [made, output(made["call_id"], number)]
        await ask(gateway, input=items, store=False)
        assert len(set(ids)) == 3
        assert read_pairs(server) == expect_pairs(ids)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_items_of_another_server(backend: str) -> None:
    """They have the ids twice in one turn and again in the next; results come in the order of the calls."""
    made = [
        {"type": "function_call", "call_id": "call_0", "name": "f", "arguments": f'{{"n":{number}}}'}
        for number in range(3)
    ]
    outputs = [output("call_0", number) for number in range(3)]
    items = [{"role": "user", "content": "go"}, *made[:2], *outputs[:2], made[2], outputs[2]]
    script = [answer(backend), call(backend, 3), answer(backend)]
    async with run_gateway_before(*script, backend=backend) as (gateway, server):
        await ask(gateway, input=items)
        first = read_pairs(server)
        ids = [call_id for call_id, _, _ in first]
        assert first == expect_pairs(ids)
        response = await ask(gateway, input=items)
        assert read_pairs(server) == first  # the same again, for the prompt cache
        new_id = response["output"][0]["call_id"]
        await ask(gateway, input=[output(new_id, 3)], previous_response_id=response["id"])
        assert read_pairs(server) == expect_pairs([*ids, new_id])


async def test_a_call_that_repeats_one_of_the_stored_conversation() -> None:
    script = [call("chat_completions", 0), answer("chat_completions"), answer("chat_completions")]
    again = {"type": "function_call", "call_id": "call_0", "name": "f", "arguments": '{"n":1}'}
    async with run_gateway_before(*script) as (gateway, server):
        response = await ask(gateway, input="go")
        response = await ask(gateway, input=[output("call_0", 0)], previous_response_id=response["id"])
        items = [again, output("call_0", 1), {"role": "user", "content": "go on"}]
        await ask(gateway, input=items, previous_response_id=response["id"])
        pairs = read_pairs(server)
        assert pairs == expect_pairs([call_id for call_id, _, _ in pairs])


WITHIN_A_TURN: dict[str, list[dict[str, Any]]] = {
    "by index": [
        {"index": number, "id": "call_0", "function": {"name": "f", "arguments": f'{{"n":{number}}}'}}
        for number in range(3)
    ],
    "by the same index": [
        {"index": 0, "id": "call_0", "function": {"name": "f", "arguments": f'{{"n":{number}}}'}}
        for number in range(3)
    ],
    "without index": [
        {"id": "call_0", "function": {"name": "f", "arguments": f'{{"n":{number}}}'}} for number in range(3)
    ],
}


@pytest.mark.parametrize("calls", WITHIN_A_TURN)
async def test_within_a_turn(calls: str) -> None:
    script = [chat_calls(*WITHIN_A_TURN[calls]), answer("chat_completions")]
    async with run_gateway_before(*script) as (gateway, server):
        response = await ask(gateway, input="go")
        ids = [item["call_id"] for item in response["output"]]
        assert len(set(ids)) == 3
        outputs = [output(call_id, number) for number, call_id in enumerate(ids)]
        # In another order: each result goes to its call.
        await ask(gateway, input=outputs[::-1], previous_response_id=response["id"])
        assert read_pairs(server) == expect_pairs(ids)


async def test_the_name_and_id_in_every_delta_are_one_call() -> None:
    pieces = ['{"n"', ":0", "}", ""]
    deltas = [{"id": "call_0", "function": {"name": "f", "arguments": piece}} for piece in pieces]
    async with run_gateway_before(chat_calls(*deltas)) as (gateway, _):
        (made,) = (await ask(gateway, input="go"))["output"]
    assert made["arguments"] == '{"n":0}'
