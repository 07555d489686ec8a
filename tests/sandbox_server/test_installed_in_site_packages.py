"""Fumehood installed in site-packages, as a wheel does: it works, and the host stays hidden."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import installed_environment
from tests.support.driver_client import PROJECT
from tests.support.package_index import FakePackageIndex, wheel
from tests.support.sandbox_runs import build_environment

ORDINARY = 54321
AS_USER = [sys.executable, str(PROJECT / "tests/support/unprivileged_user.py"), "--uid", str(ORDINARY), "--"]
# What a new Python process, started by the code, finds of the host.
LOOK = """
import importlib.util, json, os, sys
names = ["fumehood", "h11", "uvicorn", "cryptography", "starlette", "pytest", "numpy", "et_xmlfile", "pip"]
site = next(path for path in sys.path if path.endswith("site-packages"))
places = [site, "/opt", "/opt/sandbox", "/opt/python", "/opt/python/lib", "/usr", "/usr/lib/python3"]
print(json.dumps({
    "found": [name for name in names if importlib.util.find_spec(name) is not None],
    "site": sorted(os.listdir(site)),
    "mounts": open("/proc/self/mountinfo").read(),
    "listed": {path: os.listdir(path) for path in places if os.path.isdir(path)},
    "pip": importlib.util.find_spec("pip").origin,
    "written": os.access(site, os.W_OK),
}))
"""
CODE = f"""
import subprocess, sys
done = subprocess.run([sys.executable, "-c", {LOOK!r}], capture_output=True, text=True)
print(done.stdout + done.stderr)
"""


@dataclass
class Environment:
    python: Path
    root: Path
    index: FakePackageIndex
    prefix: list[str]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        variables = {
            **build_environment(),
            "FUMEHOOD_INDEX_URL": self.index.url,
            "FUMEHOOD_PACKAGES_DIR": str(self.root / "packages"),
        }
        if self.prefix:
            variables["FUMEHOOD_LIMITS"] = "best-effort"
        given = [f"{name}={value}" for name, value in variables.items() if name.startswith("FUMEHOOD_")]
        return subprocess.run(
            [*self.prefix, "env", *given, str(self.python), "-m", "fumehood", *arguments],
            env={name: value for name, value in variables.items() if not name.startswith("PYTHON")},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
        )


def _users() -> list[Any]:
    """Which user runs it, and which one owns what is installed."""
    if os.geteuid() != 0:
        return [pytest.param((False, None), id="this user")]
    return [
        pytest.param((False, 0), id="root"),
        pytest.param((True, 0), id="ordinary user, root's packages", marks=pytest.mark.slow),
        pytest.param((True, ORDINARY), id="ordinary user, own packages", marks=pytest.mark.slow),
    ]


@pytest.fixture(scope="module", params=_users())
def installation(request: pytest.FixtureRequest) -> Iterator[Environment]:
    ordinary, owner = request.param
    root = Path(tempfile.mkdtemp(prefix="fumehood-installed-", dir="/var/tmp"))
    root.chmod(0o755)
    (root / "packages").mkdir()
    if ordinary:
        os.chown(root / "packages", ORDINARY, ORDINARY)
    with FakePackageIndex() as index:
        index.add(wheel("hello", "1.0", {"hello.py": "x = 'hello'"}))
        try:
            python = installed_environment.install(root / "environment", owner)
            yield Environment(python, root, index, AS_USER if ordinary else [])
        finally:
            shutil.rmtree(root)


def test_packages_are_installed(installation: Environment) -> None:
    code = "import subprocess, sys\nimport hello, et_xmlfile\n"
    code += "print(hello.x, subprocess.run([sys.executable, '-c', 'import hello; print(hello.x)'], "
    code += "capture_output=True, text=True).stdout)"
    done = installation.run("exec", "--with", "hello", "-c", code)
    assert (done.stdout, done.returncode) == ("hello hello\n\n", 0), done.stderr
    done = installation.run("exec", "-c", "!pip install --quiet hello\nimport hello\nprint(hello.x)")
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["hello"], 0), done


def test_a_new_process_sees_nothing_of_the_host(installation: Environment) -> None:
    done = installation.run("exec", "-c", CODE)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["found"] == ["numpy", "et_xmlfile", "pip"]
    assert not {"fumehood", "h11", "uvicorn", "cryptography", "shared.pth"} & set(seen["site"])
    assert {"numpy", "et_xmlfile", "pip", "fumehood_packages.pth"} <= set(seen["site"])
    visible = json.dumps([seen["mounts"], seen["listed"]])
    for path in (installation.root, PROJECT, Path(sys.base_prefix), Path(sys.prefix)):
        assert str(path) not in visible
    assert "site-packages/fumehood" not in visible
    assert seen["written"] is False


@pytest.mark.parametrize("installation", _users()[:1], indirect=True)
def test_doctor_is_content(installation: Environment) -> None:
    done = installation.run("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    states = {finding["name"]: finding["state"] for finding in report["findings"]}
    assert (states["sandbox starts"], states["code runs"], states["overlayfs"]) == ("ok", "ok", "ok")
