"""`fumehood exec --with`: packages for one program."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_runner import FUMEHOOD, run_fumehood
from tests.support.package_index import FakePackageIndex, wheel
from tests.support.sandbox_runs import build_environment


@pytest.fixture(scope="module")
def index() -> Iterator[FakePackageIndex]:
    with FakePackageIndex() as made:
        made.add(
            wheel("hello", "1.0", {"hello.py": "x = 'hello'"}),
            wheel("world", "1.0", {"world.py": "x = 'world'"}),
        )
        yield made


def _exec(index: FakePackageIndex, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_fumehood(
        "exec", *arguments, FUMEHOOD_INDEX_URL=index.url, FUMEHOOD_PACKAGES_DIR=str(directory)
    )


def test_with_packages(index: FakePackageIndex, tmp_path: Path) -> None:
    code = "import os\n!pip --version > /dev/null\nimport hello, world\nprint(hello.x, world.x)"
    result = _exec(index, tmp_path, "--with", "hello", "--with", "world>=1", "-c", code)
    assert (result.stdout, result.returncode) == ("hello world\n", 0), result.stderr
    assert result.stderr.splitlines() == ["installing hello, world>=1", "installed hello 1.0, world 1.0"]


def test_progress_names_the_package(index: FakePackageIndex, tmp_path: Path) -> None:
    """As lines without a terminal, also of packages that the code installs; not if nothing is missing or wanted."""
    result = _exec(index, tmp_path, "-c", "!pip install hello\nimport hello")
    assert result.stdout.splitlines() == [
        "installing hello",
        "installed hello 1.0",
        "Successfully installed hello-1.0",
    ]
    assert _exec(index, tmp_path, "--with", "numpy", "-c", "print(1)").stderr == ""
    assert _exec(index, tmp_path, "--quiet", "--with", "hello", "-c", "print(1)").stderr == ""
    result = _exec(index, tmp_path, "--json", "--with", "hello", "-c", "print(1)")
    assert result.stderr.splitlines()[0] == "installing hello"
    assert all(line.startswith("{") for line in result.stdout.splitlines())


def test_on_a_terminal_the_spinner_names_the_package(index: FakePackageIndex, tmp_path: Path) -> None:
    environ = build_environment() | {"FUMEHOOD_INDEX_URL": index.url, "FUMEHOOD_PACKAGES_DIR": str(tmp_path)}
    terminal, stderr = os.openpty()
    try:
        with index.held():
            process = subprocess.Popen(
                [FUMEHOOD, "exec", "--with", "hello", "-c", "print(1)"],
                env=environ | {"TERM": "xterm"},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
            shown = b""
            while b"installing hello" not in shown:  # the test's own timeout ends it
                shown += os.read(terminal, 4096)
        assert process.wait(60) == 0
        assert b"installing hello" in shown
    finally:
        os.close(terminal)
        os.close(stderr)


def test_a_failed_installation_runs_nothing(index: FakePackageIndex, tmp_path: Path) -> None:
    result = _exec(index, tmp_path, "--with", "--index-url=x", "-c", "print('ran')")
    assert (result.stdout, result.returncode) == ("", 125)
    assert "options are not accepted" in result.stderr
