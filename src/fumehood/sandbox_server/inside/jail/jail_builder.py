"""Builds one sandbox around the calling process, step by step.

The order matters and is told in docs/security.md: cgroup, mounts and namespaces while the zygote's
privileges in its own user namespace last, then a nested user namespace in which the mounts are locked,
then capabilities, limits, Landlock, and the system-call filter last.
"""

import fcntl
import json
import os
import resource
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.inside.jail import landlock, seccomp_filter

_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x1 | 0x40
_BACKLOG = 64
# Files of a network namespace that tell of the whole host: every packet it takes, its sockets and their memory. The
# supervisor still reads the last one, which is its own or, for root, any.
_HOST_WIDE_FILES = {"softnet_stat": 0, "protocols": 0, "rt_acct": 0, "sockstat": 0o400}
NAMESPACE_FLAGS = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
_MOUNT_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV


class JailPlan(NamedTuple):
    """What the supervisor asks for, told over the sandbox's own channel.

    With namespaces the zygote has what is common to all, and only the rest is told: see `particulars`.

    uid: the sandbox's user in the zygote's user namespace.
    disk: a detached mount came with the plan; it holds the files, and `data_bytes` is for shared memory alone.
    walls: `namespaces`; or `process`, where something outside (a pod, or nothing in degraded mode) is the wall
    and only limits, Landlock and the filter are put on here.
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
    def decode(cls, body: str) -> "JailPlan":
        return cls(**json.loads(body))

    def encode(self) -> str:
        return json.dumps(self._asdict())

    def encode_overrides(self) -> bytes:
        """In few bytes and without JSON, whose code a sandbox would have to copy while it starts."""
        return b"%d %d %d %d" % (self.uid, self.data_bytes, self.fresh_interpreter, self.disk)

    def with_overrides(self, body: bytes) -> "JailPlan":
        uid, data_bytes, fresh, disk = body.split()
        return self._replace(
            uid=int(uid), data_bytes=int(data_bytes), fresh_interpreter=fresh == b"1", disk=disk == b"1"
        )


def join_cgroups(fds: list[int]) -> None:
    for fd in fds:
        os.write(fd, b"0")
        os.close(fd)


def raise_oom_score(score: int) -> None:
    """Make the kernel choose this process rather than the host's when memory runs out."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else /proc/self is root's
    fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    # Lowering takes rights that a pod does not have.
    if int(os.read(fd, 16)) < score:
        os.pwrite(fd, b"%d" % score, 0)
    os.close(fd)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def build_jail(plan: JailPlan, init_pidfd: int, disks: list[int]) -> None:
    """Furnish the namespaces of the sandbox's first process and enter them, as an owner of nothing outside."""
    os.setns(init_pidfd, NAMESPACE_FLAGS)
    os.unshare(os.CLONE_NEWCGROUP)  # whose root is where this process has just gone
    _bring_up_loopback()  # needs the proc that shows more than processes
    _mount_tmpfs(plan)
    _mount_proc()
    if plan.disk:
        _attach_disk(plan, disks)
    else:
        _bind_writable_directories(layout.WRITABLE, plan.uid)
    syscalls.set_hostname(layout.HOSTNAME)
    _enter_user_namespace(plan.uid)


def _attach_disk(plan: JailPlan, disks: list[int]) -> None:
    """Files lie on a disk of this sandbox's own; shared memory has to be memory, and is charged as such."""
    _bind_writable_directories((layout.SHARED_MEMORY,), plan.uid)
    (disk,) = disks
    syscalls.attach_mount(disk, layout.STAGING)
    os.close(disk)
    _bind_writable_directories(
        [target for target in layout.WRITABLE if target != layout.SHARED_MEMORY], plan.uid
    )


def _mount_tmpfs(plan: JailPlan) -> None:
    """One, hence one quota of bytes and inodes, for every writable place."""
    options = f"size={plan.data_bytes},nr_inodes={plan.data_inodes},mode=0755"
    syscalls.mount("data", layout.STAGING, "tmpfs", _MOUNT_FLAGS, options)


def _bind_writable_directories(targets: Iterable[str], uid: int) -> None:
    """Give each of the places a directory of what is mounted for staging, and leave nothing else of it in sight."""
    for number, target in enumerate(targets):
        source = f"{layout.STAGING}/{number}"
        os.mkdir(source)
        os.chmod(source, 0o1777 if target in (layout.TEMPORARY_DIRECTORY, layout.SHARED_MEMORY) else 0o755)
        os.chown(source, uid, uid)
        syscalls.mount(source, target, None, syscalls.MS_BIND)
    syscalls.unmount(layout.STAGING, syscalls.MNT_DETACH)


def _mount_proc() -> None:
    """The kernel grants a new proc only where an old one is in full view. That goes last, and with the staging place.

    Each time something is unmounted the kernel waits until no processor can still see it: so all goes at once.
    """
    old, new = f"{layout.STAGING}/old", f"{layout.STAGING}/new"
    os.mkdir(old)
    os.mkdir(new)
    syscalls.mount("proc", new, "proc", _MOUNT_FLAGS | syscalls.MS_NOEXEC, "subset=pid")
    syscalls.mount("/proc", old, None, syscalls.MS_MOVE)
    syscalls.mount(new, "/proc", None, syscalls.MS_MOVE)
    os.rmdir(new)


def _write_file(path: str, text: bytes) -> None:
    """Without a file object, which would touch, and so copy, many pages that the forks share."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, text)
    os.close(fd)


def _bring_up_loopback() -> None:
    """The network is this and nothing else.

    Small buffers: cgroup v1 counts those of TCP only in part, so their number times the least size, which every
    socket is granted, has to stay in proportion to what it does count of a socket.
    """
    for name in ("tcp_rmem", "tcp_wmem"):
        _write_file(f"/proc/sys/net/ipv4/{name}", b"4096 4096 65536")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))
    for name, mode in _HOST_WIDE_FILES.items():
        try:  # nobody can undo it in the read-only proc of the sandbox
            os.chmod(f"/proc/self/net/{name}", mode)
        except FileNotFoundError:
            continue  # not in this kernel


def listen_on_loopback(port: int) -> int:
    """A listening socket on the sandbox's own loopback, for whoever is to accept there; nobody does yet."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
        return listener.detach()


def switch_user(uid: int) -> None:
    """Become the sandbox's kernel user; 0: an ordinary supervisor without a range, every sandbox is that user."""
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def _enter_user_namespace(uid: int) -> None:
    """Take the sandbox's own kernel user, then enter a user namespace that knows no other."""
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
    """Resource limits; after the user namespace, so that RLIMIT_NPROC counts this sandbox only."""
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 1, 1),  # not 0: see the policy of the filter
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
        resource.setrlimit(kind, (soft, hard))


def drop_privileges() -> None:
    """No capability left, and none to be had by executing anything."""
    syscalls.drop_all_capabilities()
    seccomp_filter.set_no_new_privs()


def apply_restrictions(plan: JailPlan, seccomp_program: bytes) -> None:
    """Landlock, then the system-call filter: the last steps before code that is not ours."""
    version = landlock.restrict(
        read_only=plan.read_only,
        read_write=plan.writable,
        devices=("/dev",) if plan.isolation == "namespaces" else layout.DEVICES,
        deny_tcp=plan.deny_tcp,
    )
    if plan.needs_landlock and not version:
        raise OSError(
            "this kernel has no Landlock, and nothing else would keep the code from the host's files"
        )
    seccomp_filter.install(seccomp_program)
