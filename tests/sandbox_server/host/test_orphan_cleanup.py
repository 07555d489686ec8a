"""Orphan cleanup removes what a dead supervisor left, and nothing of a live one."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from fumehood.sandbox_server.host import disks, orphan_cleanup
from fumehood.sandbox_server.settings import SandboxServerSettings

_MAKE_AND_DIE = """
import os, sys
from fumehood.sandbox_server.host.orphan_cleanup import ScratchDirectory
print(ScratchDirectory().path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SandboxServerSettings:
    temporary, images = tmp_path / "temporary", tmp_path / "disks"
    temporary.mkdir()
    images.mkdir(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return SandboxServerSettings(disk_dir=images)


def _dead_ones(temporary: str) -> Path:
    environment = {**os.environ, "TMPDIR": temporary, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _MAKE_AND_DIE], env=environment, capture_output=True, text=True
    )
    return Path(done.stdout.strip())


def test_scratch_of_a_dead_supervisor_is_removed_and_of_a_live_one_kept(
    settings: SandboxServerSettings,
) -> None:
    dead = _dead_ones(tempfile.gettempdir())
    (dead / "a" / "b").mkdir(parents=True)
    (dead / "a").chmod(0)
    live = orphan_cleanup.ScratchDirectory()
    found = orphan_cleanup.remove_orphans(settings)
    assert str(dead) in found
    assert (dead.exists(), os.path.isdir(live.path)) == (False, True)
    live.remove()
    live.remove()
    assert os.listdir(tempfile.gettempdir()) == []


def test_creation_and_cleanup_at_once(settings: SandboxServerSettings) -> None:
    made: list[orphan_cleanup.ScratchDirectory] = []
    stop = threading.Event()

    def sweep_on_and_on() -> None:
        while not stop.is_set():
            list(orphan_cleanup.remove_orphaned_scratch(Path(tempfile.gettempdir())))

    sweeper = threading.Thread(target=sweep_on_and_on)
    sweeper.start()
    try:
        made += [orphan_cleanup.ScratchDirectory() for _ in range(200)]
    finally:
        stop.set()
        sweeper.join()
    assert all(os.path.isdir(scratch.path) for scratch in made)
    for scratch in made:
        scratch.remove()


@pytest.mark.root
def test_images_are_removed_and_other_files_kept(settings: SandboxServerSettings) -> None:
    assert settings.disk_dir is not None
    (settings.disk_dir / f"{disks.IMAGE_PREFIX}1-2").touch()
    (settings.disk_dir / "operators-own").touch()
    orphan_cleanup.remove_orphans(settings)
    assert os.listdir(settings.disk_dir) == ["operators-own"]


@pytest.mark.root
def test_a_loop_device_without_autoclear_is_detached(settings: SandboxServerSettings) -> None:
    assert settings.disk_dir is not None
    if not os.path.exists("/dev/loop-control"):
        pytest.skip("there are no loop devices here")
    image = settings.disk_dir / "image"
    image.write_bytes(bytes(1 << 20))
    name = subprocess.run(
        ["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=True
    ).stdout.strip()
    about = Path("/sys/block", Path(name).name, "loop")
    assert about.is_dir()
    assert name in orphan_cleanup.remove_orphans(settings)
    assert not about.is_dir()
    assert name not in orphan_cleanup.remove_orphans(settings)
