"""tools/setup.sh: which uv and which Python it uses, what it says without."""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.package_index import FakePackageIndex, IndexFile, WheelMember, wheel

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "tools" / "uv-requirements.txt"
TOOLS = ("awk", "cat", "dirname", "env", "rm", "sed", "sh")
PINNED = re.findall(r"^uv==([\d.]+)", PINS.read_text(), re.MULTILINE)[0]
# In place of uv: says its version, and that it is not the one on PATH.
FAKE_UV = '#!/bin/sh\n[ "$1" = --version ] && echo "uv {version}" || echo "from pip"\n'
OLD_PYTHON = '#!/bin/sh\ncase "$*" in *platform.python_version*) echo 3.11.9 ;; *) exit 1 ;; esac\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the script in it, and a directory `bin` with what it needs of a system, without any Python."""
    shutil.copytree(ROOT / "tools", tmp_path / "tree" / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    return tmp_path / "tree"


def _program(tree: Path, name: str, text: str) -> None:
    path = tree.parent / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def _setup(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tree / "tools" / "setup.sh", *arguments],
        env={
            "PATH": str(tree.parent / "bin"),
            "HOME": str(tree.parent),
            "PYENV_ROOT": "/nonexistent",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_CACHE_DIR": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=100,
    )


def _fake_uv(version: str = PINNED) -> IndexFile:
    script = WheelMember(FAKE_UV.format(version=version).encode(), stat.S_IFREG | 0o755)
    return wheel("uv", version, {f"uv-{version}.data/scripts/uv": script})


def _link_python(tree: Path) -> None:
    _program(tree, "python3", f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n')


def test_the_pinned_uv_is_that_of_the_lock_file() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    (locked,) = [package for package in lock["package"] if package["name"] == "uv"]
    systems = r"(manylinux|musllinux|macosx)\w*_(x86_64|aarch64|arm64)\b"
    hashes = {file["hash"] for file in locked["wheels"] if re.search(systems, file["url"])}
    assert locked["version"] == PINNED
    assert set(re.findall(r"--hash=(sha256:\w+)", PINS.read_text())) == hashes


def test_a_uv_with_another_hash_is_not_installed(tree: Path) -> None:
    _link_python(tree)
    with FakePackageIndex() as index:
        index.add(_fake_uv())
        done = _setup(tree, "uv", "anything", PIP_INDEX_URL=index.url)
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert "tools/uv-requirements.txt" in done.stderr
    assert done.stdout == ""
    assert not (tree / ".uv").exists()


def test_the_pinned_uv_is_installed_once_and_again_when_the_pin_changes(tree: Path) -> None:
    _link_python(tree)
    pins = tree / "tools" / "uv-requirements.txt"

    def pin(file: IndexFile, version: str) -> None:
        digest = hashlib.sha256(file.content).hexdigest()
        pins.write_text(f"uv=={version} \\\n    --hash=sha256:{digest}\n")

    with FakePackageIndex() as index:
        first, second = _fake_uv("0.90.1"), _fake_uv("0.90.2")
        index.add(first, second)
        for file, version in ((first, "0.90.1"), (second, "0.90.2")):
            pin(file, version)
            done = _setup(tree, "uv", "anything", PIP_INDEX_URL=index.url)
            assert (done.returncode, done.stdout) == (0, "from pip\n"), done.stderr
            assert f"installing uv {version} into .uv/" in done.stderr
            again = _setup(tree, "uv", "anything", PIP_INDEX_URL="http://127.0.0.1:9/nobody-listens/")
            assert (again.returncode, again.stdout, again.stderr) == (0, "from pip\n", "")


@pytest.mark.parametrize(
    ("version", "used"), [("0.5.31", False), ("0.7.22", False), ("0.8.0", True), ("1.0.2", True)]
)
def test_a_uv_on_the_path_is_used_if_it_is_new_enough(tree: Path, version: str, used: bool) -> None:
    _program(tree, "uv", f'#!/bin/sh\n[ "$1" = --version ] && echo "uv {version}" || echo "from PATH"\n')
    done = _setup(tree, "uv", "anything")
    if used:
        assert (done.returncode, done.stdout) == (0, "from PATH\n"), done.stderr
    else:  # and there is no Python to install another one with
        assert (done.returncode, done.stdout) == (1, "")
        assert "there is no uv 0.8 or later" in done.stderr


def _assert_advice(text: str) -> None:
    assert "Fumehood needs Python 3.12 or later" in text
    assert "uv tool install --python 3.12 'fumehood[all]'" in text
    assert "uv venv --python 3.12" in text


def test_users_of_python_311_are_told_how_uv_gets_them_312(tree: Path) -> None:
    _program(tree, "python3", OLD_PYTHON)
    _program(tree, "uv", '#!/bin/sh\n[ "$1" = --version ] && echo "uv 0.9.0" && exit\nexit 1\n')
    done = _setup(tree)
    assert done.returncode == 1
    assert "python3 is Python 3.11.9, which is too old for Fumehood" in done.stderr
    assert "uv downloads one" in done.stderr
    assert "none could be downloaded" in done.stderr
    _assert_advice(done.stderr)


def test_a_named_python_that_is_too_old_is_refused_with_the_same_advice(tree: Path) -> None:
    _program(tree, "python3", OLD_PYTHON)
    _program(tree, "uv", '#!/bin/sh\necho "uv 0.9.0"\n')
    done = _setup(tree, PYTHON=str(tree.parent / "bin" / "python3"))
    assert done.returncode == 1
    assert "is 3.11.9" in done.stderr
    _assert_advice(done.stderr)


def test_a_version_of_python_that_is_not_there_is_said(tree: Path) -> None:
    _program(tree, "uv", '#!/bin/sh\n[ "$1" = --version ] && echo "uv 0.9.0" && exit\nexit 1\n')
    done = _setup(tree, "for", "3.13")
    assert done.returncode == 1
    assert "no Python 3.13 was found" in done.stderr
    assert "uv python install 3.13" in done.stderr


def test_the_readme_tells_users_of_python_311_and_of_the_base_install() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    install = readme.partition("## Install\n")[2].partition("\n## ")[0]
    assert "uv tool install --python 3.12 'fumehood[all]'" in install
    assert "uv venv --python 3.12" in install
    assert "pip install 'fumehood[all]'" in install
    assert "3.11" in install
