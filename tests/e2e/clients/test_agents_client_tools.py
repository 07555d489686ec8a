"""Tools that the Agents SDK runs itself: shells, patches and custom tools, blocking and streamed.

`scripted` is a chat completions server behind the gateway, `far` a server of the Responses API that sees functions, and
`far-native` one that gets the tools as the client wrote them.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    ApplyPatchTool,
    LocalShellCommandRequest,
    LocalShellTool,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    ShellCallOutcome,
    ShellCommandOutput,
    ShellCommandRequest,
    ShellResult,
    ShellTool,
    apply_diff,
)
from agents.editor import ApplyPatchOperation, ApplyPatchResult
from agents.tool import CustomTool
from agents.tool_context import ToolContext
from openai import AsyncOpenAI

from tests.e2e.conftest import RunningGateway
from tests.support.gateway_process import text_answer, tool_call, tool_calls

QUIET = RunConfig(tracing_disabled=True)  # nothing is sent to OpenAI
MODELS = ["scripted", "far", "far-native"]
STREAMED = [False, True]

each_way = pytest.mark.parametrize(
    ("model", "streamed"), [(model, streamed) for model in MODELS for streamed in STREAMED]
)


async def run_agent(
    client: AsyncOpenAI, model: str, tools: Sequence[Any], streamed: bool, **settings: Any
) -> tuple[Any, list[str]]:
    """The result, and the types of the raw events."""
    agent = Agent(
        name="Worker",
        model=OpenAIResponsesModel(model, client),
        tools=[*tools],
        model_settings=ModelSettings(**settings),
    )
    if not streamed:
        return await Runner.run(agent, "Do it", run_config=QUIET), []
    result = Runner.run_streamed(agent, "Do it", run_config=QUIET)
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    return result, kinds


def list_tool_results(gateway: RunningGateway) -> list[str]:
    """What the model has read of its calls, in the end."""
    messages = gateway.model.requests[-1].json["messages"]
    return [message["content"] for message in messages if message["role"] == "tool"]


async def run_commands(request: ShellCommandRequest) -> ShellResult:
    outputs: list[ShellCommandOutput] = []
    for command in request.data.action.commands:
        process = await asyncio.create_subprocess_shell(
            command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        outcome = ShellCallOutcome(type="exit", exit_code=process.returncode)
        outputs.append(ShellCommandOutput(out.decode(), err.decode(), outcome, command))
    return ShellResult(outputs)


async def run_program(request: LocalShellCommandRequest) -> str:
    process = await asyncio.create_subprocess_exec(
        *request.data.action.command, stdout=asyncio.subprocess.PIPE
    )
    return (await process.communicate())[0].decode()


class DirectoryEditor:
    """Changes files below a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        (self._root / operation.path).write_text(apply_diff("", operation.diff or "", mode="create"))
        return ApplyPatchResult(status="completed", output=f"Created {operation.path}.")

    def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        path = self._root / operation.path
        path.write_text(apply_diff(path.read_text(), operation.diff or ""))
        return ApplyPatchResult(status="completed", output=f"Updated {operation.path}.")

    def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        (self._root / operation.path).unlink()
        return ApplyPatchResult(status="completed", output=f"Deleted {operation.path}.")


@each_way
async def test_a_shell(gateway: RunningGateway, client: AsyncOpenAI, model: str, streamed: bool) -> None:
    gateway.model.script(
        tool_calls(tool_call("shell", {"commands": ["echo 42", "echo oh >&2; exit 3"]})),
        text_answer("It is 42."),
    )
    result, kinds = await run_agent(client, model, [ShellTool(executor=run_commands)], streamed)
    assert result.final_output == "It is 42."
    assert [item.type for item in result.raw_responses[0].output] == ["shell_call"]
    assert list_tool_results(gateway) == ["42\noh\nExit code: 3"]
    if streamed:
        assert "response.shell_call_command.delta" in kinds


@each_way
async def test_a_local_shell(
    gateway: RunningGateway, client: AsyncOpenAI, model: str, streamed: bool
) -> None:
    gateway.model.script(
        tool_calls(tool_call("local_shell", {"command": ["echo", "42"]})), text_answer("It is 42.")
    )
    result, _ = await run_agent(client, model, [LocalShellTool(executor=run_program)], streamed)
    assert result.final_output == "It is 42."
    assert [item.type for item in result.raw_responses[0].output] == ["local_shell_call"]
    assert list_tool_results(gateway) == ["42\n"]


@each_way
async def test_patches(
    gateway: RunningGateway, client: AsyncOpenAI, model: str, streamed: bool, tmp_path: Path
) -> None:
    created = {"type": "create_file", "path": "a.txt", "diff": "+one\n+two\n"}
    updated = {"type": "update_file", "path": "a.txt", "diff": "@@\n one\n-two\n+three\n"}
    (tmp_path / "old.txt").touch()
    deleted = {"type": "delete_file", "path": "old.txt"}
    gateway.model.script(
        tool_calls(tool_call("apply_patch", created)),
        tool_calls(
            tool_call("apply_patch", updated, call_id="call_2"),
            tool_call("apply_patch", deleted, call_id="call_3", index=1),
        ),
        text_answer("Done."),
    )
    tool = ApplyPatchTool(editor=DirectoryEditor(tmp_path))
    result, kinds = await run_agent(client, model, [tool], streamed)
    assert result.final_output == "Done."
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text().split() == ["one", "three"]
    assert list_tool_results(gateway) == ["Created a.txt.", "Updated a.txt.", "Deleted old.txt."]
    if streamed:
        assert "response.apply_patch_call_operation_diff.delta" in kinds


@each_way
async def test_a_custom_tool(
    gateway: RunningGateway, client: AsyncOpenAI, model: str, streamed: bool
) -> None:
    async def count(context: ToolContext[Any], text: str) -> str:
        del context
        return str(len(text.split()))

    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z ]+"}
    tool = CustomTool(name="count", description="Counts words.", on_invoke_tool=count, format=form)
    gateway.model.script(
        tool_calls(tool_call("count", {"input": "one two three"})), text_answer("Three words.")
    )
    result, kinds = await run_agent(client, model, [tool], streamed)
    assert result.final_output == "Three words."
    assert [item.type for item in result.raw_responses[0].output] == ["custom_tool_call"]
    assert list_tool_results(gateway) == ["3"]
    (function,) = [entry["function"] for entry in gateway.model.requests[0].json["tools"]]
    assert "[a-z ]+" in function["description"]
    if streamed:
        assert "response.custom_tool_call_input.delta" in kinds


@pytest.mark.parametrize("model", MODELS)
async def test_a_conversation_that_the_server_keeps(
    gateway: RunningGateway, client: AsyncOpenAI, model: str
) -> None:
    """Only the answers are sent; the calls are known by `previous_response_id`."""
    agent = Agent(
        name="Worker",
        model=OpenAIResponsesModel(model, client),
        tools=[ShellTool(executor=run_commands), LocalShellTool(executor=run_program)],
    )
    gateway.model.script(
        tool_calls(
            tool_call("shell", {"commands": ["echo 1"]}),
            tool_call("local_shell", {"command": ["echo", "2"]}, call_id="call_2", index=1),
        ),
        text_answer("Done."),
        text_answer("Yes."),
    )
    first = await Runner.run(agent, "Do it", auto_previous_response_id=True, run_config=QUIET)
    assert first.final_output == "Done."
    assert list_tool_results(gateway) == ["1", "2\n"]
    after = await Runner.run(agent, "Sure?", previous_response_id=first.last_response_id, run_config=QUIET)
    assert after.final_output == "Yes."
    assert list_tool_results(gateway) == ["1", "2\n"]


async def test_a_shell_that_is_forced(gateway: RunningGateway, client: AsyncOpenAI) -> None:
    gateway.model.script(tool_calls(tool_call("shell", {"commands": ["true"]})), text_answer("Done."))
    tool = ShellTool(executor=run_commands)
    result, _ = await run_agent(client, "far-native", [tool], False, tool_choice="shell")
    assert result.final_output == "Done."
    assert gateway.model.requests[0].json["tool_choice"] == {
        "type": "function",
        "function": {"name": "shell"},
    }
