"""Bytecode for packages whose installer wrote none."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fumehood.sandbox_server.host.python_runtime import PackageDirectory, PythonRuntime
from fumehood.sandbox_server.packages import bytecode_cache
from fumehood.sandbox_server.packages.bytecode_cache import BytecodeUnavailable
from tests.support import installed_environment
from tests.support.sandbox_runs import build_environment

SOURCES = {
    "thing/__init__.py": "value = 1\n",
    "thing/inner/deep.py": "def where(): return where.__code__.co_filename\n",
    "thing/tests/test_it.py": "assert True\n",
    "thing/template.py": "this is {{ no }} Python\n",
    "single.py": "x = 2\n",
    "other/__init__.py": "",
    "thing-1.0.dist-info/RECORD": "thing/__init__.py,,\n",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory of packages without any bytecode; the sandbox's are `thing` and `single`."""
    directory = tmp_path / "site-packages"
    for name, text in SOURCES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o755)
    return directory


def _runtime(site: Path) -> PythonRuntime:
    keep = frozenset({"thing", "single.py", "thing-1.0.dist-info"})
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return PythonRuntime(
        prefix=None,
        executable=Path(sys.executable),
        version=version,
        library=f"python{version}",
        packages=(PackageDirectory(site, keep),),
        certificates=None,
    )


def _files(tree: Path) -> list[str]:
    return sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())


def test_what_the_installer_did_not_compile_is_compiled_once(
    site: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tree = bytecode_cache.prepare_bytecode(_runtime(site), cache)
    assert tree is not None
    expected = [
        "thing/__init__.py",
        "thing/inner/deep.py",
        "single.py",
    ]  # no tests, no other package, no template
    assert _files(tree) == sorted(importlib.util.cache_from_source(name) for name in expected)
    assert "without bytecode" in caplog.messages[0]
    before = {name: (tree / name).stat() for name in _files(tree)}
    assert bytecode_cache.prepare_bytecode(_runtime(site), cache) == tree
    assert {name: (tree / name).stat() for name in _files(tree)} == before
    assert len(caplog.messages) == 2
    assert [path.name for path in (cache / "bytecode").iterdir() if path.is_dir()] == [tree.name]


def test_python_accepts_it_and_it_names_no_path_of_the_host(site: Path, cache: Path) -> None:
    tree = bytecode_cache.prepare_bytecode(_runtime(site), cache)
    assert tree is not None
    for name in _files(tree):
        content = (tree / name).read_bytes()
        assert str(site).encode() not in content
        assert str(cache).encode() not in content
    # Laid over the sources, as in a sandbox: Python says that it took the bytecode.
    for name in _files(tree):
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_bytes((tree / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-S", "-v", "-c", "import thing.inner.deep, single"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for name in ("thing/__init__.py", "thing/inner/deep.py", "single.py"):
        assert f"matches {site / name}" in done.stderr


def test_packages_with_bytecode_of_their_own_need_no_other(site: Path, cache: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-qq", str(site)], timeout=60)
    assert bytecode_cache.find_uncompiled(_runtime(site)) == []
    assert bytecode_cache.prepare_bytecode(_runtime(site), cache) is None
    assert list(cache.iterdir()) == []
    # Bytecode that does not fit its source is none.
    (site / "thing" / "__init__.py").write_text("value = 12\n")
    assert bytecode_cache.find_uncompiled(_runtime(site)) == [(site, ["thing"])]


def test_two_starts_at_once_make_one(site: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(4) as pool:
        begun = [pool.submit(bytecode_cache.prepare_bytecode, _runtime(site), cache) for _ in range(4)]
    assert len({future.result() for future in begun}) == 1
    assert len([message for message in caplog.messages if "without bytecode" in message]) == 1


def test_another_installation_gets_its_own_and_old_ones_go(site: Path, cache: Path) -> None:
    first = bytecode_cache.prepare_bytecode(_runtime(site), cache)
    assert first is not None
    os.utime(site / "thing-1.0.dist-info" / "RECORD", (1, 1))  # as a new installation has another time
    second = bytecode_cache.prepare_bytecode(_runtime(site), cache)
    assert second is not None
    assert first != second
    assert first.is_dir()
    os.utime(first, (1, 1))  # not used for long
    os.utime(site / "thing-1.0.dist-info" / "RECORD", (2, 2))
    assert bytecode_cache.prepare_bytecode(_runtime(site), cache) is not None
    assert (first.exists(), second.exists()) == (False, True)


def test_what_a_killed_process_left_is_removed(site: Path, cache: Path) -> None:
    left = cache / "bytecode" / "making-x"
    left.mkdir(parents=True)
    (left / "half.pyc").write_bytes(b"x")
    assert bytecode_cache.prepare_bytecode(_runtime(site), cache) is not None
    assert not left.exists()


def test_a_place_that_others_can_write_is_not_used(site: Path, cache: Path) -> None:
    tree = bytecode_cache.prepare_bytecode(_runtime(site), cache)
    assert tree is not None
    for directory in (tree, cache / "bytecode", cache):
        directory.chmod(0o777)
        with pytest.raises(BytecodeUnavailable, match=f"others can write to {directory}$"):
            bytecode_cache.prepare_bytecode(_runtime(site), cache)
        directory.chmod(0o755)
    assert bytecode_cache.prepare_bytecode(_runtime(site), cache) == tree


@pytest.mark.root
@pytest.mark.parametrize("level", ["tree", "base", "cache"])
def test_a_place_of_another_user_is_not_used(site: Path, cache: Path, level: str) -> None:
    tree = bytecode_cache.prepare_bytecode(_runtime(site), cache)
    assert tree is not None
    os.chown({"tree": tree, "base": tree.parent, "cache": cache}[level], 54321, 54321)
    with pytest.raises(BytecodeUnavailable, match="is not a directory of this user or of root"):
        bytecode_cache.prepare_bytecode(_runtime(site), cache)


def test_a_link_in_its_place_is_not_used(site: Path, cache: Path, tmp_path: Path) -> None:
    tree = bytecode_cache.prepare_bytecode(_runtime(site), cache)
    assert tree is not None
    tree.rename(tmp_path / "elsewhere")
    tree.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BytecodeUnavailable, match="is not a directory"):
        bytecode_cache.prepare_bytecode(_runtime(site), cache)


def test_a_link_in_place_of_all_trees_is_not_followed(site: Path, cache: Path, tmp_path: Path) -> None:
    """Whoever plants one must not have old directories of somebody else removed."""
    old = tmp_path / "somebody" / "Documents"
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    (cache / "bytecode").symlink_to(tmp_path / "somebody")
    with pytest.raises(BytecodeUnavailable, match="is not a directory"):
        bytecode_cache.prepare_bytecode(_runtime(site), cache)
    assert old.is_dir()


def test_only_trees_of_bytecode_are_removed(site: Path, cache: Path) -> None:
    other = cache / "bytecode" / "something-else"
    other.mkdir(parents=True)
    os.utime(other, (0, 0))
    assert bytecode_cache.prepare_bytecode(_runtime(site), cache) is not None
    assert other.is_dir()


def test_a_generous_umask_makes_no_place_that_others_can_write(site: Path, tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        assert (
            bytecode_cache.prepare_bytecode(_runtime(site), tmp_path / "cache" / "fumehood" / "packages")
            is not None
        )
    finally:
        os.umask(before)


def test_a_place_that_cannot_be_written_is_said(site: Path, cache: Path) -> None:
    (cache / "bytecode").write_text("a file")
    with pytest.raises(BytecodeUnavailable, match="File exists"):
        bytecode_cache.prepare_bytecode(_runtime(site), cache)


# --- in a sandbox -------------------------------------------------------------------------------------

# Whether a new process of the sandbox takes bytecode for this package, which is installed without any.
ASK = """
import subprocess, sys
said = subprocess.run([sys.executable, "-v", "-c", "import et_xmlfile"], capture_output=True, text=True).stderr
print([line.split()[-1] for line in said.splitlines() if "matches" in line and "et_xmlfile/__init__" in line])
import et_xmlfile, os
print(os.path.isfile(et_xmlfile.__cached__), os.access(os.path.dirname(et_xmlfile.__cached__), os.W_OK))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment whose own packages have no bytecode."""
    made = installed_environment.install(tmp_path_factory.mktemp("installed") / "environment")
    assert list(made.parent.parent.rglob("et_xmlfile/**/*.pyc")) == []
    return made


def _fumehood(python: Path, packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {**build_environment(), "FUMEHOOD_PACKAGES_DIR": str(packages)}
    return subprocess.run(
        [python, "-m", "fumehood", *arguments],
        env={name: value for name, value in variables.items() if not name.startswith("PYTHON")},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_sandboxes_find_bytecode_of_packages_that_have_none(python: Path, tmp_path: Path) -> None:
    done = _fumehood(python, tmp_path / "packages", "exec", "-c", ASK)
    assert done.returncode == 0, done.stderr
    source = f"/opt/sandbox/lib/python3.{sys.version_info.minor}/site-packages/et_xmlfile/__init__.py"
    assert done.stdout == f"[{source!r}]\nTrue False\n"
    assert "without bytecode" in done.stderr
    again = _fumehood(python, tmp_path / "packages", "exec", "-c", ASK)
    assert again.stdout == done.stdout
    assert "bytecode" not in again.stderr


def test_without_a_place_for_bytecode_code_runs_and_doctor_says_why(python: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "bytecode").mkdir()
    (packages / "bytecode").chmod(0o777)
    done = _fumehood(python, packages, "exec", "-c", ASK)
    assert (done.returncode, done.stdout) == (0, "[]\nFalse False\n"), done.stderr
    assert f"imports are slow: others can write to {packages / 'bytecode'}" in done.stderr
    report = json.loads(_fumehood(python, packages, "doctor", "--json").stdout)
    (finding,) = [finding for finding in report["findings"] if finding["name"] == "bytecode"]
    assert finding["state"] == "warning"
    assert "others can write to" in finding["detail"]
    assert "packages_dir" in finding["advice"]
