"""Checks names of archive members, and the interface that receives members."""

import os
import re
from collections.abc import Iterable
from typing import Protocol

from fumehood.sandbox_server.inside.files import untrusted_files
from fumehood.sandbox_server.inside.files.quota_requests import FileTaskRefused

_DRIVE = re.compile(r"[A-Za-z]:")


class MemberSink(Protocol):
    """Receives members one after another. Every method raises FileTaskRefused for one that it refuses."""

    max_members: int

    def add_file(self, name: str, content: Iterable[bytes], *, executable: bool) -> None: ...

    def add_directory(self, name: str) -> None: ...

    def skip(self) -> None:
        """Count a member that is neither file nor directory: a link, a device, a pipe."""
        ...


def split_member_name(name: str, into: list[bytes]) -> list[bytes]:
    """Return the parts of a member's path below the data directory, none for the archive's root.

    Raises FileTaskRefused.
    """
    if name.startswith("/") or _DRIVE.match(name):
        raise FileTaskRefused(f"{printable_name(name)}: an absolute name")
    if "\\" in name:
        # Some programs read it as a separator, others as a character: the name is ambiguous.
        raise FileTaskRefused(
            f"{printable_name(name)}: a name with a backslash; archives separate directories by /"
        )
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts:
        return []
    try:
        return untrusted_files.check_path(
            os.fsdecode(b"/".join([*into, *(part.encode() for part in parts)]))
        ).split(b"/")
    except (untrusted_files.UnsafePath, UnicodeEncodeError) as error:
        raise FileTaskRefused(f"{printable_name(name)}: {error}") from None


def printable_name(name: str | bytes) -> str:
    """Return the start of a name in ASCII, escaped, for messages."""
    if isinstance(name, bytes):
        name = name.decode(errors="backslashreplace")
    return ascii(name[:200])[1:-1]
