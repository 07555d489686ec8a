"""The Agents SDK against the gateway."""

from typing import Any

import openai
import pytest
from agents import (
    Agent,
    CodeInterpreterTool,
    ModelSettings,
    OpenAIResponsesModel,
    ReasoningItem,
    RunConfig,
    Runner,
    ShellTool,
    SQLiteSession,
    function_tool,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning

from tests.e2e.conftest import RunningGateway
from tests.support import client_conversation
from tests.support.gateway_process import code_call, reasoning_answer, text_answer, tool_call, tool_calls

QUIET = RunConfig(tracing_disabled=True)  # nothing is sent to OpenAI


def make_agent(client: AsyncOpenAI, *more: Any, model: str = "scripted", **settings: Any) -> Agent:
    interpreter = CodeInterpreterTool({"type": "code_interpreter", "container": {"type": "auto"}})
    return Agent(
        name="Counter",
        instructions="Be brief.",
        model=OpenAIResponsesModel(model, client),
        tools=[interpreter, *more],
        model_settings=ModelSettings(**settings),
    )


async def test_a_conversation(gateway: RunningGateway, client: AsyncOpenAI) -> None:
    agent = make_agent(client, response_include=["code_interpreter_call.outputs"])
    client_conversation.script(gateway.model, 3)
    first = await Runner.run(agent, "Square", run_config=QUIET)
    assert first.final_output == client_conversation.LINK
    message: Any = first.raw_responses[0].output[-1]
    cited = message.content[0].annotations[0]
    content = await client.containers.files.content.retrieve(cited.file_id, container_id=cited.container_id)
    assert content.read() == client_conversation.FILE

    streamed = Runner.run_streamed(
        agent, "Add", previous_response_id=first.last_response_id, run_config=QUIET
    )
    code = ""
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type.endswith(
            "code_interpreter_call_code.delta"
        ):
            code += getattr(event.data, "delta")  # noqa: B009
    assert (code, streamed.final_output) == (client_conversation.ADD, client_conversation.SUM)

    again: Any = [*first.to_input_list(), {"role": "user", "content": "Add"}]
    assert (await Runner.run(agent, again, run_config=QUIET)).final_output == client_conversation.SUM
    replayed = Runner.run_streamed(agent, again, run_config=QUIET)
    async for _ in replayed.stream_events():
        pass
    assert replayed.final_output == client_conversation.SUM
    client_conversation.check(gateway.model, [client_conversation.SQUARED] * 3)


async def test_reasoning_arrives_and_goes_back(gateway: RunningGateway, client: AsyncOpenAI) -> None:
    agent = make_agent(
        client,
        model="scripted-reasoning",
        store=False,
        reasoning=Reasoning(summary="auto"),
        response_include=["reasoning.encrypted_content"],
    )
    gateway.model.script(reasoning_answer("Let me think.", "Yes"), text_answer("Still yes"))
    first = await Runner.run(agent, "Is it?", run_config=QUIET)
    (item,) = [item for item in first.new_items if isinstance(item, ReasoningItem)]
    assert [part.text for part in item.raw_item.summary] == ["Let me think."]
    again: Any = [*first.to_input_list(), {"role": "user", "content": "Sure?"}]
    assert (await Runner.run(agent, again, run_config=QUIET)).final_output == "Still yes"
    (replayed,) = [one for one in gateway.model.requests[1].json["messages"] if one["role"] == "assistant"]
    assert replayed["reasoning_content"] == "Let me think."


async def test_a_session_that_the_client_keeps(gateway: RunningGateway, client: AsyncOpenAI) -> None:
    agent = make_agent(client, store=False, response_include=["code_interpreter_call.outputs"])
    session = SQLiteSession("squares")
    client_conversation.script(gateway.model, 1)
    await Runner.run(agent, "Square", session=session, run_config=QUIET)
    second = await Runner.run(agent, "Add", session=session, run_config=QUIET)
    session.close()
    assert second.final_output == client_conversation.SUM
    client_conversation.check(gateway.model, ["kept 3\n"])


async def test_functions_beside_the_interpreter(gateway: RunningGateway, client: AsyncOpenAI) -> None:
    @function_tool
    def rate(currency: str) -> str:
        """What one of them is worth."""
        return f"2 {currency}"

    gateway.model.script(
        tool_calls(
            tool_call("rate", {"currency": "EUR"}, call_id="call_rate"),
            tool_call("code_interpreter", {"code": "pieces = 21"}, call_id="call_code", index=1),
        ),
        code_call("print(2 * pieces)"),
        text_answer("42 EUR"),
    )
    done = await Runner.run(make_agent(client, rate), "What are 21 worth?", run_config=QUIET)
    assert done.final_output == "42 EUR"
    messages = gateway.model.requests[-1].json["messages"]
    assert [message["role"] for message in messages[2:]] == ["assistant", "tool", "tool", "assistant", "tool"]
    assert messages[3]["content"] == "2 EUR"
    assert messages[-1]["content"] == "42"


async def streamed(agent: Agent) -> Any:
    run = Runner.run_streamed(agent, "Square", run_config=QUIET)
    async for _ in run.stream_events():
        pass
    return run.final_output


async def test_what_fails(gateway: RunningGateway, client: AsyncOpenAI) -> None:
    gateway.model.script(*client_conversation.lost_sandbox())
    assert await streamed(make_agent(client)) == client_conversation.LOST
    gateway.model.script(*client_conversation.broken_connection())
    with pytest.raises(openai.APIError, match="broke before its response was complete"):
        await streamed(make_agent(client))


async def test_a_hosted_shell(gateway: RunningGateway, client: AsyncOpenAI) -> None:
    """Its items are the server's to make and to answer; the client keeps them, and gives them back."""
    shell = ShellTool(environment={"type": "container_auto"})
    agent = make_agent(client, shell, store=False)
    gateway.model.script(
        tool_calls(tool_call("shell", {"commands": ["echo 14 > sum.txt", "cat sum.txt"]})),
        text_answer("It is 14."),
        code_call("print(open('sum.txt').read())"),
        text_answer("Still 14."),
    )
    first = await Runner.run(agent, "Add", run_config=QUIET)
    kinds = [item.type for item in first.raw_responses[0].output]
    assert kinds == ["shell_call", "shell_call_output", "message"]
    again: Any = [*first.to_input_list(), {"role": "user", "content": "And now?"}]
    streamed = Runner.run_streamed(agent, again, run_config=QUIET)
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == "Still 14."
    told = [
        message["content"]
        for message in gateway.model.requests[-1].json["messages"]
        if message["role"] == "tool"
    ]
    assert told == ["14", "14"]
