"""The program that is process 1 of sandboxes: made of its source, without any right; imports the tests' support."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fumehood.protocol.sandbox_errors import SandboxStartFailed
from fumehood.sandboxd import launching
from fumehood.sandboxd.cgroups import joining
from fumehood.sandboxd.supervisor import Supervisor
from tests.support.census import roles, waited_for
from tests.support.sandboxes import run, settings

ROOT = Path(__file__).parent.parent.parent
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
    spec = importlib.util.spec_from_file_location("build_first", ROOT / "tools/build_first.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build(tmp_path / "first")
    assert (tmp_path / "first").read_bytes() == module.TARGET.read_bytes()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="there is none for this machine")
async def test_it_has_no_right_left() -> None:
    async with Supervisor(settings(preload=())) as supervisor:
        for _ in range(5):
            sandbox = await supervisor.create()
            assert (await run(sandbox, LOOK)).stdout == "[0, 0, 0, 0, 0, 1, 2] init\n"
            assert _descriptors_of_first() == []
            await sandbox.destroy()


async def test_where_there_is_none_python_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(launching.__file__).parent
    copy = tmp_path / "fumehood" / "sandboxd"
    shutil.copytree(here, copy, ignore=shutil.ignore_patterns("first.*", "__pycache__"))
    monkeypatch.setattr(launching, "_HERE", copy)
    async with Supervisor(settings(preload=())) as supervisor:
        for _ in range(5):
            sandbox = await supervisor.create()
            assert (await run(sandbox, LOOK)).stdout == "[0, 0, 0, 0, 0, 1, 2] /opt/s\n"
            assert _descriptors_of_first() == []
            orphan = "import os, subprocess; subprocess.run(['sh', '-c', 'true &'])"
            assert (await run(sandbox, orphan)).end.status == "ok"
            await sandbox.destroy()


def _descriptors_of_first() -> list[str]:
    (first,) = roles(os.getpid())["init"]
    try:
        return os.listdir(f"/proc/{first}/fd")
    except PermissionError:  # it is not dumpable, and this user is not root
        return []


@pytest.mark.root
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs util-linux")
async def test_a_warden_without_descriptors_leaves_no_first_process() -> None:
    """Wherever on the way to a sandbox they run out: it is refused, and its neighbour does not notice."""
    async with Supervisor(settings(preload=())) as supervisor:
        neighbour = await supervisor.create()
        (warden,) = roles(os.getpid())["warden"]
        with joining(neighbour.place.cgroup) as cgroups:
            received = 1 + len(cgroups)
        refusals: list[str] = []
        for room in range(received, received + 4):  # then come a pipe, and a handle on the process
            taken = {int(name) for name in os.listdir(f"/proc/{warden}/fd")}
            _limit_descriptors(warden, [number for number in range(1024) if number not in taken][room])
            try:
                await (await supervisor.create()).destroy()
            except SandboxStartFailed as error:
                refusals.append(str(error))
            _limit_descriptors(warden, 1024)
        assert len(refusals) == 3
        assert all("Too many open files" in refusal for refusal in refusals)
        assert waited_for(lambda: len(roles(os.getpid())["init"]) == 1, 10)
        assert (await run(neighbour, "1 + 1")).result == "2"


def _limit_descriptors(pid: int, most: int) -> None:
    """As its own user: root in a container may not."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    uid, gid = (int(line.split()[1]) for line in status if line.startswith(("Uid:", "Gid:")))
    subprocess.run(["prlimit", f"--pid={pid}", f"--nofile={most}:"], user=uid, group=gid, check=True)
