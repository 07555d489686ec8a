"""What `pip install fumehood` without an extra answers.

`tests/wheel` tests the same with a real installation; here the base install is a directory with fumehood and msgspec
alone, and an interpreter that knows no other packages.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fumehood

ROOT = Path(__file__).resolve().parent.parent
ALL = "pip install 'fumehood[all]'"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with fumehood, its metadata and what the base install brings."""
    site = tmp_path_factory.mktemp("site")
    for name in ("fumehood", "msgspec"):
        _link_package(site, name)
    metadata = importlib.metadata.distribution("fumehood").locate_file(
        f"fumehood-{fumehood.__version__}.dist-info"
    )
    (site / Path(str(metadata)).name).symlink_to(str(metadata))
    return site


def _link_package(site: Path, name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    (site / name).symlink_to(Path(spec.origin).parent)


def _fumehood(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `python -m fumehood`, which is what the installed script runs, too; -S: nothing but `site` is found."""
    return subprocess.run(
        [sys.executable, "-S", "-P", "-m", "fumehood", *arguments],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_version(base: Path) -> None:
    done = _fumehood(base, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fumehood {fumehood.__version__}\n", "")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_says_what_is_installed_and_which_extra_gives_what(base: Path, option: str) -> None:
    done = _fumehood(base, option)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Installed: the client library (`import fumehood.client`).\n" in done.stdout
    assert ALL in done.stdout
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in extras:
        assert f"'fumehood[{extra}]'" in done.stdout


def test_without_arguments_the_help_is_an_error_as_in_the_whole_product(base: Path) -> None:
    done = _fumehood(base)
    assert (done.returncode, done.stdout) == (2, "")
    assert ALL in done.stderr


@pytest.mark.parametrize("arguments", [["exec", "-c", "1"], ["serve"], ["doctor"], ["exec", "--help"]])
def test_each_command_names_the_extra_in_one_line(base: Path, arguments: list[str]) -> None:
    done = _fumehood(base, *arguments)
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.startswith(f"fumehood: `fumehood {arguments[0]}` needs typer, which is not installed")
    assert ALL in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_names_the_extras_that_are_there(base: Path, tmp_path: Path) -> None:
    for entry in base.iterdir():
        (tmp_path / entry.name).symlink_to(entry.resolve())
    about = tmp_path / "openai-3.49.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: openai\nVersion: 3.49.0\n")
    done = _fumehood(tmp_path, "--help")
    assert "Installed: the client library (`import fumehood.client`) and fumehood[openai].\n" in done.stdout


def test_a_part_that_is_missing_is_named_without_a_traceback(base: Path, tmp_path: Path) -> None:
    """typer may be there for another program's sake, and nothing else of the extra."""
    for entry in base.iterdir():
        (tmp_path / entry.name).symlink_to(entry.resolve())
    for name in ("typer", "click", "typing_extensions", "shellingham", "rich", "annotated_doc"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            source = origin.parent if origin.name == "__init__.py" else origin
            (tmp_path / source.name).symlink_to(source)
    assert _fumehood(tmp_path, "--version").returncode == 0
    done = _fumehood(tmp_path, "exec", "-c", "1")
    assert done.returncode == 125
    assert "which is not installed beside fumehood" in done.stderr
    assert ALL in done.stderr
    assert "Traceback" not in done.stderr


def test_the_client_needs_no_extra(base: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", "import fumehood.client"],
        env={"PYTHONPATH": str(base)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_all_is_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras.pop("all")
    assert sorted(everything.removeprefix("fumehood[").removesuffix("]").split(",")) == sorted(extras)
