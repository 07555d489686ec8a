"""A small file system of one's own, to fill."""

import contextlib
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mount_small_disk(path: Path, size: str) -> Generator[Path]:
    """Mount one at this directory. Skips the test where that is not allowed."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill_disk(disk: Path) -> None:
    """To the last byte."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


def free_disk(disk: Path) -> None:
    (disk / "filler").unlink()
