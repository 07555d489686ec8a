"""Runs a program as an ordinary user where the tests themselves run as root.

    python tests/support/unprivileged_user.py [--delegate] [--subordinate] [--uid N] [--tree DIR]… -- PROGRAM ARGUMENT…

The interpreter and the checkout often lie in directories that only root may enter. Here, in a mount namespace
of its own, such a parent is replaced by an empty one through which just the needed tree can be reached.
With --tree these directories are to be reached, and not the checkout.
With --subordinate the user has a name and a range of further users for newuidmap, in that mount namespace only.
With --delegate the user gets a cgroup subtree of its own in every hierarchy, as an administrator would give it.
"""

import argparse
import ctypes
import errno
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_MS_BIND_REC = 4096 | 16384
_MS_PRIVATE_REC = (1 << 18) | 16384
_CONTROLLERS = ("memory", "pids", "cpu")
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [item.encode() if item is not None else None for item in (source, target, kind)]
    if _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() if options else None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def open_up(trees: list[Path]) -> None:
    """Make each tree reachable for everybody, in this mount namespace only."""
    os.unshare(os.CLONE_NEWNS)
    mount("none", "/", None, _MS_PRIVATE_REC)
    closed: dict[Path, list[tuple[Path, int]]] = {}
    for tree in trees:
        parent = next((path for path in reversed(tree.parents) if not path.stat().st_mode & 0o001), None)
        if parent is not None:
            closed.setdefault(parent, []).append((tree, os.open(tree, os.O_PATH)))
    for parent, members in closed.items():
        mount("open", str(parent), "tmpfs", 0, "mode=0755")
        for tree, anchor in members:
            tree.mkdir(parents=True, exist_ok=True)
            mount(f"/proc/self/fd/{anchor}", str(tree), None, _MS_BIND_REC)
            os.close(anchor)


def grant_users(uid: int) -> None:
    """A name and a range of users, as the administrator would write them into /etc."""
    with tempfile.TemporaryDirectory() as directory:
        lines = {
            "passwd": Path("/etc/passwd").read_text() + f"tester:x:{uid}:{uid}::/nonexistent:/bin/sh\n",
            "subuid": "tester:1000000:65536\n",
            "subgid": "tester:1000000:65536\n",
        }
        for name, text in lines.items():
            Path(f"/etc/{name}").touch()
            changed = Path(directory, name)
            changed.write_text(text)
            changed.chmod(0o644)
            mount(str(changed), f"/etc/{name}", None, _MS_BIND_REC)  # stays when the name is gone


def own_cgroup(controller: str) -> Path | None:
    """This process's cgroup in a v1 hierarchy."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            for place in (Path("/sys/fs/cgroup") / controller, Path("/sys/fs/cgroup") / names):
                if place.is_dir():
                    return place / path.lstrip("/")
    return None


def delegate(uid: int) -> list[Path]:
    """Cgroups that belong to the user, with this process moved into them."""
    name = f"test-user-{secrets.token_hex(4)}"
    made: list[Path] = []
    for controller in _CONTROLLERS:
        own = own_cgroup(controller)
        if own is None:
            sys.exit(f"no v1 hierarchy for {controller} here")
        directory = own / name
        directory.mkdir()
        made.append(directory)
        for path in (directory, directory / "cgroup.procs", directory / "tasks"):
            os.chown(path, uid, uid)
        (directory / "cgroup.procs").write_text(str(os.getpid()))
    return made


def leave(made: list[Path]) -> None:
    for directory in made:
        (directory.parent / "cgroup.procs").write_text(str(os.getpid()))
        # What a program that was killed could not take away itself, the lowest first.
        for path, _, _ in os.walk(directory, topdown=False):
            _remove(path)


def _remove(cgroup: str) -> None:
    """Its last members may still be dying."""
    for _ in range(500):
        try:
            os.rmdir(cgroup)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            time.sleep(0.02)
        else:
            return
    os.rmdir(cgroup)


def _terminated(number: int, frame: object) -> None:
    del frame
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delegate", action="store_true")
    parser.add_argument("--subordinate", action="store_true")
    parser.add_argument("--uid", type=int, default=54321)
    parser.add_argument("--tree", type=Path, action="append")
    parser.add_argument("program", nargs="+")
    arguments = parser.parse_args()
    project = Path(__file__).resolve().parents[2]
    open_up([Path(sys.base_prefix), *(arguments.tree or [project])])
    if arguments.subordinate:
        grant_users(arguments.uid)
    made = delegate(arguments.uid) if arguments.delegate else []
    signal.signal(signal.SIGTERM, _terminated)
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "LANG": "C.UTF-8"}
    try:
        return subprocess.run(
            arguments.program,
            user=arguments.uid,
            group=arguments.uid,
            extra_groups=[],
            env=environment,
            check=False,
        ).returncode
    finally:
        leave(made)


if __name__ == "__main__":
    sys.exit(main())
