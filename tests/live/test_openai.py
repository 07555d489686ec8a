"""The client against OpenAI itself; needs OPENAI_API_KEY, costs money, and is never run by default.

    OPENAI_API_KEY=… pytest -m openai tests/live

`OPENAI_MODEL` names the model. Imports `fumehood.client` and the SDK.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from fumehood.client import (
    HostMount,
    MarkdownSection,
    Prompt,
    PromptEvaluationError,
    PromptTemplate,
    Session,
    Tool,
    ToolContext,
    ToolInvoked,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    CodeInterpreterResult,
    CompactionConfig,
    CompactionState,
    ContainerConfig,
    OpenAIAdapter,
    OpenAICodeInterpreterTool,
    OpenAIContainerWorkspaceSection,
    OpenAIHostedToolsConfig,
    OpenAIWebSearchSection,
)

pytestmark = [
    pytest.mark.live,
    pytest.mark.openai,
    pytest.mark.skipif(not os.environ.get("OPENAI_API_KEY"), reason="OPENAI_API_KEY is not set"),
    pytest.mark.timeout(600),
]
MODEL = os.environ.get("OPENAI_MODEL", "gpt-4.1")


@dataclass(frozen=True)
class Sum:
    total: int


@dataclass(frozen=True)
class Numbers:
    name: str


def listen(session: Session) -> list[ToolInvoked]:
    heard: list[ToolInvoked] = []
    session.bus.subscribe(ToolInvoked, heard.append)
    return heard


def test_python_runs_in_a_container_that_is_kept() -> None:
    session = Session()
    heard = listen(session)
    text = "With Python, write 6*7 to answer.csv, then read the file back in a second call and give me a link to it."
    task = MarkdownSection(title="Task", key="task", template=text, tools=(OpenAICodeInterpreterTool(),))
    response = OpenAIAdapter(model=MODEL).evaluate(
        Prompt(ns="live", key="python", sections=[task]), session=session
    )
    values = [event.result.value for event in heard]
    assert values
    assert all(isinstance(value, CodeInterpreterResult) for value in values)
    assert len({value.container_id for value in values if value is not None}) == 1
    assert any(item.get("type") == "code_interpreter_call" for item in response.transcript)
    assert all(event.name == "code_interpreter" and event.call_id for event in heard)
    assert any("answer" in file.filename for file in response.files)


def test_python_and_a_function_and_a_typed_answer() -> None:
    def numbers(params: Numbers, *, context: ToolContext) -> ToolResult[Sum]:
        _ = context
        return ToolResult.ok(Sum(21), f"{params.name} is 21")

    tool = Tool[Numbers, Sum](name="look_up", description="Look up a number by its name.", handler=numbers)
    text = "Look up the number called 'half' and double it with Python."
    task = MarkdownSection(title="Task", key="task", template=text, tools=(tool, OpenAICodeInterpreterTool()))
    template = PromptTemplate[Sum](ns="live", key="sum", sections=[task])
    assert OpenAIAdapter(model=MODEL).evaluate(Prompt(template)).output == Sum(42)


def test_the_web_is_searched() -> None:
    session = Session()
    heard = listen(session)
    task = MarkdownSection(
        title="Task", key="task", template="Search the web: what is the latest stable Python?"
    )
    prompt = Prompt(ns="live", key="web", sections=[OpenAIWebSearchSection(), task], tool_choice="required")
    response = OpenAIAdapter(model=MODEL).evaluate(prompt, session=session)
    assert [event.name for event in heard][:1] == ["web_search"]
    assert any(item.get("type") == "web_search_call" for item in response.transcript)


def test_a_workspace_in_a_container(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("20 22")
    session = Session()
    workspace = OpenAIContainerWorkspaceSection(
        session=session,
        mounts=(HostMount(str(tmp_path), "data"),),
        allowed_host_roots=(tmp_path,),
        container_config=ContainerConfig("1g"),
    )
    task = MarkdownSection(
        title="Task", key="task", template="Add the numbers in data/numbers.txt with Python."
    )
    adapter = OpenAIAdapter(model=MODEL, hosted_tools=OpenAIHostedToolsConfig(code_interpreter=True))
    try:
        template = PromptTemplate[Sum](ns="live", key="workspace", sections=[task, workspace])
        assert adapter.evaluate(Prompt(template), session=session).output == Sum(42)
        assert workspace.container_id
    finally:
        workspace.cleanup()


def test_a_conversation_is_compacted_and_goes_on() -> None:
    session = Session()
    adapter = OpenAIAdapter(model=MODEL, compaction=CompactionConfig(threshold_tokens=50, zdr_mode=True))

    def say(text: str) -> str:
        section = MarkdownSection(title="Turn", key="turn", template=text)
        return adapter.evaluate(Prompt(ns="live", key="talk", sections=[section]), session=session).text or ""

    say("Remember that the code word is heliotrope, and tell me something long about owls.")
    assert "heliotrope" in say("Which code word did I tell you?").lower()
    state = session[CompactionState].latest()
    assert state is not None
    assert state.compaction_count >= 1


def test_mistakes_are_found_before_a_request() -> None:
    adapter = OpenAIAdapter(model=MODEL, openai_native_tools={MODEL: ()})
    with pytest.raises(PromptEvaluationError, match="does not advertise"):
        adapter.evaluate(Prompt(ns="live", key="no", sections=[OpenAIWebSearchSection()]))
