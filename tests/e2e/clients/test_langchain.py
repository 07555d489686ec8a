"""LangChain's ChatOpenAI against the gateway, in each of its formats for messages."""

import json
from typing import Any

import openai
import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    messages_from_dict,
    messages_to_dict,
)
from langchain_openai import ChatOpenAI

from tests.e2e.conftest import INTERPRETER, RunningGateway
from tests.support import client_conversation
from tests.support.gateway_process import reasoning_answer


def make_model(gateway: RunningGateway, *, name: str = "scripted", **options: Any) -> Any:
    llm: Any = ChatOpenAI(
        model=name,
        base_url=gateway.process.url,
        api_key=lambda: "none",
        use_responses_api=True,
        max_retries=0,
        **options,
    )
    return llm.bind_tools([INTERPRETER])


def streamed(model: Any, messages: Any) -> AIMessageChunk:
    pieces: list[AIMessageChunk] = list(model.stream(messages))
    assert len(pieces) > 3
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    return whole


@pytest.mark.parametrize("version", ["v0", "responses/v1", "v1"])
@pytest.mark.parametrize("stream", [False, True], ids=["blocking", "streaming"])
def test_history(gateway: RunningGateway, version: str, stream: bool) -> None:
    """What it makes of a call has lost its outputs, and in some formats its status."""
    model = make_model(gateway, output_version=version)
    ask = streamed if stream else model.__class__.invoke
    client_conversation.script(gateway.model, 2)
    question = HumanMessage("Square")
    first = ask(model, [question])
    assert first.text == client_conversation.LINK
    second = ask(model, [question, first, HumanMessage("Add")])
    assert second.text == client_conversation.SUM
    third = ask(model, [question, first, HumanMessage("Add"), second, HumanMessage("Again")])
    assert third.text == client_conversation.SUM
    client_conversation.check(gateway.model, [client_conversation.SQUARED] * 2)


def test_previous_response_id_and_the_file(gateway: RunningGateway) -> None:
    model = make_model(gateway, include=["code_interpreter_call.outputs"], output_version="responses/v1")
    client_conversation.script(gateway.model, 2)
    first = model.invoke("Square")
    (ran,) = [part for part in first.content if part["type"] == "code_interpreter_call"]
    assert ran["outputs"] == [{"type": "logs", "logs": "kept 3\n"}]
    (cited,) = first.content[-1]["annotations"]
    content = gateway.client.containers.files.content.retrieve(
        cited["file_id"], container_id=cited["container_id"]
    )
    assert content.read() == client_conversation.FILE
    second = model.invoke("Add", previous_response_id=first.response_metadata["id"])
    assert second.text == client_conversation.SUM
    third = streamed(model.bind(previous_response_id=first.response_metadata["id"]), [HumanMessage("Add")])
    assert third.text == client_conversation.SUM
    client_conversation.check(gateway.model, [client_conversation.SQUARED] * 2)


@pytest.mark.parametrize("version", ["v0", "responses/v1", "v1"])
@pytest.mark.parametrize(
    ("include", "past"),
    [([], client_conversation.FORGOTTEN), (["code_interpreter_call.outputs"], "kept 3\n")],
    ids=["bare", "outputs"],
)
def test_history_of_what_nobody_keeps(
    gateway: RunningGateway, version: str, include: list[str], past: str
) -> None:
    model = make_model(gateway, store=False, include=include, output_version=version)
    client_conversation.script(gateway.model, 1)
    first = model.invoke("Square")
    kept = messages_from_dict(json.loads(json.dumps(messages_to_dict([HumanMessage("Square"), first]))))
    assert model.invoke([*kept, HumanMessage("Add")]).text == client_conversation.SUM
    client_conversation.check(gateway.model, [past])


@pytest.mark.parametrize("version", ["v0", "responses/v1", "v1"])
@pytest.mark.parametrize("stream", [False, True], ids=["blocking", "streaming"])
def test_reasoning_arrives_and_goes_back(gateway: RunningGateway, version: str, stream: bool) -> None:
    model = make_model(
        gateway,
        name="scripted-reasoning",
        output_version=version,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
    )
    ask = streamed if stream else model.__class__.invoke
    gateway.model.script(
        reasoning_answer("Let me think.", "Yes"), reasoning_answer("Once more.", "Still yes")
    )
    question = HumanMessage("Is it?")
    first = ask(model, [question])
    assert read_reasoning(first) == ["Let me think."]
    assert first.text == "Yes"
    second = ask(model, [question, first, HumanMessage("Sure?")])
    assert read_reasoning(second) == ["Once more."]
    assert gateway.model.requests[1].json["messages"][1] == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "Let me think.",
    }


def read_reasoning(message: AIMessage) -> list[str]:
    return [block.get("reasoning", "") for block in message.content_blocks if block["type"] == "reasoning"]


def test_what_fails(gateway: RunningGateway) -> None:
    model = make_model(gateway, output_version="v1")
    gateway.model.script(*client_conversation.lost_sandbox())
    assert streamed(model, "Square").text == client_conversation.LOST
    gateway.model.script(*client_conversation.broken_connection())
    with pytest.raises(openai.APIError, match="broke before its response was complete"):
        streamed(model, "Square")
