"""Finds the cgroups (v1, v2) below which this process may create others."""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fumehood.sandbox_server.isolation_errors import IsolationUnavailable

type CgroupVersion = Literal["v1", "v2"]

REQUIRED_CONTROLLERS = frozenset({"memory", "pids"})
CONTROLLERS = REQUIRED_CONTROLLERS | {"cpu"}
SUPERVISOR_LEAF = "supervisor"

_ADVICE_V2 = (
    "Start it with `systemd-run --user --scope -p Delegate=yes …`, set Delegate=yes in its systemd service,"
    " or run it as root."
)
_ADVICE_V1 = (
    "As root, create a cgroup in the memory, pids and cpu hierarchies, chown it to uid {uid} and start the"
    " supervisor in it, or run the supervisor as root."
)
_ADVICE_READ_ONLY = (
    "Mount the cgroup file system writable in this container (for example a privileged container with a"
    " private cgroup namespace)."
)
_ADVICE_MISSING = (
    "Mount a cgroup file system with the memory and pids controllers on {root} (memory may need the kernel"
    " parameter cgroup_enable=memory)."
)
_ADVICE_SHARED = "Start the supervisor in a cgroup of its own, such as a systemd service with Delegate=yes."


class CgroupUnavailable(IsolationUnavailable):
    """Memory or processes cannot be limited on this host."""


def to_unavailable(error: OSError, version: CgroupVersion) -> CgroupUnavailable:
    where = f" at {error.filename}" if error.filename else ""
    reason = f"No cgroup with limits can be created{where}: {error.strerror}."
    if error.errno == errno.EROFS:
        return CgroupUnavailable(reason, _ADVICE_READ_ONLY)
    if error.errno == errno.EBUSY:
        return CgroupUnavailable(reason, _ADVICE_SHARED)
    return CgroupUnavailable(reason, _ADVICE_V2 if version == "v2" else _ADVICE_V1.format(uid=os.geteuid()))


@dataclass(frozen=True)
class DelegatedCgroup:
    """A cgroup below which this process may create others, and the controllers that those will have."""

    path: Path
    controllers: frozenset[str]


# --- Control files --------------------------------------------------------------------------------
# By directory fd and relative path: creating and removing a sandbox takes a dozen of these; pathlib is half as fast.


def read_control_file(path: str, dir_fd: int | None = None) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        chunks: list[bytes] = []
        while chunk := os.read(fd, 65536):
            chunks.append(chunk)
    finally:
        os.close(fd)
    return b"".join(chunks).decode()


def write_control_file(path: str, value: str | int, dir_fd: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def read_member_pids(cgroup: str, dir_fd: int | None = None) -> list[int]:
    # A member outside our pid namespace reads as 0; the caller decides whether that matters.
    return [int(pid) for pid in read_control_file(f"{cgroup}/cgroup.procs", dir_fd).split()]


# --- Mounts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CgroupMount:
    version: CgroupVersion
    path: Path
    own_cgroup: Path  # the cgroup that this process is in
    controllers: frozenset[str]


def find_mounts(root: Path, proc: Path) -> Iterator[CgroupMount]:
    """The cgroup hierarchies mounted at or below `root`, with our own cgroup in each."""
    own = dict(_read_memberships(proc))
    for line in read_control_file(str(proc / "self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        path = Path(_unescape(fields[4]))
        if kind not in ("cgroup", "cgroup2") or not path.is_relative_to(root):
            continue
        if kind == "cgroup2":
            controllers = _read_words(path / "cgroup.controllers") & set(CONTROLLERS)
            yield CgroupMount(
                "v2", path, resolve_own_cgroup(path, _unescape(fields[3]), own.get("", "/")), controllers
            )
        elif controllers := frozenset(options.split(",")) & set(CONTROLLERS):
            member = own.get(min(controllers), "/")
            yield CgroupMount("v1", path, resolve_own_cgroup(path, _unescape(fields[3]), member), controllers)


def _read_memberships(proc: Path) -> Iterator[tuple[str, str]]:
    for line in read_control_file(str(proc / "self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def resolve_own_cgroup(mount: Path, mounted: str, cgroup: str) -> Path:
    # A container may see only part of the hierarchy, and our cgroup may be outside of it ("/../x").
    inside = Path(cgroup)
    if ".." in inside.parts or not inside.is_relative_to(mounted):
        return mount
    path = mount / inside.relative_to(mounted)
    return path if path.is_dir() else mount


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read_words(path: Path) -> frozenset[str]:
    try:
        return frozenset(read_control_file(str(path)).split())
    except OSError:
        return frozenset()


def find_parents_v1(mounts: Iterable[CgroupMount], root: Path) -> list[DelegatedCgroup]:
    parents: list[DelegatedCgroup] = []
    seen: set[str] = set()
    for mount in mounts:
        if mount.version == "v1" and not mount.controllers & seen:
            seen |= mount.controllers
            parents.append(DelegatedCgroup(mount.own_cgroup, mount.controllers))
    if missing := REQUIRED_CONTROLLERS - seen:
        reason = f"The kernel offers no cgroup controller for {' and '.join(sorted(missing))} here."
        raise CgroupUnavailable(reason, _ADVICE_MISSING.format(root=root))
    return parents


# --- The parent on v2 -----------------------------------------------------------------------------


def prepare_parent_v2(mount: CgroupMount) -> tuple[DelegatedCgroup, Callable[[], None] | None]:
    """Choose and prepare the cgroup to work below; returns it, and a function that undoes the preparation."""
    refusal: OSError | None = None
    for path in _find_candidates(mount):
        try:
            return _prepare(path, mount)
        except OSError as error:
            refusal = refusal or error
    if refusal is None:
        refusal = PermissionError(errno.EACCES, "it is not delegated to this user", str(mount.own_cgroup))
        if not os.access(mount.path, os.W_OK, effective_ids=True) and os.geteuid() == 0:
            refusal = OSError(errno.EROFS, os.strerror(errno.EROFS), str(mount.own_cgroup))
    raise refusal


def _find_candidates(mount: CgroupMount) -> list[Path]:
    """Our own cgroup if we may split it, then the nearest delegated ancestor, then the topmost writable one.

    The last is the root of the hierarchy for root, and on a desktop the user's `user@….service`.
    """
    above = [path for path in mount.own_cgroup.parents if path.is_relative_to(mount.path)]
    order = [path for path in above if _is_delegated(path)]
    order += [path for path in reversed(above) if path not in order]
    order = [path for path in order if _is_root_cgroup(path) or not read_member_pids(str(path))]
    if _may_split(mount):
        order.insert(0, mount.own_cgroup)
    return [
        path
        for path in order
        if _is_writable(path) and _read_words(path / "cgroup.controllers") >= REQUIRED_CONTROLLERS
    ]


def _may_split(mount: CgroupMount) -> bool:
    # Other processes of a login session must not be moved; in a cgroup delegated to us, or in our container, they
    # are our own launchers.
    own = mount.own_cgroup
    return own == mount.path or _is_delegated(own) or read_member_pids(str(own)) == [os.getpid()]


def _is_delegated(path: Path) -> bool:
    for attribute in ("trusted.delegate", "user.delegate"):  # set by systemd; users can read the second
        with suppress(OSError):
            if os.getxattr(path, attribute) == b"1":
                return True
    return False


def _is_writable(path: Path) -> bool:
    files = (path, path / "cgroup.procs", path / "cgroup.subtree_control")
    return all(os.access(file, os.W_OK, effective_ids=True) for file in files)


def _is_root_cgroup(path: Path) -> bool:
    # Only the real root lacks this file; only there a cgroup may have both children and processes.
    return not (path / "cgroup.events").exists()


def _prepare(path: Path, mount: CgroupMount) -> tuple[DelegatedCgroup, Callable[[], None] | None]:
    before = _read_words(path / "cgroup.subtree_control")
    moves = path == mount.own_cgroup and not _is_root_cgroup(path)
    leaf = path / SUPERVISOR_LEAF
    controllers = _read_words(path / "cgroup.controllers") & set(CONTROLLERS)

    def undo() -> None:
        # Fails harmlessly while another supervisor uses the same cgroup.
        with suppress(OSError):
            if added := " ".join(f"-{controller}" for controller in sorted(controllers - before)):
                write_control_file(str(path / "cgroup.subtree_control"), added)
            _move_processes(leaf, path)
            os.rmdir(leaf)

    try:
        if moves:
            with suppress(FileExistsError):
                os.mkdir(leaf, 0o755)
            _move_processes(path, leaf)
        enabled = enable_controllers(path, controllers)
    except OSError:
        if moves:
            undo()
        raise
    return DelegatedCgroup(path, enabled), undo if moves else None


def _move_processes(source: Path, target: Path) -> None:
    for _ in range(100):  # Members may fork meanwhile.
        pids = read_member_pids(str(source))
        if not pids:
            return
        if 0 in pids:
            raise OSError(errno.EBUSY, "it has processes of another pid namespace", str(source))
        for pid in pids:
            with suppress(ProcessLookupError):
                write_control_file(str(target / "cgroup.procs"), pid)
    raise OSError(errno.EBUSY, "its processes multiply faster than they can be moved", str(source))


def enable_controllers(path: Path, controllers: frozenset[str]) -> frozenset[str]:
    """Enable the controllers for the children of `path`; only cpu may be refused. Returns the enabled ones."""
    control = str(path / "cgroup.subtree_control")
    present = _read_words(Path(control))
    if wanted := " ".join(f"+{controller}" for controller in sorted(REQUIRED_CONTROLLERS - present)):
        write_control_file(control, wanted)
    if "cpu" in controllers - present:
        try:
            write_control_file(control, "+cpu")
        except OSError:
            return controllers - {"cpu"}
    return controllers
