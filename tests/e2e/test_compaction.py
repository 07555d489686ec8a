"""Conversations over a socket with the OpenAI SDK: counted, compacted, continued."""

from typing import Any

import openai
import pytest

from tests.e2e.conftest import INTERPRETER, RunningGateway
from tests.support.code_word_model_server import CodeWordModel, extract_texts
from tests.support.gateway_process import code_call, text_answer

MANAGED: Any = [{"type": "compaction", "compact_threshold": 2000}]
FACT = "Remember: the code word is heliotrope."
QUESTION = "Which word did I tell you first?"


@pytest.fixture
def thinker(gateway: RunningGateway) -> CodeWordModel:
    thinker = CodeWordModel()
    gateway.model.script(*[thinker.answer] * 400)
    return thinker


def test_a_conversation_is_counted_and_compacted_on_demand(
    gateway: RunningGateway, thinker: CodeWordModel
) -> None:
    client = gateway.strict
    first = client.responses.create(model="scripted", input=FACT)
    counted = client.responses.input_tokens.count(
        model="scripted", previous_response_id=first.id, input="x" * 4000
    )
    assert first.usage is not None
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == first.usage.total_tokens + 1004
    compacted = client.responses.compact(model="scripted", previous_response_id=first.id)
    assert compacted.object == "response.compaction"
    assert compacted.usage.total_tokens > 0
    window: list[Any] = [item.model_dump(exclude_none=True) for item in compacted.output]
    assert window[-1]["type"] == "compaction"
    assert "heliotrope" not in str(window)
    last = client.responses.create(model="scripted", input=[*window, {"role": "user", "content": QUESTION}])
    assert last.output_text == "heliotrope"
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses/compact", cast_to=object, body={"input": "Hi"})
    assert refused.value.param == "model"
    sealed = window[-1]["encrypted_content"]
    for place in (0, 9, 40, len(sealed) // 2, len(sealed) - 1):
        other = "A" if sealed[place] != "A" else "B"
        window[-1]["encrypted_content"] = sealed[:place] + other + sealed[place + 1 :]
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="scripted", input=window)
        assert refused.value.param == f"input[{len(window) - 1}].encrypted_content"


def test_a_stream_tells_of_the_compaction_after_the_message(
    gateway: RunningGateway, thinker: CodeWordModel
) -> None:
    with gateway.strict.responses.create(
        model="scripted", input="x" * 9000, context_management=MANAGED, stream=True
    ) as stream:
        events: list[Any] = list(stream)
    told = [(event.type, getattr(getattr(event, "item", None), "type", None)) for event in events[-5:]]
    assert told == [
        ("response.content_part.done", None),
        ("response.output_item.done", "message"),
        ("response.output_item.added", "compaction"),
        ("response.output_item.done", "compaction"),
        ("response.completed", None),
    ]
    again = gateway.strict.responses.retrieve(events[-1].response.id)
    assert [item.model_dump() for item in again.output] == [
        item.model_dump() for item in events[-1].response.output
    ]


def test_the_container_and_its_files_outlive_the_items_that_named_them(gateway: RunningGateway) -> None:
    client, thinker = gateway.strict, CodeWordModel()
    gateway.model.script(code_call("x = 41; open('notes.txt', 'w').write('seven')"), text_answer("Done."))
    first = client.responses.create(model="scripted", input="Run it", tools=[INTERPRETER])
    gateway.model.script(thinker.answer)
    compacted = client.responses.compact(model="scripted", previous_response_id=first.id)
    window: list[Any] = [item.model_dump(exclude_none=True) for item in compacted.output]
    gateway.model.script(code_call("print(x + 1, open('notes.txt').read())"), text_answer("42"))
    second = client.responses.create(
        model="scripted",
        input=[*window, {"role": "user", "content": "And now?"}],
        tools=[INTERPRETER],
        include=["code_interpreter_call.outputs"],
        store=False,
    )
    before: Any = first.output[0]
    after: Any = second.output[0]
    assert before.type == after.type == "code_interpreter_call"
    assert after.container_id == before.container_id
    assert after.outputs[0].logs == "42 seven\n"
    told = extract_texts(gateway.model.requests[0].json["messages"])
    assert any("/mnt/data/notes.txt (5 bytes)" in text for text in told)
