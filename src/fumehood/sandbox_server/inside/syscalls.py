"""System calls that Python does not wrap, through ctypes.

Prototypes are bound at import: nothing here opens a library after a fork or in a finished jail. Every function raises
OSError that names the call and its subject.
"""

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Generator

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_MOVE = 8192
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_GET_NO_NEW_PRIVS = 39
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_STRICTLY = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV

# These numbers are the same on every 64-bit architecture.
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_SYS_FSPICK = 433
_SYS_OPENAT2 = 437
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446
# These differ.
_SYS_PIVOT_ROOT, _SYS_CAPSET, _SYS_SECCOMP = {"x86_64": (155, 126, 317), "aarch64": (41, 91, 277)}.get(
    os.uname().machine, (-1, -1, -1)
)

_CAPABILITY_VERSION_3 = 0x20080522
_AT_FDCWD = -100
_OPEN_TREE_CLONE = 0x1
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOUNT_ATTR_NOSUID_NODEV_NOATIME = 0x02 | 0x04 | 0x10
_CLOEXEC = 1  # of fsopen and fsmount
_FSPICK_EMPTY_PATH = 0x08
_FSCONFIG_SET_FLAG = 0
_FSCONFIG_SET_STRING = 1
_FSCONFIG_CMD_CREATE = 6
_FSCONFIG_CMD_RECONFIGURE = 7

_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.sethostname.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_libc.syscall.restype = ctypes.c_long

type _Argument = int | bytes | ctypes.Array[ctypes.c_char] | None


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _call(what: str, number: int, *arguments: _Argument) -> int:
    if number < 0:
        raise OSError(f"{what}: no call number for {os.uname().machine}")
    result: int = _libc.syscall(
        ctypes.c_long(number),
        *[ctypes.c_long(item) if isinstance(item, int) else item for item in arguments],
    )
    if result < 0:
        raise _os_error(what)
    return result


@contextlib.contextmanager
def closing_fd(fd: int) -> Generator[int]:
    """Yield a descriptor and close it afterwards."""
    try:
        yield fd
    finally:
        os.close(fd)


def mount(
    source: str, target: str, filesystem_type: str | None, flags: int, options: str | None = None
) -> None:
    if _libc.mount(_encode(source), _encode(target), _encode(filesystem_type), flags, _encode(options)):
        raise _os_error(f"mount {filesystem_type or 'bind'} on {target}")


def _encode(text: str | None) -> bytes | None:
    """Encode like os.fsencode, but in one function: a sandbox copies the pages of each function it calls."""
    return None if text is None else text.encode("utf-8", "surrogateescape")


def unmount(target: str, flags: int = 0) -> None:
    if _libc.umount2(_encode(target), flags):
        raise _os_error(f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _call(f"pivot_root {new}", _SYS_PIVOT_ROOT, os.fsencode(new), os.fsencode(old))


def clone_mount(path: str) -> int:
    """Return a descriptor of a detached copy of the mount at `path`."""
    return _call(
        f"open_tree {path}", _SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | os.O_CLOEXEC
    )


def attach_mount(tree: int, target: str) -> None:
    """Attach a detached mount at `target`, on top of what is there."""
    _call(
        f"move_mount to {target}",
        _SYS_MOVE_MOUNT,
        tree,
        b"",
        _AT_FDCWD,
        os.fsencode(target),
        _MOVE_MOUNT_F_EMPTY_PATH,
    )


def set_hostname(name: str) -> None:
    encoded = name.encode()
    if _libc.sethostname(encoded, len(encoded)):
        raise _os_error("sethostname")


def prctl(option: int, value: int = 0, third: int = 0) -> int:
    result: int = _libc.prctl(option, value, third, 0, 0)
    if result < 0:
        raise _os_error(f"prctl {option}")
    return result


def set_process_name(name: str) -> None:
    """Set the name that `ps` shows (at most 15 bytes) until the next exec."""
    buffer = ctypes.create_string_buffer(name.encode())
    prctl(PR_SET_NAME, ctypes.addressof(buffer))


def drop_all_privileges() -> None:
    """Drop every capability of the calling process, and the ways to regain one by exec: sets no_new_privs."""
    drop = _libc.prctl
    for capability in range(64):
        if drop(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the last capability of this kernel
    keep_capabilities(0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def keep_capabilities(mask: int) -> None:
    """Keep only these permitted capabilities in effect; none is inherited by other programs."""
    try:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without ambient capabilities, as gVisor
            raise
    header = struct.pack("=II", _CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    # Two halves of effective, permitted and inheritable.
    _call("capset", _SYS_CAPSET, header, struct.pack("=6I", low, low, 0, high, high, 0))


def seccomp(operation: int, flags: int, argument: int) -> int:
    """Call seccomp(2); `argument` is an address."""
    return _call("seccomp", _SYS_SECCOMP, operation, flags, argument)


def openat2(directory: int, path: bytes, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """Open `path` relative to `directory`, close-on-exec; the kernel enforces the flags `resolve`.

    gVisor has no such call: there, with all of RESOLVE_STRICTLY, the path is opened name by name.
    """
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    try:
        return _call("openat2", _SYS_OPENAT2, directory, path, how, len(how))
    except OSError as error:
        if error.errno != errno.ENOSYS or resolve != RESOLVE_STRICTLY:
            raise
    return open_name_by_name(directory, path, flags, mode)


def open_name_by_name(directory: int, path: bytes, flags: int, mode: int = 0) -> int:
    """Open a path as `openat2` does with RESOLVE_STRICTLY: no link, no `..`, no other file system."""
    *parents, name = [part for part in path.split(b"/") if part != b"."] or [b"."]
    if path.startswith(b"/") or b".." in (*parents, name):
        raise OSError(errno.EXDEV, "the path leads out of its directory")
    device = os.fstat(directory).st_dev
    here = os.dup(directory)
    try:
        for parent in parents:
            below = _open_below(here, parent, os.O_PATH | os.O_DIRECTORY, 0, device)
            os.close(here)
            here = below
        return _open_below(here, name, flags, mode, device)
    finally:
        os.close(here)


def _open_below(directory: int, name: bytes, flags: int, mode: int, device: int) -> int:
    if not name:
        raise OSError(errno.ENOENT, "an empty name")
    try:
        found = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory)
    except NotADirectoryError:
        if stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise
    status = os.fstat(found)  # of a link itself, if it was opened as a path
    if stat.S_ISLNK(status.st_mode) or status.st_dev != device:
        os.close(found)
        raise OSError(errno.ELOOP if stat.S_ISLNK(status.st_mode) else errno.EXDEV, "a link or a mount")
    return found


def resize_tmpfs(mount_root: int, *, size: int, inodes: int) -> None:
    """Change the size limits of the tmpfs whose mount root is open as `mount_root`."""
    with closing_fd(_call("fspick", _SYS_FSPICK, mount_root, b"", _FSPICK_EMPTY_PATH)) as context:
        for key, value in (("size", size), ("nr_inodes", inodes)):
            _call(
                f"fsconfig {key}",
                _SYS_FSCONFIG,
                context,
                _FSCONFIG_SET_STRING,
                key.encode(),
                str(value).encode(),
                0,
            )
        _call("fsconfig reconfigure", _SYS_FSCONFIG, context, _FSCONFIG_CMD_RECONFIGURE, None, None, 0)


def mount_detached(filesystem_type: str, source: str, options: dict[str, str | None]) -> int:
    """Return a descriptor of a new mount (nosuid, nodev, noatime); unattached, it ends with its descriptor."""
    with closing_fd(
        _call(f"fsopen {filesystem_type}", _SYS_FSOPEN, filesystem_type.encode(), _CLOEXEC)
    ) as context:
        for key, value in {"source": source, **options}.items():
            what = _FSCONFIG_SET_FLAG if value is None else _FSCONFIG_SET_STRING
            encoded = None if value is None else os.fsencode(value)
            _call(f"fsconfig {key}", _SYS_FSCONFIG, context, what, key.encode(), encoded, 0)
        _call(f"mount {filesystem_type}", _SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _call(
            f"fsmount {filesystem_type}", _SYS_FSMOUNT, context, _CLOEXEC, _MOUNT_ATTR_NOSUID_NODEV_NOATIME
        )


def landlock_abi() -> int:
    """Return the Landlock ABI version of this kernel, or 0."""
    result: int = _libc.syscall(
        ctypes.c_long(_SYS_LANDLOCK_CREATE_RULESET), None, ctypes.c_long(0), ctypes.c_long(1)
    )
    return max(result, 0)


def landlock_create(files: int, network: int, scoped: int) -> int:
    # Older kernels accept the longer structure if the extra fields are zero.
    attributes = struct.pack("=QQQ", files, network, scoped)
    return _call("landlock_create_ruleset", _SYS_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)


def landlock_allow(ruleset: int, directory: int, rights: int) -> None:
    rule = struct.pack("=Qi", rights, directory)
    _call("landlock_add_rule", _SYS_LANDLOCK_ADD_RULE, ruleset, 1, rule, 0)


def landlock_enforce(ruleset: int) -> None:
    _call("landlock_restrict_self", _SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0)


if sys.byteorder != "little":  # the structures here and the committed filters assume it
    raise ImportError("fumehood's jail is built for little-endian machines only")
