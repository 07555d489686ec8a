"""The house rules that a machine can check."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fumehood

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "fumehood"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 600

# What a merge leaves where it needs a decision.
CONFLICTS = re.compile(r"^(?:<{7}|>{7}) ")
# Paths that exist on one machine only; each written so that it does not find itself.
LOCAL_PATHS = re.compile(r"(?<![\w./-])/wor[k]/|(?<![\w/])\.\./share[d]\b|file:/[/]/opt\b")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _tracked() -> list[Path]:
    """The files that are, or are about to be, in the repository."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in done.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_module_says_its_purpose(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, "a module docstring begins with one sentence of purpose"
    first = " ".join(docstring.split("\n\n")[0].split())
    assert first.endswith("."), f"the docstring's first paragraph is no sentence: {first!r}"
    assert not re.search(r"\bimports\b", first), f"{first!r} says what the module imports; the contracts do"
    assert len(first.split()) > 2, f"{first!r} does not say what the module is for"


# Entered by module: wire types, code of both servers, and packages whose parts are used one without the other.
OPEN_PACKAGES = {"protocol", "http_server", "sandbox_server", "client", "cli", "interfaces", "testing"}
# Not exported, because not every command needs what they import.
OPEN_MODULES = {"fumehood.models.registry", "fumehood.store.aes_gcm_sealer"}


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_other_packages_are_imported_through_their_init(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and re.match(r"fumehood\.\w+\.", node.module or ""):
            package = str(node.module).split(".")[1]
            entered = package == own or package in OPEN_PACKAGES or node.module in OPEN_MODULES
            assert entered, f"import it from fumehood.{package}, which exports what others use"


@pytest.mark.parametrize("path", sorted((PACKAGE / "engine").rglob("*.py")), ids=_name)
def test_the_engine_knows_no_hosted_tool_by_name(path: Path) -> None:
    named = re.findall(
        r"code_?interpreter|file_search|web_search|shell_call|\bmcp_|\"ci\"", path.read_text(encoding="utf-8")
    )
    assert not named, "what only one tool needs belongs to that tool, or to the protocol"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_module_is_short_enough_to_read(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines; split it by idea"


def _found(pattern: re.Pattern[str]) -> list[str]:
    found: list[str] = []
    for path in _tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := pattern.search(line):
                found.append(f"{_name(path)}:{number}: {match.group()}")
    return found


def test_no_file_names_a_path_of_one_machine() -> None:
    assert not _found(LOCAL_PATHS)


def test_no_file_was_committed_with_a_conflict() -> None:
    assert not _found(CONFLICTS)


def test_lock_file_names_the_public_index_only() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    for package in lock["package"]:
        source = package["source"]
        assert source in ({"registry": "https://pypi.org/simple"}, {"editable": "."}), package["name"]
        for file in [*package.get("wheels", []), *filter(None, [package.get("sdist")])]:
            assert file["url"].startswith("https://files.pythonhosted.org/"), file["url"]
            assert file["hash"].startswith("sha256:"), file["url"]


def test_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_base_install_needs_msgspec_only() -> None:
    names = [re.split(r"[^\w-]", requirement)[0] for requirement in _pyproject()["project"]["dependencies"]]
    assert names == ["msgspec"]


def test_changelog_fits_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    releases = [tuple(int(part) for part in heading.split(".")) for heading in headings[1:]]
    assert releases == sorted(releases, reverse=True)
    version = tuple(int(part) for part in fumehood.__version__.split("."))
    # Between releases the package already carries the number of the next one.
    assert not releases or version >= releases[0]


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    records = sorted(path.name for path in folder.glob("[0-9]*.md"))
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert records
    assert [name for name in records if f"({name})" not in index] == []
    numbers = [name.split("-")[0] for name in records]
    assert len(set(numbers)) == len(numbers), "two records with one number"


@pytest.mark.parametrize("script", [".ci/run", "tools/setup.sh"])
def test_script_is_executable(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111


def test_no_public_class_name_is_defined_twice() -> None:
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(_name(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
