"""Prompts through the adapter, the SDK and our gateway to a scripted model and real sandboxes; imports the support."""

from dataclasses import dataclass

from fumehood.client import MarkdownSection, Prompt, Session, Tool, ToolContext, ToolInvoked, ToolResult
from fumehood.client.adapters.openai import (
    CodeInterpreterResult,
    OpenAICodeInterpreterTool,
    OpenAIHostedToolsConfig,
)
from fumehood.client.prompt import AnyTool
from tests.client.conftest import House
from tests.support.served import answer, call, calls, runs


@dataclass(frozen=True)
class Topic:
    topic: str


@dataclass(frozen=True)
class Echo:
    text: str


def echo(params: Echo, *, context: ToolContext) -> ToolResult[Echo]:
    _ = context
    return ToolResult.success(params)


echo_tool = Tool[Echo, Echo](name="echo", description="Echo the text.", handler=echo)


def task(*tools: AnyTool, template: str = "Tell me about ${topic}.") -> MarkdownSection[Topic]:
    return MarkdownSection[Topic](title="Task", key="task", template=template, tools=tools)


def listen(session: Session) -> list[ToolInvoked]:
    heard: list[ToolInvoked] = []
    session.bus.subscribe(ToolInvoked, heard.append)
    return heard


def test_a_function_is_run_and_its_result_shown_to_the_model(house: House) -> None:
    house.model.script(calls(call("echo", {"text": "hello"}, call_id="call_7")), answer("It said hello."))
    prompt = Prompt(ns="tests", key="echo", sections=(task(echo_tool),))
    session = Session()
    heard = listen(session)
    response = house.adapter().evaluate(prompt, Topic("echoes"), session=session)
    assert response.text == "It said hello."
    assert [(event.name, event.params, event.call_id, event.result.success) for event in heard] == [
        ("echo", Echo("hello"), "call_7", True)
    ]
    first, second = house.model.asked
    assert first.json["messages"][0] == {"role": "system", "content": "## 1. Task\n\nTell me about echoes."}
    assert second.json["messages"][-1]["content"] == '{"success":true,"payload":{"text":"hello"}}'
    assert response.usage.total_tokens == 36


def test_python_is_run_and_its_result_told(house: House) -> None:
    house.model.script(
        runs("open('a.csv', 'w').write('1,2'); print(6 * 7)"), answer("42: sandbox:/mnt/data/a.csv")
    )
    session = Session()
    heard = listen(session)
    prompt = Prompt(ns="tests", key="python", sections=(task(OpenAICodeInterpreterTool()),))
    response = house.adapter().evaluate(prompt, Topic("sums"), session=session)
    (event,) = heard
    value = event.result.value
    assert isinstance(value, CodeInterpreterResult)
    assert (value.stdout, value.exit_code, event.result.success) == ("42\n", 0, True)
    assert [file.filename for file in value.files] == ["a.csv"]
    assert [file.filename for file in response.files] == ["a.csv"]
    assert event.result.message == "42\n"


def test_hosted_tools(house: House) -> None:
    house.model.script(runs("1 / 0"), answer("It failed."))
    session = Session()
    heard = listen(session)
    adapter = house.adapter(hosted_tools=OpenAIHostedToolsConfig(code_interpreter=True))
    adapter.evaluate(Prompt(ns="tests", key="python", sections=(task(),)), Topic("zero"), session=session)
    assert [(event.name, event.result.success) for event in heard] == [("code_interpreter", False)]
    value = heard[0].result.value
    assert isinstance(value, CodeInterpreterResult)
    assert "ZeroDivisionError" in value.stderr
    assert value.exit_code == 1


def test_python_and_a_function_in_one_evaluation(house: House) -> None:
    house.model.script(
        runs("x = 20"),
        calls(call("echo", {"text": "22"}, call_id="call_2")),
        calls(call("code_interpreter", {"code": "print(x + 22)"}, call_id="call_3")),
        answer("42"),
    )
    session = Session()
    heard = listen(session)
    prompt = Prompt(ns="tests", key="both", sections=(task(echo_tool, OpenAICodeInterpreterTool()),))
    response = house.adapter().evaluate(prompt, Topic("sums"), session=session)
    assert response.text == "42"
    assert [event.name for event in heard] == ["code_interpreter", "echo", "code_interpreter"]
    first, _, last = (event.result.value for event in heard)
    assert isinstance(first, CodeInterpreterResult)
    assert isinstance(last, CodeInterpreterResult)
    assert last.stdout == "42\n"
    assert last.container_id == first.container_id  # an auto container is the same one all along
    kinds = [item.get("type", item.get("role")) for item in response.transcript]
    assert kinds == [
        "system",
        "code_interpreter_call",
        "function_call",
        "function_call_output",
        "code_interpreter_call",
        "message",
    ]
