"""Pydantic AI against the gateway."""

from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    CodeExecutionTool,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelResponse,
    ModelServerError,
    NativeToolCallPart,
    ThinkingPart,
)
from pydantic_ai.capabilities import NativeTool
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.conftest import RunningGateway
from tests.support import client_conversation
from tests.support.gateway_process import code_call, reasoning_answer, text_answer

# Without it, it leaves out of its history whatever ran on a server, and with it the container.
WITH_IDS = OpenAIResponsesModelSettings(openai_send_reasoning_ids=True)


def make_agent(
    client: AsyncOpenAI, settings: OpenAIResponsesModelSettings, output: Any = str
) -> Agent[None, Any]:
    return Agent(
        OpenAIResponsesModel("scripted", provider=OpenAIProvider(openai_client=client)),
        output_type=output,
        capabilities=[NativeTool(CodeExecutionTool())],
        model_settings=settings,
    )


def kept(messages: list[ModelMessage]) -> list[ModelMessage]:
    """As they are after a night in a database."""
    return ModelMessagesTypeAdapter.validate_json(ModelMessagesTypeAdapter.dump_json(messages))


@pytest.mark.parametrize(
    "settings",
    [
        WITH_IDS,
        OpenAIResponsesModelSettings(openai_previous_response_id="auto"),
        OpenAIResponsesModelSettings(
            openai_send_reasoning_ids=True, openai_include_code_execution_outputs=True
        ),
    ],
    ids=["history", "previous_response_id", "outputs"],
)
async def test_a_conversation(
    gateway: RunningGateway, client: AsyncOpenAI, settings: OpenAIResponsesModelSettings
) -> None:
    agent = make_agent(client, settings)
    client_conversation.script(gateway.model, 2)
    first = await agent.run("Square")
    assert first.output == client_conversation.LINK
    (ran,) = [part for part in first.response.parts if isinstance(part, NativeToolCallPart)]
    container_id = str(ran.args_as_dict()["container_id"])
    (file,) = gateway.client.containers.files.list(container_id)
    content = gateway.client.containers.files.content.retrieve(file.id, container_id=container_id)
    assert content.read() == client_conversation.FILE

    async with agent.run_stream("Add", message_history=kept(first.all_messages())) as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == client_conversation.SUM
    third = await agent.run("Add", message_history=kept(streamed.all_messages()))
    assert third.output == client_conversation.SUM
    client_conversation.check(gateway.model, [client_conversation.SQUARED] * 2)


@pytest.mark.parametrize("store", [True, False], ids=["stored", "unstored"])
async def test_reasoning_arrives_and_goes_back(
    gateway: RunningGateway, client: AsyncOpenAI, store: bool
) -> None:
    """Blocking, then streamed with the first turn in its history."""
    model = OpenAIResponsesModel(
        "scripted-reasoning",
        provider=OpenAIProvider(openai_client=client),
        profile=OpenAIModelProfile(openai_supports_encrypted_reasoning_content=True),
    )
    settings = OpenAIResponsesModelSettings(openai_reasoning_summary="auto", openai_store=store)
    agent = Agent(model, model_settings=settings)
    gateway.model.script(
        reasoning_answer("Let me think.", "Yes"), reasoning_answer("Once more.", "Still yes")
    )
    first = await agent.run("Is it?")
    assert read_thinking(first.response) == ["Let me think."]
    async with agent.run_stream("Sure?", message_history=kept(first.all_messages())) as streamed:
        assert await streamed.get_output() == "Still yes"
    assert read_thinking(streamed.response) == ["Once more."]
    assert gateway.model.requests[1].json["messages"][1] == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "Let me think.",
    }


def read_thinking(response: ModelResponse) -> list[str]:
    return [part.content for part in response.parts if isinstance(part, ThinkingPart)]


class Total(BaseModel):
    total: int


async def test_structured_output_is_a_call_beside_the_interpreter(
    gateway: RunningGateway, client: AsyncOpenAI
) -> None:
    gateway.model.script(code_call("print(42)"), text_answer('{"total":42}'))
    done = await make_agent(client, WITH_IDS, Total).run("6 * 7?")
    assert done.output == Total(total=42)


async def test_what_fails(gateway: RunningGateway, client: AsyncOpenAI) -> None:
    agent = make_agent(client, WITH_IDS)
    gateway.model.script(*client_conversation.lost_sandbox())
    async with agent.run_stream("Square") as streamed:
        assert await streamed.get_output() == client_conversation.LOST
    gateway.model.script(*client_conversation.broken_connection())
    with pytest.raises(ModelServerError, match="broke before its response was complete"):
        async with agent.run_stream("Square") as streamed:
            await streamed.get_output()
