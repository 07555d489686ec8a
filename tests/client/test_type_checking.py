"""What a type checker reports about code that uses the client."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

GOOD = """
from dataclasses import dataclass
from fumehood.client import (
    HostMount, HostWorkspaceSection, MarkdownSection, Prompt, PromptSection, PromptTemplate, ProviderTool,
    ResourceRegistry, Session, Tool, ToolContext, ToolInvoked, ToolResult, InProcessDispatcher, InMemoryFilesystem,
    VfsToolsSection, TextDelta, EvaluationFinished,
)
from fumehood.client.adapters.openai import (
    CompactionConfig, OpenAIAdapter, OpenAICodeInterpreterTool, OpenAIContainerWorkspaceSection,
    OpenAIFileSearchSection, OpenAIHostedToolsConfig, ProviderToolCallData,
)
from fumehood.client.adapters.openai.native_tools.file_search_section import FileSearchParams
from fumehood.client.prompt import NoParams


@dataclass(frozen=True)
class Params:
    topic: str


@dataclass(frozen=True)
class Report:
    summary: str


class Database:
    def rows(self) -> list[str]:
        return []


def query(params: Params, *, context: ToolContext) -> ToolResult[Report]:
    rows = context.resources.get(Database).rows()
    if not rows:
        return ToolResult.error("nothing")
    return ToolResult.success(Report(rows[0]))


def on_tool_invoked(event: ToolInvoked) -> None:
    reveal_type(event.result.success)


tool = Tool[Params, Report](name="query", description="Query.", handler=query)
inferred = Tool(name="query", description="Query.", handler=query)


class Timed[R](Tool[Params, R]):
    pass


def report(data: ProviderToolCallData, context: ToolContext, kind: type[Report]) -> ToolResult[Report]:
    inner = context.adapter.evaluate(Prompt[Report](ns="n", key="k"), deadline=context.deadline)
    return ToolResult(data.code or "", inner.output)


timed = Timed[Report](name="timed", description="Query.", handler=query)
hosted = ProviderTool[NoParams, Report, FileSearchParams](
    name="hosted", description="Search.", provider="openai", native_type="file_search", config=FileSearchParams(),
    handle_provider_output=report,
)
inline = ProviderTool[NoParams, Report, FileSearchParams](
    name="inline", description="Search.", provider="openai", native_type="web_search", config=FileSearchParams(),
    handle_provider_output=lambda data, context, kind: ToolResult.ok(kind(data.type + context.prompt.name)),
)
many = PromptTemplate[list[Report]](
    ns="n",
    key="k",
    sections=[
        OpenAIFileSearchSection(default_params=FileSearchParams(("vs_1",)), model="m"),
        MarkdownSection(title="T", key="t", template="t", tools=(timed, hosted, inline)),
    ],
)
bus = InProcessDispatcher()
bus.subscribe(ToolInvoked, on_tool_invoked)
session = Session(bus=bus)


def workspace(local: bool) -> PromptSection:
    mounts = (HostMount(host_path="/x", mount_path="x"),)
    if local:
        return HostWorkspaceSection(session=session, mounts=mounts, allowed_host_roots=("/x",))
    return OpenAIContainerWorkspaceSection(session=session, mounts=mounts, allowed_host_roots=("/x",))


template = PromptTemplate[Report](
    ns="n",
    key="k",
    sections=[
        MarkdownSection[Params](title="T", key="t", template="${topic}", tools=(tool, OpenAICodeInterpreterTool())),
        MarkdownSection(title="U", key="u", template="u"),
        VfsToolsSection(filesystem=InMemoryFilesystem()),
        workspace(True),
    ],
)
adapter = OpenAIAdapter(
    model="m",
    hosted_tools=OpenAIHostedToolsConfig(code_interpreter=True),
    compaction=CompactionConfig(),
    tool_choice={"type": "code_interpreter"},
)
response = adapter.evaluate(
    Prompt(template), Params("x"), session=session, resources=ResourceRegistry.build({Database: Database()})
)
plain = adapter.evaluate(Prompt(ns="n", key="k", sections=[workspace(False)]))
reveal_type(response.output)
reveal_type(plain.output)
reveal_type(Prompt[Report](ns="n", key="k"))
reveal_type(inferred.params_type)
reveal_type(session[Report].latest())
reveal_type(ToolResult.success(1))
reveal_type(ToolResult.success(1).success)
reveal_type(timed.params_type)
reveal_type(hosted.config)
reveal_type(adapter.evaluate(Prompt(many)).output)


async def look_up(params: Params, *, context: ToolContext) -> ToolResult[Report]:
    inner = await context.adapter.aevaluate(Prompt[Report](ns="n", key="k"))
    return ToolResult("", inner.output)


reveal_type(Tool(name="look_up", description="Look up.", handler=look_up).result_type)


async def main() -> None:
    reveal_type((await adapter.aevaluate(Prompt(many))).output)
    with adapter.stream(Prompt(template)) as events:
        for event in events:
            if isinstance(event, TextDelta):
                reveal_type(event.delta)
    reveal_type(events.response.output)
    async with adapter.astream(Prompt(template)) as later:
        async for event in later:
            match event:
                case EvaluationFinished():
                    reveal_type(event.response.output)
                case _:
                    pass
        reveal_type((await later.get_final_response()).output)
"""

BAD = """
from dataclasses import dataclass
from fumehood.client import MarkdownSection, Prompt, PromptTemplate, Session, Tool, ToolContext, ToolResult
from fumehood.client.adapters.openai import ContainerConfig, OpenAIAdapter

@dataclass
class Params:
    topic: str

@dataclass
class Other:
    x: int

def query(params: Params, *, context: ToolContext) -> ToolResult[Other]:
    return ToolResult.success(Params("x"))

Tool[Other, Other](name="q", description="d", handler=query)
MarkdownSection[int](title="T", key="t", template="x")
MarkdownSection[Params](title="T", key="t", template="x", default_params=Other(1))
PromptTemplate(ns="n", key="k", sections=["text"])
OpenAIAdapter(model="m", tool_choice="sometimes")
ContainerConfig(mode="sometimes")
Session()[Params].append(Other(1))
OpenAIAdapter(model="m").evaluate(Prompt(PromptTemplate[Params](ns="n", key="k"))).output.topic
OpenAIAdapter(model="m").evaluate(Prompt(ns="n", key="k"), "text")
"""


def run_type_checker(tmp_path: Path, **files: str) -> list[tuple[str, int, str, str]]:
    """(file, line, severity, message) of everything that pyright says, in strict mode."""
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.12", "venvPath": str(ROOT), "venv": ".venv"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({**settings, "extraPaths": [str(ROOT / "src")]}))
    command = [sys.executable, "-m", "pyright", "--project", str(tmp_path), "--outputjson"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    )
    diagnostics = json.loads(done.stdout)["generalDiagnostics"]
    return [
        (
            Path(one["file"]).stem,
            one["range"]["start"]["line"],
            one["severity"],
            one["message"].splitlines()[0],
        )
        for one in diagnostics
    ]


@pytest.mark.slow
def test_type_checkers_accept_correct_code_and_report_errors(tmp_path: Path) -> None:
    diagnostics = run_type_checker(tmp_path, good=GOOD, bad=BAD)
    good = [one for one in diagnostics if one[0] == "good"]
    assert [one for one in good if one[2] == "error"] == []
    revealed = [
        message.rpartition(" is ")[2] for _, _, severity, message in good if severity == "information"
    ]
    assert revealed == [
        '"bool"',
        '"Report | None"',
        '"None"',
        '"Prompt[Report]"',
        '"type[Params]"',
        '"Report | None"',
        '"ToolResult[int]"',
        '"bool"',
        '"type[Params]"',
        '"FileSearchParams"',
        '"list[Report] | None"',
        '"type[Report]"',
        '"list[Report] | None"',
        '"str"',
        '"Report | None"',
        '"Report | None"',
        '"Report | None"',
    ]
    lines = BAD.splitlines()
    wrong = {lines[line] for name, line, severity, _ in diagnostics if name == "bad" and severity == "error"}
    expected = {
        line
        for line in lines
        if line.startswith(("Tool[", "MarkdownSection[", "PromptTemplate(", "OpenAIAdapter("))
    }
    expected |= {line for line in lines if line.startswith(("ContainerConfig(", "Session()", "    return"))}
    assert wrong == expected
