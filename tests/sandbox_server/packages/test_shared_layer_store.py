"""A layer store of several supervisors, of a killed one, and of an unprivileged user."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.driver_client import Driver, SandboxClient
from tests.support.package_index import FakePackageIndex, wheel
from tests.support.sandbox_runs import has_cgroups, run, settings
from tests.support.waiting import becomes_true


@pytest.fixture
def index() -> Iterator[FakePackageIndex]:
    with FakePackageIndex() as made:
        made.add(wheel("hello", "1.0", {"hello.py": "version = 1"}))
        made.add(wheel("other", "1.0", {"other.py": ""}))
        yield made


def _driver(index: FakePackageIndex, directory: Path, who: str = "root") -> Driver:
    limits = "enforced" if has_cgroups() else "best-effort"
    return Driver.start(
        "ordinary" if who == "ordinary" or os.geteuid() else "root",
        pool=0,
        preload=[],
        limits=limits,
        index_url=index.url,
        packages_dir=str(directory),
    )


def _find_install_jails(pid: int) -> list[int]:
    """The processes of the install jails that a supervisor has started: uv, and the one that waits for it."""
    found: list[int] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            command = Path(entry.path, "cmdline").read_bytes()
            parent = _parent_pid(int(entry.name))
            if command.startswith(b"/uv\0") and _parent_pid(parent) == pid:
                found += [int(entry.name), parent]
        except OSError:
            continue
    return found


def _parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_a_killed_build_leaves_nothing(index: FakePackageIndex, tmp_path: Path) -> None:
    with index.held(), _driver(index, tmp_path) as host:
        host.send("create", requirements=["hello"])
        supervisor = host.started["supervisor"]
        assert becomes_true(lambda: index.asked and _find_install_jails(supervisor))
        jails = _find_install_jails(supervisor)
        host.kill()
    assert becomes_true(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in jails))
    assert len(list((tmp_path / "staging").iterdir())) == 1
    options = settings(index_url=index.url, packages_dir=tmp_path, preload=())
    async with Supervisor(options) as running:
        assert list((tmp_path / "staging").iterdir()) == []
        assert list((tmp_path / "layers").iterdir()) == []
        sandbox = await running.create(SandboxSpec(requirements=["hello"]))
        assert (await run(sandbox, "import hello; hello.version")).result == "1"


@pytest.mark.slow
async def test_two_supervisors_leave_each_other_s_layers(index: FakePackageIndex, tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        index.add(wheel(name, "1.0", {f"{name}.py": "x = 1", f"{name}.bin": os.urandom(400_000)}))
    options = settings(index_url=index.url, packages_dir=tmp_path, preload=(), packages_bytes=1_000_000)
    with _driver(index, tmp_path) as host:
        async with Supervisor(options) as running:
            other = host.send("create", requirements=["first"])
            await (await running.create(SandboxSpec(requirements=["first"]))).destroy()
            box = SandboxClient(host, other.wait()["sandbox"])
            # Over its bound, this one evicts what nobody uses; the other's sandbox still uses the oldest.
            for name in ("second", "third"):
                await (await running.create(SandboxSpec(requirements=[name]))).destroy()
            assert box.run("import first; first.x").result == "1"
            assert _stored_packages(tmp_path) == {"first", "third"}
            box.destroy()
            await running.create(SandboxSpec(requirements=["second"]))
            assert _stored_packages(tmp_path) == {"second", "third"}


def _stored_packages(directory: Path) -> set[str]:
    return {path.stem for path in (directory / "layers").glob("*/*.py")}


@pytest.mark.root
def test_as_an_ordinary_user(index: FakePackageIndex, tmp_path: Path) -> None:
    directory = Path("/tmp") / f"fumehood-test-{os.getpid()}-{time.monotonic_ns()}"
    directory.mkdir()
    os.chown(directory, 54321, 54321)
    try:
        with _driver(index, directory / "packages", "ordinary") as host:
            box = host.create(requirements=["hello"])
            assert box.run("import hello; hello.version").result == "1"
            assert box.run("!pip install other\nimport other; 1").result == "1"
            outcome = box.run("open('/opt/packages/hello.py', 'a')")
            assert outcome.error == "OSError"
            assert "Read-only" in outcome.error_value
            assert box.run("1", requirements=("./x",)).end.status == "install_failed"
            assert (
                box.ask("print(any('fumehood-test' in line for line in open('/proc/self/mountinfo')) * 1)")
                == 0
            )
    finally:
        for root, directories, files in os.walk(directory, topdown=False):
            for name in files:
                os.unlink(os.path.join(root, name))
            for name in directories:
                os.rmdir(os.path.join(root, name))
        directory.rmdir()
