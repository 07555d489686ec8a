"""Errors of invalid requests name the field; with the real engine."""

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from fumehood.http_server.json_decode_errors import find_lone_surrogate
from fumehood.protocol.openai.responses import CreateResponse
from fumehood.testing import ScriptedModel, says
from tests.support.engine_harness import EngineHarness
from tests.support.raw_http_connection import open_connection
from tests.support.scripted_gateway import HttpResponse, ScriptedGateway, run_gateway
from tests.support.websocket_client import open_socket

pytestmark = pytest.mark.asyncio(loop_scope="module")

HUGE = 10**400
JSON_PATHS = ["/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact", "/v1/containers"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[ScriptedGateway]:
    """A gateway before the real engine, whose model always says the same."""
    engine = EngineHarness(ScriptedModel(*([says("yes")] * 1000)))
    async with run_gateway(runs=engine.runs, store=engine.store) as gateway:
        yield gateway


async def ask(real: ScriptedGateway, **fields: Any) -> HttpResponse:
    return await real.request("POST", "/v1/responses", {"model": "scripted", "input": "hi", **fields})


def message_of(answer: HttpResponse) -> str:
    return answer.json["error"]["message"]


# --- bodies that are no JSON --------------------------------------------------------------------------


@pytest.mark.parametrize("path", JSON_PATHS)
@pytest.mark.parametrize("body", [b"", b" \r\n\t "])
async def test_an_empty_body_is_called_empty(real: ScriptedGateway, path: str, body: bytes) -> None:
    answer = await real.request("POST", path, body)
    assert answer.error == (400, "invalid_json", None)
    assert "The body is empty" in message_of(answer)


@pytest.mark.parametrize("path", JSON_PATHS)
async def test_no_body_at_all_is_called_empty(real: ScriptedGateway, path: str) -> None:
    async with open_connection(real.port) as connection:
        await connection.send(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        answer = await connection.read_response()
    assert answer.status == 400
    assert b"The body is empty" in answer.body


SURROGATES = [
    (rb'{"model":"x","input":"\ud800"}', 22),
    (rb'{"model":"x","input":"a\uDC00b and so on and on"}', 23),
    (rb'{"model":"x","input":[{"role":"user","content":"\ud83d \ude00"}]}', 48),
    (rb'{"model":"x","tools":[{"type":"x","a":"\ud800\ud83d\ude00"}]}', 39),
    (rb'{"model":"x","unknown":"\\\ud800"}', 26),
    (rb'{"\udfff":1}', 2),
    (b'{"model":"x","input":"\xed\xa0\x80"}', 22),
]


@pytest.mark.parametrize(("body", "place"), SURROGATES)
async def test_a_lone_surrogate_is_called_one(real: ScriptedGateway, body: bytes, place: int) -> None:
    answer = await real.request("POST", "/v1/responses", body)
    assert answer.error == (400, "invalid_json", None)
    assert f"lone surrogate at byte {place} " in message_of(answer)


async def test_a_lone_surrogate_over_a_websocket(real: ScriptedGateway) -> None:
    async with open_socket(real) as socket:
        await socket.raw.send('{"type":"response.create","model":"scripted","input":"\\ud800"}')
        error = await socket.read_event()
        assert (error["status"], error["error"]["code"]) == (400, "invalid_json")
        assert "lone surrogate" in error["error"]["message"]


@pytest.mark.parametrize(
    "body", [rb'{"a":"\ud83d\ude00"', rb'{"a":"\\ud800"', rb'{"a":"\\\\udc00', b'{"a":"\xf0\x9f\x98\x80"']
)
async def test_what_is_no_lone_surrogate_is_not_called_one(real: ScriptedGateway, body: bytes) -> None:
    assert find_lone_surrogate(body) is None
    assert "truncated" in message_of(await real.request("POST", "/v1/responses", body))


async def test_a_pair_of_surrogates_is_a_character(real: ScriptedGateway) -> None:
    body = rb'{"model":"scripted","input":"\ud83d\ude00 \\ud800"}'
    assert (await real.request("POST", "/v1/responses", body)).status == 200


async def test_what_is_not_utf8_says_where(real: ScriptedGateway) -> None:
    answer = await real.request("POST", "/v1/responses", b'{"input":"\xff"}')
    assert message_of(answer) == "The body is not UTF-8 text: invalid byte at position 10."


# --- requests for chat completions --------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"input": "hi"}, {"stream": True}])
@pytest.mark.parametrize("path", JSON_PATHS[:3])
async def test_a_request_for_chat_completions_is_told_so(
    real: ScriptedGateway, path: str, more: dict[str, Any]
) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], **more}
    answer = await real.request("POST", path, body)
    assert answer.error == (400, "unsupported_parameter", "messages")
    assert "'input'" in message_of(answer)
    assert "chat completions" in message_of(answer)


async def test_a_request_for_chat_completions_over_a_websocket(real: ScriptedGateway) -> None:
    async with open_socket(real) as socket:
        assert await socket.read_error(messages=[]) == (400, "unsupported_parameter", "messages")


async def test_messages_elsewhere_are_no_fault(real: ScriptedGateway) -> None:
    for fields in ({"messages": None}, {"input": 'the field "messages"'}, {"metadata": {"messages": "x"}}):
        assert (await ask(real, **fields)).status == 200


async def test_a_tool_of_chat_completions_is_told_so(real: ScriptedGateway) -> None:
    answer = await ask(real, tools=[{"type": "function", "function": {"name": "f"}}])
    assert answer.error == (400, "missing_required_parameter", "tools[0].name")
    assert "beside 'type'" in message_of(answer)


# --- numbers and names --------------------------------------------------------------------------------

INTEGERS = ["max_output_tokens", "max_tool_calls", "top_logprobs"]
NUMBERS = ["temperature", "top_p", "presence_penalty", "frequency_penalty"]


async def test_these_are_all_fields_with_numbers() -> None:
    """One that is added needs a bound, too."""
    fields = msgspec.json.schema(CreateResponse)["$defs"]["CreateResponse"]["properties"]
    numbers = {
        name
        for name, field in fields.items()
        if any(kind.get("type") in ("integer", "number") for kind in field.get("anyOf", [field]))
    }
    assert numbers == {*INTEGERS, *NUMBERS}


@pytest.mark.parametrize(
    "value", [str(HUGE), str(-HUGE), str(2**31), str(2**63), str(2**64), "1" + "0" * 5000]
)
@pytest.mark.parametrize("field", [*INTEGERS, *NUMBERS])
async def test_a_number_beyond_any_integer_is_refused(real: ScriptedGateway, field: str, value: str) -> None:
    body = f'{{"model": "scripted", "input": "hi", "{field}": {value}}}'
    answer = await real.request("POST", "/v1/responses", body.encode())
    assert answer.error == (400, "invalid_value", field)


async def test_the_largest_number_is_served(real: ScriptedGateway) -> None:
    answer = await ask(real, max_output_tokens=2**31 - 1, max_tool_calls=2**31 - 1)
    assert (answer.status, answer.json["max_output_tokens"]) == (200, 2**31 - 1)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/containers", {"name": "c", "expires_after": {"minutes": HUGE}}, "expires_after.minutes"),
        ("/v1/responses", {"context_management": [{"type": "compaction", "compact_threshold": HUGE}]}, None),
        ("/v1/responses", {"metadata": {"a": HUGE}}, "metadata"),
        ("/v1/responses", {"model": HUGE}, "model"),
        ("/v1/responses", {"text": {"verbosity": HUGE}}, "text.verbosity"),
        ("/v1/responses", {"tools": [HUGE]}, "tools[0]"),
    ],
)
async def test_large_numbers_elsewhere(
    real: ScriptedGateway, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = await real.request("POST", path, {"model": "scripted", "input": "hi", **body})
    assert answer.status == 400
    assert answer.json["error"]["param"] == (param or "context_management[0]")


async def test_large_numbers_in_what_is_passed_on_are_no_fault(real: ScriptedGateway) -> None:
    """Nobody here reads them, and their reader may know numbers of any length."""
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": HUGE}}}
    answer = await ask(real, tools=[{"type": "function", "name": "f", "parameters": schema}], unknown=HUGE)
    assert answer.status == 200
    assert json.loads(answer.body)["tools"][0]["parameters"] == schema


@pytest.mark.parametrize("kind", ["function", "custom"])
@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", "a/b", "a\n", "x" * 65, "f()", "\0", "a" * 100_000])
async def test_a_name_outside_the_pattern_is_refused(real: ScriptedGateway, kind: str, name: str) -> None:
    tools = [{"type": kind, "name": "fine"}, {"type": kind, "name": name}]
    answer = await ask(real, tools=tools)
    assert answer.error == (400, "invalid_value", "tools[1].name")
    assert "^[a-zA-Z0-9_-]{1,64}$" in message_of(answer)
    assert len(message_of(answer)) < 1000


@pytest.mark.parametrize("kind", ["function", "custom"])
@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 64, "mcp__server__tool"])
async def test_a_name_within_the_pattern_is_served(real: ScriptedGateway, kind: str, name: str) -> None:
    assert (await ask(real, tools=[{"type": kind, "name": name}])).status == 200
