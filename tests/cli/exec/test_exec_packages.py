"""`fumehood exec --with`: packages for one program."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.package_index import FakePackageIndex, wheel
from tests.support.sandbox_runs import build_environment, strip_limits_warning

FUMEHOOD = Path(sys.executable).parent / "fumehood"


@pytest.fixture(scope="module")
def index() -> Iterator[FakePackageIndex]:
    with FakePackageIndex() as made:
        made.add(
            wheel("hello", "1.0", {"hello.py": "x = 'hello'"}),
            wheel("world", "1.0", {"world.py": "x = 'world'"}),
        )
        yield made


def _exec(index: FakePackageIndex, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FUMEHOOD, "exec", *arguments],
        env={**build_environment(), "FUMEHOOD_INDEX_URL": index.url, "FUMEHOOD_PACKAGES_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_with_packages(index: FakePackageIndex, tmp_path: Path) -> None:
    code = "import os\n!pip --version > /dev/null\nimport hello, world\nprint(hello.x, world.x)"
    result = _exec(index, tmp_path, "--with", "hello", "--with", "world>=1", "-c", code)
    assert (result.stdout, result.returncode) == ("hello world\n", 0), result.stderr


def test_what_cannot_be_installed_is_said_and_nothing_runs(index: FakePackageIndex, tmp_path: Path) -> None:
    result = _exec(index, tmp_path, "--with", "--index-url=x", "-c", "print('ran')")
    assert (result.stdout, result.returncode) == ("", 125)
    assert "options are not accepted" in strip_limits_warning(result.stderr)
