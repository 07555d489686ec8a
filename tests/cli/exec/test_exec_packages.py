"""`fumehood exec --with`: packages for one program."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_runner import run_fumehood
from tests.support.package_index import FakePackageIndex, wheel


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


def test_a_failed_installation_runs_nothing(index: FakePackageIndex, tmp_path: Path) -> None:
    result = _exec(index, tmp_path, "--with", "--index-url=x", "-c", "print('ran')")
    assert (result.stdout, result.returncode) == ("", 125)
    assert "options are not accepted" in result.stderr
