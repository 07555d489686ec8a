"""A gateway whose model is another gateway: both sides of the Responses API are ours."""

from typing import Any

import openai
import pytest

from tests.e2e.conftest import INTERPRETER, OUTPUTS, RunningGateway
from tests.support.gateway_process import USAGE, code_call, text_answer, tool_call
from tests.support.raw_model_server import DONE, chunk, stream


def test_a_streamed_turn_with_code_and_the_next_one(gateway: RunningGateway) -> None:
    code = "n = 6 * 7\nprint(n)"
    gateway.model.script(
        stream(
            chunk({"reasoning_content": "hm"}),
            *tool_call("code_interpreter", {"code": code}),
            chunk(finish="tool_calls"),
            USAGE,
            DONE,
        ),
        text_answer("It is ", "42."),
    )
    with gateway.strict.responses.create(
        model="far", input="6 * 7?", tools=[INTERPRETER], include=OUTPUTS, stream=True
    ) as events:
        seen: list[Any] = list(events)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    pieces = [event.delta for event in seen if event.type.endswith("_code.delta")]
    assert "".join(pieces) == code
    assert len(pieces) > 2
    response = seen[-1].response
    thoughts, ran, message = response.output
    assert thoughts.content[0].text == "hm"
    assert ran.outputs[0].logs == "42\n"
    assert message.content[0].text == "It is 42."
    assert response.usage.total_tokens == 2 * 18
    gateway.model.script(code_call("print(n + 1)"), text_answer("43."))
    after: Any = gateway.strict.responses.create(
        model="far",
        input="And one more?",
        previous_response_id=response.id,
        tools=[INTERPRETER],
        include=OUTPUTS,
    )
    assert after.output[0].outputs[0].logs == "43\n"
    assert after.output_text == "43."
    # What the model behind both has read in the end: every call with its result, as it wrote and read them.
    told = gateway.model.requests[-1].json["messages"]
    assert [entry["role"] for entry in told] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    assert "42" in told[2]["content"]


def test_a_model_that_is_none_behind(gateway: RunningGateway) -> None:
    answer = gateway.strict.responses.create(
        model="far-direct", input="```\nprint(6 * 7)\n```", tools=[INTERPRETER]
    )
    assert [item.type for item in answer.output] == ["code_interpreter_call", "message"]
    assert answer.output_text.startswith("42")


def test_what_goes_wrong_behind_is_told_in_front(gateway: RunningGateway) -> None:
    gateway.model.script(stream(chunk({"content": "Hel"})))
    seen: list[Any] = []
    with (
        gateway.strict.responses.create(model="far", input="?", stream=True) as events,
        pytest.raises(openai.APIError, match="broke before its response was complete"),
    ):
        seen.extend(events)
    kept = gateway.strict.responses.retrieve(seen[0].response.id)
    assert kept.status == "failed"
    assert kept.output_text == "Hel"
