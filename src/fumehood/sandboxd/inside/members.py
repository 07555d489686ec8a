"""What a member of an archive may be called, and who takes it; imports only the standard library and siblings."""

import os
import re
from collections.abc import Iterable
from typing import Protocol

from fumehood.sandboxd.inside import files
from fumehood.sandboxd.inside.leave import Refused

_DRIVE = re.compile(r"[A-Za-z]:")


class Sink(Protocol):
    """Takes members one after another; raises Refused for one that cannot be."""

    most_members: int

    def file(self, name: str, content: Iterable[bytes], *, executable: bool) -> None: ...

    def directory(self, name: str) -> None: ...

    def skip(self) -> None:
        """A member that is neither: a link, a device, a pipe."""
        ...


def member_parts(name: str, into: list[bytes]) -> list[bytes]:
    """The parts of a member's path below the data directory; none for the directory itself. Raises Refused."""
    if name.startswith("/") or _DRIVE.match(name):
        raise Refused(f"{shown(name)}: an absolute name")
    if "\\" in name:
        # Meant as a separator by some, as a letter by others: whoever reads it otherwise is deceived.
        raise Refused(f"{shown(name)}: a name with a backslash; archives separate directories by /")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts:
        return []
    try:
        return files.checked(os.fsdecode(b"/".join([*into, *(part.encode() for part in parts)]))).split(b"/")
    except (files.UnsafePath, UnicodeEncodeError) as error:
        raise Refused(f"{shown(name)}: {error}") from None


def shown(name: str | bytes) -> str:
    if isinstance(name, bytes):
        name = name.decode(errors="backslashreplace")
    return ascii(name[:200])[1:-1]
