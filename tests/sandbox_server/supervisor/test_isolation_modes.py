"""Modes pod and unsafe-degraded, and hosts that are refused: no cgroup, wrong architecture."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.bundle_encoding import BundledFile, ReadFilesResponseDecoder, encode_bundle
from fumehood.sandbox_server import seccomp
from fumehood.sandbox_server.host import cgroups
from fumehood.sandbox_server.host.cgroups import CgroupUnavailable
from fumehood.sandbox_server.inside.jail import jail_builder, landlock, seccomp_installer
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor import supervisor
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from fumehood.sandbox_server.supervisor.zygote_connection import ZygoteConnection, ZygoteInfo
from tests.support.archives import make_zip
from tests.support.sandbox_runs import run, settings, start, wait_for_outcome
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
_PROJECT = Path(__file__).parents[3]


# ---- unsafe-degraded --------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def degraded() -> AsyncIterator[SandboxInstance]:
    async with Supervisor(settings(mode="unsafe-degraded")) as running:
        yield await running.create()


async def test_degraded_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    async with Supervisor(settings(mode="unsafe-degraded", preload=())):
        assert "no namespaces" in caplog.text


async def test_degraded_runs_code_and_keeps_files(degraded: SandboxInstance) -> None:
    outcome = await run(
        degraded, "import pandas as pd\nopen('x.txt', 'w').write('hi')\npd.Series([1, 2]).sum()"
    )
    assert outcome.result == "np.int64(3)"
    assert await degraded.files.read("x.txt", limit=10) == b"hi"
    assert (await degraded.files.unpack(make_zip(("d/z", b"z")), kind="zip")).files == 1
    assert await degraded.files.read("d/z", limit=10) == b"z"
    await _pass_many(degraded)
    assert (await run(degraded, "import tempfile; tempfile.mkstemp() and 1")).result == "1"


async def _pass_many(sandbox: SandboxInstance) -> None:
    """Many files at once, in and out."""
    wanted = {f"many/{number}": b"%d" % number for number in range(200)}

    async def files() -> AsyncGenerator[Sequence[BundledFile]]:
        yield [*wanted.items()]

    assert (await sandbox.files.write_bundle(encode_bundle(files()))).files == 200
    answers = ReadFilesResponseDecoder([*wanted])
    found = [one async for piece in sandbox.files.read_bundle([*wanted]) for one in answers.feed(piece)]
    assert found == [*wanted.values()]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("open('/etc/passwd')", "PermissionError"),
        (f"open({str(_PROJECT / 'pyproject.toml')!r})", "PermissionError"),
        ("open('/tmp/escaped', 'w')", "PermissionError"),
        ("import os; os.listdir('/proc')", "PermissionError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import os; os.unshare(os.CLONE_NEWUSER)", "PermissionError"),
    ],
)
async def test_degraded_still_holds(degraded: SandboxInstance, code: str, error: str) -> None:
    outcome = await run(degraded, code)
    assert outcome.raised is not None
    assert outcome.raised.name == error


async def test_degraded_has_no_packages_to_give(degraded: SandboxInstance) -> None:
    execution = start(degraded, "1", timeout=30, requirements=["humanize"])
    end = (await wait_for_outcome(execution)).end
    assert end.status == "install_failed"
    assert "Packages cannot be installed in mode unsafe-degraded" in end.reason


async def test_degraded_runs_commands_and_ends_them(degraded: SandboxInstance) -> None:
    outcome = await run(degraded, "echo $((6 * 7)) > y.txt; cat y.txt; exit 3", language="shell")
    assert (outcome.end.exit_code, outcome.stdout) == (3, "42\n")
    assert await degraded.files.read("y.txt", limit=10) == b"42\n"
    outcome = await run(degraded, "sleep 600 & sleep 600", timeout=0.3, language="shell")
    assert (outcome.end.status, outcome.end.state_kept) == ("timeout", True)
    assert (await run(degraded, "1 + 1")).result == "2"


@pytest.mark.root
async def test_degraded_is_not_root_either(degraded: SandboxInstance) -> None:
    assert (await run(degraded, "import os; os.getuid() >= 1_000_000_000")).result == "True"


async def test_degraded_takes_everything_along() -> None:
    async with Supervisor(settings(mode="unsafe-degraded", preload=())) as running:
        sandbox = await running.create()
        code = "import subprocess; subprocess.Popen(['sleep', '4711'], start_new_session=True).pid"
        pid = int((await run(sandbox, code)).result or 0)
        scratch = sandbox.resources.scratch_directory
        assert pid
        await sandbox.destroy()
        await wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert scratch is not None
    assert not os.path.exists(scratch)


async def test_degraded_needs_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ZygoteConnection, "info", ZygoteInfo("3", {}, 1, 0))
    with pytest.raises(IsolationUnavailable, match="no Landlock"):
        async with Supervisor(settings(mode="unsafe-degraded", preload=())):
            pass


async def test_no_seal_without_landlock_where_it_is_the_only_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    def restrict(**_: object) -> int:
        return 0

    installed: list[bytes] = []
    monkeypatch.setattr(landlock, "restrict", restrict)
    monkeypatch.setattr(seccomp_installer, "install", installed.append)
    plan = jail_builder.JailPlan(
        isolation="process",
        uid=0,
        data_bytes=0,
        data_inodes=0,
        processes=1,
        open_files=1,
        fresh_interpreter=False,
        writable=[],
        read_only=[],
        deny_tcp=True,
        needs_landlock=True,
        work_directory="/",
    )
    with pytest.raises(OSError, match="no Landlock"):
        jail_builder.apply_restrictions(plan, b"")
    assert installed == []


async def test_degraded_removes_trees_of_any_depth() -> None:
    async with Supervisor(settings(mode="unsafe-degraded", preload=())) as running:
        sandbox = await running.create()
        await run(sandbox, "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')")
        await run(sandbox, "import os; os.chdir('/usr'); os.chmod(os.environ['OUTPUT_DIR'], 0)")
        scratch = sandbox.resources.scratch_directory
        await sandbox.destroy()
    assert scratch is not None
    assert not os.path.exists(os.path.dirname(scratch))


# ---- pod --------------------------------------------------------------------------------------------------------


async def test_pod_without_a_code_container_is_refused(tmp_path: Path) -> None:
    none = tmp_path / "none.sock"
    with pytest.raises(IsolationUnavailable, match="Start the code container first"):
        async with Supervisor(SandboxServerSettings(mode="pod", guest_socket=none)):
            pass
    with pytest.raises(IsolationUnavailable, match="guest_socket"):
        async with Supervisor(SandboxServerSettings(mode="pod")):
            pass


@pytest.mark.root
async def test_the_guest_never_runs_as_root(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fumehood.sandbox_server.inside.pod_entrypoint", str(tmp_path / "s")]
    answer = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)
    assert answer.returncode == 1
    assert "code never runs as root" in answer.stderr


# ---- an ordinary user with a range of users ---------------------------------------------------------------------

_WITH_A_RANGE = """
import asyncio
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.archives import make_zip
from tests.support.sandbox_runs import run

async def main():
    async with Supervisor(SandboxServerSettings(pool=0, preload=())) as supervisor:
        boxes = [await supervisor.create() for _ in range(2)]
        assert len({box.resources.uid for box in boxes} - {0}) == 2
        box = boxes[0]
        await run(box, "import os\\nos.mkdir('d', 0o700); open('d/f', 'w').write('x'); os.chmod('d/f', 0o600)")
        assert [item.path for item in (await box.files.list()).files] == ["d/f"]
        assert await box.files.read("d/f", limit=9) == b"x"
        await box.files.write("d/g", b"y")
        assert (await box.files.unpack(make_zip(("e/z", b"z")), kind="zip", into="e")).files == 1
        await box.files.delete("e/e/z")
        assert (await run(box, "open('d/g').read()")).result == "'y'"
        assert (await run(box, "while True: pass", timeout=0.5)).end.state_kept
        stubborn = "import signal; signal.signal(2, signal.SIG_IGN)\\nwhile True: pass"
        assert not (await run(box, stubborn, timeout=0.5)).end.state_kept
        assert (await run(boxes[1], "1 + 1")).result == "2"

asyncio.run(main())
print("all well")
"""


@pytest.mark.root
@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="newuidmap is not installed")
@pytest.mark.skipif(
    not os.path.isdir("/sys/fs/cgroup/memory"), reason="the test delegates cgroups of version 1"
)
async def test_an_ordinary_user_with_a_range_has_a_kernel_user_per_sandbox() -> None:
    script = str(_PROJECT / "tests/support/unprivileged_user.py")
    command = [
        sys.executable,
        script,
        "--delegate",
        "--subordinate",
        "--",
        sys.executable,
        "-c",
        _WITH_A_RANGE,
    ]
    answer = await asyncio.to_thread(
        subprocess.run, command, cwd=_PROJECT, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout == "all well\n", answer.stderr


# ---- refusals ---------------------------------------------------------------------------------------------------


async def test_without_cgroups_it_refuses_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(**_: object) -> None:
        raise CgroupUnavailable("Nothing is delegated.", "Delegate something.")

    monkeypatch.setattr(cgroups, "open_tree", unavailable)
    with pytest.raises(IsolationUnavailable, match=r"Delegate something\. Or use --limits best-effort"):
        async with Supervisor(SandboxServerSettings(pool=0)):
            pass
    async with Supervisor(SandboxServerSettings(pool=0, limits="best-effort", preload=())) as lax:
        assert "memory and CPU of sandboxes are not limited" in caplog.text
        assert (await run(await lax.create(), "1 + 1")).result == "2"


async def test_a_machine_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str, machine: str) -> bytes:
        raise RuntimeError(f"no seccomp program {name!r} for {machine!r}")

    monkeypatch.setattr(seccomp, "load_program", unknown)
    with pytest.raises(IsolationUnavailable, match="no seccomp program"):
        async with Supervisor(settings()):
            pass


async def test_a_damaged_filter_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(name: str, machine: str) -> bytes:
        return bytes(8 * 4)

    monkeypatch.setattr(seccomp, "load_program", damaged)
    async with Supervisor(settings(preload=())) as broken:
        with pytest.raises(supervisor.SandboxStartFailed, match="seccomp"):
            await broken.create()
