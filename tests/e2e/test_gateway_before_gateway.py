"""A gateway whose model is another gateway: both sides of the Responses API are ours; imports the support."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.conftest import House, client_of, settings_for
from tests.support import served
from tests.support.chat_server import DONE, chunk, stream
from tests.support.served import USAGE, answer, call, runs

INTERPRETER: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
OUTPUTS: Any = ["code_interpreter_call.outputs"]


@pytest.fixture(scope="module")
def front(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a gateway that has its own sandboxes and asks the house for its model."""
    settings = settings_for(house.model, sandbox_pool=1) | {
        "models": [{"match": "far", "backend": "responses", "base_url": house.served.url, "name": "scripted"}]
    }
    directory = tmp_path_factory.mktemp("front")
    with served.serving(directory, settings) as running, client_of(running, strict=True) as client:
        yield client


def test_a_streamed_turn_with_code_and_the_next_one(house: House, front: OpenAI) -> None:
    code = "n = 6 * 7\nprint(n)"
    house.model.script(
        stream(
            chunk({"reasoning_content": "hm"}),
            *call("code_interpreter", {"code": code}),
            chunk(finish="tool_calls"),
            USAGE,
            DONE,
        ),
        answer("It is ", "42."),
    )
    with front.responses.create(
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
    house.model.script(runs("print(n + 1)"), answer("43."))
    after: Any = front.responses.create(
        model="far",
        input="And one more?",
        previous_response_id=response.id,
        tools=[INTERPRETER],
        include=OUTPUTS,
    )
    assert after.output[0].outputs[0].logs == "43\n"
    assert after.output_text == "43."
    # What the model behind both has read in the end: every call with its result, as it wrote and read them.
    told = house.model.asked[-1].json["messages"]
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


def test_what_goes_wrong_behind_is_told_in_front(house: House, front: OpenAI) -> None:
    house.model.script(stream(chunk({"content": "Hel"})))
    seen: list[Any] = []
    with (
        front.responses.create(model="far", input="?", stream=True) as events,
        pytest.raises(openai.APIError, match="broke before its answer was complete"),
    ):
        seen.extend(events)
    kept = front.responses.retrieve(seen[0].response.id)
    assert kept.status == "failed"
    assert kept.output_text == "Hel"
