"""Removes what dead supervisors left on this host.

The kernel cleans up most of it: processes, namespaces, mounts, loop devices, unnamed images, locks on uid blocks.
The next supervisor to start removes what has a name. It must be ours by name and owner, and provably unused: its lock
is free, or (cgroups) the process in its name is dead.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fumehood.sandbox_server.host import cgroups, disks
from fumehood.sandbox_server.settings import SandboxServerSettings

logger = logging.getLogger(__name__)

SCRATCH_PREFIX = "fumehood-scratch-"
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOP_CLR_FD = 0x4C01
_REMOVE_TIMEOUT = 60


def remove_orphans(settings: SandboxServerSettings) -> list[str]:
    """Remove all orphans and return their names; what cannot be removed stays for the next time."""
    found: list[str] = []
    if settings.mode != "pod":
        # Processes first: they might still write to the rest.
        found += [str(path) for path in cgroups.remove_stale_trees()]
        found += remove_orphaned_scratch(Path(tempfile.gettempdir()))
    if os.geteuid() == 0:
        directory = settings.disk_dir or disks.DEFAULT_DIRECTORY
        found += _remove_orphaned_images(directory)
        found += _detach_orphaned_loop_devices(directory)
    if found:
        logger.info("Removed what a supervisor that was killed had left: %s.", ", ".join(found))
    return found


# ---- scratch directories of mode unsafe-degraded ---------------------------------------------------------------


class ScratchDirectory:
    """A directory on the host, locked for as long as this process lives."""

    def __init__(self) -> None:
        while True:
            self.path = f"{tempfile.gettempdir()}/{SCRATCH_PREFIX}{secrets.token_hex(8)}"
            os.mkdir(self.path, 0o700)
            # Before it is locked, another supervisor may take it for an orphan.
            with contextlib.suppress(OSError):
                self._lock = os.open(self.path, _OPEN_DIRECTORY)
                if _try_lock(self._lock, self.path):
                    return
                os.close(self._lock)

    def remove(self) -> None:
        if self._lock >= 0:
            remove_tree(self.path)
            os.close(self._lock)
            self._lock = -1


def _try_lock(directory: int, path: str) -> bool:
    """Lock it if it is not locked and its name still refers to it."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(directory), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def remove_orphaned_scratch(parent: Path) -> Iterator[str]:
    for entry in _list_by_prefix(parent, SCRATCH_PREFIX):
        try:
            directory = os.open(entry, _OPEN_DIRECTORY)
        except OSError:
            continue
        try:
            if os.fstat(directory).st_uid == os.geteuid() and _try_lock(directory, str(entry)):
                remove_tree(str(entry))
                yield str(entry)
        finally:
            os.close(directory)


def remove_tree(path: str) -> None:
    """Remove a tree written by code, however deep; Python's rmtree fails on very deep ones."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*command, "--", path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
                timeout=_REMOVE_TIMEOUT,
            )


# ---- disks -----------------------------------------------------------------------------------------------------


def _remove_orphaned_images(directory: Path) -> Iterator[str]:
    """Names of images: their creators unlink them at once, so unlinking a live one's is no loss."""
    for entry in _list_by_prefix(directory, disks.IMAGE_PREFIX):
        with contextlib.suppress(OSError):
            if entry.lstat().st_uid == os.geteuid():
                entry.unlink()
                yield str(entry)


def _detach_orphaned_loop_devices(directory: Path, sysfs: Path = Path("/sys/block")) -> Iterator[str]:
    """Loop devices of our images without the autoclear flag; one in use is cleared when it is closed."""
    for entry in sysfs.glob("loop*/loop"):
        with contextlib.suppress(OSError):
            image = (entry / "backing_file").read_text()
            if not image.startswith(f"{directory}/") or (entry / "autoclear").read_text().strip() != "0":
                continue
            name = f"/dev/{entry.parent.name}"
            device = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CLR_FD)
                yield name
            finally:
                os.close(device)


def _list_by_prefix(directory: Path, prefix: str) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory) if name.startswith(prefix)]
    except OSError:
        return []
