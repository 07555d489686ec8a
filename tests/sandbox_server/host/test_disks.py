"""Real disks of large sandboxes: quota, cost, fallback, overcommit."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxPayloadTooLarge,
    SandboxServerAtCapacity,
    SandboxStartFailed,
)
from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec
from fumehood.sandbox_server.diagnostics import host_checks
from fumehood.sandbox_server.diagnostics.findings import HostFinding, InspectedHost
from fumehood.sandbox_server.host import disks
from fumehood.sandbox_server.host.disks import Disk, DiskManager, DisksUnavailable
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.sandbox_runs import run, settings
from tests.support.waiting import wait_until

_LARGE = SandboxSpec(memory="16g")
_MIB = 1 << 20
_SMALL_DISK = {"disk_size_ratio": 1 / 64, "disk_reserve": 0}  # 256 MiB for 16g


def _why_unavailable() -> str:
    try:
        disks.check_disk_support(SandboxServerSettings())
    except DisksUnavailable as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() == 0 and _why_unavailable() != "", reason=_why_unavailable() or "there are disks"
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of these tests alone: others on this host have disks as well."""
    return tmp_path_factory.mktemp("disks")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor(directory: Path) -> AsyncIterator[Supervisor]:
    async with Supervisor(settings(preload=(), disk_dir=directory, **_SMALL_DISK)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(supervisor: Supervisor) -> AsyncIterator[SandboxInstance]:
    made = await supervisor.create(_LARGE)
    yield made
    await made.destroy()


def _disk(sandbox: SandboxInstance) -> Disk:
    assert sandbox.resources.disk is not None
    return sandbox.resources.disk


def _loop_devices(directory: Path) -> set[str]:
    """Those over an image from there, wherever they are mounted."""
    found: set[str] = set()
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # just cleared
            if path.read_text().startswith(f"{directory}/"):
                found.add(path.parents[1].name)
    return found


async def _wait_until_no_devices(directory: Path) -> None:
    await wait_until(lambda: not _loop_devices(directory))


@contextlib.contextmanager
def _small_host(size: int, path: Path) -> Generator[Path]:
    """A directory on a file system of its own, with that much space."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


async def test_files_lie_on_a_disk_and_shared_memory_in_memory(sandbox: SandboxInstance) -> None:
    outcome = await run(
        sandbox,
        "kinds = {}\n"
        "for line in open('/proc/self/mountinfo'):\n"
        "    before, after = line.split(' - ')\n"
        "    kinds[before.split()[4]] = (after.split()[0], before.split()[5])\n"
        "for place in ('/mnt/data', '/tmp', '/home/user', '/dev/shm'): print(*kinds[place])\n",
    )
    assert outcome.stdout.splitlines() == ["ext4 rw,nosuid,nodev,noatime"] * 3 + [
        "tmpfs rw,nosuid,nodev,relatime"
    ]


async def test_all_places_can_be_written_and_files_go_in_and_out(sandbox: SandboxInstance) -> None:
    await sandbox.files.write("in/x.txt", b"given")
    code = (
        "import multiprocessing.shared_memory as sm, pathlib, tempfile\n"
        "block = sm.SharedMemory(create=True, size=1000); block.close(); block.unlink()\n"
        "pathlib.Path.home().joinpath('h').write_text('h'); tempfile.mkstemp()\n"
        "pathlib.Path('out.txt').write_text(pathlib.Path('in/x.txt').read_text()[::-1])"
    )
    assert (await run(sandbox, code)).end.status == "ok"
    assert await sandbox.files.read("out.txt", limit=10) == b"nevig"
    listing = await sandbox.files.list()
    assert [entry.path for entry in listing.files] == ["in/x.txt", "out.txt"]
    await sandbox.files.delete("in/x.txt")
    assert [entry.path for entry in (await sandbox.files.list()).files] == ["out.txt"]


async def test_small_tiers_have_no_disk(supervisor: Supervisor) -> None:
    sandbox = await supervisor.create(SandboxSpec(memory="1g"))
    assert sandbox.resources.disk is None
    await sandbox.destroy()


async def test_files_do_not_count_as_memory(sandbox: SandboxInstance) -> None:
    assert sandbox.resources.cgroup is not None
    sandbox.resources.cgroup.set_memory(96 * _MIB)
    outcome = await run(
        sandbox, "f = open('x', 'wb')\nfor _ in range(200): _ = f.write(bytes(1 << 20))\nf.close()"
    )
    assert (outcome.end.status, outcome.raised, outcome.notes) == ("ok", None, [])
    # Pages of the file are the sandbox's, and are given up when it needs the room.
    assert sandbox.resources.cgroup.memory_current() <= 96 * _MIB
    assert (await run(sandbox, "import os; os.path.getsize('x') >> 20")).result == "200"


async def test_a_disk_has_an_end(sandbox: SandboxInstance) -> None:
    outcome = await run(sandbox, "f = open('x', 'wb')\nwhile True: _ = f.write(bytes(1 << 20))")
    assert outcome.raised is not None
    assert "No space left" in outcome.raised.value
    assert outcome.end.state_kept
    assert _disk(sandbox).used_bytes() <= _disk(sandbox).size
    with pytest.raises((FileRefused, SandboxPayloadTooLarge), match=r"No space left|disk quota"):
        await sandbox.files.write("y", bytes(_MIB))
    # The rest of the disk is another place's rest as well: there is one quota.
    assert "No space left" in str((await run(sandbox, "open('/tmp/z', 'wb').write(bytes(1 << 20))")).raised)


async def test_inodes_have_an_end() -> None:
    async with Supervisor(settings(preload=(), inodes=500, **_SMALL_DISK)) as supervisor:
        sandbox = await supervisor.create(_LARGE)
        outcome = await run(sandbox, "for n in range(20_000): open(f'{n}', 'w').close()")
        assert outcome.raised is not None
        assert "No space left" in outcome.raised.value


async def test_what_is_deleted_returns_to_the_host(sandbox: SandboxInstance) -> None:
    await run(
        sandbox,
        "import os\nf = open('x', 'wb'); f.write(os.urandom(64 << 20)); f.flush(); os.fsync(f.fileno())",
    )
    assert _disk(sandbox).used_bytes() > 60 * _MIB
    await run(sandbox, "f.close(); os.unlink('x')")
    await wait_until(lambda: _disk(sandbox).used_bytes() < 16 * _MIB)


async def test_a_full_host_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    with _small_host(400 * _MIB, tmp_path):
        chosen = settings(preload=(), disk_dir=tmp_path, **_SMALL_DISK)
        async with Supervisor(chosen) as supervisor:
            first = await supervisor.create(_LARGE)
            with pytest.raises(
                SandboxServerAtCapacity,
                match=r"No disk of 256 MiB can be promised: .* delete a sandbox, or retry later",
            ):
                await supervisor.create(_LARGE)
            assert (await run(first, "open('x', 'w').write('still here')")).result == "10"
            small = await supervisor.create()  # needs none
            await small.destroy()
            await first.destroy()
            await _wait_until_no_devices(tmp_path)
            again = await supervisor.create(_LARGE)
            assert (await run(again, "import os; os.listdir()")).result == "[]"


async def test_more_may_be_promised_than_there_is(tmp_path: Path) -> None:
    with _small_host(100 * _MIB, tmp_path):
        chosen = settings(preload=(), disk_dir=tmp_path, disk_backing_ratio=0.1, **_SMALL_DISK)
        async with Supervisor(chosen) as supervisor:
            sandbox = await supervisor.create(_LARGE)
            code = (
                "import os\nf = open('x', 'wb')\n"
                "for _ in range(200): f.write(os.urandom(1 << 20))\n"
                "f.flush(); os.fsync(f.fileno())"
            )
            outcome = await run(sandbox, code, timeout=30)
            assert outcome.raised is not None, "the host is full: the code hears of it"
            other = await supervisor.create()
            assert (await run(other, "1 + 1")).result == "2"


async def test_without_disks_files_are_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disks, "_LOOP_CONTROL", "/dev/no-loop-control")
    async with Supervisor(settings(preload=())) as supervisor:
        sandbox = await supervisor.create(_LARGE)
        again = await supervisor.create(_LARGE)
        assert sandbox.resources.disk is None
        outcome = await run(sandbox, "import shutil; shutil.disk_usage('/mnt/data').total >> 30")
        assert outcome.result == "8"
        assert again.resources.disk is None
    assert caplog.text.count("kept in memory: There is no /dev/no-loop-control") == 1


async def test_required_disks_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_LOOP_CONTROL", "/dev/no-loop-control")
    async with Supervisor(settings(preload=(), disks="required")) as supervisor:
        with pytest.raises(IsolationUnavailable, match="modprobe loop"):
            await supervisor.create(_LARGE)
        sandbox = await supervisor.create()
        assert (await run(sandbox, "1 + 1")).result == "2"


async def test_disks_can_be_off() -> None:
    async with Supervisor(settings(preload=(), disks="off")) as supervisor:
        assert (await supervisor.create(_LARGE)).resources.disk is None


async def test_whoever_gives_up_leaves_nothing(supervisor: Supervisor, directory: Path) -> None:
    await _wait_until_no_devices(directory)
    for pause in (0.0, 0.001, 0.003, 0.01, 0.02):
        asking = asyncio.ensure_future(supervisor.create(_LARGE))
        await asyncio.sleep(pause)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await asking).destroy()
    await _wait_until_no_devices(directory)
    assert os.listdir(directory) == []


async def test_a_mkfs_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "mkfs.ext4"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'no such feature' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(disks, "_program_path", lambda: str(program.parent))
    with pytest.raises(DisksUnavailable, match=r"mkfs\.ext4: no such feature"):
        disks.check_disk_support(SandboxServerSettings(disk_dir=tmp_path))


async def test_a_disk_that_cannot_be_made_later_is_an_error_of_that_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = DiskManager(settings(**_SMALL_DISK), 0)
    assert await made.has_disk_for("16g")

    def refuse(*_: object) -> Any:
        raise OSError(16, "no loop device could be had")

    monkeypatch.setattr(disks, "_attach_loop_device", refuse)
    with pytest.raises(SandboxStartFailed, match="no loop device could be had"):
        await made.create("16g")
    assert made.promised_bytes() == 0
    await made.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"disk_dir": Path("/proc/no")}, "cannot be made"),
        ({"disk_dir": Path("/tmp")}, "Others may write"),
    ],
)
async def test_a_directory_that_will_not_do(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DisksUnavailable, match=words):
        disks.check_disk_support(SandboxServerSettings(**changes))


async def test_memory_is_no_place_for_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _small_host(200 * _MIB, tmp_path):
        monkeypatch.setattr(disks, "DEFAULT_DIRECTORY", tmp_path)
        with pytest.raises(DisksUnavailable, match=r"kept in memory \(tmpfs\)"):
            disks.check_disk_support(SandboxServerSettings())


def _check_disks(chosen: SandboxServerSettings) -> list[HostFinding]:
    return list(host_checks.check_disks(chosen, InspectedHost(uid=0)))


async def test_doctor_says_where_disks_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = _check_disks(SandboxServerSettings())
    assert (finding.state, str(disks.DEFAULT_DIRECTORY) in finding.detail) == ("ok", True)
    assert _check_disks(SandboxServerSettings(disks="off")) == []
    monkeypatch.setattr(disks, "_LOOP_CONTROL", "/dev/no-loop-control")
    (finding,) = _check_disks(SandboxServerSettings())
    assert (finding.state, "kept in memory" in finding.detail) == ("warning", True)
    (finding,) = _check_disks(SandboxServerSettings(disks="required"))
    assert finding.state == "missing"
