"""Workspaces in containers of our own gateway, with real sandboxes; imports the support."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fumehood.client import ContainerExpiredError, HostMount, MarkdownSection, Prompt, Session, ToolInvoked
from fumehood.client.adapters.openai import (
    ContainerConfig,
    ContainerFilesystem,
    ContainerManager,
    ExistingContainerRef,
    OpenAICodeInterpreterTool,
    OpenAIContainerWorkspaceSection,
    OpenAIHostedToolsConfig,
)
from tests.client.conftest import House
from tests.contracts.filesystem_kit import FilesystemKit
from tests.support.served import answer, runs

HOSTED = OpenAIHostedToolsConfig(code_interpreter=True)
SMALL = ContainerConfig(memory_limit="1g")


class TestContainerFilesystem(FilesystemKit):
    @pytest.fixture
    def files(self, house: House) -> ContainerFilesystem:
        return ContainerFilesystem(client=house.client, container_config=SMALL)


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
def workspace(house: House, project: Path) -> Iterator[OpenAIContainerWorkspaceSection]:
    made = OpenAIContainerWorkspaceSection(
        session=Session(),
        mounts=(HostMount(str(project), "project"),),
        allowed_host_roots=(project,),
        container_config=SMALL,
        sync_on_cleanup=True,
        sync_dir=project.parent / "synced",
        client=house.client,
    )
    yield made
    made.cleanup()


def evaluate(house: House, workspace: OpenAIContainerWorkspaceSection, code: str) -> Any:
    """What came of this code, as the bus tells it."""
    house.model.script(runs(code), answer("Done."))
    session, heard = Session(), list[ToolInvoked]()
    session.bus.subscribe(ToolInvoked, heard.append)
    task = MarkdownSection(title="Task", key="task", template="Add them.")
    prompt = Prompt(ns="tests", key="add", sections=[task, workspace])
    house.adapter(hosted_tools=HOSTED).evaluate(prompt, session=session)
    return heard[0].result.value


def test_an_archive_is_unpacked_by_the_gateway(
    house: House, workspace: OpenAIContainerWorkspaceSection, project: Path
) -> None:
    code = """
import subprocess
total = sum(map(int, open("project/src/numbers.txt").read().split()))
open("project/total.txt", "w").write(str(total))
print(total, subprocess.run(["sh", "project/run.sh"], capture_output=True, text=True).stdout)
"""
    ran = evaluate(house, workspace, code)
    assert (ran.stdout, ran.stderr) == ("42 ran\n\n", "")
    assert ran.container_id == workspace.container_id
    assert "packed" not in house.model.asked[0].json["messages"][0]["content"]
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
        evaluate(house, workspace, "print(open('project/src/numbers.txt').read(), total)").stdout
        == "1 2 42\n"
    )
    workspace.cleanup()
    assert (project.parent / "synced/project/total.txt").read_text() == "42"
    assert (project.parent / "synced/project/src/numbers.txt").read_text() == "1 2"
    assert (project / "src/numbers.txt").read_text() == "20 22"


def test_a_container_that_was_deleted_is_made_again(
    house: House, workspace: OpenAIContainerWorkspaceSection
) -> None:
    workspace.filesystem.write_text("notes.txt", "mine")
    first = workspace.container_id
    house.client.containers.delete(first or "")
    ran = evaluate(
        house, workspace, "print(open('notes.txt').read(), open('project/src/numbers.txt').read())"
    )
    assert ran.stdout == "mine 20 22\n"
    assert workspace.container_id not in (None, first)
    house.client.containers.delete(workspace.container_id or "")
    assert workspace.filesystem.read_text("notes.txt") == "mine"


def test_an_existing_container_is_used_while_it_is_there(house: House) -> None:
    manager = ContainerManager(house.client, SMALL)
    container = manager.create()
    manager.upload(container, "data.csv", b"1,2,3")
    tool = OpenAICodeInterpreterTool(container=ExistingContainerRef(container, "1g"))
    task = MarkdownSection(title="Task", key="task", template="Read it.", tools=(tool,))
    prompt = Prompt(ns="tests", key="read", sections=[task])
    house.model.script(runs("print(open('data.csv').read())"), answer("Done."))
    response = house.adapter().evaluate(prompt)
    call = response.transcript[1]
    assert (call["container_id"], call["outputs"]) == (container, [{"type": "logs", "logs": "1,2,3\n"}])
    house.client.containers.delete(container)
    with pytest.raises(ContainerExpiredError):
        house.adapter().evaluate(prompt)
