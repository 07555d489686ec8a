"""What a dead supervisor left is removed, a living one's is not."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from fumehood.sandbox_server.host import disks, orphan_cleanup
from fumehood.sandbox_server.settings import Settings

_MAKE_AND_DIE = """
import os, sys
from fumehood.sandbox_server.host.orphan_cleanup import ScratchDirectory
print(ScratchDirectory().path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    temporary, images = tmp_path / "temporary", tmp_path / "disks"
    temporary.mkdir()
    images.mkdir(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return Settings(disk_dir=images)


def _dead_ones(temporary: str) -> Path:
    environment = {**os.environ, "TMPDIR": temporary, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _MAKE_AND_DIE], env=environment, capture_output=True, text=True
    )
    return Path(done.stdout.strip())


def test_a_dead_ones_scratch_goes_and_a_living_ones_stays(places: Settings) -> None:
    dead = _dead_ones(tempfile.gettempdir())
    (dead / "a" / "b").mkdir(parents=True)
    (dead / "a").chmod(0)
    living = orphan_cleanup.ScratchDirectory()
    found = orphan_cleanup.remove_orphans(places)
    assert str(dead) in found
    assert (dead.exists(), os.path.isdir(living.path)) == (False, True)
    living.remove()
    living.remove()
    assert os.listdir(tempfile.gettempdir()) == []


def test_makers_and_sweepers_do_not_disturb_each_other(places: Settings) -> None:
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
def test_names_of_images_go_and_other_files_stay(places: Settings) -> None:
    assert places.disk_dir is not None
    (places.disk_dir / f"{disks.IMAGE_PREFIX}1-2").touch()
    (places.disk_dir / "operators-own").touch()
    orphan_cleanup.remove_orphans(places)
    assert os.listdir(places.disk_dir) == ["operators-own"]


@pytest.mark.root
def test_a_loop_device_that_would_stay_is_cleared(places: Settings) -> None:
    assert places.disk_dir is not None
    if not os.path.exists("/dev/loop-control"):
        pytest.skip("there are no loop devices here")
    image = places.disk_dir / "image"
    image.write_bytes(bytes(1 << 20))
    name = subprocess.run(
        ["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=True
    ).stdout.strip()
    about = Path("/sys/block", Path(name).name, "loop")
    assert about.is_dir()
    assert name in orphan_cleanup.remove_orphans(places)
    assert not about.is_dir()
    assert name not in orphan_cleanup.remove_orphans(places)
