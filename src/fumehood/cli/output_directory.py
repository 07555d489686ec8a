"""Puts files of untrusted names and content into a directory of the operator's."""

import base64
import binascii
import os
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

_MAX_PATH_DEPTH = 32
_MAX_CANDIDATES = 10_000
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Characters that make a name look like another one, or act on a terminal that lists it.
_UNSAFE_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
_BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_IMAGE_SUFFIXES = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/gif": ".gif",
    "image/webp": ".webp",
    "image/svg+xml": ".svg",
}


class FileNotSaved(Exception):
    """A name or content that is not put on the operator's disk; the text says why."""


class OutputDirectory:
    """A directory that only grows: nothing in it is replaced, and no link in it is followed.

    Entering and `save` go by descriptors, so that what happens to the path meanwhile does not matter.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def save(self, name: str, content: bytes) -> str:
        """The path below the folder where the content now lies: `name`, or `name` with a number if that is taken."""
        *above, last = split_safe_path(name)
        stem, suffix = os.path.splitext(last)
        numbered = (f"{stem}-{number}{suffix}" for number in count(2))
        return self._write_first_free(above, _prepend(last, numbered), content)

    def save_image(self, suffix: str, content: bytes) -> str:
        return self._write_first_free([], (f"figure-{number}{suffix}" for number in count(1)), content)

    def _write_first_free(self, parents: list[str], candidates: Iterator[str], content: bytes) -> str:
        try:
            directory = self._open_subdirectory(parents)
            try:
                return "/".join([*parents, _write_new_file(directory, candidates, content)])
            finally:
                os.close(directory)
        except OSError as error:
            raise FileNotSaved(error.strerror or str(error)) from error

    def _open_subdirectory(self, parents: list[str]) -> int:
        here = os.dup(self._fd)
        for part in parents:
            try:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=here)
                below = os.open(part, _DIRECTORY_FLAGS, dir_fd=here)
            except NotADirectoryError as error:
                raise FileNotSaved("a file or a link stands where its directory would be") from error
            finally:
                os.close(here)
            here = below
        return here


def split_safe_path(name: str) -> list[str]:
    """The parts of a relative path without tricks; the sandbox server has checked it once, this is the second time."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise FileNotSaved("not a plain relative path")
    # Programs obey many of them without being asked: .envrc, .git/hooks, .vscode, .bashrc.
    if any(part.startswith(".") for part in parts):
        raise FileNotSaved("hidden: a part of its path begins with a dot")
    if len(parts) > _MAX_PATH_DEPTH:
        raise FileNotSaved(f"more than {_MAX_PATH_DEPTH} directories deep")
    for char in name:
        if unicodedata.category(char) in _UNSAFE_CATEGORIES or char in _BIDI_CONTROLS:
            raise FileNotSaved("its name has control characters or is not valid text")
    return parts


def _prepend(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _write_new_file(directory: int, candidates: Iterator[str], content: bytes) -> str:
    """Write to the first candidate that is free or has this very content already."""
    for name in islice(candidates, _MAX_CANDIDATES):
        try:
            fd = os.open(name, _CREATE_FLAGS, 0o644, dir_fd=directory)
        except FileExistsError:
            if _has_content(directory, name, content):
                return name
            continue
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
        except BaseException:
            os.unlink(name, dir_fd=directory)
            raise
        return name
    raise FileNotSaved(f"{_MAX_CANDIDATES} files of that name are there already")


def _has_content(directory: int, name: str, content: bytes) -> bool:
    try:
        fd = os.open(name, _READ_FLAGS, dir_fd=directory)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size != len(content):
            return False
        return file.read(len(content) + 1) == content


def decode_images(data: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """The pictures among what was shown, each with the suffix of its file; raises NotSaved for broken ones."""
    for kind, suffix in _IMAGE_SUFFIXES.items():
        if kind not in data:
            continue
        if kind == "image/svg+xml":
            yield suffix, data[kind].encode()
            continue
        try:
            yield suffix, base64.b64decode(data[kind])
        except (binascii.Error, ValueError) as error:
            raise FileNotSaved(f"a picture ({kind}) that is not valid base64") from error
