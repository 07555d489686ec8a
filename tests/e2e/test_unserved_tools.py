"""A tool that the server does not have, asked for over HTTP and WebSocket by the OpenAI SDK."""

import json
from typing import Any

import openai
import pytest

from tests.e2e.conftest import INTERPRETER, RunningGateway, make_client
from tests.support.gateway_process import text_answer
from tests.support.waiting import becomes_true

SEARCH: Any = {"type": "web_search"}
MCP: Any = {
    "type": "mcp",
    "server_label": "wiki",
    "server_url": "https://wiki.example",
    "authorization": "s3cret",
}
WARNING = "tools[0] web_search is not configured"
REQUEST: Any = {"model": "scripted", "input": "Hi", "tools": [SEARCH, INTERPRETER]}


def create_raw(client: Any, **more: Any) -> Any:
    """The answer with its headers."""
    return client.responses.with_raw_response.create(**REQUEST | more)


def test_a_blocking_response_says_it_in_a_header_and_keeps_it(gateway: RunningGateway) -> None:
    gateway.model.script(text_answer("Hello."))
    answer = create_raw(gateway.strict)
    assert answer.headers["fumehood-warning"] == WARNING
    response: Any = answer.parse()
    assert response.output_text == "Hello."
    assert response.model_extra["fumehood:warnings"] == [WARNING]
    kept = gateway.strict.responses.retrieve(response.id)
    assert kept.model_extra == response.model_extra
    assert [tool.type for tool in kept.tools] == ["web_search", "code_interpreter"]
    functions = [tool["function"]["name"] for tool in gateway.model.requests[0].json["tools"]]
    assert functions == ["code_interpreter"]


def test_a_stream_says_it_in_a_header_and_in_its_first_event(gateway: RunningGateway) -> None:
    gateway.model.script(text_answer("Hello."))
    client: Any = gateway.strict
    with client.responses.with_streaming_response.create(**REQUEST, stream=True) as answer:
        assert answer.headers["fumehood-warning"] == WARNING
        events: list[Any] = list(answer.parse())
    assert events[0].response.model_extra["fumehood:warnings"] == [WARNING]
    assert events[-1].response.model_extra["fumehood:warnings"] == [WARNING]


def test_a_websocket_says_it_in_its_first_event(gateway: RunningGateway) -> None:
    gateway.model.script(text_answer("Hello."))
    with gateway.strict.responses.connect() as connection:
        connection.response.create(**REQUEST)
        events: list[Any] = []
        for event in connection:
            events.append(event)
            if event.type == "response.completed":
                break
    assert events[0].type == "response.created"
    assert events[0].response.model_extra["fumehood:warnings"] == [WARNING]


def test_several_are_separated_by_commas(gateway: RunningGateway) -> None:
    gateway.model.script(text_answer("Hello."))
    tools = [SEARCH, INTERPRETER, MCP]
    answer = create_raw(gateway.strict, tools=tools)
    assert answer.headers.get_list("fumehood-warning", split_commas=True) == [
        WARNING,
        "tools[2] mcp is not configured",
    ]


def test_a_repeated_request_says_it_again(gateway: RunningGateway) -> None:
    gateway.model.script(text_answer("Hello."))
    headers = {"Idempotency-Key": "unserved-tools"}
    for _ in range(2):
        answer = create_raw(gateway.strict, extra_headers=headers)
        assert answer.headers["fumehood-warning"] == WARNING


def test_counting_tokens_says_it(gateway: RunningGateway) -> None:
    client: Any = gateway.strict
    answer = client.responses.input_tokens.with_raw_response.count(**REQUEST)
    assert answer.headers["fumehood-warning"] == WARNING


def test_the_log_has_one_line_with_the_id_of_the_request(gateway: RunningGateway) -> None:
    gateway.model.script(text_answer("Hello."))
    answer = create_raw(gateway.client)
    request_id = answer.headers["x-request-id"]

    def find_lines() -> list[Any]:
        lines = [line for line in gateway.process.output if request_id in line]
        return [json.loads(line) for line in lines if WARNING in line]

    assert becomes_true(find_lines)
    (line,) = find_lines()
    assert line["level"] == "warning"


def test_without_such_a_tool_nothing_is_said(gateway: RunningGateway) -> None:
    gateway.model.script(text_answer("Hello."))
    answer = create_raw(gateway.strict, tools=[INTERPRETER])
    assert "fumehood-warning" not in answer.headers
    assert "fumehood:warnings" not in (answer.parse().model_extra or {})


def test_the_only_tool_or_one_that_is_forced_is_refused(gateway: RunningGateway) -> None:
    for tools, choice, param in (
        ([SEARCH], "auto", "tools[0]"),
        ([SEARCH, INTERPRETER], {"type": "web_search"}, "tool_choice"),
    ):
        request: Any = {"model": "scripted", "input": "Hi", "tools": tools, "tool_choice": choice}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="web_search is not configured") as refused:
                gateway.strict.responses.create(**request, stream=stream)
            assert refused.value.param == param


def test_codex_asks_for_a_search_without_the_web(gateway: RunningGateway) -> None:
    gateway.model.script(text_answer("Hello."))
    tools: Any = [{"type": "web_search", "external_web_access": False}]
    answer = create_raw(gateway.strict, tools=tools)
    assert answer.headers["fumehood-warning"] == WARNING


def test_a_code_interpreter_that_is_off_is_always_refused(gateway: RunningGateway) -> None:
    """Clients that name it need it; the specification says so."""
    function: Any = {"type": "function", "name": "f", "parameters": {}}
    with make_client(gateway.far) as far:
        for tools in ([INTERPRETER], [SEARCH, function, INTERPRETER]):
            with pytest.raises(openai.BadRequestError, match="code_interpreter is not enabled"):
                far.responses.create(model="scripted", input="Hi", tools=tools)
