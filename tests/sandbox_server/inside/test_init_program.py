"""The init program of sandboxes: built from its source, without privileges."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fumehood.protocol.sandbox.sandbox_errors import SandboxStartFailed
from fumehood.sandbox_server.host import jail_launcher
from fumehood.sandbox_server.host.cgroups import open_join_fds
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.host_census import find_processes_by_role
from tests.support.sandbox_runs import run, settings
from tests.support.waiting import becomes_true

ROOT = Path(__file__).parents[3]
LOOK = """
status = dict(line.split(":", 1) for line in open("/proc/1/status").read().splitlines())
names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
print([int(status[name], 16) for name in names], open("/proc/1/cmdline").read().split("\\0")[0][:6])
"""


@pytest.mark.skipif(
    shutil.which("as") is None or shutil.which("objcopy") is None, reason="there is no assembler"
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="its assembler is another one")
def test_it_is_what_its_source_says(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("build_init", ROOT / "tools/build_init.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build(tmp_path / "init")
    assert (tmp_path / "init").read_bytes() == module.TARGET.read_bytes()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="there is none for this machine")
async def test_it_has_no_right_left() -> None:
    async with Supervisor(settings(preload=())) as supervisor:
        for _ in range(5):
            sandbox = await supervisor.create()
            assert (await run(sandbox, LOOK)).stdout == "[0, 0, 0, 0, 0, 1, 2] init\n"
            assert _init_descriptors() == []
            await sandbox.destroy()


async def test_where_there_is_none_python_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(jail_launcher.__file__).parents[1]
    copy = tmp_path / "fumehood" / "sandbox_server"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("init.*", "__pycache__"))
    monkeypatch.setattr(jail_launcher, "_SERVER_PACKAGE", copy)
    async with Supervisor(settings(preload=())) as supervisor:
        for _ in range(5):
            sandbox = await supervisor.create()
            assert (await run(sandbox, LOOK)).stdout == "[0, 0, 0, 0, 0, 1, 2] /opt/s\n"
            assert _init_descriptors() == []
            orphan = "import os, subprocess; subprocess.run(['sh', '-c', 'true &'])"
            assert (await run(sandbox, orphan)).end.status == "ok"
            await sandbox.destroy()


def _init_descriptors() -> list[str]:
    (init,) = find_processes_by_role(os.getpid())["init"]
    try:
        return os.listdir(f"/proc/{init}/fd")
    except PermissionError:  # it is not dumpable, and this user is not root
        return []


@pytest.mark.root
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs util-linux")
async def test_a_spawner_without_descriptors_leaves_no_init() -> None:
    """Wherever on the way to a sandbox they run out: it is refused, and its neighbour does not notice."""
    async with Supervisor(settings(preload=())) as supervisor:
        neighbour = await supervisor.create()
        (spawner,) = find_processes_by_role(os.getpid())["spawner"]
        with open_join_fds(neighbour.resources.cgroup) as cgroups:
            received = 1 + len(cgroups)
        refusals: list[str] = []
        for room in range(received, received + 4):  # then come a pipe, and a handle on the process
            taken = {int(name) for name in os.listdir(f"/proc/{spawner}/fd")}
            _limit_descriptors(spawner, [number for number in range(1024) if number not in taken][room])
            try:
                await (await supervisor.create()).destroy()
            except SandboxStartFailed as error:
                refusals.append(str(error))
            _limit_descriptors(spawner, 1024)
        assert len(refusals) == 3
        assert all("Too many open files" in refusal for refusal in refusals)
        assert becomes_true(lambda: len(find_processes_by_role(os.getpid())["init"]) == 1, 10)
        assert (await run(neighbour, "1 + 1")).result == "2"


def _limit_descriptors(pid: int, most: int) -> None:
    """As its own user: root in a container may not."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    uid, gid = (int(line.split()[1]) for line in status if line.startswith(("Uid:", "Gid:")))
    subprocess.run(["prlimit", f"--pid={pid}", f"--nofile={most}:"], user=uid, group=gid, check=True)
