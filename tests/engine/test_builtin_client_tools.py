"""Tools that the client runs itself: what the model is offered, items and events of its calls, and answers."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fumehood.protocol.model_turns import (
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelTurnEnded,
    TurnEndReason,
)
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.response_aggregation import aggregate_events
from fumehood.protocol.openai.response_replay import replay_response
from fumehood.protocol.openai.responses import Response
from fumehood.testing import ScriptedModel, says
from tests.support.chat_messages import render, summarize_messages
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import ECHO, FUNCTION, EngineHarness
from tests.support.stream_checks import check_invariants, event_types

RECORDED = Path(__file__).parents[3] / "shared" / "reference" / "recorded"
SHELL: dict[str, Any] = {"type": "shell", "environment": {"type": "local"}}
LOCAL_SHELL: dict[str, Any] = {"type": "local_shell"}
APPLY_PATCH: dict[str, Any] = {"type": "apply_patch"}
CREATE = {"type": "create_file", "path": "a.md", "diff": "+# A\n+\n+text\n"}
DELETE = {"type": "delete_file", "path": "a.md"}


def writes(name: str, arguments: str, reason: TurnEndReason = "calls", *, size: int = 3) -> list[Any]:
    """A turn whose call is written in small pieces, and perhaps cut off."""
    pieces = [arguments[start : start + size] for start in range(0, len(arguments), size)]
    return [
        ModelCallStarted(0, "call_1", name),
        *(ModelCallArgumentsDelta(0, piece) for piece in pieces),
        ModelTurnEnded(reason),
    ]


def to_plain(response: Response) -> list[Any]:
    """The output items without their ids."""
    items: list[Any] = msgspec.json.decode(msgspec.json.encode(response.output))
    for item in items:
        assert item.pop("id")
    return items


async def run_call(tool: dict[str, Any], turn: list[Any], *more: Any) -> tuple[list[Any], list[str]]:
    """The items that a turn makes, and the types of their events without repetitions."""
    async with ScriptedModel(turn, *more) as model:
        events = await EngineHarness(model).stream(tools=[tool])
    response = check_invariants(events)
    assert aggregate_events(replay_response(response)) == response
    kinds = [kind.removeprefix("response.") for kind, _ in groupby(event_types(events))]
    return to_plain(response), kinds[2:-1]


# --- calls --------------------------------------------------------------------------------------------


async def test_a_shell_call_streams_its_commands() -> None:
    arguments = json.dumps({"commands": ["ls -l", "echo 'ä\n'"], "timeout_ms": 500})
    items, kinds = await run_call(SHELL, writes("shell", arguments))
    assert items == [
        {
            "type": "shell_call",
            "call_id": "call_1",
            "status": "completed",
            "environment": {"type": "local"},
            "action": {"commands": ["ls -l", "echo 'ä\n'"], "timeout_ms": 500, "max_output_length": None},
        }
    ]
    command = ["shell_call_command.added", "shell_call_command.delta", "shell_call_command.done"]
    assert kinds == ["output_item.added", *command, *command, "output_item.done"]


async def test_a_local_shell_call() -> None:
    arguments = {"command": ["ls", "-a"], "env": {"A": "1"}, "working_directory": "/tmp"}
    items, kinds = await run_call(LOCAL_SHELL, writes("local_shell", json.dumps(arguments)))
    action = {"type": "exec", **arguments}
    assert items == [
        {"type": "local_shell_call", "call_id": "call_1", "status": "completed", "action": action}
    ]
    assert kinds == ["output_item.added", "output_item.done"]


async def test_a_patch_streams_its_diff() -> None:
    items, kinds = await run_call(APPLY_PATCH, writes("apply_patch", json.dumps(CREATE)))
    assert items == [
        {"type": "apply_patch_call", "call_id": "call_1", "status": "completed", "operation": CREATE}
    ]
    assert kinds == [
        "output_item.added",
        "apply_patch_call_operation_diff.delta",
        "apply_patch_call_operation_diff.done",
        "output_item.done",
    ]


async def test_a_patch_in_any_order_and_without_a_diff() -> None:
    backwards = dict(reversed(CREATE.items()))
    for arguments, operation in ((backwards, CREATE), (DELETE, DELETE), (DELETE | {"diff": "+x"}, DELETE)):
        items, _ = await run_call(APPLY_PATCH, writes("apply_patch", json.dumps(arguments)))
        assert items[0]["operation"] == operation


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded streams are not at hand")
@pytest.mark.parametrize(
    ("recording", "tool", "field"),
    [
        ("openai-shell-tool.1", {"type": "shell"}, "action"),
        ("openai-local-shell-tool.1", LOCAL_SHELL, "action"),
        ("openai-apply-patch-tool.1", APPLY_PATCH, "operation"),
        ("openai-apply-patch-tool-delete.1", APPLY_PATCH, "operation"),
    ],
)
async def test_a_call_is_streamed_as_openai_streams_it(
    recording: str, tool: dict[str, Any], field: str
) -> None:
    lines = (RECORDED / f"{recording}.chunks.txt").read_text().splitlines()
    recorded: list[Any] = [json.loads(line) for line in lines if line]
    of_call = f"{tool['type']}_call"
    (index, item) = next(
        (event["output_index"], event["item"])
        for event in recorded
        if event["type"] == "response.output_item.done" and event["item"]["type"] == of_call
    )
    end = next(number for number, event in enumerate(recorded) if event["type"] == "response.completed")
    expected = [
        kind.removeprefix("response.")
        for kind, _ in groupby(
            event["type"] for event in recorded[:end] if event.get("output_index") == index
        )
    ]
    arguments = {key: value for key, value in item[field].items() if value is not None}
    items, kinds = await run_call(tool, writes(str(tool["type"]), json.dumps(arguments)))
    assert kinds == expected
    (made,) = items
    made.pop("environment", None)
    assert made == {key: value for key, value in item.items() if key != "id"} | {"call_id": "call_1"}


async def test_what_small_models_write_is_understood() -> None:
    items, _ = await run_call(SHELL, writes("shell", '{"commands": "ls"}'))
    assert items[0]["action"]["commands"] == ["ls"]
    items, _ = await run_call(LOCAL_SHELL, writes("local_shell", '{"command": "ls | head"}'))
    assert items[0]["action"]["command"] == ["bash", "-lc", "ls | head"]


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (SHELL, "{}"),
        (SHELL, '{"commands": []}'),
        (SHELL, "ls"),
        (LOCAL_SHELL, '{"command": [1]}'),
        (APPLY_PATCH, '{"type": "rename_file", "path": "a", "diff": "+x"}'),
        (APPLY_PATCH, '{"type": "create_file", "path": "", "diff": "+x"}'),
        (APPLY_PATCH, '{"type": "update_file", "path": "a"}'),
    ],
)
async def test_the_model_is_told_of_arguments_that_make_no_call(tool: dict[str, Any], arguments: str) -> None:
    """The client sees nothing of it: it could not do anything with such a call."""
    async with ScriptedModel(writes(tool["type"], arguments), says("Sorry.")) as model:
        response = await EngineHarness(model).create(tools=[tool])
    assert [item["type"] for item in to_plain(response)] == ["message"]
    exchange = model.requests[1].segments[-1].entries[0].exchange
    assert exchange is not None
    assert exchange.output.startswith("Nothing ran: ")


@pytest.mark.parametrize("reason", ["length", "calls"])
async def test_a_client_gets_no_part_of_a_command_or_patch(reason: TurnEndReason) -> None:
    """Half of `rm -r build/tmp` is another command, and half of a patch destroys the file."""
    items, _ = await run_call(SHELL, writes("shell", '{"commands": ["make", "rm -r buil', reason))
    assert (items[0]["status"], items[0]["action"]["commands"]) == ("incomplete", ["make"])
    cut = json.dumps(CREATE)[:-8]
    items, _ = await run_call(APPLY_PATCH, writes("apply_patch", cut, reason))
    assert (items[0]["status"], items[0]["operation"]) == ("in_progress", CREATE | {"diff": ""})
    unseen = [] if reason == "length" else [says("Sorry.")]
    items, _ = await run_call(LOCAL_SHELL, writes("local_shell", '{"command": ["ls"', reason), *unseen)
    assert [item["type"] for item in items] == (["message"] if unseen else [])


async def test_calls_beside_others() -> None:
    script: list[Any] = [
        ModelCallStarted(0, "call_0", "local_shell"),
        ModelCallStarted(1, "call_1", "apply_patch"),
        ModelCallArgumentsDelta(1, json.dumps(CREATE)),
        ModelCallArgumentsDelta(0, '{"command": ["ls"]}'),
        ModelCallStarted(2, "call_2", "f"),
        ModelCallArgumentsDelta(2, "{}"),
        ModelCallStarted(3, "call_3", "echo"),
        ModelCallArgumentsDelta(3, '{"text":"x"}'),
        ModelTurnEnded("calls"),
    ]
    async with ScriptedModel(script) as model:
        engine = EngineHarness(model, [EchoTool()])
        response = check_invariants(await engine.stream(tools=[LOCAL_SHELL, APPLY_PATCH, FUNCTION, ECHO]))
    assert sorted(item["type"] for item in to_plain(response)) == [
        "apply_patch_call",
        "code_interpreter_call",
        "function_call",
        "local_shell_call",
    ]


# --- what the model is offered ------------------------------------------------------------------------


async def test_each_is_offered_as_a_function_and_can_be_chosen() -> None:
    tools = [SHELL, LOCAL_SHELL, APPLY_PATCH, FUNCTION]
    async with ScriptedModel(says("a"), says("b"), says("c")) as model:
        for kind in ("shell", "local_shell", "apply_patch"):
            await EngineHarness(model).create(tools=tools, tool_choice={"type": kind})
    for kind, request in zip(("shell", "local_shell", "apply_patch"), model.requests, strict=True):
        assert [function.name for function in request.function_tools] == [
            "shell",
            "local_shell",
            "apply_patch",
            "f",
        ]
        assert getattr(request.tool_choice, "name", None) == kind
        for function in request.function_tools[:3]:
            assert function.description
            assert msgspec.json.decode(function.parameters)["additionalProperties"] is False


async def test_skills_of_a_shell_are_described() -> None:
    skill = {"name": "csv", "description": "Cuts columns.", "path": "/skills/csv"}
    tool = {"type": "shell", "environment": {"type": "local", "skills": [skill]}}
    async with ScriptedModel(says("a")) as model:
        await EngineHarness(model).create(tools=[tool])
    (function,) = model.requests[0].function_tools
    assert "- csv (in /skills/csv): Cuts columns." in function.description
    for wrong in ([{"path": "x"}], [skill] * 65, "csv"):
        tool = {"type": "shell", "environment": {"type": "local", "skills": wrong}}
        with pytest.raises(InvalidRequest) as refused:
            await EngineHarness(ScriptedModel()).start(tools=[tool])
        assert refused.value.param == "tools[0]"


async def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'shell'"):
        await EngineHarness(ScriptedModel()).start(tools=[SHELL, FUNCTION | {"name": "shell"}])


# --- answers ------------------------------------------------------------------------------------------

ANSWERS: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    (LOCAL_SHELL, '{"command":["ls"]}', {"type": "local_shell_call_output", "output": "a.md"}, "a.md"),
    (
        APPLY_PATCH,
        json.dumps(DELETE, separators=(",", ":")),
        {"type": "apply_patch_call_output", "status": "completed"},
        "completed",
    ),
    (
        APPLY_PATCH,
        json.dumps(DELETE, separators=(",", ":")),
        {"type": "apply_patch_call_output", "status": "failed", "output": "No such file."},
        "The patch was not applied. No such file.",
    ),
]


@pytest.mark.parametrize(("tool", "arguments", "answer", "text"), ANSWERS)
async def test_an_answer_reaches_the_model_with_its_call(
    tool: dict[str, Any], arguments: str, answer: dict[str, Any], text: str
) -> None:
    """By `previous_response_id`, and if the client sends all items itself."""
    async with ScriptedModel(writes(tool["type"], arguments), says("Done."), says("Done.")) as model:
        engine = EngineHarness(model)
        first = await engine.create(tools=[tool])
        answer = answer | {"call_id": "call_1"}
        await engine.create(tools=[tool], previous_response_id=first.id, input=[answer])
        (item,) = msgspec.json.decode(msgspec.json.encode(first.output))
        question = {"role": "user", "content": "Hi"}
        await engine.create(tools=[tool], store=False, input=[question, item, answer])
    for request in model.requests[1:]:
        messages = render(*request.segments)
        assert summarize_messages(messages) == ["user Hi", "assistant call_1", f"tool {text} -> call_1"]
        assert messages[1]["tool_calls"][0]["function"] == {"name": tool["type"], "arguments": arguments}


async def test_the_output_of_a_local_shell_may_name_its_call_by_id() -> None:
    """OpenAI's type for it has no `call_id`; clients put either id of the call there."""
    async with ScriptedModel(writes("local_shell", '{"command":["ls"]}'), *[says("x")] * 2) as model:
        engine = EngineHarness(model)
        first = await engine.create(tools=[LOCAL_SHELL])
        (call,) = msgspec.json.decode(msgspec.json.encode(first.output))
        for identity in (call["id"], call["call_id"]):
            answer = {"type": "local_shell_call_output", "id": identity, "output": "a.md"}
            await engine.create(previous_response_id=first.id, input=[answer])
    for request in model.requests[1:]:
        messages = render(*request.segments)
        assert messages[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "a.md"}


async def test_a_call_that_is_not_answered_is_refused() -> None:
    async with ScriptedModel(writes("local_shell", '{"command":["ls"]}')) as model:
        engine = EngineHarness(model)
        first = await engine.create(tools=[LOCAL_SHELL])
        unnamed: Any = {"type": "local_shell_call_output", "call_id": []}
        for said in ([{"role": "user", "content": "Well?"}], [unnamed]):
            with pytest.raises(
                InvalidRequest, match="No tool output found for function call call_1"
            ) as refused:
                await engine.start(previous_response_id=first.id, input=said)
            assert refused.value.param == "input"
