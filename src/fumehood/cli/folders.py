"""Puts files of untrusted names and content into a directory of the operator's; imports the standard library."""

import base64
import binascii
import os
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

_MOST_PARTS = 32
_MOST_NUMBERS = 10_000
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Characters that make a name look like another one, or act on a terminal that lists it.
_BAD_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_PICTURES = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/gif": ".gif",
    "image/webp": ".webp",
    "image/svg+xml": ".svg",
}


class NotSaved(Exception):
    """A name or content that is not put on the operator's disk; the text says why."""


class Folder:
    """A directory that only grows: nothing in it is replaced, and no link in it is followed.

    Entering and `save` go by descriptors, so that what happens to the path meanwhile does not matter.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def save(self, name: str, content: bytes) -> str:
        """The path below the folder where the content now lies: `name`, or `name` with a number if that is taken."""
        *above, last = checked_parts(name)
        stem, suffix = os.path.splitext(last)
        numbered = (f"{stem}-{number}{suffix}" for number in count(2))
        return self._place(above, _with_first(last, numbered), content)

    def save_picture(self, suffix: str, content: bytes) -> str:
        return self._place([], (f"figure-{number}{suffix}" for number in count(1)), content)

    def _place(self, above: list[str], candidates: Iterator[str], content: bytes) -> str:
        try:
            directory = self._descend(above)
            try:
                return "/".join([*above, _put(directory, candidates, content)])
            finally:
                os.close(directory)
        except OSError as error:
            raise NotSaved(error.strerror or str(error)) from error

    def _descend(self, above: list[str]) -> int:
        here = os.dup(self._fd)
        for part in above:
            try:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=here)
                below = os.open(part, _DIRECTORY, dir_fd=here)
            except NotADirectoryError as error:
                raise NotSaved("a file or a link stands where its directory would be") from error
            finally:
                os.close(here)
            here = below
        return here


def checked_parts(name: str) -> list[str]:
    """The parts of a relative path without tricks; the sandbox server has checked it once, this is the second time."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise NotSaved("not a plain relative path")
    # Programs obey many of them without being asked: .envrc, .git/hooks, .vscode, .bashrc.
    if any(part.startswith(".") for part in parts):
        raise NotSaved("hidden: a part of its path begins with a dot")
    if len(parts) > _MOST_PARTS:
        raise NotSaved(f"more than {_MOST_PARTS} directories deep")
    for char in name:
        if unicodedata.category(char) in _BAD_CATEGORIES or char in _BIDIRECTIONAL:
            raise NotSaved("its name has control characters or is not valid text")
    return parts


def _with_first(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _put(directory: int, candidates: Iterator[str], content: bytes) -> str:
    """Write to the first candidate that is free or has this very content already."""
    for name in islice(candidates, _MOST_NUMBERS):
        try:
            fd = os.open(name, _NEW_FILE, 0o644, dir_fd=directory)
        except FileExistsError:
            if _holds(directory, name, content):
                return name
            continue
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
        except BaseException:
            os.unlink(name, dir_fd=directory)
            raise
        return name
    raise NotSaved(f"{_MOST_NUMBERS} files of that name are there already")


def _holds(directory: int, name: str, content: bytes) -> bool:
    try:
        fd = os.open(name, _OLD_FILE, dir_fd=directory)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size != len(content):
            return False
        return file.read(len(content) + 1) == content


def pictures(data: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """The pictures among what was shown, each with the suffix of its file; raises NotSaved for broken ones."""
    for kind, suffix in _PICTURES.items():
        if kind not in data:
            continue
        if kind == "image/svg+xml":
            yield suffix, data[kind].encode()
            continue
        try:
            yield suffix, base64.b64decode(data[kind])
        except (binascii.Error, ValueError) as error:
            raise NotSaved(f"a picture ({kind}) that is not valid base64") from error
