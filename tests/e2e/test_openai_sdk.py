"""The OpenAI SDK against `fumehood serve`, over a socket, with real sandboxes."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from inline_snapshot import snapshot
from pydantic import BaseModel

from tests.e2e.conftest import INTERPRETER, OUTPUTS, RunningGateway, read_logs
from tests.support.gateway_process import code_call, text_answer, tool_call, tool_calls

PLOT = """
import matplotlib.pyplot as plt
values = [1, 4, 9]
plt.plot(values)
plt.savefig("squares.png")
open("squares.csv", "w").write("1,4,9")
plt.show()
print("plotted", len(values))
"""


def list_event_order(events: list[Any]) -> list[str]:
    """The types of the events, with runs of deltas as one."""
    types: list[str] = []
    for event in events:
        if not (types and event.type.endswith(".delta") and types[-1] == event.type):
            types.append(event.type)
    return types


def test_a_streamed_turn_that_plots_and_the_next_one(gateway: RunningGateway) -> None:
    linked = "Here: [the chart](sandbox:/mnt/data/squares.png)."
    gateway.model.script(
        code_call(PLOT), text_answer("Here: [the chart]", "(sandbox:/mnt/data/squares.png).")
    )
    client = gateway.strict
    with client.responses.create(
        model="scripted", input="Plot squares", tools=[INTERPRETER], include=OUTPUTS, stream=True
    ) as stream:
        events: list[Any] = list(stream)
    assert list_event_order(events) == snapshot(
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.code_interpreter_call.in_progress",
            "response.code_interpreter_call_code.delta",
            "response.code_interpreter_call_code.done",
            "response.code_interpreter_call.interpreting",
            "response.code_interpreter_call.completed",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.annotation.added",
            "response.output_text.annotation.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    code = "".join(event.delta for event in events if event.type.endswith("_code.delta"))
    assert code == PLOT
    assert sum(event.type.endswith("_code.delta") for event in events) > 3
    response = events[-1].response
    ran, message = response.output
    assert ran.status == "completed"
    assert ran.code == PLOT
    logs = [output.logs for output in ran.outputs if output.type == "logs"]
    pictures = [output.url for output in ran.outputs if output.type == "image"]
    assert "plotted 3" in "".join(logs)
    (picture,) = pictures  # saved and still open, and one picture all the same
    kind, _, content = picture.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content).startswith(b"\x89PNG")
    notes = {note.filename: note for note in message.content[0].annotations}
    assert {"squares.png", "squares.csv"} <= notes.keys()
    cited = notes["squares.png"]
    assert message.content[0].text == linked
    assert linked[cited.start_index : cited.end_index] == "sandbox:/mnt/data/squares.png"
    assert cited.container_id == ran.container_id
    content = client.containers.files.content.retrieve(cited.file_id, container_id=cited.container_id)
    assert content.read().startswith(b"\x89PNG")

    gateway.model.script(code_call("print(sum(values), open('squares.csv').read())"), text_answer("14"))
    after = client.responses.create(
        model="scripted",
        input="Add them",
        tools=[INTERPRETER],
        include=OUTPUTS,
        previous_response_id=response.id,
    )
    again: Any = after.output[0]
    assert again.container_id == ran.container_id
    assert again.outputs[0].logs == "14 1,4,9\n"
    assert after.output_text == "14"
    messages = gateway.model.requests[0].json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert "plotted 3" in messages[2]["content"]
    assert gateway.model.unused_answers == 0


def test_a_blocking_call_has_every_field(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("print('It is'); 6 * 7"), text_answer("42"))
    response = gateway.strict.responses.create(model="scripted", input="6 * 7?", tools=[INTERPRETER])
    assert response.status == "completed"
    assert response.output_text == "42"
    ran: Any = response.output[0]
    assert ran.outputs is None
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (22, 14)
    offered, read = gateway.model.requests
    (function,) = [tool["function"] for tool in offered.json["tools"]]
    assert function["name"] == "code_interpreter"
    assert function["parameters"]["required"] == ["code"]
    assert read.json["messages"][-1]["role"] == "tool"
    assert read.json["messages"][-1]["content"] == "It is\n42"


def test_two_calls_in_one_turn(gateway: RunningGateway) -> None:
    gateway.model.script(
        tool_calls(
            tool_call("code_interpreter", {"code": "print('one')"}, call_id="call_a"),
            tool_call("code_interpreter", {"code": "print('two')"}, call_id="call_b", index=1),
        ),
        text_answer("."),
    )
    response = gateway.strict.responses.create(
        model="scripted", input="?", tools=[INTERPRETER], include=OUTPUTS
    )
    outputs: list[Any] = [item for item in response.output if item.type == "code_interpreter_call"]
    assert [item.outputs[0].logs for item in outputs] == ["one\n", "two\n"]
    results = [message for message in gateway.model.requests[1].json["messages"] if message["role"] == "tool"]
    assert [result["tool_call_id"] for result in results] == ["call_a", "call_b"]


def test_kept_read_and_deleted(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("print('kept')"), text_answer("Done"))
    client = gateway.strict
    made = client.responses.create(model="scripted", input="Go", tools=[INTERPRETER], metadata={"a": "b"})
    read = client.responses.retrieve(made.id, include=OUTPUTS)
    assert read_logs(read) == "kept\n"
    assert read.metadata == {"a": "b"}
    assert client.responses.retrieve(made.id) == made
    items = client.responses.input_items.list(made.id)
    assert [item.type for item in items] == ["message"]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="scripted", input="?", previous_response_id=made.id)
    assert refused.value.code == "previous_response_not_found"


def test_not_stored(gateway: RunningGateway) -> None:
    gateway.model.script(text_answer("x"))
    client = gateway.strict
    made = client.responses.create(model="scripted", input="Go", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_functions_beside_the_interpreter(gateway: RunningGateway) -> None:
    function: Any = {
        "type": "function",
        "name": "rate",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        "strict": True,
    }
    client = gateway.strict
    gateway.model.script(
        tool_calls(
            tool_call("rate", {}, call_id="call_a"),
            tool_call("code_interpreter", {"code": "x = 2"}, call_id="call_b", index=1),
        )
    )
    first = client.responses.create(model="scripted", input="Both", tools=[INTERPRETER, function])
    asked: Any = first.output[0]
    assert [item.type for item in first.output] == ["function_call", "code_interpreter_call"]
    gateway.model.script(code_call("print(x * 3)"), text_answer("6"))
    second = client.responses.create(
        model="scripted",
        input=[{"type": "function_call_output", "call_id": asked.call_id, "output": "3"}],
        tools=[INTERPRETER, function],
        previous_response_id=first.id,
        include=OUTPUTS,
    )
    assert read_logs(second) == "6\n"
    messages = gateway.model.requests[0].json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [message["tool_call_id"] for message in messages[2:]] == ["call_a", "call_b"]


class Answer(BaseModel):
    total: int


def test_structured_output_with_the_interpreter(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("print(sum(range(5)))"), text_answer('{"total"', ": 10}"))
    parsed = gateway.strict.responses.parse(
        model="scripted", input="Add", tools=[INTERPRETER], text_format=Answer
    )
    assert parsed.output_parsed == Answer(total=10)
    for asked in gateway.model.requests:
        assert asked.json["response_format"]["json_schema"]["schema"]["required"] == ["total"]


def test_the_stream_helper_of_the_sdk(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("print(1)"), text_answer("One", "!"))
    with gateway.strict.responses.stream(model="scripted", input="?", tools=[INTERPRETER]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "One!"


def test_a_lost_sandbox_is_a_failed_call_and_the_loop_goes_on(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("import os; os.kill(os.getpid(), 9)"), text_answer("It died"))
    response = gateway.strict.responses.create(model="scripted", input="?", tools=[INTERPRETER])
    ran: Any = response.output[0]
    assert ran.status == "failed"
    assert response.output_text == "It died"
    gateway.model.script(code_call("import os; os.kill(os.getpid(), 9)"), text_answer("It died"))
    events: list[Any] = list(
        gateway.client.responses.create(model="scripted", input="?", tools=[INTERPRETER], stream=True)
    )
    assert "response.code_interpreter_call.failed" in [event.type for event in events]
    assert events[-1].response.status == "completed"


def test_execution_details_on_request(gateway: RunningGateway) -> None:
    gateway.model.script(
        code_call("import sys; print('o'); print('e', file=sys.stderr); sys.exit(3)"), text_answer("x")
    )
    include: Any = ["fumehood:execution"]
    response = gateway.client.responses.create(
        model="scripted", input="?", tools=[INTERPRETER], include=include
    )
    ran: Any = response.output[0]
    details = ran.to_dict()["fumehood:execution"]
    assert (details["stdout"], details["stderr"], details["exit_code"]) == ("o\n", "e\n", 3)
    assert ran.outputs is None


def test_execution_details_of_produced_files(gateway: RunningGateway) -> None:
    large = 1_100_000
    code = f"open('t.csv', 'w').write('a,b'); open('deep.unknown', 'wb').write(bytes({large}))\nprint('o')"
    gateway.model.script(code_call(code), text_answer("x"))
    include: Any = ["fumehood:execution"]
    created = gateway.client.responses.create(
        model="scripted", input="?", tools=[INTERPRETER], include=include
    )
    found: Any = created.output[0]
    details = found.to_dict()["fumehood:execution"]
    assert (details["stdout"], details["stderr"], details["exit_code"]) == ("o\n", "", 0)
    assert (details["files_complete"], details["missing_files"], details["truncated"]) == (True, [], False)
    unknown, table = details["files"]
    for file in (unknown, table):
        content = gateway.client.containers.files.content.retrieve(
            file["file_id"], container_id=file["container_id"]
        ).read()
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert file["bytes"] == len(content)
        assert file["path"] == f"/mnt/data/{file['filename']}"
    assert (table["filename"], table["mime_type"]) == ("t.csv", "text/csv")
    assert base64.b64decode(table["content"]) == b"a,b"
    assert (unknown["mime_type"], unknown["content"]) == ("application/octet-stream", None)
    # By default there is OpenAI's item alone; and what was not asked for in time is described without content.
    assert "fumehood:execution" not in gateway.client.responses.retrieve(created.id).output[0].to_dict()
    gateway.model.script(code_call("open('u.csv', 'w').write('c')"), text_answer("x"))
    plain = gateway.client.responses.create(model="scripted", input="?", tools=[INTERPRETER])
    assert "fumehood:execution" not in plain.output[0].to_dict()
    later: Any = gateway.client.responses.retrieve(plain.id, include=include).output[0]
    (file,) = later.to_dict()["fumehood:execution"]["files"]
    assert (file["sha256"], file["content"]) == (hashlib.sha256(b"c").hexdigest(), None)


def test_replayed_items_find_their_container(gateway: RunningGateway) -> None:
    gateway.model.script(code_call("secret = 5"), text_answer("ok"))
    client = gateway.strict
    first = client.responses.create(model="scripted", input="Keep 5", tools=[INTERPRETER], store=False)
    replay: Any = [{"role": "user", "content": "Keep 5"}]
    for item in first.output:
        plain = item.to_dict()
        for name in ("outputs", "status"):
            plain.pop(name, None)
        replay.append(plain)
    gateway.model.script(code_call("print(secret)"), text_answer("5"))
    second = client.responses.create(
        model="scripted",
        input=[*replay, {"role": "user", "content": "Show it"}],
        tools=[INTERPRETER],
        include=OUTPUTS,
        store=False,
    )
    assert read_logs(second) == "5\n"


def test_pictures_of_the_user_reach_the_model(gateway: RunningGateway) -> None:
    gateway.model.script(text_answer("A dot"))
    url = "data:image/png;base64,iVBORw0KGgo="
    content: Any = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": url}]
    gateway.strict.responses.create(model="scripted", input=[{"role": "user", "content": content}])
    sent = gateway.model.requests[0].json["messages"][0]["content"]
    assert sent[1]["image_url"]["url"] == url


def test_models(gateway: RunningGateway) -> None:
    cards = {card.id: card for card in gateway.strict.models.list()}
    for card in (cards["direct"], gateway.strict.models.retrieve("direct")):
        assert (card.model_extra or {})["fumehood:tools"] == ["code_interpreter", "shell"]


def test_direct_runs_fenced_python(gateway: RunningGateway) -> None:
    response = gateway.strict.responses.create(
        model="direct", input="```python\nprint(6 * 7)\n```", tools=[INTERPRETER]
    )
    assert "42" in response.output_text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "unknown"}, "model"),
        ({"tools": [{"type": "code_interpreter", "container": "cntr_none"}]}, None),
        (
            {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "8g"}}]},
            "tools",
        ),
        ({"temperature": 9}, "temperature"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"include": ["everything"]}, "include"),
    ],
)
def test_what_is_refused(gateway: RunningGateway, body: dict[str, Any], param: str | None) -> None:
    gateway.model.script()
    create: Any = gateway.strict.responses.create
    with pytest.raises(openai.APIStatusError) as refused:
        create(**({"model": "scripted", "input": "x"} | body))
    assert 400 <= refused.value.status_code < 500
    assert json.loads(refused.value.response.content)["error"].keys() == {"message", "type", "param", "code"}
    if param:
        assert refused.value.param is not None
        assert refused.value.param.startswith(param)


def test_the_examples_of_the_readme(gateway: RunningGateway, tmp_path: Path) -> None:
    """In one program, as the second goes on with the client of the first."""
    page = (Path(__file__).parents[2] / "README.md").read_text()
    first, second = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    example = first + second
    assert "http://127.0.0.1:8080/v1" in example
    (tmp_path / "measured.csv").write_text("a,b\n1,2\n3,5\n")
    done = subprocess.run(
        [sys.executable, "-c", example.replace("http://127.0.0.1:8080/v1", gateway.process.url)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ran, *said = done.stdout.splitlines()
    assert re.match(r"cntr_\w+ \[OutputLogs\(logs='6\\n', type='logs'\)\]", ran)
    assert "6" in said[0]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
