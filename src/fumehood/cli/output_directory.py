"""Saves files with untrusted names and content into a local directory."""

import base64
import binascii
import os
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

from fumehood.protocol.name_sanitizing import candidate_names

_MAX_PATH_DEPTH = 32
_MAX_CANDIDATES = 10_000
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Characters that disguise a name or control a terminal.
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
    """A file that is not saved; the text says why."""


class OutputDirectory:
    """A directory in which no file is overwritten and no link followed.

    It works with descriptors, so that changes of the path meanwhile do not matter.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def save(self, name: str, content: bytes) -> str:
        """Save a file and return its relative path: `name`, with a number if it exists with other content."""
        *parents, last = split_safe_path(name)
        return self._write_first_free(parents, candidate_names(last), content)

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
        current = os.dup(self._fd)
        for part in parents:
            try:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=current)
                child = os.open(part, _DIRECTORY_FLAGS, dir_fd=current)
            except NotADirectoryError as error:
                raise FileNotSaved("its directory exists as a file or a link") from error
            finally:
                os.close(current)
            current = child
        return current


def split_safe_path(name: str) -> list[str]:
    """Split a relative path and check its parts. Raises FileNotSaved. The sandbox server has checked it before."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise FileNotSaved("not a plain relative path")
    # Programs run many of them unasked: .envrc, .git/hooks, .vscode, .bashrc.
    if any(part.startswith(".") for part in parts):
        raise FileNotSaved("hidden: a part of its path begins with a dot")
    if len(parts) > _MAX_PATH_DEPTH:
        raise FileNotSaved(f"more than {_MAX_PATH_DEPTH} directories deep")
    for char in name:
        if unicodedata.category(char) in _UNSAFE_CATEGORIES or char in _BIDI_CONTROLS:
            raise FileNotSaved("its name contains control characters or is not valid text")
    return parts


def _write_new_file(directory: int, candidates: Iterator[str], content: bytes) -> str:
    """Write to the first candidate that does not exist; return one that exists with the same content."""
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
    raise FileNotSaved(f"{_MAX_CANDIDATES} files with this name exist")


def _has_content(directory: int, name: str, content: bytes) -> bool:
    try:
        fd = os.open(name, _READ_FLAGS, dir_fd=directory)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(content):
            return False
        return file.read(len(content) + 1) == content


def decode_images(data: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """Decode the images of a display event, each with its file suffix. Raises FileNotSaved if one is invalid."""
    for media_type, suffix in _IMAGE_SUFFIXES.items():
        if media_type not in data:
            continue
        if media_type == "image/svg+xml":
            yield suffix, data[media_type].encode()
            continue
        try:
            yield suffix, base64.b64decode(data[media_type])
        except (binascii.Error, ValueError) as error:
            raise FileNotSaved(f"an image ({media_type}) that is not valid base64") from error
