"""Builds the root file system of a jail from directories of the host, and pivots into it.

This happens in the jail's own mount namespace. The host's directories are mounted under neutral names on the stage, an
empty tmpfs; the new root is assembled from them beside them. Pivoting detaches the stage and all of the host's mounts.
"""

import errno
import os
import stat
from collections.abc import Mapping

from fumehood.sandbox_server.inside import layout, syscalls

NEW_ROOT = "new"  # the root under construction, on the stage
# Any directory will do: it is covered in this namespace only.
_STAGE_CANDIDATES = ("/tmp", "/mnt", "/media", "/srv", "/opt")
_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV
_LOCKED_FLAGS = _FLAGS | syscalls.MS_RDONLY | syscalls.MS_NOEXEC  # a remount may not clear them
_DEVICES = {f"device-{path.rpartition('/')[2]}": path for path in layout.DEVICES}


def mount_stage(host_paths: Mapping[str, str], *, writable: frozenset[str] = frozenset()) -> None:
    """Mount the stage, make it the working directory, and mount host paths on it.

    host_paths: name on the stage -> path on the host. Mounts below a path are left out.
    writable: names that are not mounted read-only.
    Raises OSError that names the failed step.
    """
    syscalls.mount("none", "/", None, syscalls.MS_PRIVATE | syscalls.MS_REC)
    trees = {name: _clone_mount(path) for name, path in {**host_paths, **_DEVICES}.items()}
    stage = next((path for path in _STAGE_CANDIDATES if os.path.isdir(path)), None)
    if stage is None:
        raise OSError(f"no directory for the stage: none of {', '.join(_STAGE_CANDIDATES)} exists")
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
        hint = "something is mounted below it, and only root can leave that out: unmount it, or run Fumehood as root"
        raise OSError(error.errno, f"{error.strerror} ({hint})") from error


def make_mount_point(path: str, *, is_directory: bool) -> None:
    """Create a directory or an empty file to mount on, with its parents."""
    if is_directory:
        os.makedirs(path, exist_ok=True)
        return
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def remount_with_flags(path: str, flags: int, *, nodev: bool = True) -> None:
    """Add these flags and nosuid to a mount; flags that the kernel has locked stay."""
    flags |= syscalls.MS_NOSUID | (syscalls.MS_NODEV if nodev else syscalls.MS_NOEXEC)
    flags |= os.statvfs(path).f_flag & _LOCKED_FLAGS
    syscalls.mount("none", path, None, syscalls.MS_REMOUNT | syscalls.MS_BIND | flags)


def bind_mount(name: str, target: str) -> None:
    """Bind `name` of the stage to `target` in the new root, with the same mount flags."""
    make_mount_point(NEW_ROOT + target, is_directory=os.path.isdir(name))
    syscalls.mount(name, NEW_ROOT + target, None, syscalls.MS_BIND)


def bind_devices() -> None:
    """Bind the harmless devices. No terminals: the whole host has a limited number of them.

    The nodes are the host's. A read-only mount still lets data through, but their times and modes cannot change.
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
    """Mount proc of this PID namespace; the kernel allows it only while the host's proc is fully visible."""
    os.makedirs(f"{NEW_ROOT}/proc", exist_ok=True)
    syscalls.mount("proc", f"{NEW_ROOT}/proc", "proc", _FLAGS | syscalls.MS_NOEXEC)


def pivot_into_new_root() -> None:
    """Make the new root the root; the old one is unreachable afterwards."""
    os.chdir(NEW_ROOT)
    syscalls.pivot_root(".", ".")
    syscalls.unmount(".", syscalls.MNT_DETACH)
    os.chdir("/")
