"""Prompts and workspaces through our gateway to a scripted model and real sandboxes."""

import gzip
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fumehood.client import (
    ContainerNotFoundError,
    HostMount,
    MarkdownSection,
    Prompt,
    PromptEvaluationError,
    PromptValidationError,
    Session,
    Tool,
    ToolContext,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    AutoContainerConfig,
    CodeInterpreterResult,
    ContainerConfig,
    ContainerFilesystem,
    ContainerManager,
    ExistingContainerRef,
    OpenAICodeInterpreterTool,
    OpenAIContainerWorkspaceSection,
    OpenAIHostedToolsConfig,
)
from tests.client.conftest import GatewayServer
from tests.contracts.filesystem_kit import FilesystemKit
from tests.support.client_prompts import HOSTED, listen, prompt
from tests.support.gateway_process import code_call, text_answer, tool_call, tool_calls

ALL_MODES = {
    "test_a_function_is_run_and_its_result_shown_to_the_model",
    "test_python_runs_and_its_result_is_published",
    "test_hosted_tools",
    "test_python_and_a_function_in_one_evaluation",
    "test_an_archive_is_unpacked_by_the_gateway",
    "test_a_deleted_container_is_recreated",
    "test_an_existing_container_is_used_while_it_is_there",
}

SMALL = ContainerConfig(memory_limit="1g")


@dataclass(frozen=True)
class Echo:
    text: str


def echo(params: Echo, *, context: ToolContext) -> ToolResult[Echo]:
    _ = context
    return ToolResult.success(params)


echo_tool = Tool[Echo, Echo](name="echo", description="Echo the text.", handler=echo)


def test_a_function_is_run_and_its_result_shown_to_the_model(gateway_server: GatewayServer) -> None:
    section = MarkdownSection[Echo](
        title="Task", key="task", template="Tell me about ${text}.", tools=[echo_tool]
    )
    session, events = listen()
    response = gateway_server.evaluate(
        Prompt(ns="tests", key="echo", sections=[section]).bind(Echo("echoes")),
        tool_calls(tool_call("echo", {"text": "hello"}, call_id="call_7")),
        text_answer("It said hello."),
        session=session,
    )
    assert response.text == "It said hello."
    assert [(event.name, event.params, event.call_id, event.result.success) for event in events] == [
        ("echo", Echo("hello"), "call_7", True)
    ]
    first, second = gateway_server.model.requests
    # A chat server gets it as a user's, which many chat templates ask for.
    assert first.json["messages"][0] == {"role": "user", "content": "## 1. Task\n\nTell me about echoes."}
    assert second.json["messages"][-1]["content"] == '{"success":true,"payload":{"text":"hello"}}'
    assert response.usage.total_tokens == 36


def test_python_runs_and_its_result_is_published(gateway_server: GatewayServer) -> None:
    session, events = listen()
    response = gateway_server.evaluate(
        prompt(OpenAICodeInterpreterTool()),
        code_call("open('a.csv', 'w').write('1,2'); print(6 * 7)"),
        text_answer("42: sandbox:/mnt/data/a.csv"),
        session=session,
    )
    (event,) = events
    value = event.result.value
    assert isinstance(value, CodeInterpreterResult)
    assert (value.stdout, value.exit_code, event.result.success) == ("42\n", 0, True)
    assert [file.filename for file in value.files] == ["a.csv"]
    assert [file.filename for file in response.files] == ["a.csv"]
    assert event.result.message == "42\n"


def test_hosted_tools(gateway_server: GatewayServer) -> None:
    session, events = listen()
    replies = (code_call("1 / 0"), text_answer("It failed."))
    gateway_server.evaluate(prompt(), *replies, session=session, hosted_tools=HOSTED)
    assert [(event.name, event.result.success) for event in events] == [("code_interpreter", False)]
    value = events[0].result.value
    assert isinstance(value, CodeInterpreterResult)
    assert "ZeroDivisionError" in value.stderr
    assert value.exit_code == 1


def test_a_tool_that_the_gateway_does_not_host_is_rejected_before_a_request(
    gateway_without_code: GatewayServer,
) -> None:
    """It announces the tools of a model."""
    settings = OpenAIHostedToolsConfig(web_search=True)
    with pytest.raises(PromptValidationError, match=r"does not host the native tool 'web_search' .*none"):
        gateway_without_code.evaluate(prompt(), model="named", hosted_tools=settings)
    assert not gateway_without_code.model.requests
    # Of a model that only a pattern names, it announces nothing, and decides itself.
    with pytest.raises(PromptEvaluationError, match=r"refused the request \(400\)"):
        gateway_without_code.evaluate(prompt(), hosted_tools=settings)


def test_python_and_a_function_in_one_evaluation(gateway_server: GatewayServer) -> None:
    session, events = listen()
    response = gateway_server.evaluate(
        prompt(echo_tool, OpenAICodeInterpreterTool()),
        code_call("x = 20"),
        tool_calls(tool_call("echo", {"text": "22"}, call_id="call_2")),
        tool_calls(tool_call("code_interpreter", {"code": "print(x + 22)"}, call_id="call_3")),
        text_answer("42"),
        session=session,
    )
    assert response.text == "42"
    assert [event.name for event in events] == ["code_interpreter", "echo", "code_interpreter"]
    first, _, last = (event.result.value for event in events)
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


# --- workspaces ---------------------------------------------------------------------------------------


class TestContainerFilesystem(FilesystemKit):
    @pytest.fixture
    def files(self, gateway_server: GatewayServer) -> ContainerFilesystem:
        return ContainerFilesystem(client=gateway_server.client, container_config=SMALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "numbers.txt").write_text("20 22")
    (root / "odd ${name}").write_text("x")
    script = root / "run.sh"
    script.write_text("#!/bin/sh\necho ran\n")
    os.chmod(script, 0o755)
    return root


@pytest.fixture
def workspace(gateway_server: GatewayServer, project: Path) -> Iterator[OpenAIContainerWorkspaceSection]:
    made = OpenAIContainerWorkspaceSection(
        session=Session(),
        mounts=(HostMount(str(project), "project"),),
        allowed_host_roots=(project,),
        container_config=SMALL,
        sync_on_cleanup=True,
        sync_dir=project.parent / "synced",
        client=gateway_server.client,
    )
    yield made
    made.cleanup()


def evaluate(gateway_server: GatewayServer, workspace: OpenAIContainerWorkspaceSection, code: str) -> Any:
    """What came of this code, as the bus tells it."""
    session, events = listen()
    replies = (code_call(code), text_answer("Done."))
    gateway_server.evaluate(prompt(sections=(workspace,)), *replies, session=session, hosted_tools=HOSTED)
    return events[0].result.value


@pytest.mark.slow
def test_a_large_repository_is_worked_on(gateway_server: GatewayServer, tmp_path: Path) -> None:
    for number in range(5000):
        path = tmp_path / "repository" / f"d{number % 50}" / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {number}")
    made = OpenAIContainerWorkspaceSection(
        session=Session(),
        mounts=[HostMount(str(tmp_path / "repository"), "repository")],
        allowed_host_roots=[tmp_path],
        container_config=SMALL,
        client=gateway_server.client,
    )
    try:
        look = "import glob; print(len(glob.glob('repository/*/*.py')))"
        change = "open('repository/d1/1.py', 'w').write('changed')"
        assert evaluate(gateway_server, made, f"{look}\n{change}").stdout.startswith("5000\n")
        assert len(made.filesystem.paths()) == 5000
        assert made.filesystem.read_text("repository/d1/1.py") == "changed"
        made.filesystem.write_text("repository/d2/2.py", "mine")
        assert "mine" in evaluate(gateway_server, made, "print(open('repository/d2/2.py').read())").stdout
    finally:
        made.cleanup()


def test_an_archive_is_unpacked_by_the_gateway(
    gateway_server: GatewayServer, workspace: OpenAIContainerWorkspaceSection, project: Path
) -> None:
    code = """
import subprocess
total = sum(map(int, open("project/src/numbers.txt").read().split()))
open("project/total.txt", "w").write(str(total))
print(total, subprocess.run(["sh", "project/run.sh"], capture_output=True, text=True).stdout)
"""
    ran = evaluate(gateway_server, workspace, code)
    assert (ran.stdout, ran.stderr) == ("42 ran\n\n", "")
    assert ran.container_id == workspace.container_id
    assert "packed" not in gateway_server.model.requests[0].json["messages"][0]["content"]
    files = workspace.filesystem
    assert files.glob("**") == [
        "project/odd ${name}",
        "project/run.sh",
        "project/src/numbers.txt",
        "project/total.txt",
    ]
    assert files.read_text("project/total.txt") == "42"
    files.write_text("project/src/numbers.txt", "1 2")
    assert (
        evaluate(gateway_server, workspace, "print(open('project/src/numbers.txt').read(), total)").stdout
        == "1 2 42\n"
    )
    workspace.cleanup()
    assert (project.parent / "synced/project/total.txt").read_text() == "42"
    assert (project.parent / "synced/project/src/numbers.txt").read_text() == "1 2"
    assert (project / "src/numbers.txt").read_text() == "20 22"


def test_a_sync_brings_everything_back(
    gateway_server: GatewayServer,
    workspace: OpenAIContainerWorkspaceSection,
    project: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Caches, temporary names and links as well; what leads out of the workspace is named."""
    code = """
import os
os.makedirs('pkg/__pycache__')
for name in ('pkg/__pycache__/m.pyc', 'draft~', 'half.tmp', '.x.swp', '.hidden', 'pkg/real.txt'):
    open(name, 'w').write(name)
os.symlink('pkg/real.txt', 'relative.txt')
os.symlink('/mnt/data/pkg/real.txt', 'pkg/absolute.txt')
os.symlink('pkg', 'alias')
os.symlink('/etc', 'outside')
os.link('pkg/real.txt', 'hard.txt')
"""
    evaluate(gateway_server, workspace, code)
    workspace.cleanup()
    synced = project.parent / "synced"
    for name in ("pkg/__pycache__/m.pyc", "draft~", "half.tmp", ".x.swp", ".hidden", "pkg/real.txt"):
        assert (synced / name).read_text() == name
    for name in ("relative.txt", "pkg/absolute.txt", "alias"):
        assert (synced / name).is_symlink()
    for name in ("relative.txt", "pkg/absolute.txt", "alias/real.txt", "hard.txt"):
        assert (synced / name).read_text() == "pkg/real.txt"
        assert (synced / name).resolve().is_relative_to(synced.resolve())
    assert not (synced / "outside").is_symlink()
    assert (
        "1 link(s) lead out of the workspace and were not brought back, among them 'outside'" in caplog.text
    )


def test_files_that_the_container_does_not_list_are_an_error(
    gateway_server: GatewayServer, workspace: OpenAIContainerWorkspaceSection, project: Path
) -> None:
    deep = "import os; d = '/'.join('d' * 40); os.makedirs(d); open(d + '/f', 'w'); open('kept', 'w')"
    evaluate(gateway_server, workspace, deep)
    with pytest.raises(OSError, match="the container does not list it") as missing:
        workspace.filesystem.download_all(project.parent / "back")
    assert "1 file(s) could not be brought back" in str(missing.value)
    assert (project.parent / "back/kept").exists()
    workspace.sync_on_cleanup = False


def test_a_deleted_container_is_recreated(
    gateway_server: GatewayServer, workspace: OpenAIContainerWorkspaceSection
) -> None:
    workspace.filesystem.write_text("notes.txt", "mine")
    first = workspace.container_id
    gateway_server.client.containers.delete(first or "")
    ran = evaluate(
        gateway_server, workspace, "print(open('notes.txt').read(), open('project/src/numbers.txt').read())"
    )
    assert ran.stdout == "mine 20 22\n"
    assert workspace.container_id not in (None, first)
    gateway_server.client.containers.delete(workspace.container_id or "")
    assert workspace.filesystem.read_text("notes.txt") == "mine"


def test_an_existing_container_is_used_while_it_is_there(gateway_server: GatewayServer) -> None:
    manager = ContainerManager(gateway_server.client, SMALL)
    container = manager.create()
    manager.upload(container, "data.csv", b"1,2,3")
    tool = OpenAICodeInterpreterTool(container=ExistingContainerRef(container, "1g"))
    replies = (code_call("print(open('data.csv').read())"), text_answer("Done."))
    response = gateway_server.evaluate(prompt(tool), *replies)
    call = response.transcript[1]
    assert (call["container_id"], call["outputs"]) == (container, [{"type": "logs", "logs": "1,2,3\n"}])
    gateway_server.client.containers.delete(container)
    with pytest.raises(ContainerNotFoundError, match=container):
        gateway_server.evaluate(prompt(tool))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sales.parquet", b"PAR1\x15\4"),
        ("sales.feather", b"ARROW1\0\0"),
        ("sales.db", b"SQLite format 3\0\x10"),
        ("sales.csv.gz", gzip.compress(b"1\n", mtime=0)),
        ("sales.json.zst", b"\x28\xb5\x2f\xfd\0"),
        ("sales.ndjson", b"{}\n"),
        ("settings.toml", b"[a]\n"),
    ],
)
def test_the_gateway_accepts_what_analysts_have(
    gateway_server: GatewayServer, shared_container: str, name: str, content: bytes
) -> None:
    manager = ContainerManager(gateway_server.client, SMALL)
    made = manager.upload(shared_container, f"data/{name}", content)
    assert (made.path, manager.read_file(shared_container, made.id)) == (f"data/{name}", content)
    upload = gateway_server.client.files.create(file=(name, content), purpose="user_data")
    assert upload.bytes == len(content)
    gateway_server.client.files.delete(upload.id)


def test_the_gateway_says_what_it_does_not_accept(
    gateway_server: GatewayServer, shared_container: str
) -> None:
    manager = ContainerManager(gateway_server.client, SMALL)
    for name, content in (("run.exe", b"MZ\x90\0"), ("a.csv", b"\x7fELF\2\1\1\0"), ("a.parquet", b"text")):
        with pytest.raises(PromptValidationError, match=f"'{name}' cannot be uploaded") as refused:
            manager.upload(shared_container, name, content)
        assert refused.value.phase == "configuration"
        assert "unsupported_file" in str(refused.value.provider_payload)
    assert "run.exe" not in [file.path for file in manager.list_files(shared_container)]


def test_a_filesystem_writes_files_of_any_type(gateway_server: GatewayServer) -> None:
    files = ContainerFilesystem(client=gateway_server.client, container_config=SMALL)
    for content in (b"MZ\x90\0", b"MZ\x90\0again"):
        files.write("bin/run.exe", content)
        assert files.read("bin/run.exe") == content
    assert files.glob("**") == ["bin/run.exe"]


@pytest.fixture(scope="module")
def shared_container(shared_gateway: GatewayServer) -> Iterator[str]:
    container = ContainerManager(shared_gateway.client, SMALL).create()
    yield container
    shared_gateway.client.containers.delete(container)


def test_a_workspace_and_the_tool_share_one_container(
    gateway_server: GatewayServer, workspace: OpenAIContainerWorkspaceSection
) -> None:
    upload = gateway_server.client.files.create(file=("rates.csv", b"7\n"), purpose="user_data")
    tool = OpenAICodeInterpreterTool(container=AutoContainerConfig(file_ids=(upload.id,)))
    session, events = listen()
    for _ in range(2):
        gateway_server.evaluate(
            prompt(tool, sections=(workspace,)),
            code_call("print(open('rates.csv').read(), open('project/src/numbers.txt').read())"),
            text_answer("Read."),
            session=session,
        )
        results = [event.result.value or CodeInterpreterResult() for event in events]
        assert {result.container_id for result in results} == {workspace.container_id}
        assert results[-1].stdout == "7\n 20 22\n"
        gateway_server.client.containers.delete(workspace.container_id or "")  # another one gets the same
        events.clear()
    gateway_server.client.files.delete(upload.id)
