"""Runs a program as a container of a pod would run it, as far as this matters for code: see `main`.

    python tests/support/pod_container.py --uid 10003 --gid 10000 --volume SRC:DST[:ro]… --tmpfs DST… -- PROGRAM…

It ends with whoever started it, and what it runs ends with it.
"""

import argparse
import os
import signal
import struct
import sys
from pathlib import Path

from unprivileged_user import open_up

from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.inside.jail import seccomp_installer

ROOT = Path(__file__).parents[2]
_UNSHARE = {"x86_64": 272, "aarch64": 97}[os.uname().machine]


def mount_over(path: str, source: int | None, *, read_only: bool = False) -> None:
    """Mount the tree that is open as `source`, or else an empty one, at a path that need not exist."""
    make_mount_point(Path(path))
    if source is None:
        syscalls.mount("tmpfs", path, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0777")
        return
    syscalls.mount(f"/proc/self/fd/{source}", path, None, syscalls.MS_BIND)
    if read_only:
        flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY
        syscalls.mount("none", path, None, flags | syscalls.MS_NOSUID | syscalls.MS_NODEV)


def make_mount_point(path: Path) -> None:
    """Make a directory, in this mount namespace only: its nearest parent is replaced by one with the same entries."""
    if path.is_dir():
        return
    parent = path.parent
    make_mount_point(parent)
    anchors = {entry.name: os.open(entry, os.O_PATH | os.O_NOFOLLOW) for entry in parent.iterdir()}
    links = {entry.name: os.readlink(entry) for entry in parent.iterdir() if entry.is_symlink()}
    directories = {entry.name for entry in parent.iterdir() if entry.is_dir() and not entry.is_symlink()}
    syscalls.mount("tmpfs", str(parent), "tmpfs", 0, "mode=0755")
    for name, anchor in anchors.items():
        target = parent / name
        if name in links:
            target.symlink_to(links[name])
        else:
            target.mkdir() if name in directories else target.touch()
            flags = syscalls.MS_BIND | syscalls.MS_REC
            syscalls.mount(f"/proc/self/fd/{anchor}", str(target), None, flags)
        os.close(anchor)
    path.mkdir()


def enter_user_namespace() -> None:
    """Where the tests do not run as root: the right to mount, and the same user."""
    uid, gid = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
    for name, line in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
        Path(f"/proc/self/{name}").write_text(line)


def refuse_unshare() -> None:
    """As a container runtime's default filter does; it leaves everything else to the filter of the code."""
    instructions = (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, _UNSHARE),
        (0x06, 0, 0, 0x00050001),
        (0x06, 0, 0, 0x7FFF0000),
    )
    seccomp_installer.install(b"".join(struct.pack("=HBBI", *one) for one in instructions))


def main() -> int:
    """Separate mounts, processes and user; volumes and nothing else of the pod; no privileges to gain."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uid", type=int, required=True)
    parser.add_argument("--gid", type=int, required=True)
    parser.add_argument("--hide", action="append", default=[])
    parser.add_argument("--volume", action="append", default=[])
    parser.add_argument("--tmpfs", action="append", default=[])
    parser.add_argument("--allow-unshare", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    is_root = os.geteuid() == 0
    volumes = [volume.split(":") for volume in options.volume]
    if is_root:
        open_up([ROOT, Path(sys.base_prefix)])
    else:
        enter_user_namespace()
    syscalls.mount("none", "/", None, syscalls.MS_PRIVATE | syscalls.MS_REC)
    sources = [os.open(source, os.O_PATH) for source, *_ in volumes]
    for path in (*options.hide, *options.tmpfs):
        mount_over(path, None)
    for (_, target, *mode), source in zip(volumes, sources, strict=True):
        mount_over(target, source, read_only=mode == ["ro"])
        os.close(source)
    os.unshare(os.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        syscalls.mount("proc", "/proc", "proc", 0)
        if is_root:
            os.setgroups([options.gid])
            os.setresgid(options.gid, options.gid, options.gid)
            os.setresuid(options.uid, options.uid, options.uid)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.drop_all_privileges()
        if not options.allow_unshare:
            refuse_unshare()
        os.chdir("/")
        os.execv(options.command[0], options.command)

    def pass_on(number: int, _: object) -> None:
        os.kill(pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) % 256


if __name__ == "__main__":
    sys.exit(main())
