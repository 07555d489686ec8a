"""The program that is process 1 of sandboxes: made of its source, without any right; imports the tests' support."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from fumehood.sandboxd import launching
from fumehood.sandboxd.supervisor import Supervisor
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
            await sandbox.destroy()


async def test_where_there_is_none_python_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(launching.__file__).parent
    shutil.copytree(here, tmp_path / "sandboxd", ignore=shutil.ignore_patterns("first.*", "__pycache__"))
    monkeypatch.setattr(launching, "_HERE", tmp_path / "sandboxd")
    async with Supervisor(settings(preload=())) as supervisor:
        for _ in range(5):
            sandbox = await supervisor.create()
            assert (await run(sandbox, LOOK)).stdout == "[0, 0, 0, 0, 0, 1, 2] /opt/s\n"
            orphan = "import os, subprocess; subprocess.run(['sh', '-c', 'true &'])"
            assert (await run(sandbox, orphan)).end.status == "ok"
            await sandbox.destroy()
