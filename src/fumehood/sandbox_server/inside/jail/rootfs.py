"""Builds the private root of a jail from trees of the host, and enters it.

Everything happens in a mount namespace of the jail's own, in two steps. On a stage, an empty tmpfs, each tree of the
host gets a neutral name; from these the new root is put together beside them. Entering the new root detaches the
stage and, with it, all of the host's mounts.
"""

import errno
import os
import stat
from collections.abc import Mapping

from fumehood.sandbox_server.inside import layout, syscalls

NEW_ROOT = "new"  # the root that is being built, beside the trees on the stage
_STAGE_CANDIDATES = (
    "/tmp",
    "/mnt",
    "/media",
    "/srv",
    "/opt",
)  # any directory will do: it is covered in this namespace only
_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV
_LOCKED_FLAGS = (
    _FLAGS | syscalls.MS_RDONLY | syscalls.MS_NOEXEC
)  # what a remount may not take away from a mount
_DEVICES = {f"device-{path.rpartition('/')[2]}": path for path in layout.DEVICES}


def mount_stage(host_paths: Mapping[str, str], *, writable: frozenset[str] = frozenset()) -> None:
    """Show trees and files of the host by name in the working directory, read-only unless they are in `writable`.

    What is mounted below a tree is not shown. Raises OSError, with the name of the step that failed.
    """
    syscalls.mount("none", "/", None, syscalls.MS_PRIVATE | syscalls.MS_REC)
    trees = {name: _clone_mount(path) for name, path in {**host_paths, **_DEVICES}.items()}
    stage = next((path for path in _STAGE_CANDIDATES if os.path.isdir(path)), None)
    if stage is None:
        raise OSError(f"none of {', '.join(_STAGE_CANDIDATES)} exists to put things together in")
    syscalls.mount("stage", stage, "tmpfs", _FLAGS, "mode=0755,size=64m")
    os.chdir(stage)
    for name, tree in trees.items():
        make_mount_point(name, is_directory=stat.S_ISDIR(os.fstat(tree).st_mode))
        syscalls.attach_mount(tree, name)
        os.close(tree)
        remount_with_flags(name, 0 if name in writable else syscalls.MS_RDONLY, nodev=name not in _DEVICES)
    os.mkdir(NEW_ROOT)
    syscalls.mount("sandbox", NEW_ROOT, "tmpfs", _FLAGS, "mode=0755,size=64m")


def _clone_mount(path: str) -> int:
    try:
        return syscalls.clone_mount(path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        why = "something is mounted below it, which only root can leave out: unmount it, or run Fumehood as root"
        raise OSError(error.errno, f"{error.strerror} ({why})") from error


def make_mount_point(path: str, *, is_directory: bool) -> None:
    """Something to mount on, with its parents."""
    if is_directory:
        os.makedirs(path, exist_ok=True)
        return
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def remount_with_flags(path: str, flags: int, *, nodev: bool = True) -> None:
    """Put these flags and nosuid on a mount; those that it has stay, as the kernel insists for the host's."""
    flags |= syscalls.MS_NOSUID | (syscalls.MS_NODEV if nodev else syscalls.MS_NOEXEC)
    flags |= os.statvfs(path).f_flag & _LOCKED_FLAGS
    syscalls.mount("none", path, None, syscalls.MS_REMOUNT | syscalls.MS_BIND | flags)


def bind_mount(name: str, target: str) -> None:
    """Show what is on the stage at `target` of the new root, with the protection that it has there."""
    make_mount_point(NEW_ROOT + target, is_directory=os.path.isdir(name))
    syscalls.mount(name, NEW_ROOT + target, None, syscalls.MS_BIND)


def bind_devices() -> None:
    """The harmless devices only; no terminals: their number is limited for the whole host.

    The nodes are the host's own: read-only still lets data through, but their times and modes stay.
    """
    for name, path in _DEVICES.items():
        bind_mount(name, path)
    for name, target in (
        ("fd", "self/fd"),
        ("stdin", "self/fd/0"),
        ("stdout", "self/fd/1"),
        ("stderr", "self/fd/2"),
    ):
        os.symlink(f"/proc/{target}", f"{NEW_ROOT}/dev/{name}")


def mount_proc() -> None:
    """Of the calling process's PID namespace. The kernel grants it only while the host's is in full view."""
    os.makedirs(f"{NEW_ROOT}/proc", exist_ok=True)
    syscalls.mount("proc", f"{NEW_ROOT}/proc", "proc", _FLAGS | syscalls.MS_NOEXEC)


def pivot_into_new_root() -> None:
    """Make the new root the only one: nothing of the old one can be reached afterwards."""
    os.chdir(NEW_ROOT)
    syscalls.pivot_root(".", ".")
    syscalls.unmount(".", syscalls.MNT_DETACH)
    os.chdir("/")
