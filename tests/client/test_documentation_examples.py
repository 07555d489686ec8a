"""Runs every example of the client's pages, and the one in docs/telemetry.md."""

import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from openai import OpenAI

import fumehood.client
import fumehood.client.adapters.openai
from fumehood.client import MarkdownSection, Prompt, PromptTemplate, Session
from fumehood.client.adapters.openai import (
    CompactionConfig,
    CompactionState,
    OpenAIClientConfig,
    OpenAIContainerWorkspaceSection,
)
from fumehood.client.adapters.openai.compaction import LastModel
from tests.client.conftest import GatewayServer, OpenAIStandIn
from tests.client.test_attachments import PNG
from tests.support import gateway_process
from tests.support.client_prompts import function_call, listen
from tests.support.gateway_process import code_call, text_answer, tool_call, tool_calls
from tests.support.openai_server import message, response
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.sandbox_runs import has_cgroups

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / "client.md", DOCS / "client-examples.md", DOCS / "telemetry.md"]
_BLOCK = re.compile(r"<!-- example: ([\w-]+) -->\n```python\n(.*?)```", re.DOTALL)
EXAMPLES: dict[str, str] = dict(_BLOCK.findall("".join(page.read_text(encoding="utf-8") for page in PAGES)))

type Run = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class AnalysisResult:
    findings: list[str]


class DatabaseConnection:
    def execute(self, sql: str) -> list[dict[str, Any]]:
        return [{"sql": sql}]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs an example with these names besides the client's own, and gives what it has defined."""
    for name in ("path/to/repo", "repos/myproject/src", "repos/myproject/.git", "data/analysis"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "repos/myproject/src/app.py").write_text("import os\n")
    (tmp_path / "repos/myproject/.git/HEAD").write_text("ref")
    (tmp_path / "data/analysis/sales.csv").write_text("1\n2\n")

    def run(name: str, **names: Any) -> dict[str, Any]:
        text = EXAMPLES[name]
        for prefix in ("/path/to", "/repos", "/data"):
            text = text.replace(f'"{prefix}', f'"{tmp_path}{prefix}')
        known: dict[str, Any] = {"Any": Any, "dataclass": dataclass}
        for module in (fumehood.client, fumehood.client.adapters.openai):
            known |= {name: getattr(module, name) for name in module.__all__}
        known |= {"AnalysisResult": AnalysisResult, "DatabaseConnection": DatabaseConnection, **names}
        module = ModuleType("example")
        monkeypatch.setitem(sys.modules, "example", module)
        vars(module).update(known)
        exec(compile(text, f"example {name}", "exec"), vars(module))
        return vars(module)

    clients: list[OpenAI] = []
    create_client = OpenAIClientConfig.create_client

    def made(config: OpenAIClientConfig) -> OpenAI:
        clients.append(create_client(config))
        return clients[-1]

    monkeypatch.setattr(OpenAIClientConfig, "create_client", made)
    yield run
    for client in clients:
        client.close()


@pytest.fixture
def gateway(gateway_server: GatewayServer, monkeypatch: pytest.MonkeyPatch) -> GatewayServer:
    """Where `OpenAI()` leads to."""
    monkeypatch.setenv("OPENAI_BASE_URL", gateway_server.process.url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return gateway_server


def test_first(run: Run, gateway: GatewayServer, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.model.script(code_call("print(7)"), text_answer('{"mean": 7, "how": "by Python"}'))
    run("first")
    assert capsys.readouterr().out == "code_interpreter 7\n\nAnswer(mean=7.0, how='by Python')\n"


def test_first_without_a_model_server(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = "enforced" if has_cgroups() else "best-effort"
    settings = {"providers": {"code_interpreter": {"settings": {"sandbox_limits": limits}}}}
    with gateway_process.run_gateway(tmp_path, settings) as process:
        monkeypatch.setenv("OPENAI_BASE_URL", process.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        run("first")
    printed = '{"mean": 7, "how": "with Python"}'
    assert capsys.readouterr().out == f"code_interpreter {printed}\n\nAnswer(mean=7.0, how='with Python')\n"


def test_attachments(run: Run, gateway: GatewayServer, tmp_path: Path) -> None:
    (tmp_path / "data/analysis/chart.png").write_bytes(PNG)
    gateway.model.script(
        code_call(
            "print(open('glossary.md').read(), open('sales.csv').read(), len(open('image.png', 'rb').read()))"
        ),
        text_answer("It is the holidays."),
    )
    names = run("attachments", adapter=gateway.adapter())
    assert names["response"].text == "It is the holidays."
    first, second = gateway.model.requests
    assert "data:image/png;base64," in str(first.json["messages"][1]["content"])
    assert f"Net: after returns. 1\n2\n {len(PNG)}" in second.json["messages"][-1]["content"]


def test_telemetry(
    run: Run,
    openai_environment: OpenAIStandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    openai_environment.server.script(response(message("Hello.")))
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        run("telemetry")
        trace = bytes.fromhex(openai_environment.server.headers[-1]["traceparent"].split("-")[1])
        spans = receiver.trace(trace, 2)
    assert [span.name for _, span in spans] == ["invoke_agent hello", "chat gpt-4.1"]
    assert capsys.readouterr().out == "Hello.\n"


@dataclass(frozen=True)
class Query:
    sql: str


@dataclass(frozen=True)
class Rows:
    rows: list[str]


def test_async(run: Run, openai_environment: OpenAIStandIn, capsys: pytest.CaptureFixture[str]) -> None:
    openai_environment.server.script(
        response(function_call("c1", '{"sql": "count"}', "look_up")), response(message("One."))
    )
    run("async", Query=Query, Rows=Rows)
    assert capsys.readouterr().out == "One.\n"
    assert openai_environment.server.asked[1]["input"][-1]["output"].endswith('{"rows":["count"]}}')


def test_stream(run: Run, gateway: GatewayServer, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.model.script(code_call("print(6 * 7)"), text_answer("It is 42."))
    run("stream")
    assert capsys.readouterr().out == "print(6 * 7)42\nIt is 42.36\n"


def test_mounts(run: Run) -> None:
    made = run("mounts", session=Session())["workspace"]
    assert made.mount_previews[0].entries == ("src/",)
    made.cleanup()
    assert (made.sync_dir / "project/src/app.py").read_text() == "import os\n"
    shutil.rmtree(made.sync_dir)


def test_section(run: Run) -> None:
    made = run("section")["OpenAIFileSearchSection"]()
    assert Prompt(ns="n", key="k", sections=[made]).render().text == ""
    clone = made.clone()
    assert (type(clone), clone.default_params) == (type(made), made.default_params)
    assert (made.key, made.tools(), made.accepts_overrides) == ("openai_file_search", (), False)


def test_native(run: Run) -> None:
    names = run("native")
    rendered = names["prompt"].render(names["ContentParams"]("owls"))
    assert rendered.native_tools[0]["name"] == "file_search"
    assert "about owls using" in rendered.text
    assert rendered.prompt_name == "native_file_search"


def test_mixed(run: Run, openai_environment: OpenAIStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_VECTOR_STORE_IDS", "vs_1, vs_2")
    search: dict[str, Any] = {
        "type": "file_search_call",
        "id": "fs_1",
        "status": "completed",
        "queries": ["q"],
        "results": [],
    }
    echo = {"type": "function_call", "call_id": "c1", "name": "echo", "arguments": '{"text": "hello"}'}
    openai_environment.server.script(response(search, echo), response(message("Found.")))
    names = run("mixed")
    assert names["response"].text == "Found."
    assert openai_environment.server.asked[0]["tools"][1]["vector_store_ids"] == ["vs_1", "vs_2"]
    assert (
        openai_environment.server.asked[1]["input"][-1]["output"]
        == '{"success":true,"payload":{"text":"hello"}}'
    )


def test_provider_tool(run: Run, gateway: GatewayServer) -> None:
    gateway.model.script(
        code_call("open('s.txt', 'w').write('1 4 9'); print('plotted')"),
        text_answer("See sandbox:/mnt/data/s.txt"),
    )
    names = run("provider-tool")
    assert names["result"].stdout == "plotted\n"
    assert [file.filename for file in names["response"].files] == ["s.txt"]


def test_plot(run: Run, gateway: GatewayServer, tmp_path: Path) -> None:
    gateway.model.script(
        code_call("open('plot.svg', 'w').write('<svg/>' + open('sales.csv').read())"),
        text_answer("Here it is: sandbox:/mnt/data/plot.svg"),
    )
    run("plot")
    assert (tmp_path / "data/plot.svg").read_text() == "<svg/>1\n2\n"


def test_chat(run: Run, gateway: GatewayServer, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.model.script(
        text_answer("A fine place."),
        tool_calls(tool_call("weather", {"name": "Bern"})),
        text_answer("Clear, 21.5 degrees."),
    )
    run("chat")
    assert capsys.readouterr().out == "A fine place.\nClear, 21.5 degrees.\n"
    asked = gateway.model.requests[-1].json["messages"]
    assert [message["role"] for message in asked] == ["system", "assistant", "user", "assistant", "tool"]
    assert "I am in Bern." in asked[0]["content"]
    assert "21.5" in asked[-1]["content"]


def test_workspace(run: Run) -> None:
    made = run("workspace", session=Session())["workspace"]
    assert isinstance(made, OpenAIContainerWorkspaceSection)
    made.cleanup()


def test_adapter(run: Run) -> None:
    assert run("adapter")["adapter"].model == "gpt-5.2-codex"


def test_manager(run: Run, openai_environment: OpenAIStandIn) -> None:
    window = [{"type": "compaction", "encrypted_content": "x"}]
    openai_environment.server.script(response(*window))
    answered = fumehood.client.PromptResponse(
        "p", "t", None, usage=fumehood.client.TokenUsage(total_tokens=200_000)
    )
    session = Session()
    session.dispatch(LastModel("gpt-4o"))
    names = run(
        "manager",
        client=openai_environment.client,
        config=CompactionConfig(),
        session=session,
        messages=[{"role": "user", "content": "hi"}],
        response=answered,
    )
    assert names["messages"] == window


REVIEW = '{"summary": "short", "issues": ["none"], "suggestions": []}'


def test_story_1(run: Run, gateway: GatewayServer, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.model.script(
        code_call("import os; print(sorted(os.listdir('project')), open('project/src/app.py').read())"),
        text_answer(REVIEW),
    )
    names = run("story-1")
    assert "ReviewResult(summary='short'" in capsys.readouterr().out
    shown = gateway.model.requests[1].json["messages"][-1]["content"]
    assert "['src'] import os" in shown
    assert not names["workspace"].temp_dir.exists()


def test_story_1_on_this_machine(run: Run, gateway: GatewayServer) -> None:
    gateway.model.script(
        tool_calls(tool_call("read_file", {"path": "project/src/app.py"})), text_answer(REVIEW)
    )
    names = run("story-1", OpenAIContainerWorkspaceSection=fumehood.client.HostWorkspaceSection)
    assert names["response"].output.summary == "short"
    assert "import os" in gateway.model.requests[1].json["messages"][-1]["content"]


def test_story_2(run: Run, gateway: GatewayServer) -> None:
    session, results = Session(), list[Any]()

    def create_analysis_prompt(task: str, workspace: Any) -> Prompt[AnalysisResult]:
        section = MarkdownSection(title="Task", key="task", template=task)
        return Prompt(PromptTemplate[AnalysisResult](ns="a", key="b", sections=[section, workspace]))

    found = text_answer('{"findings": ["up"]}')
    gateway.model.script(
        code_call("total = sum(int(x) for x in open('data/sales.csv'))"),
        found,
        code_call("open('data/report.txt', 'w').write(str(total))"),
        found,
    )
    names = run(
        "story-2",
        session=session,
        analysis_tasks=["Add them.", "Report."],
        create_analysis_prompt=create_analysis_prompt,
        process_results=results.append,
    )
    assert results == [AnalysisResult(["up"])] * 2
    synced = names["workspace"].sync_dir
    assert (synced / "data/report.txt").read_text() == "3"
    assert (synced / "data/sales.csv").read_text() == "1\n2\n"
    assert session[CompactionState].all() == ()


def test_story_3(run: Run, openai_environment: OpenAIStandIn) -> None:
    session, events = listen()
    workspace = OpenAIContainerWorkspaceSection(session=session)
    query = {
        "type": "function_call",
        "call_id": "c1",
        "name": "run_query",
        "arguments": '{"sql": "select 1"}',
    }
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    ran: dict[str, Any] = {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "status": "completed",
        "code": "1",
        "outputs": [],
    }
    openai_environment.server.script(response(searched, ran, query), response(message('{"findings": []}')))
    names = run("story-3", workspace=workspace)
    found = names["adapter"].evaluate(
        Prompt(names["template"]), session=session, resources={DatabaseConnection: DatabaseConnection()}
    )
    assert found.output == AnalysisResult([])
    assert [event.name for event in events] == ["web_search", "code_interpreter", "run_query"]
    assert events[2].result.message == "Query returned 1 rows"
    workspace.cleanup()


def test_from_vfs(run: Run) -> None:
    workspace = run("from-vfs", session=Session())["workspace"]
    assert isinstance(workspace, OpenAIContainerWorkspaceSection)
    assert [mount.mount_path for mount in workspace.mounts] == ["data"]
    workspace.cleanup()


def test_from_another_vendor(run: Run) -> None:
    names = run("from-another-vendor", session=Session(), mounts=(), roots=())
    assert isinstance(names["workspace"], OpenAIContainerWorkspaceSection)
    assert names["adapter"].model == "gpt-5.2-codex"
    names["workspace"].cleanup()


def test_every_example_has_a_test() -> None:
    tests = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    assert EXAMPLES.keys() <= tests


@pytest.mark.parametrize("here", [False, True])
def test_the_script(
    tmp_path: Path, gateway: GatewayServer, capsys: pytest.CaptureFixture[str], here: bool
) -> None:
    (tmp_path / "app.py").write_text("x = 1")
    looks = (
        tool_calls(tool_call("read_file", {"path": "code/app.py"}))
        if here
        else code_call("print(open('code/app.py').read())")
    )
    gateway.model.script(looks, text_answer('{"summary": "Short.", "issues": ["app.py: no docstring"]}'))
    script = runpy.run_path(str(DOCS.parent / "examples" / "review.py"), run_name="review")
    script["main"]([str(tmp_path), "--model", "gpt-5.2", *(["--here"] if here else [])])
    output = capsys.readouterr().out
    assert output.startswith("· read_file: " if here else "· code_interpreter: x = 1\n")
    assert output.endswith("Short.\n- app.py: no docstring\n")
    assert "x = 1" in gateway.model.requests[1].json["messages"][-1]["content"]
