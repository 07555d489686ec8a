"""Uid ranges for sandboxes: a reserved block as root, or what /etc/subuid grants."""

import fcntl
import os
import pwd
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from fumehood.sandbox_server.isolation_errors import IsolationUnavailable

_UIDS_PER_BLOCK = 4096
_MAX_BLOCKS = 64


@dataclass(slots=True)
class UidRange:
    """Uids of one zygote and its sandboxes; uid 0 of its namespace is `own_ids`, or else the first."""

    first_uid: int
    count: int
    own_ids: tuple[int, int] | None = None  # uid and gid
    lock: IO[bytes] | None = None
    installer_uid: int | None = None  # of install jails: the same for all supervisors, which share a cache
    proxy_uid: int | None = None  # of the egress proxy; None if it must run as our own

    @property
    def zygote_uid(self) -> int:
        return self.first_uid if self.own_ids is None else self.own_ids[0]

    def id_map_rows(self, kind: Literal["uid", "gid"]) -> list[tuple[int, int, int]]:
        """Rows (inside, outside, count) of the uid or gid map."""
        if self.own_ids is None:
            return [(0, self.first_uid, self.count)]
        return [(0, self.own_ids[kind == "gid"], 1), (1, self.first_uid, self.count - 1)]

    def write_id_maps(self, pid: int) -> None:
        """Write the maps of a process in a new user namespace; raises OSError, SubprocessError."""
        for kind in ("uid", "gid"):
            numbers = [[str(number) for number in row] for row in self.id_map_rows(kind)]
            if self.own_ids is None:
                Path(f"/proc/{pid}/{kind}_map").write_text("\n".join(map(" ".join, numbers)) + "\n")
            else:
                arguments = [number for row in numbers for number in row]
                subprocess.run(
                    [f"new{kind}map", str(pid), *arguments], check=True, capture_output=True, timeout=10
                )

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def reserve_uid_range(
    base: int, directory: Path = Path("/run/fumehood"), proc: Path = Path("/proc")
) -> UidRange:
    """As root: a block that no other supervisor on this host uses, locked for as long as we live.

    Sandboxes of two supervisors with the same uid would share its kernel quotas.
    """
    base, available = _find_mapped_range(base, proc / "self/uid_map")
    users = _lock_block(base, available, directory, own=None)
    users.installer_uid = base + available - 1
    if users.installer_uid < users.first_uid + users.count:
        users.count -= 1  # not for sandboxes
    users.count -= 1  # nor is this one
    users.proxy_uid = users.first_uid + users.count
    return users


def _find_mapped_range(base: int, uid_map: Path) -> tuple[int, int]:
    """(first uid, count) for blocks: at `base`, or in the upper half of a user namespace that lacks it."""
    rows = [[int(field) for field in line.split()] for line in uid_map.read_text().splitlines()]
    wanted = _MAX_BLOCKS * _UIDS_PER_BLOCK
    if any(first <= base and base + wanted <= first + count for first, _, count in rows):
        return base, wanted
    first, _, count = max(rows, key=lambda row: row[2])
    if count < 2 * _UIDS_PER_BLOCK:
        raise IsolationUnavailable(
            f"This container knows {count} users, too few for a user per sandbox.",
            f"Map at least {2 * _UIDS_PER_BLOCK} users into it.",
        )
    return first + count // 2, count // 2


def reserve_subordinate_uids(etc: Path = Path("/etc"), directory: Path | None = None) -> UidRange | None:
    """As an ordinary user: a block of the granted range; None means that all sandboxes share our uid."""
    if shutil.which("newuidmap") is None or shutil.which("newgidmap") is None:
        return None
    users = _read_granted_range(etc / "subuid")
    groups = _read_granted_range(etc / "subgid")
    # One range is used for both maps, so they must start alike.
    if users is None or groups is None or users[0] != groups[0]:
        return None
    own = (os.getuid(), os.getgid())
    if directory is None:
        directory = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"fumehood-{own[0]}"
    return _lock_block(users[0], min(users[1], groups[1]), directory, own=own)


def _lock_block(first: int, available: int, directory: Path, *, own: tuple[int, int] | None) -> UidRange:
    """Lock the first free block of `available` uids; only this user can write to the lock directory."""
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise IsolationUnavailable(
            f"{directory} is not a directory of this user alone.", "Remove it, or make it so (chmod 700)."
        )
    blocks = max(1, available // _UIDS_PER_BLOCK)
    for number in range(blocks):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.fdopen(os.open(directory / f"users-{first}-{number}.lock", flags, 0o600), "r+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return UidRange(
            first + number * _UIDS_PER_BLOCK, min(available, _UIDS_PER_BLOCK), own_ids=own, lock=lock
        )
    raise IsolationUnavailable(
        f"All {blocks} uid blocks are in use by other supervisors on this host.",
        "Stop one, or set another uid_base.",
    )


def _read_granted_range(path: Path) -> tuple[int, int] | None:
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
