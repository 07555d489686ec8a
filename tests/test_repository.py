"""Rules of the repository that a machine can check."""

import ast
import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import fumehood

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "fumehood"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 600

# What a merge leaves where it needs a decision.
CONFLICTS = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)
# Paths that exist on one machine only; each written so that it does not find itself.
LOCAL_PATHS = re.compile(r"(?<![\w./-])/wor[k]/|(?<![\w/])\.\./share[d]\b|file:/[/]/opt\b")


@dataclass(frozen=True)
class _Module:
    """What the rules need of a module."""

    docstring: str
    imports: list[str]
    classes: list[str]
    lines: int


@cache
def _modules() -> dict[Path, _Module]:
    return {path: _read_module(path.read_text(encoding="utf-8")) for path in MODULES}


def _read_module(text: str) -> _Module:
    tree = ast.parse(text)
    imports = [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return _Module(ast.get_docstring(tree) or "", imports, classes, len(text.splitlines()))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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


def _purpose_problem(docstring: str) -> str | None:
    if not docstring:
        return "it has no docstring"
    first = " ".join(docstring.split("\n\n", maxsplit=1)[0].split())
    if not first.endswith("."):
        return f"the first paragraph is no sentence: {first!r}"
    if re.search(r"\bimports\b", first):
        return f"{first!r} says what the module imports; the contracts do"
    return None if len(first.split()) > 2 else f"{first!r} does not say what the module is for"


def test_every_module_says_its_purpose() -> None:
    problems = {_name(path): _purpose_problem(module.docstring) for path, module in _modules().items()}
    assert {name: problem for name, problem in problems.items() if problem} == {}


# Entered by module: wire types, code of both servers, and packages whose parts are used one without the other.
OPEN_PACKAGES = {"protocol", "http_server", "sandbox_server", "client", "cli", "interfaces", "testing"}
# Not exported, because not every command needs what they import.
OPEN_MODULES = {
    "fumehood.files.input_file_loader",
    "fumehood.files.url_fetcher",
    "fumehood.models.registry",
    "fumehood.models.upstream_checks",
    "fumehood.models.upstream_health",
    "fumehood.sandbox_client.kubernetes",
    "fumehood.store.aes_gcm_sealer",
}


def test_other_packages_are_imported_through_their_init() -> None:
    found: list[str] = []
    for path, module in _modules().items():
        open_packages = {path.relative_to(PACKAGE).parts[0], *OPEN_PACKAGES}
        for imported in module.imports:
            inner = re.match(r"fumehood\.(\w+)\.", imported)
            if inner and inner[1] not in open_packages and imported not in OPEN_MODULES:
                found.append(f"{_name(path)} imports {imported}; import it from fumehood.{inner[1]}")
    assert found == []


def test_the_engine_knows_no_hosted_tool_by_name() -> None:
    """What only one tool needs belongs to that tool, or to the protocol."""
    names = re.compile(r"code_?interpreter|file_search|web_search|shell_call|\bmcp_|\"ci\"")
    modules = sorted((PACKAGE / "engine").rglob("*.py"))
    found = {_name(path): names.findall(path.read_text(encoding="utf-8")) for path in modules}
    assert {name: named for name, named in found.items() if named} == {}


def test_every_module_is_short_enough_to_read() -> None:
    long = {_name(path): module.lines for path, module in _modules().items() if module.lines > MAX_LINES}
    assert long == {}


def _found(pattern: re.Pattern[str]) -> list[str]:
    found: list[str] = []
    for path in _tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{_name(path)}: {match.group()}" for match in pattern.finditer(text)]
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]]
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


@pytest.mark.parametrize("script", [".ci/run", "deploy/images/build.sh", "tools/setup.sh"])
def test_script_is_executable(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111


def test_no_public_class_name_is_defined_twice() -> None:
    found: dict[str, list[str]] = {}
    for path, module in _modules().items():
        for name in module.classes:
            if not name.startswith("_"):
                found.setdefault(name, []).append(_name(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
