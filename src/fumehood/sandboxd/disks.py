"""Disks for the files of large sandboxes: sparse ext4 images on loop devices; imports `fumehood.protocol`, siblings.

    template  one empty file system per size, made by mkfs.ext4, copied without its holes
    image     a file without a name: whatever ends this process, the kernel frees the space
    device    a loop device that the kernel clears when the last mount is gone
    mount     detached, handed to the sandbox's first process as a descriptor; it is never in the host's view

The kernel reads only file systems that were made here, and a sandbox never reaches the device below its files.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import struct
import subprocess
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

from fumehood.protocol.sandbox import MEMORY_TIERS, MemoryTier
from fumehood.protocol.sandbox_errors import AtCapacity, SandboxStartFailed
from fumehood.sandboxd.errors import IsolationUnavailable
from fumehood.sandboxd.inside import syscalls
from fumehood.sandboxd.settings import Settings

logger = logging.getLogger(__name__)

DEFAULT_DIRECTORY = Path("/var/lib/fumehood/disks")
IMAGE_PREFIX = "fumehood-image-"
LARGE_TIERS: tuple[MemoryTier, ...] = ("16g", "64g")

_CONTROL = "/dev/loop-control"
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_LO_FLAGS_DIRECT_IO = 16  # else every page is cached twice, the second time at the host's expense
_BLOCK = 4096
_TRIES = 32  # between asking for a free device and taking it, somebody else may
_EXT4_IOC_SHUTDOWN = 0x8004587D
_EXT4_GOING_FLAGS_NOLOGFLUSH = 2
_MKFS_TIMEOUT = 60
_PROBE_BYTES = 64 << 20
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
# No journal: after a crash of the host nobody looks for these files. Metadata packed in front: few pieces to copy.
_FEATURES = "^has_journal,^resize_inode,sparse_super2"
_EXTENDED = "nodiscard,lazy_itable_init=1,num_backup_sb=0,packed_meta_blocks=1"
_OPTIONS: dict[str, str | None] = {
    "noinit_itable": None,  # the kernel would fill the inode tables behind our back: zeroes in a sparse file
    "discard": None,  # what is deleted returns to the host
    "errors": "remount-ro",
}


class DisksUnavailable(Exception):
    """Why this machine has none; `advice` says what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason} {advice}")
        self.reason = reason
        self.advice = advice


class Disk:
    """One sandbox's: the mount until it is handed over, then what is needed to count it and to end it."""

    def __init__(self, size: int, image: int, mount: int) -> None:
        self.size = size
        self._image = image
        self.mount = mount
        self._root = -1
        try:
            self._root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
        except OSError:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._image < 0

    def used(self) -> int:
        """Bytes it takes on the host."""
        return 0 if self.closed else os.fstat(self._image).st_blocks * 512

    def handed_over(self) -> None:
        """The sandbox has the mount: from now on it lasts no longer than the sandbox."""
        if self.mount >= 0:
            os.close(self.mount)
            self.mount = -1

    def close(self) -> None:
        """Give it up, with what is on it: nothing that was not written yet needs to be."""
        with contextlib.suppress(OSError, ValueError):
            fcntl.ioctl(self._root, _EXT4_IOC_SHUTDOWN, struct.pack("=I", _EXT4_GOING_FLAGS_NOLOGFLUSH))
        for fd in (self._root, self.mount, self._image):
            if fd >= 0:
                os.close(fd)
        self._root = self.mount = self._image = -1


class Disks:
    """Those of one supervisor; `owner` is the kernel user in whose namespace sandboxes lay out their files."""

    def __init__(self, settings: Settings, owner: int | None) -> None:
        self._settings = settings
        self._owner = owner
        self._directory: Path | None = None
        self._looked = False
        self._lock = threading.Lock()
        self._templates: dict[int, int] = {}
        self._live: set[Disk] = set()
        self._being_made: dict[asyncio.Future[Disk], int] = {}

    async def serve(self, memory: MemoryTier) -> bool:
        """Whether files of this tier lie on a disk; IsolationUnavailable where they have to and cannot."""
        if self._settings.mode != "namespaces" or self._settings.disks == "off" or memory not in LARGE_TIERS:
            return False
        if not self._looked:
            try:
                self._directory = await asyncio.to_thread(look, self._settings)
            except DisksUnavailable as error:
                if self._settings.disks == "required":
                    raise IsolationUnavailable(error.reason, error.advice) from error
                # An ordinary user was never promised any.
                level = logging.WARNING if os.geteuid() == 0 else logging.DEBUG
                logger.log(
                    level, "Files of large sandboxes are kept in memory: %s %s", error.reason, error.advice
                )
            self._looked = True
        return self._directory is not None and self._owner is not None

    def size_for(self, memory: MemoryTier) -> int:
        return int(MEMORY_TIERS[memory] * self._settings.disk_share) // _BLOCK * _BLOCK

    async def make(self, memory: MemoryTier) -> Disk:
        """A new, empty disk; AtCapacity when the host has no room for it, SandboxStartFailed when it refuses."""
        size = self.size_for(memory)
        self._check_room(size)
        making = asyncio.ensure_future(asyncio.to_thread(self._make, size))
        self._being_made[making] = size
        try:
            disk = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._unwanted)
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise AtCapacity("The host has no disk space left for sandboxes; try again later.") from error
            raise SandboxStartFailed(f"The sandbox's disk could not be made: {error}.") from error
        finally:
            if making.done():
                del self._being_made[making]
        self._live.add(disk)
        return disk

    def _unwanted(self, making: asyncio.Future[Disk]) -> None:
        """Nobody waits for it any more: who asked has gone."""
        self._being_made.pop(making, None)
        if not making.cancelled() and making.exception() is None:
            making.result().close()

    async def give_back(self, disk: Disk) -> None:
        """Throw away what is on it, which takes a while; that is done even if nobody waits for it."""
        self._live.discard(disk)
        await asyncio.shield(asyncio.to_thread(disk.close))

    async def close(self) -> None:
        if self._being_made:
            await asyncio.wait(self._being_made)
        for disk in [*self._live]:
            await self.give_back(disk)
        for template in self._templates.values():
            os.close(template)
        self._templates.clear()

    def promised(self) -> int:
        """Bytes that live disks may still come to take."""
        coming = sum(self._being_made.values())
        return coming + sum(max(0, disk.size - disk.used()) for disk in self._live)

    def _check_room(self, size: int) -> None:
        if self._directory is None:
            raise SandboxStartFailed("There are no disks for sandboxes here.")
        free = free_space(self._directory)
        promised = self.promised()
        if (promised + size) * self._settings.disk_backing + self._settings.disk_reserve > free:
            raise AtCapacity(
                f"No disk of {in_words(size)} can be promised: {in_words(free)} are free on the host, "
                f"{in_words(promised)} of it are promised to other sandboxes and "
                f"{in_words(self._settings.disk_reserve)} are kept back; delete a sandbox or wait."
            )

    def _make(self, size: int) -> Disk:
        if self._directory is None or self._owner is None:
            raise OSError(errno.ENODEV, "no disks here")
        with self._lock:
            if size not in self._templates:
                self._templates[size] = _format(self._directory, size, self._settings.inodes, self._owner)
            template = self._templates[size]
        return _disk_from(self._directory, template, size)


# ---- whether it can be done ----------------------------------------------------------------------------------


def look(settings: Settings) -> Path:
    """The directory for images, after one disk was made and given up; DisksUnavailable says what is in the way."""
    if os.geteuid() != 0:
        raise DisksUnavailable("Only root may make disks.", "Files of large sandboxes are kept in memory.")
    if shutil.which("mkfs.ext4", path=_programs()) is None:
        raise DisksUnavailable("mkfs.ext4 is not installed.", "Install e2fsprogs.")
    if not os.path.exists(_CONTROL):
        raise DisksUnavailable(
            f"There is no {_CONTROL}.",
            "Load the module (`modprobe loop`); in a container, give it the host's /dev and the right to use it.",
        )
    directory = _directory(settings)
    try:
        template = _format(directory, _PROBE_BYTES, 16, 0)
        try:
            _disk_from(directory, template, _PROBE_BYTES).close()
        finally:
            os.close(template)
    except (OSError, subprocess.SubprocessError) as error:
        raise DisksUnavailable(
            f"A disk cannot be made in {directory}: {error}.",
            "Allow loop devices and mounts, or set disks to off.",
        ) from error
    return directory


def _programs() -> str:
    """Programs of an administrator are not on everybody's path."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _directory(settings: Settings) -> Path:
    directory = settings.disk_dir or DEFAULT_DIRECTORY
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = directory.stat()
    except OSError as error:
        raise DisksUnavailable(f"{directory} cannot be made: {error.strerror}.", "Set disk_dir.") from error
    if about.st_uid != 0 or stat.S_IMODE(about.st_mode) & 0o022:
        raise DisksUnavailable(
            f"Others may write into {directory}.", "Set disk_dir to a directory of root's alone."
        )
    if settings.disk_dir is None and (kind := file_system(directory)) in _IN_MEMORY:
        raise DisksUnavailable(
            f"{directory} is kept in memory ({kind}).", "Set disk_dir to a directory on a real disk."
        )
    return directory


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system below a path, empty if it cannot be told."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""


def free_space(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def in_words(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


# ---- images, devices, mounts ---------------------------------------------------------------------------------


def _nameless(directory: Path, size: int) -> int:
    try:
        image = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        image = _soon_nameless(directory)
    try:
        os.ftruncate(image, size)
    except OSError:
        os.close(image)
        raise
    return image


def _soon_nameless(directory: Path) -> int:
    """Where the file system knows no files without names; a name that a kill leaves is swept at the next start."""
    path = directory / f"{IMAGE_PREFIX}{os.getpid()}-{threading.get_native_id()}"
    image = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    path.unlink(missing_ok=True)  # a sweeper may have been faster
    return image


def _format(directory: Path, size: int, inodes: int, owner: int) -> int:
    """An empty file system in a nameless file, its root directory the owner's."""
    image = _nameless(directory, size)
    try:
        program = shutil.which("mkfs.ext4", path=_programs()) or "mkfs.ext4"
        subprocess.run(
            [
                *(program, "-q", "-F", "-b", str(_BLOCK), "-m", "0", "-N", str(inodes + 16), "-O", _FEATURES),
                *("-E", f"{_EXTENDED},root_owner={owner}:{owner}", f"/proc/self/fd/{image}"),
            ],
            pass_fds=(image,),
            env={"PATH": _programs()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_MKFS_TIMEOUT,
        )
    except subprocess.SubprocessError as error:
        os.close(image)
        said = getattr(error, "stderr", None) or b""
        last = said.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
        raise OSError(errno.EIO, f"mkfs.ext4: {last[0]}") from error
    except BaseException:
        os.close(image)
        raise
    return image


def _disk_from(directory: Path, template: int, size: int) -> Disk:
    image = _nameless(directory, size)
    try:
        for start, end in _pieces(template, size):
            _copy(template, image, start, end)
        with _attached(image) as device:
            mount = syscalls.mount_detached("ext4", device, _OPTIONS)
    except BaseException:
        os.close(image)
        raise
    return Disk(size, image, mount)


def _pieces(file: int, size: int) -> Iterator[tuple[int, int]]:
    """What is not a hole."""
    end = 0
    while end < size:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, end


def _copy(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        chunk = os.pread(source, min(end - start, 1 << 20), start)
        if not chunk:
            raise OSError(errno.EIO, "the template is shorter than it was")
        start += os.pwrite(target, chunk, start)


@contextlib.contextmanager
def _attached(image: int) -> Generator[str]:
    """A loop device over the image; after the block the mount alone keeps it."""
    device, path = _attach(image)
    try:
        yield path
    finally:
        os.close(device)


def _attach(image: int) -> tuple[int, str]:
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
    # struct loop_config: descriptor, block size, struct loop_info64 with its flags at 52, 8 reserved words.
    config = struct.pack("=II", image, _BLOCK) + struct.pack("=52xI176x", flags) + bytes(64)
    control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:
                    raise
            else:
                return device, path
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no loop device could be had")
