"""Reads secret files, after checking that no other user can read or change them."""

import os
import stat
from pathlib import Path

_OTHERS_ACCESS = stat.S_IRWXO
_GROUP_WRITE = stat.S_IWGRP | stat.S_IXGRP


class InsecureSecretFile(Exception):
    """The file is not safe to use; the message says why and what to do."""


def read_secret_file(path: Path, limit: int = 1 << 20) -> bytes:
    """At most `limit` bytes of the file. Raises InsecureSecretFile, OSError.

    Checks the opened file, and follows links: Kubernetes mounts secrets as links.
    """
    with path.open("rb") as file:
        check_secret_file(os.fstat(file.fileno()), path)
        return file.read(limit)


def check_secret_file(found: os.stat_result, path: Path) -> None:
    """Raises InsecureSecretFile unless only this user and root can read and change the file.

    A file of root may be readable by its group: a non-root pod reads its secrets through `fsGroup`.
    """
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode)):
        raise InsecureSecretFile("it is not a regular file")
    if found.st_uid not in (0, os.geteuid()):
        raise InsecureSecretFile(
            f"it belongs to another user ({found.st_uid}), who can read and change it. Change its owner: chown "
            f"{os.geteuid()} {path}"
        )
    if found.st_mode & _OTHERS_ACCESS:
        raise InsecureSecretFile(
            f"other users may read it. Restrict it: chmod 600 {path} (for a secret that is mounted into a pod, set "
            "defaultMode: 0400)"
        )
    if found.st_mode & _GROUP_WRITE or (found.st_mode & stat.S_IRGRP and found.st_uid != 0):
        raise InsecureSecretFile(f"its group may read or change it. Restrict it: chmod 600 {path}")
