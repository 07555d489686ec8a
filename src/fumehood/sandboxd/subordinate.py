"""User ranges that /etc/subuid grants an ordinary user, for newuidmap; imports only the standard library and siblings."""

import os
import pwd
import shutil
from pathlib import Path

from fumehood.sandboxd.zygotes import UserRange

_MOST = 4096


def subordinate_users(etc: Path = Path("/etc")) -> UserRange | None:
    """The range of this user, or None: then all its sandboxes share one kernel user (docs/security.md)."""
    if shutil.which("newuidmap") is None or shutil.which("newgidmap") is None:
        return None
    users = _granted(etc / "subuid")
    groups = _granted(etc / "subgid")
    # One range serves both maps, so they must start alike.
    if users is None or groups is None or users[0] != groups[0]:
        return None
    return UserRange(users[0], min(users[1], groups[1], _MOST), own=os.getuid())


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
