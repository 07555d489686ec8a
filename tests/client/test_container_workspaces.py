"""Workspaces in containers of a server that does not unpack archives, as OpenAI."""

import gc
import io
import tarfile
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from fumehood.client import (
    ContainerExpiredError,
    HostMount,
    HostWorkspaceSection,
    PromptEvaluationError,
    Session,
    WorkspaceBudgetError,
    WorkspaceSecurityError,
)
from fumehood.client.adapters.openai import (
    ContainerConfig,
    ContainerFilesystem,
    ContainerManager,
    OpenAIContainerWorkspaceSection,
)
from fumehood.client.adapters.openai.container import UPLOAD_TYPES, check_upload
from tests.client.conftest import CreateWorkspace, OpenAIStandIn
from tests.contracts.filesystem_kit import FilesystemKit
from tests.support.client_prompts import HOSTED, prompt
from tests.support.openai_server import error, make_client, message, response


class TestContainerFilesystem(FilesystemKit):
    @pytest.fixture
    def files(self, openai_stand_in: OpenAIStandIn) -> ContainerFilesystem:
        return ContainerFilesystem(client=openai_stand_in.client, container_config=ContainerConfig())


def list_uploads(openai_stand_in: OpenAIStandIn, container_id: str | None) -> dict[str, bytes]:
    """By the names that they had before the server chose others."""
    stored = openai_stand_in.server.containers[container_id or ""].files.values()
    return {path.partition("-")[2]: content for path, content in stored}


def test_a_container_is_created_and_filled_on_first_use(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, project: Path
) -> None:
    workspace = create_workspace()
    assert openai_stand_in.server.calls == []
    assert workspace.container_id is None
    openai_stand_in.server.script(response(message("fine")), response(message("still fine")))
    adapter = openai_stand_in.adapter(hosted_tools=HOSTED)
    adapter.evaluate(prompt(sections=(workspace,)))
    made = workspace.container_id
    assert [call for call in openai_stand_in.server.calls if call != "GET /v1/fumehood"] == [
        "POST /v1/containers",
        f"POST /v1/containers/{made}/files",
        "POST /v1/responses",
    ]
    (request,) = openai_stand_in.server.asked
    assert request["tools"] == [{"type": "code_interpreter", "container": made}]
    assert openai_stand_in.server.containers[made or ""].memory_limit == "4g"
    text = request["input"][0]["content"]
    ((archive_path, _),) = openai_stand_in.server.containers[made or ""].files.values()
    assert f"tarfile.open('/mnt/data/{archive_path}')" in text
    assert "`project`: 3 file(s)" in text
    (archive,) = list_uploads(openai_stand_in, made).values()
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        members = packed.getmembers()
    assert [member.name for member in members] == [
        "project",
        "project/README.md",
        "project/src",
        "project/src/main.py",
        "project/tool.exe",
    ]
    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}
    adapter.evaluate(prompt(sections=(workspace,)))
    assert workspace.container_id == made


def test_packed_files_are_read_from_the_local_copy(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, project: Path
) -> None:
    workspace = create_workspace(client=openai_stand_in.client)
    files = workspace.filesystem
    assert files.glob("**") == ["project/README.md", "project/src/main.py", "project/tool.exe"]
    assert files.read_text("project/src/main.py") == "print(1)"
    files.write_text("project/src/main.py", "changed")
    files.write_text("notes.txt", "mine")
    files.delete("project/tool.exe")
    assert files.glob("**") == ["notes.txt", "project/README.md", "project/src/main.py"]
    assert files.read_text("project/src/main.py") == "changed"
    assert list_uploads(openai_stand_in, files.container_id)["notes.txt"] == b"mine"
    assert (project / "src/main.py").read_text() == "print(1)"


def test_the_later_of_two_files_with_one_path_is_read(openai_stand_in: OpenAIStandIn) -> None:
    files = ContainerFilesystem(client=openai_stand_in.client, container_config=ContainerConfig())
    stored = openai_stand_in.server.containers[files.ensure_container()].files
    stored |= {"cfile_a": ("a.txt", b"old"), "cfile_b": ("a.txt", b"new")}
    assert files.read("a.txt") == b"new"


@pytest.mark.parametrize("sign", ["expired", "deleted"])
def test_an_expired_container_is_recreated_with_written_files(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, sign: str
) -> None:
    workspace = create_workspace(client=openai_stand_in.client)
    files = workspace.filesystem
    files.write_text("notes.txt", "mine")
    files.write_text("gone.txt", "soon")
    files.delete("gone.txt")
    before = files.container_id
    if sign == "expired":
        openai_stand_in.server.expire()
    else:
        openai_stand_in.server.containers.clear()
    assert files.read_text("notes.txt") == "mine"
    assert files.container_id not in (None, before)
    assert list_uploads(openai_stand_in, files.container_id).keys() == {"workspace.tar", "notes.txt"}
    second = files.container_id
    assert files.ensure_container() == files.ensure_container() == second
    openai_stand_in.server.expire()
    assert files.ensure_container() not in (before, second)
    assert list_uploads(openai_stand_in, files.container_id).keys() == {"workspace.tar", "notes.txt"}


def test_a_container_that_expires_before_the_request_is_recreated_once(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    workspace = create_workspace()
    found = openai_stand_in.evaluate(
        prompt(sections=(workspace,)),
        error(400, "Container is expired."),
        response(message("after all")),
        hosted_tools=HOSTED,
    )
    assert found.text == "after all"
    first, second = (request["tools"][0]["container"] for request in openai_stand_in.server.asked)
    assert (second, first == second) == (workspace.container_id, False)
    for request in openai_stand_in.server.asked:  # each says where in its own container the archive lies
        ((archive, _),) = openai_stand_in.server.containers[request["tools"][0]["container"]].files.values()
        assert f"/mnt/data/{archive}" in request["input"][0]["content"]
    with pytest.raises(ContainerExpiredError):
        openai_stand_in.evaluate(
            prompt(sections=(workspace,)),
            error(400, "Container is expired."),
            error(404, "Container not found."),
            hosted_tools=HOSTED,
        )


def test_a_container_that_cannot_be_recreated_raises(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, project: Path
) -> None:
    workspace = create_workspace(client=openai_stand_in.client)
    made = workspace.filesystem.ensure_container()
    openai_stand_in.server.expire()
    openai_stand_in.server.no_more_containers = True
    with pytest.raises(ContainerExpiredError, match="any more containers") as gone:
        workspace.filesystem.read("project/src/main.py")
    assert gone.value.container_id == made
    assert isinstance(gone.value.original_error, PromptEvaluationError)


def test_an_auto_container_that_expires_during_a_run_raises(openai_stand_in: OpenAIStandIn) -> None:
    with pytest.raises(ContainerExpiredError, match="make another one"):
        openai_stand_in.evaluate(prompt(), error(400, "Container is expired."), hosted_tools=HOSTED)


def test_files_are_synced_on_cleanup(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, project: Path, tmp_path: Path
) -> None:
    workspace = create_workspace(
        client=openai_stand_in.client, sync_on_cleanup=True, sync_dir=tmp_path / "back"
    )
    made = workspace.filesystem.ensure_container()
    stored = openai_stand_in.server.containers[made].files
    stored["cfile_a"] = ("out/report.md", b"# Report")  # as code would have written them
    stored["cfile_b"] = ("../../evil", b"x")
    workspace.cleanup()
    assert (tmp_path / "back/out/report.md").read_bytes() == b"# Report"
    assert (tmp_path / "back/project/src/main.py").exists()
    assert not list(tmp_path.rglob("evil"))
    assert not workspace.temp_dir.exists()
    assert not any(call.startswith("DELETE") for call in openai_stand_in.server.calls)


def test_the_directory_of_synced_files_can_be_removed(
    create_workspace: CreateWorkspace, tmp_path: Path
) -> None:
    workspace = create_workspace(sync_on_cleanup=True)
    workspace.cleanup()
    synced = workspace.sync_dir
    assert synced is not None
    assert synced.name.startswith("fumehood-synced-")
    assert (synced / "project/src/main.py").exists()
    workspace.remove_synced_files()
    workspace.remove_synced_files()
    assert not synced.exists()
    named = create_workspace(sync_on_cleanup=True, sync_dir=tmp_path / "back")
    named.cleanup()
    named.remove_synced_files()
    assert (tmp_path / "back/project/src/main.py").exists()


def test_local_copies_are_synced_if_the_container_has_expired(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, project: Path, tmp_path: Path
) -> None:
    workspace = create_workspace(
        client=openai_stand_in.client, sync_on_cleanup=True, sync_dir=tmp_path / "back"
    )
    workspace.filesystem.write_text("notes.txt", "mine")
    openai_stand_in.server.expire()
    made = len(openai_stand_in.server.containers)
    workspace.cleanup()
    assert (tmp_path / "back/notes.txt").read_text() == "mine"
    assert (tmp_path / "back/project/src/main.py").exists()
    assert len(openai_stand_in.server.containers) == made


def test_nothing_is_synced_unless_requested(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    workspace = create_workspace(client=openai_stand_in.client)
    workspace.filesystem.ensure_container()
    openai_stand_in.server.script()
    workspace.cleanup()
    assert openai_stand_in.server.calls == []
    assert workspace.container_id is None


def test_unused_workspaces_sync_their_local_copies(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, project: Path, tmp_path: Path
) -> None:
    openai_stand_in.server.script()
    unused = create_workspace(client=openai_stand_in.client, sync_on_cleanup=True, sync_dir=tmp_path / "back")
    unused.cleanup()
    assert openai_stand_in.server.calls == []
    assert (tmp_path / "back/project/src/main.py").read_text() == "print(1)"


def test_mode_auto_reuses_a_live_container_of_the_session(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    session = Session()

    def made(**config: Any) -> str:
        config.setdefault("mode", "auto")
        workspace = create_workspace(
            session=session,
            client=openai_stand_in.client,
            container_config=ContainerConfig(**config),
        )
        return workspace.filesystem.ensure_container()

    first = made()
    assert made() == first
    own = made(mode="explicit")
    assert own != first
    assert made() == first  # one of its own is nobody else's
    assert made(memory_limit="16g") not in (first, own)
    third = made()
    openai_stand_in.server.expire()
    assert made() != third


def test_one_container_has_one_client(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    with make_client(openai_stand_in.server) as other:
        workspace = create_workspace(client=other)
        with pytest.raises(PromptEvaluationError, match="pass the same client= to both"):
            openai_stand_in.adapter(hosted_tools=HOSTED).evaluate(prompt(sections=(workspace,)))
    assert openai_stand_in.server.calls == []


def test_without_a_client_the_environment_describes_one(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = create_workspace()
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(PromptEvaluationError, match="No client of OpenAI"):
        workspace.filesystem.ensure_container()
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_BASE_URL", openai_stand_in.server.url)
    assert workspace.filesystem.ensure_container() == workspace.container_id
    workspace.filesystem.client.close()


def test_security_and_budgets_are_checked_at_construction(project: Path) -> None:
    with pytest.raises(WorkspaceSecurityError):
        OpenAIContainerWorkspaceSection(
            session=Session(), mounts=(HostMount(str(project)),), allowed_host_roots=()
        )
    with pytest.raises(WorkspaceBudgetError):
        OpenAIContainerWorkspaceSection(
            session=Session(), mounts=(HostMount(str(project), max_bytes=3),), allowed_host_roots=(project,)
        )


def test_a_clone_has_a_container_of_its_own(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    workspace = create_workspace(client=openai_stand_in.client)
    clone = workspace.clone(container_config=ContainerConfig("1g"))
    assert workspace.filesystem.ensure_container() != clone.filesystem.ensure_container()
    assert openai_stand_in.server.containers[clone.container_id or ""].memory_limit == "1g"


def test_overrides_of_a_workspace_are_accepted_on_request(create_workspace: CreateWorkspace) -> None:
    fixed, changeable = create_workspace(), create_workspace(accepts_overrides=True)
    with pytest.raises(PromptEvaluationError, match="'workspace' accepts no overrides"):
        prompt(sections=(fixed,), overrides={"workspace": "Mine."})
    text = prompt(sections=(changeable,), overrides={"workspace": "Mine."}).render().text
    assert text.startswith("## 1. Workspace\n\nMine.\n\n`project`: 3 file(s)")


def test_nothing_is_left_of_a_workspace_that_nobody_cleaned_up(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))

    def create() -> OpenAIContainerWorkspaceSection:
        mounts = (HostMount(str(project), "project"),)
        return OpenAIContainerWorkspaceSection(
            session=Session(), mounts=mounts, allowed_host_roots=(project,)
        )

    workspace = create()
    assert len([*directory.iterdir()]) == 2
    workspace.cleanup()
    assert [*directory.iterdir()] == []
    forgotten = create()
    assert forgotten.temp_dir.exists()
    del forgotten
    gc.collect()
    assert [*directory.iterdir()] == []


def test_one_line_switches_between_container_and_host(openai_stand_in: OpenAIStandIn, project: Path) -> None:
    here, there = (
        signature(kind).parameters for kind in (HostWorkspaceSection, OpenAIContainerWorkspaceSection)
    )
    assert there.keys() - here.keys() == {"container_config", "client"}
    for name in here.keys() - {"template"}:
        assert str(here[name]) == str(there[name])
    for kind in (OpenAIContainerWorkspaceSection, HostWorkspaceSection):
        workspace = kind(
            session=Session(),
            mounts=(HostMount(str(project), "project", exclude_glob=("*.exe",)),),
            allowed_host_roots=(project,),
        )
        assert (
            openai_stand_in.evaluate(
                prompt(sections=(workspace,)), response(message("fine")), hosted_tools=HOSTED
            ).text
            == "fine"
        )
        assert workspace.filesystem.read_text("project/src/main.py") == "print(1)"
        assert workspace.mount_previews[0].file_count == 2
        workspace.cleanup()


# --- the manager --------------------------------------------------------------------------------------


def test_files_are_uploaded_attached_listed_read_and_deleted(openai_stand_in: OpenAIStandIn) -> None:
    manager = ContainerManager(openai_stand_in.client)
    container = manager.create()
    assert manager.is_alive(container)
    data = manager.upload(container, "data.csv", b"1,2")
    attached = manager.attach(container, "file-9")
    assert [file.path.partition("-")[2] for file in manager.list_files(container)] == [
        "data.csv",
        "file-9.txt",
    ]
    assert manager.read_file(container, data.id) == b"1,2"
    manager.delete_file(container, attached.id)
    assert [file.id for file in manager.list_files(container)] == [data.id]
    with pytest.raises(FileNotFoundError):
        manager.read_file(container, attached.id)
    openai_stand_in.server.expire()
    assert not manager.is_alive(container)
    with pytest.raises(ContainerExpiredError, match="has expired; its files are gone"):
        manager.list_files(container)
    assert not manager.is_alive("cntr_none")
    with pytest.raises(PromptEvaluationError, match="cannot be uploaded"):
        manager.upload(container, "run.exe", b"x")


def test_a_container_that_cannot_be_created_is_a_configuration_error(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.server.no_more_containers = True
    with pytest.raises(PromptEvaluationError, match="may not have any more containers"):
        ContainerManager(openai_stand_in.client).create()
    workspace = OpenAIContainerWorkspaceSection(session=Session())
    with pytest.raises(PromptEvaluationError, match="may not have any more containers") as refused:
        openai_stand_in.evaluate(prompt(sections=(workspace,)), hosted_tools=HOSTED)
    assert refused.value.phase == "configuration"
    assert openai_stand_in.server.asked == []


def test_types_that_the_specification_names_can_be_uploaded() -> None:
    assert {"csv", "png", "zip", "pdf", "py", "ipynb"} <= {*UPLOAD_TYPES}


@pytest.mark.parametrize("name", sorted(UPLOAD_TYPES))
def test_common_types_can_be_uploaded(name: str) -> None:
    check_upload(f"a.{name.upper()}", b"content")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.exe", b"x"),
        ("a.csv", b"\x7fELF\x02\x01\0"),
        ("a.py", b"MZ\x90\0"),
        ("data", b"\xff\x00"),
        ("a.tar.xz", b"x"),
    ],
)
def test_other_types_are_refused(name: str, content: bytes) -> None:
    with pytest.raises(PromptEvaluationError, match="cannot be uploaded"):
        check_upload(name, content)


def test_text_needs_no_extension_and_may_begin_like_a_program() -> None:
    check_upload("Makefile", "täg: all".encode())
    check_upload("codes.csv", b"MZ,Mozambique\n")
