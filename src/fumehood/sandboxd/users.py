"""Kernel users for sandboxes: a block of root's, or what /etc/subuid grants; imports only siblings."""

import fcntl
import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from fumehood.sandboxd.errors import IsolationUnavailable

_PER_BLOCK = 4096
_BLOCKS = 64


@dataclass(slots=True)
class UserRange:
    """Users for one zygote and its sandboxes; user 0 of the zygote's namespace is `own`, or else the first."""

    first: int
    count: int
    own: tuple[int, int] | None = None  # user and group
    lock: IO[bytes] | None = None

    @property
    def zygote(self) -> int:
        return self.first if self.own is None else self.own[0]

    def rows(self, kind: Literal["uid", "gid"]) -> list[tuple[int, int, int]]:
        """(inside, outside, count) of the map of users or groups."""
        if self.own is None:
            return [(0, self.first, self.count)]
        return [(0, self.own[kind == "gid"], 1), (1, self.first, self.count - 1)]

    def map_into(self, pid: int) -> None:
        """Write the maps of a process that waits in a fresh user namespace; OSError or SubprocessError if refused."""
        for kind in ("uid", "gid"):
            numbers = [[str(number) for number in row] for row in self.rows(kind)]
            if self.own is None:
                Path(f"/proc/{pid}/{kind}_map").write_text("\n".join(map(" ".join, numbers)) + "\n")
            else:
                arguments = [number for row in numbers for number in row]
                subprocess.run(
                    [f"new{kind}map", str(pid), *arguments], check=True, capture_output=True, timeout=10
                )

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def reserve_users(base: int, directory: Path | None = None) -> UserRange:
    """As root: a block that no other supervisor on this host has, held by a lock for as long as we live.

    Sandboxes of two supervisors under one kernel user would share its quotas.
    """
    if directory is None:
        directory = Path("/run/lock") if os.path.isdir("/run/lock") else Path("/run")
    for number in range(_BLOCKS):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.fdopen(os.open(directory / f"fumehood-users-{base}-{number}.lock", flags, 0o600), "r+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return UserRange(base + number * _PER_BLOCK, _PER_BLOCK, lock=lock)
    raise IsolationUnavailable(
        f"All {_BLOCKS} blocks of sandbox users are taken by other supervisors on this host.",
        "Stop one, or set another uid_base.",
    )


def subordinate_users(etc: Path = Path("/etc")) -> UserRange | None:
    """As an ordinary user: the granted range, or None: then all its sandboxes share one kernel user."""
    if shutil.which("newuidmap") is None or shutil.which("newgidmap") is None:
        return None
    users = _granted(etc / "subuid")
    groups = _granted(etc / "subgid")
    # One range serves both maps, so they must start alike.
    if users is None or groups is None or users[0] != groups[0]:
        return None
    count = min(users[1], groups[1], _PER_BLOCK)
    return UserRange(users[0], count, own=(os.getuid(), os.getgid()))


def _granted(path: Path) -> tuple[int, int] | None:
    names = {str(os.getuid())}
    try:
        names.add(pwd.getpwuid(os.getuid()).pw_name)
        lines = path.read_text().splitlines()
    except (KeyError, OSError):
        return None
    for line in lines:
        fields = line.split(":")
        if len(fields) == 3 and fields[0] in names and fields[2].isdigit() and int(fields[2]) >= 2:
            return int(fields[1]), int(fields[2])
    return None
