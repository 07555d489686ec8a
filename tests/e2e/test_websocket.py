"""Code over WebSocket, in a real sandbox, with the OpenAI SDK."""

from typing import Any

from openai.resources.responses.responses import ResponsesConnection

from tests.e2e.conftest import INTERPRETER, OUTPUTS, RunningGateway, read_logs
from tests.support.gateway_process import code_call, text_answer


def turn(connection: ResponsesConnection, previous: str | None) -> Any:
    connection.response.create(
        model="scripted",
        input="?",
        store=False,
        tools=[INTERPRETER],
        include=OUTPUTS,
        previous_response_id=previous,
    )
    for event in connection:
        assert event.type not in ("error", "response.failed")
        if event.type == "response.completed":
            return event.response
    raise AssertionError("it did not end")


def test_the_next_turn_finds_the_container_though_nothing_is_stored(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("n = 6"), text_answer("Set."), code_call("n * 7"), text_answer("42."))
    with gateway.strict.responses.connect() as connection:
        first = turn(connection, None)
        second = turn(connection, first.id)
    assert first.output[0].container_id == second.output[0].container_id
    assert second.output[0].outputs[0].logs == "42"
    assert second.output_text == "42."


def test_a_client_that_leaves_interrupts_its_code(gateway: RunningGateway) -> None:
    loop = "import time\nfor n in range(600): time.sleep(0.1)"
    gateway.model.script(code_call("n = 0"), text_answer("Set."), code_call(loop))
    with gateway.client.responses.connect() as connection:
        first = turn(connection, None)
        tool: Any = {"type": "code_interpreter", "container": first.output[0].container_id}
        connection.response.create(model="scripted", input="?", tools=[tool])
        for event in connection:
            if event.type == "response.code_interpreter_call.interpreting":
                break
    # The sandbox is not ended: it can be used as soon as the code is.
    gateway.model.script(code_call("print(n < 599)"), text_answer("ok"))
    after = gateway.client.responses.create(model="scripted", input="?", tools=[tool], include=OUTPUTS)
    assert read_logs(after) == "True\n"
