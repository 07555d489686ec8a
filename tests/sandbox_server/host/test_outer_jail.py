"""The outer jail: its namespaces, mounts, privileges and end."""

import asyncio
import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import pytest_asyncio

from fumehood.sandbox_server.host import jail_launcher
from fumehood.sandbox_server.host.outer_jail import FAILURE_PREFIX
from fumehood.sandbox_server.host.python_runtime import PythonRuntime, discover_runtime
from fumehood.sandbox_server.host.uid_ranges import UidRange
from fumehood.sandbox_server.inside import layout
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.supervisor import managed_zygote
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.driver_client import PROJECT
from tests.support.sandbox_runs import settings

_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


@dataclass
class Jail:
    """The process that waits for the jail to end, and process 1 inside."""

    outer: Path
    first: Path

    def __init__(self, pid: int) -> None:
        self.outer = Path(f"/proc/{pid}")
        (first,) = (self.outer / f"task/{pid}/children").read_text().split()
        self.first = Path("/proc", first)


def status(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest_asyncio.fixture
async def jail() -> AsyncIterator[Jail]:
    async with Supervisor(settings(preload=(), packages=False)) as running:
        pid = running.zygote.pid
        assert pid is not None
        yield Jail(pid)


async def test_it_has_every_namespace_and_the_warden_is_process_one(jail: Jail) -> None:
    # As an ordinary user, links of a process with another user namespace cannot be read: so its own are looked at.
    own = {name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES}
    for name in _NAMESPACES:
        try:
            assert os.readlink(jail.first / "ns" / name) != own[name], name
        except PermissionError:
            assert os.geteuid() != 0
    about = status(jail.first)
    assert about["NSpid"].split()[-1] == "1"
    assert b"spawner" in (jail.first / "cmdline").read_bytes()


async def test_no_other_program_makes_the_jail(jail: Jail) -> None:
    requires = importlib.metadata.requires("fumehood") or []
    assert requires
    assert not [line for line in requires if "bubblewrap" in line or "bwrap" in line]
    if os.geteuid() == 0:
        assert os.readlink(jail.outer / "exe") == os.path.realpath(sys.executable)
        assert os.readlink(jail.first / "exe").startswith((layout.PYTHON_PREFIX, "/usr/bin/python"))


async def test_no_process_of_it_is_root_or_can_become_it(jail: Jail) -> None:
    for process in (jail.outer, jail.first):
        about = status(process)
        assert "0" not in about["Uid"].split()
        assert "0" not in about["Gid"].split()
        assert about["NoNewPrivs"] == "1"
    assert status(jail.first)["Groups"] == "" or os.geteuid() != 0
    assert status(jail.outer)["CapEff"] == status(jail.outer)["CapPrm"] == "0" * 16
    assert status(jail.outer)["CapBnd"] == "0" * 16


@pytest.mark.root
async def test_nothing_of_the_host_is_mounted(jail: Jail) -> None:
    mounts = [line.split() for line in (jail.first / "mountinfo").read_text().splitlines()]
    by_target = {fields[4]: fields for fields in mounts}
    devices = {path for path in by_target if path.startswith("/dev/")}
    assert devices == set(layout.DEVICES)
    for target, fields in by_target.items():
        options = fields[5].split(",")
        assert "nosuid" in options
        assert "nodev" in options or target in devices
        assert "ro" in options or target == "/proc", target
        told = " ".join(fields)
        for path in (str(PROJECT), sys.base_prefix, str(Path.home()), "/mnt/guest", "/tmp/"):
            assert path not in told
        assert fields[3] == "/" or target in devices, "a part of a file system of the host"
    assert set(os.listdir(jail.first / "root")) <= {
        *("bin", "sbin", "lib", "lib32", "lib64", "libx32"),
        *("usr", "etc", "opt", "proc", "dev", "mnt", "home", "run", "tmp"),
    }
    assert os.readlink(jail.outer / "root") == os.readlink(jail.first / "root"), "not even outside of it"


@pytest.mark.root
async def test_environment_and_descriptors_are_those_it_was_given(
    jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (jail.first / "environ").read_bytes().rstrip(b"\0").split(b"\0")
    names = {line.partition(b"=")[0].decode() for line in lines}
    assert names <= {*layout.ENVIRON, "LD_LIBRARY_PATH"}
    assert (jail.outer / "environ").read_bytes() == b""
    opened = [os.readlink(entry.path) for entry in os.scandir(jail.outer / "fd") if int(entry.name) > 2]
    assert len(opened) == 1
    assert opened[0].startswith("pipe:"), "the end that shows the child that its parent lives"
    for entry in os.scandir(jail.first / "fd"):
        kind = os.readlink(entry.path)
        assert kind.startswith(("socket:", "pipe:", "anon_inode:", "mnt:", "/dev/null")), kind
    shown = (jail.outer / "cmdline").read_bytes()
    assert b"host_trees" not in shown, "the configuration stands on no command line"


async def test_it_ends_with_the_process_around_it(jail: Jail) -> None:
    first = os.pidfd_open(int(jail.first.name))
    os.kill(int(jail.outer.name), signal.SIGKILL)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(first, ended.set)
    async with asyncio.timeout(30):
        await ended.wait()
    asyncio.get_running_loop().remove_reader(first)
    os.close(first)


def _run(configuration: bytes) -> subprocess.CompletedProcess[str]:
    """The program as launching.py starts it, with these bytes in its pipe."""
    reader, writer = os.pipe()
    os.write(writer, configuration)
    os.close(writer)
    try:
        return subprocess.run(
            jail_launcher.outer_jail_command(reader),
            pass_fds=(reader,),
            env={},
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        os.close(reader)


@pytest.mark.parametrize("configuration", [b"", b'{"kind": "zyg'], ids=["none", "cut short"])
def test_nothing_is_started_for_a_supervisor_that_is_gone(configuration: bytes) -> None:
    done = _run(configuration)
    assert done.returncode != 0
    assert done.stdout == ""


def _without_interpreter(runtime: PythonRuntime) -> PythonRuntime:
    return replace(runtime, executable=runtime.executable.with_name("python-nowhere"))


def _without_certificates(runtime: PythonRuntime) -> PythonRuntime:
    return replace(runtime, certificates=Path("/nowhere/ca.crt"))


@pytest.mark.parametrize(
    ("change", "step"),
    [
        (_without_certificates, "mount what the jail is made of"),
        (_without_interpreter, "start the spawner"),
    ],
)
async def test_a_step_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, change: Any, step: str) -> None:
    runtime = change(discover_runtime())
    monkeypatch.setattr(managed_zygote, "discover_runtime", lambda: runtime)
    with pytest.raises(IsolationUnavailable, match=f"{FAILURE_PREFIX}{step}.*No such file"):
        async with Supervisor(settings(preload=())):
            pytest.fail("it started")


@pytest.mark.root
async def test_without_a_range_of_users_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError(1, "the map was refused")

    monkeypatch.setattr(UidRange, "write_id_maps", refuse)
    with pytest.raises(IsolationUnavailable, match="the map was refused"):
        async with Supervisor(settings(preload=())):
            pytest.fail("it started")


@pytest.mark.root
@pytest.mark.parametrize("ordinary", [False, True], ids=["root", "ordinary user"])
def test_what_is_mounted_below_usr_is_not_shown(tmp_path: Path, ordinary: bool) -> None:
    """An ordinary user cannot take /usr without it, and is refused."""
    tmp_path.chmod(0o777)
    command = ["env", "FUMEHOOD_LIMITS=best-effort", f"FUMEHOOD_PACKAGES_DIR={tmp_path / 'packages'}"]
    command += [sys.executable, "-m", "fumehood", "exec", "-c"]
    command += [
        "import os; print('of-the-mount' in os.listdir('/usr/share'), len(os.listdir('/usr/share')) > 3)"
    ]
    if ordinary:
        command = [sys.executable, str(PROJECT / "tests/support/unprivileged_user.py"), "--", *command]
    mount = "mount --make-rprivate / && mount -t tmpfs none /usr/share && touch /usr/share/of-the-mount"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *command],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if ordinary:
        assert done.returncode == 125
        assert "mount what the jail is made of: open_tree /usr" in done.stderr
        assert "something is mounted below it" in done.stderr
    else:
        assert (done.stdout, done.returncode) == ("False True\n", 0), done.stderr


@pytest.mark.root
def test_what_the_stage_covers_can_be_part_of_the_jail() -> None:
    source = (
        "import os; os.mkdir('/mnt/tree'); open('/mnt/file', 'w').close(); "
        "from fumehood.sandbox_server.host import outer_jail; "
        "staged = outer_jail._stage_mounts({'tree': '/mnt/tree', 'file': '/mnt/file'}); "
        "print(os.path.isdir(staged['tree']), os.path.isfile(staged['file']))"
    )
    mount = "mount --make-rprivate / && mount -t tmpfs none /mnt"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("True True\n", 0), done.stderr
