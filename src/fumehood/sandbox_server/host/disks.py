"""Disks for the files of large sandboxes: sparse ext4 images on loop devices.

    template  an empty file system per size, created by mkfs.ext4 and copied without its holes
    image     an unnamed file: however this process ends, the kernel frees the space
    device    a loop device that the kernel clears when the last mount is gone
    mount     detached, passed to the sandbox's init as a descriptor; never visible on the host

The kernel mounts only file systems created here, and a sandbox never reaches the device below its files.
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

from fumehood.protocol.sandbox.sandbox_errors import SandboxServerAtCapacity, SandboxStartFailed
from fumehood.protocol.sandbox.sandbox_messages import MEMORY_TIERS, MemoryTier
from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.settings import SandboxServerSettings

logger = logging.getLogger(__name__)

DEFAULT_DIRECTORY = Path("/var/lib/fumehood/disks")
IMAGE_PREFIX = "fumehood-image-"
LARGE_TIERS: tuple[MemoryTier, ...] = ("16g", "64g")

_LOOP_CONTROL = "/dev/loop-control"
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_LO_FLAGS_DIRECT_IO = 16  # otherwise every page is cached twice, once at the host's expense
_BLOCK_BYTES = 4096
_ATTACH_ATTEMPTS = 32  # another process may take the free device first
_EXT4_IOC_SHUTDOWN = 0x8004587D
_EXT4_GOING_FLAGS_NOLOGFLUSH = 2
_MKFS_TIMEOUT = 60
_PROBE_BYTES = 64 << 20
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
# No journal: these files need not survive a crash. Metadata packed at the front: few ranges to copy.
_FEATURES = "^has_journal,^resize_inode,sparse_super2"
_EXTENDED_OPTIONS = "nodiscard,lazy_itable_init=1,num_backup_sb=0,packed_meta_blocks=1"
_MOUNT_OPTIONS: dict[str, str | None] = {
    "noinit_itable": None,  # the kernel would write the inode tables in the background: zeroes in a sparse file
    "discard": None,  # deleted space returns to the host
    "errors": "remount-ro",
}


class DisksUnavailable(IsolationUnavailable):
    """Disks cannot be created on this host."""


class Disk:
    """The disk of one sandbox: its mount until the sandbox has it, its image to measure and discard it."""

    def __init__(self, size: int, image_fd: int, mount_fd: int) -> None:
        self.size = size
        self._image_fd = image_fd
        self.mount_fd = mount_fd
        self._root_fd = -1
        try:
            self._root_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount_fd)
        except OSError:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        return self._image_fd < 0

    def used_bytes(self) -> int:
        """Bytes that it occupies on the host."""
        return 0 if self.is_closed else os.fstat(self._image_fd).st_blocks * 512

    def close_mount(self) -> None:
        """The sandbox has the mount: from now on it lasts as long as the sandbox."""
        if self.mount_fd >= 0:
            os.close(self.mount_fd)
            self.mount_fd = -1

    def close(self) -> None:
        """Discard the disk and its content, without writing back what is cached."""
        with contextlib.suppress(OSError, ValueError):
            fcntl.ioctl(self._root_fd, _EXT4_IOC_SHUTDOWN, struct.pack("=I", _EXT4_GOING_FLAGS_NOLOGFLUSH))
        for fd in (self._root_fd, self.mount_fd, self._image_fd):
            if fd >= 0:
                os.close(fd)
        self._root_fd = self.mount_fd = self._image_fd = -1


class DiskManager:
    """The disks of one supervisor; `owner_uid` is the host uid of root in the sandboxes' user namespace."""

    def __init__(self, settings: SandboxServerSettings, owner_uid: int | None) -> None:
        self._settings = settings
        self._owner_uid = owner_uid
        self._directory: Path | None = None
        self._checked = False
        self._lock = threading.Lock()
        self._templates: dict[int, int] = {}
        self._live: set[Disk] = set()
        self._pending: dict[asyncio.Future[Disk], int] = {}

    async def has_disk_for(self, memory: MemoryTier) -> bool:
        """Whether sandboxes of this tier get a disk; raises IsolationUnavailable if disks are required but missing."""
        if self._settings.mode != "namespaces" or self._settings.disks == "off" or memory not in LARGE_TIERS:
            return False
        if not self._checked:
            try:
                self._directory = await asyncio.to_thread(check_disk_support, self._settings)
            except DisksUnavailable as error:
                if self._settings.disks == "required":
                    raise
                # An ordinary user expects none.
                level = logging.WARNING if os.geteuid() == 0 else logging.DEBUG
                logger.log(
                    level, "Files of large sandboxes are kept in memory: %s %s", error.reason, error.advice
                )
            self._checked = True
        return self._directory is not None and self._owner_uid is not None

    def size_for(self, memory: MemoryTier) -> int:
        return int(MEMORY_TIERS[memory] * self._settings.disk_size_ratio) // _BLOCK_BYTES * _BLOCK_BYTES

    async def create(self, memory: MemoryTier) -> Disk:
        """A new, empty disk; raises SandboxServerAtCapacity if the host lacks space, SandboxStartFailed."""
        size = self.size_for(memory)
        self._check_free_space(size)
        pending = asyncio.ensure_future(asyncio.to_thread(self._create_in_thread, size))
        self._pending[pending] = size
        try:
            disk = await asyncio.shield(pending)
        except asyncio.CancelledError:
            pending.add_done_callback(self._discard_abandoned)
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise SandboxServerAtCapacity(
                    "The host has no disk space left for sandboxes; try again later."
                ) from error
            raise SandboxStartFailed(f"The sandbox's disk could not be made: {error}.") from error
        finally:
            if pending.done():
                del self._pending[pending]
        self._live.add(disk)
        return disk

    def _discard_abandoned(self, pending: asyncio.Future[Disk]) -> None:
        """The caller was cancelled: discard the disk when it is done."""
        self._pending.pop(pending, None)
        if not pending.cancelled() and pending.exception() is None:
            pending.result().close()

    async def release(self, disk: Disk) -> None:
        """Discard a disk, which takes a while; completes even if the caller is cancelled."""
        self._live.discard(disk)
        await asyncio.shield(asyncio.to_thread(disk.close))

    async def close(self) -> None:
        if self._pending:
            await asyncio.wait(self._pending)
        for disk in [*self._live]:
            await self.release(disk)
        for template in self._templates.values():
            os.close(template)
        self._templates.clear()

    def promised_bytes(self) -> int:
        """Bytes that existing and pending disks may still occupy."""
        return sum(self._pending.values()) + sum(max(0, disk.size - disk.used_bytes()) for disk in self._live)

    def _check_free_space(self, size: int) -> None:
        if self._directory is None:
            raise SandboxStartFailed("There are no disks for sandboxes here.")
        free = free_bytes(self._directory)
        promised = self.promised_bytes()
        if (promised + size) * self._settings.disk_backing_ratio + self._settings.disk_reserve > free:
            raise SandboxServerAtCapacity(
                f"No disk of {format_size(size)} can be promised: {format_size(free)} are free on the host, "
                f"{format_size(promised)} of it are promised to other sandboxes and "
                f"{format_size(self._settings.disk_reserve)} are reserved; delete a sandbox, or retry later."
            )

    def _create_in_thread(self, size: int) -> Disk:
        if self._directory is None or self._owner_uid is None:
            raise OSError(errno.ENODEV, "no disks here")
        with self._lock:
            if size not in self._templates:
                self._templates[size] = _create_template(
                    self._directory, size, self._settings.inodes, self._owner_uid
                )
            template = self._templates[size]
        return _create_from_template(self._directory, template, size)


# ---- support on this host ------------------------------------------------------------------------------------


def check_disk_support(settings: SandboxServerSettings) -> Path:
    """The directory for images, after a trial; raises DisksUnavailable."""
    if os.geteuid() != 0:
        raise DisksUnavailable("Only root may create disks.", "Files of large sandboxes are kept in memory.")
    if shutil.which("mkfs.ext4", path=_program_path()) is None:
        raise DisksUnavailable("mkfs.ext4 is not installed.", "Install e2fsprogs.")
    if not os.path.exists(_LOOP_CONTROL):
        raise DisksUnavailable(
            f"There is no {_LOOP_CONTROL}.",
            "Load the module (`modprobe loop`); in a container, give it the host's /dev and the right to use it.",
        )
    directory = _prepare_directory(settings)
    try:
        template = _create_template(directory, _PROBE_BYTES, 16, 0)
        try:
            _create_from_template(directory, template, _PROBE_BYTES).close()
        finally:
            os.close(template)
    except (OSError, subprocess.SubprocessError) as error:
        raise DisksUnavailable(
            f"A disk cannot be made in {directory}: {error}.",
            "Allow loop devices and mounts, or set disks to off.",
        ) from error
    return directory


def _program_path() -> str:
    """PATH with the sbin directories, which may be missing from it."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _prepare_directory(settings: SandboxServerSettings) -> Path:
    directory = settings.disk_dir or DEFAULT_DIRECTORY
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise DisksUnavailable(f"{directory} cannot be made: {error.strerror}.", "Set disk_dir.") from error
    if status.st_uid != 0 or stat.S_IMODE(status.st_mode) & 0o022:
        raise DisksUnavailable(
            f"Others may write into {directory}.", "Set disk_dir to a directory of root's alone."
        )
    if settings.disk_dir is None and (kind := file_system_type(directory)) in _MEMORY_FILE_SYSTEMS:
        raise DisksUnavailable(
            f"{directory} is kept in memory ({kind}).", "Set disk_dir to a directory on a real disk."
        )
    return directory


def file_system_type(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds a path; empty if unknown."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""


def free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def format_size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


# ---- images, devices, mounts ---------------------------------------------------------------------------------


def _create_unnamed_file(directory: Path, size: int) -> int:
    try:
        image = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        image = _create_unlinked_file(directory)
    try:
        os.ftruncate(image, size)
    except OSError:
        os.close(image)
        raise
    return image


def _create_unlinked_file(directory: Path) -> int:
    """For file systems without O_TMPFILE; a name left by a killed process is removed at the next start."""
    path = directory / f"{IMAGE_PREFIX}{os.getpid()}-{threading.get_native_id()}"
    image = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    path.unlink(missing_ok=True)  # orphan cleanup of another supervisor may have been faster
    return image


def _create_template(directory: Path, size: int, inodes: int, owner: int) -> int:
    """An empty file system in an unnamed file, whose root directory belongs to `owner`."""
    image = _create_unnamed_file(directory, size)
    try:
        program = shutil.which("mkfs.ext4", path=_program_path()) or "mkfs.ext4"
        subprocess.run(
            [
                *(program, "-q", "-F", "-b", str(_BLOCK_BYTES), "-m", "0", "-N", str(inodes + 16)),
                *("-O", _FEATURES),
                *("-E", f"{_EXTENDED_OPTIONS},root_owner={owner}:{owner}", f"/proc/self/fd/{image}"),
            ],
            pass_fds=(image,),
            env={"PATH": _program_path()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_MKFS_TIMEOUT,
        )
    except subprocess.SubprocessError as error:
        os.close(image)
        stderr = getattr(error, "stderr", None) or b""
        last = stderr.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
        raise OSError(errno.EIO, f"mkfs.ext4: {last[0]}") from error
    except BaseException:
        os.close(image)
        raise
    return image


def _create_from_template(directory: Path, template: int, size: int) -> Disk:
    image = _create_unnamed_file(directory, size)
    try:
        for start, end in _iter_data_ranges(template, size):
            _copy_range(template, image, start, end)
        with _loop_device(image) as device:
            mount = syscalls.mount_detached("ext4", device, _MOUNT_OPTIONS)
    except BaseException:
        os.close(image)
        raise
    return Disk(size, image, mount)


def _iter_data_ranges(file: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a sparse file that hold data."""
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


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        chunk = os.pread(source, min(end - start, 1 << 20), start)
        if not chunk:
            raise OSError(errno.EIO, "the template is shorter than it was")
        start += os.pwrite(target, chunk, start)


@contextlib.contextmanager
def _loop_device(image: int) -> Generator[str]:
    """A loop device for the image; after the block only the mount keeps it."""
    device, path = _attach_loop_device(image)
    try:
        yield path
    finally:
        os.close(device)


def _attach_loop_device(image: int) -> tuple[int, str]:
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
    # struct loop_config: descriptor, block size, struct loop_info64 with its flags at 52, 8 reserved words.
    config = struct.pack("=II", image, _BLOCK_BYTES) + struct.pack("=52xI176x", flags) + bytes(64)
    control = os.open(_LOOP_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_ATTACH_ATTEMPTS):
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
