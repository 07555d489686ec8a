"""Files behind one small interface, on the host or in memory.

Paths are relative to the filesystem's root, with `/` between their parts. What is listed is sorted. Errors are those
that Python's own files raise: FileNotFoundError, IsADirectoryError, NotADirectoryError; a path that is absolute or
climbs with `..` raises WorkspaceSecurityError.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol, runtime_checkable

from fumehood.client.errors import WorkspaceSecurityError


@runtime_checkable
class Filesystem(Protocol):
    """A directory exists while there is something in it; the root always does."""

    def read(self, path: str) -> bytes: ...
    def read_text(self, path: str, encoding: str = "utf-8") -> str: ...
    def write(self, path: str, content: bytes) -> None:
        """Make or replace a file; the directories that it needs are made, too."""
        ...

    def write_text(self, path: str, content: str, encoding: str = "utf-8") -> None: ...
    def exists(self, path: str) -> bool: ...
    def is_file(self, path: str) -> bool: ...
    def is_dir(self, path: str) -> bool: ...
    def list_dir(self, path: str) -> list[str]:
        """The names in a directory."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file."""
        ...

    def glob(self, pattern: str) -> list[str]:
        """The files whose path fits. `*` stays within one directory, `**` stands for any number of them."""
        ...


# --- paths and patterns -------------------------------------------------------------------------------


def normalize_path(path: str) -> str:
    """The path without `.` and doubled slashes; "." is the workspace itself. Raises WorkspaceSecurityError for a path
    that leads out of it.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise WorkspaceSecurityError(f"The path {path!r} is not within the workspace; give a relative one.")
    return "/".join(parts) or "."


def matches_glob(path: str, pattern: str) -> bool:
    """Whether the whole path fits the whole pattern; time is linear in both."""
    wanted = [part for part in pattern.split("/") if part not in ("", ".")]
    places = _skip_double_stars({0}, wanted)
    for part in path.split("/"):
        ahead = {
            place if wanted[place] == "**" else place + 1
            for place in places
            if _part_matches(part, wanted, place)
        }
        places = _skip_double_stars(ahead, wanted)
    return len(wanted) in places


def _part_matches(part: str, pattern_parts: list[str], position: int) -> bool:
    return position < len(pattern_parts) and (
        pattern_parts[position] == "**" or fnmatchcase(part, pattern_parts[position])
    )


def _skip_double_stars(positions: set[int], pattern_parts: list[str]) -> set[int]:
    """These places of the pattern, and those that are reached by letting `**` stand for nothing."""
    for place in sorted(positions):
        while place < len(pattern_parts) and pattern_parts[place] == "**":
            place += 1
            positions.add(place)
    return positions


# --- what all share -----------------------------------------------------------------------------------


class _TextMethods(ABC):
    """Text over bytes."""

    @abstractmethod
    def read(self, path: str) -> bytes: ...

    @abstractmethod
    def write(self, path: str, content: bytes) -> None: ...

    def read_text(self, path: str, encoding: str = "utf-8") -> str:
        return self.read(path).decode(encoding)

    def write_text(self, path: str, content: str, encoding: str = "utf-8") -> None:
        self.write(path, content.encode(encoding))


class ListingFilesystem(_TextMethods):
    """Answers every question about directories from the list of all files."""

    @abstractmethod
    def paths(self) -> Collection[str]:
        """Every file, in any order."""

    def exists(self, path: str) -> bool:
        place, files = normalize_path(path), self.paths()
        return place in files or is_directory(place, files)

    def is_file(self, path: str) -> bool:
        return normalize_path(path) in self.paths()

    def is_dir(self, path: str) -> bool:
        return is_directory(normalize_path(path), self.paths())

    def list_dir(self, path: str) -> list[str]:
        place, files = normalize_path(path), self.paths()
        if place in files:
            raise NotADirectoryError(path)
        if not is_directory(place, files):
            raise FileNotFoundError(path)
        prefix = "" if place == "." else f"{place}/"
        return sorted({file.removeprefix(prefix).split("/")[0] for file in files if file.startswith(prefix)})

    def glob(self, pattern: str) -> list[str]:
        return sorted(file for file in self.paths() if matches_glob(file, pattern))


def is_directory(path: str, files: Collection[str]) -> bool:
    return path == "." or any(file.startswith(f"{path}/") for file in files)


def resolve_existing(path: str, files: Collection[str]) -> str:
    """The normalised path of one of these files, or the error that says why it is none."""
    place = normalize_path(path)
    if place not in files:
        raise IsADirectoryError(path) if is_directory(place, files) else FileNotFoundError(path)
    return place


def resolve_writable(path: str, files: Collection[str]) -> str:
    """The normalised path of a file that there can be beside these."""
    place = normalize_path(path)
    if is_directory(place, files):
        raise IsADirectoryError(path)
    check_parents(place, files)
    return place


def check_parents(path: str, files: Collection[str]) -> None:
    """Raise NotADirectoryError if one of these files stands where a normalised path needs a directory."""
    parts = path.split("/")
    if any("/".join(parts[:end]) in files for end in range(1, len(parts))):
        raise NotADirectoryError(path)


class InMemoryFilesystem(ListingFilesystem):
    """Files that nobody else sees, and that are gone with it."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def paths(self) -> Collection[str]:
        return self._files.keys()

    def read(self, path: str) -> bytes:
        return self._files[resolve_existing(path, self._files)]

    def write(self, path: str, content: bytes) -> None:
        self._files[resolve_writable(path, self._files)] = bytes(content)

    def delete(self, path: str) -> None:
        del self._files[resolve_existing(path, self._files)]


class HostFilesystem(_TextMethods):
    """A directory of this machine. Symbolic links that lead out of it do not exist here."""

    def __init__(self, root: os.PathLike[str] | str) -> None:
        self.root = Path(root).resolve()

    def read(self, path: str) -> bytes:
        return self._resolve(path).read_bytes()

    def write(self, path: str, content: bytes) -> None:
        self.prepare_path(path).write_bytes(content)

    def prepare_path(self, path: str) -> Path:
        """Where a file is to be written; the directories that it needs are made."""
        place = self._resolve(path)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(path) from error
        return place

    def exists(self, path: str) -> bool:
        return self.is_file(path) or self.is_dir(path)

    def is_file(self, path: str) -> bool:
        return self._is_inside(path) and self._resolve(path).is_file()

    def is_dir(self, path: str) -> bool:
        return self._is_inside(path) and self._resolve(path).is_dir()

    def list_dir(self, path: str) -> list[str]:
        place = self._resolve(path)
        return sorted(name for name in os.listdir(place) if self._is_inside(f"{normalize_path(path)}/{name}"))

    def delete(self, path: str) -> None:
        place = self._resolve(path)
        if place.is_dir():
            raise IsADirectoryError(path)
        found = self.root / normalize_path(path)
        found.unlink()
        for above in found.parents:  # a directory exists while there is something in it
            if above == self.root or any(above.iterdir()):
                return
            above.rmdir()

    def glob(self, pattern: str) -> list[str]:
        return sorted(file for file in self._paths() if matches_glob(file, pattern))

    def _paths(self) -> Iterator[str]:
        for directory, _, names in os.walk(self.root):
            for name in names:
                file = Path(directory, name).relative_to(self.root).as_posix()
                if self.is_file(file):
                    yield file

    def _is_inside(self, path: str) -> bool:
        return (self.root / normalize_path(path)).resolve().is_relative_to(self.root)

    def _resolve(self, path: str) -> Path:
        if not self._is_inside(path):
            raise FileNotFoundError(path)
        return (self.root / normalize_path(path)).resolve()
