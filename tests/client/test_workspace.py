"""Host files in workspaces: copying, rejected paths, and the text for the model."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fumehood.client import (
    HostMount,
    HostWorkspaceSection,
    Prompt,
    PromptEvaluationError,
    Session,
    WorkspaceBudgetError,
    WorkspaceSecurityError,
)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    for name, content in {
        "src/main.py": "print(1)",
        "src/__pycache__/main.pyc": "binary",
        ".git/HEAD": "ref",
        "vendored/.git/objects/ab/cd": "object",
        "README.md": "# Hi",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.fixture
def made() -> Iterator[list[HostWorkspaceSection]]:
    sections: list[HostWorkspaceSection] = []
    yield sections
    for section in sections:
        section.cleanup()


@pytest.fixture
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks that the temporary directories of workspaces are gone at the end."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    yield
    assert os.listdir(directory) == []


def workspace(*mounts: HostMount, roots: tuple[Any, ...], **more: Any) -> HostWorkspaceSection:
    return HostWorkspaceSection(session=Session(), mounts=mounts, allowed_host_roots=roots, **more)


def test_a_mount_is_copied_to_its_path_without_excluded_files(
    repo: Path, made: list[HostWorkspaceSection]
) -> None:
    made.append(
        workspace(
            HostMount(str(repo), "project", exclude_glob=(".git/*", "__pycache__/*", "*.pyc")),
            roots=(repo.parent,),
        )
    )
    section = made[0]
    assert section.filesystem.glob("**") == ["project/README.md", "project/src/main.py"]
    section.filesystem.write_text("project/src/main.py", "changed")
    assert (repo / "src/main.py").read_text() == "print(1)"
    (preview,) = section.mount_previews
    assert (
        preview.mount_path,
        preview.entries,
        preview.bytes_copied,
        preview.file_count,
        preview.is_directory,
    ) == (
        "project",
        ("README.md", "src/"),
        12,
        2,
        True,
    )
    assert preview.resolved_host == repo.resolve()


def test_only_included_and_not_excluded_files_are_copied(
    repo: Path, made: list[HostWorkspaceSection]
) -> None:
    mount = HostMount(str(repo), include_glob=("*.py", ".git"), exclude_glob=("vendored/**",))
    made.append(workspace(mount, roots=(str(repo),)))
    assert made[0].filesystem.glob("**") == ["repo/.git/HEAD", "repo/src/main.py"]


def test_patterns_match_at_any_depth(tmp_path: Path, made: list[HostWorkspaceSection]) -> None:
    root = tmp_path / "root"
    names = (
        "a/.git/x/y",
        ".git/z",
        "a/b/keep.py",
        "keep.py",
        "a/build/out/keep.py",
        "buildx/keep.py",
        "a/b/c.txt",
    )
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    for exclude, include, remaining in (
        ((".git/*",), (), ["a/b/c.txt", "a/b/keep.py", "a/build/out/keep.py", "buildx/keep.py", "keep.py"]),
        ((".git", "build"), ("*.py",), ["a/b/keep.py", "buildx/keep.py", "keep.py"]),
        ((), ("a/**/keep.py",), ["a/b/keep.py", "a/build/out/keep.py"]),
        (("a",), ("build*",), ["buildx/keep.py"]),
        ((), ("x",), ["a/.git/x/y"]),
    ):
        mount = HostMount(str(root), "r", include_glob=include, exclude_glob=exclude)
        made.append(workspace(mount, roots=(root,)))
        assert [path.removeprefix("r/") for path in made[-1].filesystem.glob("**")] == remaining


def test_a_file_can_be_mounted(repo: Path, made: list[HostWorkspaceSection]) -> None:
    made.append(workspace(HostMount(str(repo / "README.md")), roots=(repo,)))
    assert made[0].filesystem.read_text("README.md") == "# Hi"
    assert not made[0].mount_previews[0].is_directory


def test_a_relative_path_can_be_mounted(
    repo: Path, made: list[HostWorkspaceSection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo.parent)
    made.append(workspace(HostMount("repo/src"), roots=("repo",)))
    assert made[0].filesystem.read_text("src/main.py") == "print(1)"


@pytest.mark.parametrize("mount_path", ["../out", "/abs", "a/../..", ".", ""])
def test_a_mount_stays_in_the_workspace(repo: Path, no_leftovers: None, mount_path: str) -> None:
    with pytest.raises(WorkspaceSecurityError):
        workspace(HostMount(str(repo), mount_path), roots=(repo,))


def test_only_allowed_roots_can_be_mounted(repo: Path, no_leftovers: None) -> None:
    for roots in ((), (repo / "src",), (str(repo) + "-other",)):
        with pytest.raises(WorkspaceSecurityError, match="outside allowed_host_roots"):
            workspace(HostMount(str(repo)), roots=roots)
    with pytest.raises(WorkspaceSecurityError, match="outside allowed_host_roots"):
        workspace(HostMount(str(repo / "src" / ".." / ".git")), roots=(repo / "src",))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        workspace(HostMount(str(repo / "missing")), roots=(repo,))
    with pytest.raises(WorkspaceSecurityError, match="Two mounts"):
        workspace(HostMount(str(repo)), HostMount(str(repo / "src"), "repo"), roots=(repo,))
    workspace(roots=()).cleanup()


def test_a_budget_is_for_all_files_of_a_mount(repo: Path, no_leftovers: None) -> None:
    total = sum(path.stat().st_size for path in repo.rglob("*") if path.is_file())
    workspace(HostMount(str(repo), max_bytes=total), roots=(repo,)).cleanup()
    with pytest.raises(WorkspaceBudgetError, match=f"more than its max_bytes of {total - 1}"):
        workspace(HostMount(str(repo), max_bytes=total - 1), roots=(repo,))
    workspace(HostMount(str(repo), include_glob=("*.md",), max_bytes=4), roots=(repo,)).cleanup()


def test_symbolic_links(repo: Path, tmp_path: Path, made: list[HostWorkspaceSection]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (repo / "inside").symlink_to(repo / "README.md")
    (repo / "loop").symlink_to(repo)
    (repo / "dangling").symlink_to(repo / "nowhere")
    only: Any = {"include_glob": ("inside", "loop", "dangling", "README.md")}
    made.append(workspace(HostMount(str(repo), **only), roots=(repo,)))
    assert made[0].filesystem.glob("**") == ["repo/README.md"]
    made.append(workspace(HostMount(str(repo), **only, follow_symlinks=True), roots=(repo,)))
    assert made[1].filesystem.glob("**") == ["repo/README.md", "repo/inside"]
    (repo / "outside").symlink_to(secret)
    with pytest.raises(WorkspaceSecurityError, match="outside allowed_host_roots"):
        workspace(HostMount(str(repo), follow_symlinks=True), roots=(repo,))
    linked = tmp_path / "linked"
    linked.symlink_to(repo)
    made.append(workspace(HostMount(str(linked), **only), roots=(repo,)))
    assert made[2].mount_previews[0].mount_path == "repo"


class Scanned(list[Any]):
    """What `os.scandir` gives."""

    def __enter__(self) -> Iterator[Any]:
        return iter(self)

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_path_that_becomes_a_link_while_it_is_copied_is_rejected(
    repo: Path, tmp_path: Path, no_leftovers: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "main.py").write_text("secret")
    scan = os.scandir

    def swap(directory: Any) -> Any:
        """Between the look into the directory above and the look at what is in there."""
        found = Scanned(scan(directory))
        victim = repo / "src" if kind == "directory" else repo / "src/main.py"
        if any(entry.name == victim.name for entry in found) and not victim.is_symlink():
            victim.rename(tmp_path / "moved")
            victim.symlink_to(secrets if kind == "directory" else secrets / "main.py")
        return found

    monkeypatch.setattr("os.scandir", swap)
    with pytest.raises(WorkspaceSecurityError, match="became a link while it was being copied"):
        workspace(HostMount(str(repo), include_glob=("src",)), roots=(repo,))


def test_a_file_that_vanishes_while_it_is_copied_is_left_out(
    repo: Path, made: list[HostWorkspaceSection], monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def vanish(directory: Any) -> Any:
        found = Scanned(scan(directory))
        (repo / "README.md").unlink(missing_ok=True)
        return found

    monkeypatch.setattr("os.scandir", vanish)
    made.append(workspace(HostMount(str(repo), include_glob=("*.md", "*.py")), roots=(repo,)))
    assert made[0].mount_previews[0].entries == ("src/",)


def test_a_single_root_is_rejected(repo: Path, no_leftovers: None) -> None:
    for root in (str(repo), repo):
        with pytest.raises(PromptEvaluationError, match=r"allowed_host_roots is .*; it has to be several"):
            workspace(HostMount("/etc/hostname"), roots=root)  # pyright: ignore[reportArgumentType] - the mistake


@pytest.mark.parametrize("name", ["a\0", "a\ud800"])
def test_a_root_whose_name_is_invalid_is_rejected(repo: Path, name: str, no_leftovers: None) -> None:
    with pytest.raises(WorkspaceSecurityError, match=r"entry of allowed_host_roots .* cannot be followed"):
        workspace(HostMount(str(repo)), roots=(repo, name))


@pytest.mark.parametrize(
    ("settings", "expected_error"),
    [
        ({"exclude_glob": "*.pyc"}, r"exclude_glob is '\*.pyc'; it has to be several"),
        ({"include_glob": "src"}, "include_glob is 'src'; it has to be several"),
        ({"exclude_glob": ("*.md", "")}, "exclude_glob has an empty pattern"),
        ({"max_bytes": -1}, "max_bytes is -1"),
    ],
)
def test_a_mount_is_checked_where_it_is_made(settings: dict[str, Any], expected_error: str) -> None:
    with pytest.raises(PromptEvaluationError, match=expected_error):
        HostMount("/repos", **settings)


def test_contradictory_settings_of_a_workspace_are_rejected(tmp_path: Path, no_leftovers: None) -> None:
    for settings, expected_error in (
        ({"sync_dir": tmp_path}, "sync_on_cleanup"),
        ({"mounts": HostMount("x")}, "mounts is HostMount.*; it has to be several"),
    ):
        with pytest.raises(PromptEvaluationError, match=expected_error):
            HostWorkspaceSection(session=Session(), **settings)  # pyright: ignore[reportArgumentType] - mistakes


def test_overlapping_mounts_are_rejected(repo: Path, no_leftovers: None) -> None:
    below = HostMount(str(repo / "README.md"), "p/docs/README.md")
    workspace(HostMount(str(repo), "p"), below, roots=(repo,)).cleanup()
    readme = str(repo / "README.md")
    for first, second in (
        (HostMount(str(repo), "p"), HostMount(readme, "p/README.md")),
        (HostMount(str(repo), "p/q"), HostMount(readme, "p")),
        (HostMount(readme, "p"), HostMount(str(repo), "p/q")),
    ):
        with pytest.raises(WorkspaceSecurityError, match=r"Two mounts.* lead to 'p"):
            workspace(first, second, roots=(repo,))


def test_paths_that_cannot_be_followed_are_named(repo: Path, no_leftovers: None) -> None:
    (repo / "a").symlink_to(repo / "b")
    (repo / "b").symlink_to(repo / "a")
    for path in (str(repo / "a"), "nul\0byte", "/" + "x" * 5000):
        with pytest.raises((WorkspaceSecurityError, FileNotFoundError), match="The host path") as refused:
            workspace(HostMount(path), roots=("/",))
        assert len(str(refused.value)) < 500


def test_a_tree_has_an_end(tmp_path: Path, no_leftovers: None) -> None:
    deep = tmp_path / "deep"
    (deep / "/".join("d" * 201)).mkdir(parents=True)
    with pytest.raises(WorkspaceBudgetError, match=r"deeper than 200 directories.*exclude_glob"):
        workspace(HostMount(str(deep)), roots=(deep,))
    workspace(HostMount(str(deep), exclude_glob=("d/d/d",)), roots=(deep,)).cleanup()


@pytest.mark.parametrize("name", ["README.md", "src"])
def test_unreadable_files_are_named(
    repo: Path, no_leftovers: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    opens = os.open

    def refuse(path: Any, *more: Any, **named: Any) -> int:
        if path == name:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opens(path, *more, **named)

    monkeypatch.setattr("os.open", refuse)  # root could read it all the same
    with pytest.raises(PermissionError, match=f"leave it out with exclude_glob: '{repo / name}'"):
        workspace(HostMount(str(repo)), roots=(repo,))


def test_pipes_and_sockets_are_left_alone(repo: Path, made: list[HostWorkspaceSection]) -> None:
    os.mkfifo(repo / "pipe")
    made.append(workspace(HostMount(str(repo), include_glob=("pipe", "*.md")), roots=(repo,)))
    assert made[0].filesystem.glob("**") == ["repo/README.md"]


def test_the_prompt_lists_the_files(tmp_path: Path, made: list[HostWorkspaceSection]) -> None:
    root = tmp_path / "odd"
    root.mkdir()
    for name in ("$HOME ${x}.txt", "`tick`", "new\nline", "right\u202eleft"):
        (root / name).write_text("x")
    made.append(workspace(HostMount(str(root)), roots=(root,), template="Files."))
    assert Prompt(ns="n", key="k", sections=[made[0]]).render().text == snapshot("""\
## 1. Workspace

Files.

`odd`: 4 file(s), 4 bytes, among them
- `$HOME ${x}.txt`
- `\\x60tick\\x60`
- `new\\x0aline`
- `right\\x202eleft`\
""")


def test_many_names_are_cut_short(tmp_path: Path, made: list[HostWorkspaceSection]) -> None:
    root = tmp_path / "many"
    root.mkdir()
    for number in range(40):
        (root / f"{number:03}{'x' * 200}").write_text("")
    made.append(workspace(HostMount(str(root)), roots=(root,)))
    text = Prompt(ns="n", key="k", sections=[made[0]]).render().text
    assert "40 file(s)" in text
    twenty = tmp_path / "twenty"
    twenty.mkdir()
    for number in range(20):
        (twenty / str(number)).write_text("")
    made.append(workspace(HostMount(str(twenty)), roots=(twenty,)))
    assert "…" not in Prompt(ns="n", key="k", sections=[made[1]]).render().text
    assert text.endswith("…`\n- …")
    assert len(text) < 4000


def test_cleanup_removes_the_copies_and_keeps_what_is_asked_for(repo: Path, tmp_path: Path) -> None:
    plain = workspace(HostMount(str(repo)), roots=(repo,))
    plain.cleanup()
    plain.cleanup()
    assert not plain.temp_dir.exists()
    assert plain.sync_dir is None
    remaining = workspace(
        HostMount(str(repo)), roots=(repo,), sync_on_cleanup=True, sync_dir=tmp_path / "kept"
    )
    remaining.filesystem.write_text("report.txt", "done")
    remaining.cleanup()
    assert not remaining.temp_dir.exists()
    assert (tmp_path / "kept/report.txt").read_text() == "done"
    assert (tmp_path / "kept/repo/src/main.py").read_text() == "print(1)"
    fresh = workspace(sync_on_cleanup=True, roots=())
    fresh.cleanup()
    assert fresh.sync_dir is not None
    assert fresh.sync_dir.is_dir()
    fresh.sync_dir.rmdir()


def test_a_clone_has_copies_of_its_own(repo: Path, made: list[HostWorkspaceSection]) -> None:
    made.append(workspace(HostMount(str(repo)), roots=(repo,)))
    made.append(made[0].clone())
    assert made[0].temp_dir != made[1].temp_dir
    assert made[0].filesystem.glob("**") == made[1].filesystem.glob("**")
