"""The hosted shell with the OpenAI SDK against `fumehood serve`, with real sandboxes."""

from pathlib import Path
from typing import Any

import openai
import pytest
from inline_snapshot import snapshot

from tests.e2e.conftest import INTERPRETER, RunningGateway
from tests.e2e.test_openai_sdk import list_event_order
from tests.support.gateway_process import Responder, code_call, text_answer, tool_call, tool_calls

SHELL: Any = {"type": "shell", "environment": {"type": "container_auto"}}


def commands(*lines: str, **more: object) -> Responder:
    return tool_calls(tool_call("shell", {"commands": lines, **more}))


def list_tool_results(gateway: RunningGateway, turn: int = -1) -> list[str]:
    """What the model was told of calls, in that request."""
    return [
        message["content"]
        for message in gateway.model.requests[turn].json["messages"]
        if message["role"] == "tool"
    ]


def test_a_streamed_call_its_files_and_the_next_turn(gateway: RunningGateway) -> None:
    gateway.model.script(
        commands("seq 3 > numbers.txt; cat numbers.txt", "echo oops >&2; exit 3"),
        text_answer("See [numbers](sandbox:/mnt/data/numbers.txt)."),
    )
    client = gateway.strict
    with client.responses.create(model="scripted", input="Count", tools=[SHELL], stream=True) as stream:
        events: list[Any] = list(stream)
    assert list_event_order(events) == snapshot(
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.shell_call_command.added",
            "response.shell_call_command.delta",
            "response.shell_call_command.done",
            "response.shell_call_command.added",
            "response.shell_call_command.delta",
            "response.shell_call_command.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.shell_call_output_content.delta",
            "response.shell_call_output_content.done",
            "response.shell_call_output_content.delta",
            "response.shell_call_output_content.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.annotation.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response = events[-1].response
    called, said, message = response.output
    assert (
        "".join(
            event.delta
            for event in events
            if event.type.endswith("command.delta") and event.command_index == 0
        )
        == (called.action.commands[0])
    )
    assert (called.status, said.status, said.call_id) == ("completed", "completed", called.call_id)
    assert [(one.stdout, one.stderr, one.outcome.exit_code) for one in said.output] == [
        ("1\n2\n3\n", "", 0),
        ("", "oops\n", 3),
    ]
    (note,) = message.content[0].annotations
    assert (note.type, note.filename) == ("container_file_citation", "numbers.txt")
    content = client.containers.files.content.retrieve(note.file_id, container_id=note.container_id)
    assert content.read() == b"1\n2\n3\n"
    (heard,) = list_tool_results(gateway)
    assert heard.startswith("$ seq 3 > numbers.txt; cat numbers.txt\n1\n2\n3\n$ echo oops")
    assert heard.endswith("\noops\nExit code: 3\nFiles: /mnt/data/numbers.txt")

    # The same container for Python, in the next turn; and the model is told of the first as before.
    gateway.model.script(code_call("print(open('numbers.txt').read().split())"), text_answer("Read."))
    again = client.responses.create(
        model="scripted", input="Read", tools=[INTERPRETER], previous_response_id=response.id
    )
    ran: Any = again.output[0]
    assert ran.container_id == called.environment.container_id
    first, second = list_tool_results(gateway)
    assert first.startswith("$ seq 3")
    assert second == "['1', '2', '3']"


def test_blocking_retrieval_and_replay_by_the_client(gateway: RunningGateway) -> None:
    client = gateway.strict
    gateway.model.script(commands("echo one > a.txt; echo done"), text_answer("Done."))
    response = client.responses.create(model="scripted", input="Write", tools=[SHELL], store=False)
    called: Any = response.output[0]
    items: Any = [{"role": "user", "content": "Write"}]
    items += [item.model_dump(exclude_none=True) for item in response.output]
    items += [{"role": "user", "content": "And read"}]
    gateway.model.script(commands("cat a.txt"), text_answer("It says one."))
    second = client.responses.create(model="scripted", input=items, tools=[SHELL])
    read, said = second.output[0], second.output[1]
    assert read.type == "shell_call"
    assert said.type == "shell_call_output"
    assert read.environment == called.environment
    assert said.output[0].stdout == "one\n"
    assert list_tool_results(gateway) == ["done", "one"]
    messages = gateway.model.requests[-1].json["messages"]
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    assert client.responses.retrieve(second.id).output == second.output
    include: Any = ["fumehood:execution"]
    whole: Any = client.responses.retrieve(second.id, include=include).output[1].to_dict()
    assert whole["fumehood:execution"]["stdout"] == "one\n"
    assert "fumehood:execution" not in said.to_dict()
    listed = client.responses.input_items.list(second.id).data
    assert {"shell_call", "shell_call_output"} <= {item.type for item in listed}


def test_both_tools_at_once_in_one_container(gateway: RunningGateway) -> None:
    gateway.model.script(
        tool_calls(
            tool_call("shell", {"commands": ["echo from the shell > s.txt"]}, call_id="a", index=0),
            tool_call(
                "code_interpreter", {"code": "open('p.txt', 'w').write('from python')"}, call_id="b", index=1
            ),
        ),
        commands("cat s.txt p.txt"),
        text_answer("Both."),
    )
    response = gateway.strict.responses.create(model="scripted", input="Both", tools=[INTERPRETER, SHELL])
    kinds = [item.type for item in response.output]
    assert kinds == [
        "shell_call",
        "code_interpreter_call",
        "shell_call_output",
        "shell_call",
        "shell_call_output",
        "message",
    ]
    said: Any = response.output[4]
    assert said.output[0].stdout == "from the shell\nfrom python"
    first: Any = response.output[0]
    second: Any = response.output[1]
    assert first.environment.container_id == second.container_id


def test_a_time_out_ends_the_command_and_nothing_else(gateway: RunningGateway) -> None:
    gateway.model.script(
        code_call("kept = 11"),
        commands("sleep 600 & sleep 600", timeout_ms=300),
        code_call("print(kept)"),
        text_answer("Still there."),
    )
    response = gateway.strict.responses.create(
        model="scripted", input="Wait", tools=[INTERPRETER, SHELL], include=["code_interpreter_call.outputs"]
    )
    said: Any = response.output[2]
    assert said.output[0].outcome.type == "timeout"
    ran: Any = response.output[3]
    assert ran.outputs[0].logs == "11\n"


def test_it_can_be_forced(gateway: RunningGateway) -> None:
    gateway.model.script(commands("true"), text_answer("Done."))
    gateway.client.responses.create(
        model="scripted", input="Do", tools=[INTERPRETER, SHELL], tool_choice={"type": "shell"}
    )
    assert gateway.model.requests[0].json["tool_choice"] == {
        "type": "function",
        "function": {"name": "shell"},
    }


def test_a_local_shell_stays_the_clients(gateway: RunningGateway) -> None:
    """Its calls are the client's to run; its items, given back, are shown to the model."""
    gateway.model.script(commands("ls"))
    response: Any = gateway.strict.responses.create(
        model="scripted", input="Hi", tools=[{"type": "shell", "environment": {"type": "local"}}]
    )
    assert response.tools[0].type == "shell"
    (call,) = response.output
    assert (call.type, call.environment.type, call.action.commands) == ("shell_call", "local", ["ls"])
    gateway.model.script(text_answer("So be it."))
    items: Any = [
        {
            "type": "shell_call",
            "call_id": "c1",
            "action": {"commands": ["ls"]},
            "environment": {"type": "local"},
        },
        {
            "type": "shell_call_output",
            "call_id": "c1",
            "output": [{"stdout": "x\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        {"role": "user", "content": "Well?"},
    ]
    gateway.strict.responses.create(model="scripted", input=items, tools=[SHELL])
    assert list_tool_results(gateway) == ["x"]


def test_what_cannot_be_is_refused_before_anything_begins(gateway: RunningGateway) -> None:
    for environment in ({"type": "container_reference", "container_id": "cntr_none"}, {"type": "cloud"}):
        tool: Any = {"type": "shell", "environment": environment}
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
            gateway.strict.responses.create(model="scripted", input="Do", tools=[tool])
        assert refused.value.param == "tools"


def test_a_model_behind_another_gateway(gateway: RunningGateway) -> None:
    """What speaks Responses itself is told of the shell as of a function, and gets its calls back as such."""
    gateway.model.script(commands("echo far"), text_answer("Far."))
    response = gateway.strict.responses.create(model="far", input="Do", tools=[SHELL])
    said: Any = response.output[1]
    assert (response.output[0].type, said.output[0].stdout) == ("shell_call", "far\n")
    gateway.model.script(text_answer("Yes."))
    gateway.strict.responses.create(
        model="far", input="And?", tools=[SHELL], previous_response_id=response.id
    )
    assert list_tool_results(gateway) == ["far"]


def test_an_upload_is_there_for_commands(gateway: RunningGateway, tmp_path: Path) -> None:
    given = tmp_path / "words.txt"
    given.write_bytes(b"b\na\n")
    file = gateway.strict.files.create(file=given, purpose="user_data")
    tool: Any = {"type": "shell", "environment": {"type": "container_auto", "file_ids": [file.id]}}
    gateway.model.script(commands("sort words.txt > sorted.txt; cat sorted.txt"), text_answer("Sorted."))
    response = gateway.strict.responses.create(model="scripted", input="Sort", tools=[tool])
    said: Any = response.output[1]
    assert said.output[0].stdout == "a\nb\n"
    message: Any = response.output[2]
    assert [note.filename for note in message.content[0].annotations] == ["sorted.txt"]


def test_it_can_be_tried_without_a_model(gateway: RunningGateway) -> None:
    said = "```sh\nseq 3 > n.txt\n```\n```python\nprint(open('n.txt').read().split())\n```"
    response = gateway.strict.responses.create(model="direct", input=said, tools=[SHELL, INTERPRETER])
    assert [item.type for item in response.output] == [
        "shell_call",
        "shell_call_output",
        "code_interpreter_call",
        "message",
    ]
    assert "['1', '2', '3']" in response.output_text
