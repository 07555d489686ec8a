"""Builds the jail of one sandbox around the calling process.

The order matters (docs/security.md): cgroup, mounts and namespaces while the zygote's privileges in its user namespace
last; then a nested user namespace in which the mounts are locked; then capabilities, limits, Landlock; the seccomp
filter last.
"""

import contextlib
import fcntl
import json
import os
import resource
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.inside.jail import landlock, seccomp_installer

_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x1 | 0x40
_BACKLOG = 64
# Files of a network namespace that describe the whole host: its packets, its sockets and their memory. The supervisor
# still reads the last one.
_HOST_WIDE_FILES = {"softnet_stat": 0, "protocols": 0, "rt_acct": 0, "sockstat": 0o400}
NAMESPACE_FLAGS = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
_MOUNT_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV


# gVisor has what these limit in its own, bounded memory, and does not let anybody set them.
_NOT_IN_GVISOR = (
    *(resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING),
    *(resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK),
)
_GVISOR_MARK = "/proc/sentry-meminfo"


class JailPlan(NamedTuple):
    """The jail that the supervisor asks for, sent over the sandbox's own channel.

    isolation: `namespaces`, or `process` where something outside isolates (a pod; nothing in mode `degraded`) and the
        jail is limits, Landlock and the seccomp filter.
    uid: the sandbox's user in the zygote's user namespace.
    disk: a detached mount came with the plan and holds the files; `data_bytes` then limits shared memory only.
    """

    isolation: str
    uid: int
    data_bytes: int
    data_inodes: int
    processes: int
    open_files: int
    fresh_interpreter: bool
    writable: list[str]
    read_only: list[str]
    deny_tcp: bool
    needs_landlock: bool
    work_directory: str
    disk: bool = False

    @classmethod
    def decode(cls, body: bytes) -> "JailPlan":
        return cls(**json.loads(body))

    def encode(self) -> bytes:
        return json.dumps(self._asdict()).encode()


def join_cgroups(fds: list[int]) -> None:
    """Move this process into the cgroups whose `cgroup.procs` are open as `fds`; closes them."""
    for fd in fds:
        os.write(fd, b"0")
        os.close(fd)


def raise_oom_score(score: int) -> None:
    """Make the OOM killer prefer this process to the host's."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
    fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    # A pod may not lower it.
    if int(os.read(fd, 16)) < score:
        os.pwrite(fd, b"%d" % score, 0)
    os.close(fd)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def build_jail(plan: JailPlan, init_pidfd: int, disks: list[int]) -> None:
    """Enter the namespaces of the sandbox's init, mount its file systems and become its user.

    disks: the descriptor of the detached mount if `plan.disk`, else empty.
    """
    os.setns(init_pidfd, NAMESPACE_FLAGS)
    os.unshare(os.CLONE_NEWCGROUP)  # its root is the cgroup that this process has just joined
    _bring_up_loopback()  # needs the full proc
    _mount_tmpfs(plan)
    _mount_proc()
    if plan.disk:
        _attach_disk(plan, disks)
    else:
        _bind_writable_directories(layout.WRITABLE, plan.uid)
    syscalls.set_hostname(layout.HOSTNAME)
    _enter_user_namespace(plan.uid)


def _attach_disk(plan: JailPlan, disks: list[int]) -> None:
    """Put the writable directories on the sandbox's disk, except shared memory, which stays on tmpfs."""
    _bind_writable_directories((layout.SHARED_MEMORY,), plan.uid)
    (disk,) = disks
    syscalls.attach_mount(disk, layout.STAGING)
    os.close(disk)
    _bind_writable_directories(
        [target for target in layout.WRITABLE if target != layout.SHARED_MEMORY], plan.uid
    )


def _mount_tmpfs(plan: JailPlan) -> None:
    """Mount one tmpfs, and so one quota of bytes and inodes, for all writable directories."""
    options = f"size={plan.data_bytes},nr_inodes={plan.data_inodes},mode=0755"
    syscalls.mount("data", layout.STAGING, "tmpfs", _MOUNT_FLAGS, options)


def _bind_writable_directories(targets: Iterable[str], uid: int) -> None:
    """Bind a directory of the staging mount to each target, then detach the staging mount."""
    for number, target in enumerate(targets):
        source = f"{layout.STAGING}/{number}"
        os.mkdir(source)
        os.chmod(source, 0o1777 if target in (layout.TEMPORARY_DIRECTORY, layout.SHARED_MEMORY) else 0o755)
        os.chown(source, uid, uid)
        syscalls.mount(source, target, None, syscalls.MS_BIND)
    syscalls.unmount(layout.STAGING, syscalls.MNT_DETACH)


def _mount_proc() -> None:
    """Mount a new proc and move the old one below the staging mount.

    The kernel allows a new proc only while a full one is visible. The old one is detached together with the staging
    mount: each unmount waits for an RCU grace period.
    """
    old, new = f"{layout.STAGING}/old", f"{layout.STAGING}/new"
    os.mkdir(old)
    os.mkdir(new)
    syscalls.mount("proc", new, "proc", _MOUNT_FLAGS | syscalls.MS_NOEXEC, "subset=pid")
    syscalls.mount("/proc", old, None, syscalls.MS_MOVE)
    syscalls.mount(new, "/proc", None, syscalls.MS_MOVE)
    os.rmdir(new)


def _write_file(path: str, text: bytes) -> None:
    """Write to an existing file without a file object, which would copy many shared pages."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, text)
    os.close(fd)


def _bring_up_loopback() -> None:
    """Bring up `lo`, the only interface, and hide files that describe the host.

    TCP buffers are small because cgroup v1 counts them only in part: the minimum that every socket gets must stay in
    proportion to what is counted for a socket.
    """
    for name in ("tcp_rmem", "tcp_wmem"):
        _write_file(f"/proc/sys/net/ipv4/{name}", b"4096 4096 65536")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))
    for name, mode in _HOST_WIDE_FILES.items():
        try:  # the sandbox's proc is read-only, so this cannot be undone
            os.chmod(f"/proc/self/net/{name}", mode)
        except FileNotFoundError:
            continue  # not in this kernel


def listen_on_loopback(port: int) -> int:
    """Return a listening socket on the sandbox's loopback; the supervisor decides who accepts."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
        return listener.detach()


def listen_on_path(path: str) -> int:
    """Return a listening unix socket: where code shares its network with others, loopback is not its own."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # left by an earlier run in this container
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        listener.bind(path)
        listener.listen(_BACKLOG)
        return listener.detach()


def switch_user(uid: int) -> None:
    """Become the sandbox's kernel user. 0: an unprivileged supervisor without a uid range; the user stays."""
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def _enter_user_namespace(uid: int) -> None:
    """Become the sandbox's kernel user, then enter a user namespace that maps no other."""
    switch_user(uid)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root after a change of user
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
    for name, line in (
        ("setgroups", b"deny"),
        ("gid_map", b"%d %d 1" % (layout.USER_ID, uid)),
        ("uid_map", b"%d %d 1" % (layout.USER_ID, uid)),
    ):
        _write_file(f"/proc/self/{name}", line)
    remount = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOEXEC | _MOUNT_FLAGS
    syscalls.mount("proc", "/proc", None, remount)


def set_resource_limits(plan: JailPlan) -> None:
    """Set the resource limits; after the user namespace, so that RLIMIT_NPROC counts this sandbox only."""
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 1, 1),  # not 0: see syscall_policy.py
        (resource.RLIMIT_NPROC, plan.processes, plan.processes),
        (resource.RLIMIT_NOFILE, min(1024, plan.open_files), plan.open_files),
        (resource.RLIMIT_MEMLOCK, 1 << 16, 1 << 16),
        (resource.RLIMIT_MSGQUEUE, 1 << 16, 1 << 16),
        (resource.RLIMIT_SIGPENDING, 1024, 1024),
        (resource.RLIMIT_RTPRIO, 0, 0),
        (resource.RLIMIT_NICE, 0, 0),
        (resource.RLIMIT_STACK, 8 << 20, 64 << 20),
    ):
        _, ceiling = resource.getrlimit(kind)
        if ceiling != resource.RLIM_INFINITY and hard > ceiling:
            soft, hard = min(soft, ceiling), ceiling
        try:
            resource.setrlimit(kind, (soft, hard))
        except ValueError:
            if kind not in _NOT_IN_GVISOR or not os.path.exists(_GVISOR_MARK):
                raise


def apply_restrictions(plan: JailPlan, seccomp_program: bytes) -> None:
    """Apply Landlock, then the seccomp filter: the last steps before untrusted code. Raises OSError."""
    version = landlock.restrict(
        read_only=plan.read_only,
        read_write=plan.writable,
        devices=("/dev",) if plan.isolation == "namespaces" else layout.DEVICES,
        deny_tcp=plan.deny_tcp,
    )
    if plan.needs_landlock and not version:
        raise OSError("this kernel has no Landlock, and nothing else keeps the code from the host's files")
    seccomp_installer.install(seccomp_program)
