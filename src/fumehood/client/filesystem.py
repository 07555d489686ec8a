"""A small filesystem interface, on the host or in memory.

Paths are relative to the root, with `/` as separator. Listings are sorted. Errors are those of Python's own files:
FileNotFoundError, IsADirectoryError, NotADirectoryError. An absolute path or one with `..` that leaves the root raises
WorkspaceSecurityError.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol, runtime_checkable

from fumehood.client.errors import WorkspaceSecurityError
from fumehood.client.type_validation import require_type


@runtime_checkable
class Filesystem(Protocol):
    """A directory exists while it has entries; the root always exists."""

    def read(self, path: str) -> bytes: ...
    def read_text(self, path: str, encoding: str = "utf-8") -> str: ...
    def write(self, path: str, content: bytes) -> None:
        """Create or replace a file, with its parent directories."""
        ...

    def write_text(self, path: str, content: str, encoding: str = "utf-8") -> None: ...
    def exists(self, path: str) -> bool: ...
    def is_file(self, path: str) -> bool: ...
    def is_dir(self, path: str) -> bool: ...
    def list_dir(self, path: str) -> list[str]:
        """Return the names in a directory."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file."""
        ...

    def glob(self, pattern: str) -> list[str]:
        """Return the files that match. `*` stays within one directory, `**` matches any number of directories."""
        ...


# --- paths and patterns -------------------------------------------------------------------------------


def normalize_path(path: str) -> str:
    """Return the path without `.` and doubled slashes; "." is the root.

    Raises WorkspaceSecurityError for a path outside the root.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise WorkspaceSecurityError(f"The path {path!r} is not within the workspace; give a relative one.")
    return "/".join(parts) or "."


def matches_glob(path: str, pattern: str) -> bool:
    """Whether the whole path matches the whole pattern. Linear in both."""
    pattern_parts = [part for part in pattern.split("/") if part not in ("", ".")]
    positions = _skip_double_stars({0}, pattern_parts)
    for part in path.split("/"):
        following = {
            position if pattern_parts[position] == "**" else position + 1
            for position in positions
            if _part_matches(part, pattern_parts, position)
        }
        positions = _skip_double_stars(following, pattern_parts)
    return len(pattern_parts) in positions


def _part_matches(part: str, pattern_parts: list[str], position: int) -> bool:
    return position < len(pattern_parts) and (
        pattern_parts[position] == "**" or fnmatchcase(part, pattern_parts[position])
    )


def _skip_double_stars(positions: set[int], pattern_parts: list[str]) -> set[int]:
    """Return these positions of the pattern, and those reached by matching `**` with nothing."""
    for position in sorted(positions):
        while position < len(pattern_parts) and pattern_parts[position] == "**":
            position += 1
            positions.add(position)
    return positions


# --- shared implementations -----------------------------------------------------------------------------------


class _TextMethods(ABC):
    """Text methods over bytes."""

    @abstractmethod
    def read(self, path: str) -> bytes: ...

    @abstractmethod
    def write(self, path: str, content: bytes) -> None: ...

    def read_text(self, path: str, encoding: str = "utf-8") -> str:
        return self.read(path).decode(encoding)

    def write_text(self, path: str, content: str, encoding: str = "utf-8") -> None:
        self.write(path, content.encode(encoding))


class ListingFilesystem(_TextMethods):
    """Derives directories from the list of all files."""

    @abstractmethod
    def paths(self) -> Collection[str]:
        """Return all files, in any order."""

    def exists(self, path: str) -> bool:
        normalized, files = normalize_path(path), self.paths()
        return normalized in files or is_directory(normalized, files)

    def is_file(self, path: str) -> bool:
        return normalize_path(path) in self.paths()

    def is_dir(self, path: str) -> bool:
        return is_directory(normalize_path(path), self.paths())

    def list_dir(self, path: str) -> list[str]:
        normalized, files = normalize_path(path), self.paths()
        if normalized in files:
            raise NotADirectoryError(path)
        if not is_directory(normalized, files):
            raise FileNotFoundError(path)
        prefix = "" if normalized == "." else f"{normalized}/"
        return sorted({file.removeprefix(prefix).split("/")[0] for file in files if file.startswith(prefix)})

    def glob(self, pattern: str) -> list[str]:
        return sorted(file for file in self.paths() if matches_glob(file, pattern))


def is_directory(path: str, files: Collection[str]) -> bool:
    return path == "." or any(file.startswith(f"{path}/") for file in files)


def resolve_existing(path: str, files: Collection[str]) -> str:
    """Return the normalised path of an existing file, or raise the matching OSError."""
    normalized = normalize_path(path)
    if normalized not in files:
        raise IsADirectoryError(path) if is_directory(normalized, files) else FileNotFoundError(path)
    return normalized


def resolve_writable(path: str, files: Collection[str]) -> str:
    """Return the normalised path of a file that can be written, or raise the matching OSError."""
    normalized = normalize_path(path)
    if is_directory(normalized, files):
        raise IsADirectoryError(path)
    check_parents(normalized, files)
    return normalized


def check_parents(path: str, files: Collection[str]) -> None:
    """Raise NotADirectoryError if a file stands where the path needs a directory."""
    parts = path.split("/")
    if any("/".join(parts[:end]) in files for end in range(1, len(parts))):
        raise NotADirectoryError(path)


class InMemoryFilesystem(ListingFilesystem):
    """Files in memory."""

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
    """A local directory. Symbolic links that lead out of it are treated as missing."""

    def __init__(self, root: os.PathLike[str] | str) -> None:
        require_type(root, os.PathLike[str] | str, "root")
        self.root = Path(root).resolve()

    def read(self, path: str) -> bytes:
        return self._resolve(path).read_bytes()

    def write(self, path: str, content: bytes) -> None:
        self.prepare_path(path).write_bytes(content)

    def prepare_path(self, path: str) -> Path:
        """Return the host path of a file to write, and create its parent directories."""
        normalized = self._resolve(path)
        try:
            normalized.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(path) from error
        return normalized

    def link(self, path: str, target: str) -> None:
        """Create a symbolic link to another path of this directory, in place of an existing link.

        Raises WorkspaceSecurityError for a path outside, FileExistsError if something else is there.
        """
        normalized, destination = normalize_path(path), normalize_path(target)
        place = self.prepare_path(normalized.rpartition("/")[0] or ".") / normalized.rpartition("/")[2]
        place.parent.mkdir(exist_ok=True)
        if place.is_symlink():
            place.unlink()
        place.symlink_to(os.path.relpath(self.root / destination, place.parent))

    def exists(self, path: str) -> bool:
        return self.is_file(path) or self.is_dir(path)

    def is_file(self, path: str) -> bool:
        return self._is_inside(path) and self._resolve(path).is_file()

    def is_dir(self, path: str) -> bool:
        return self._is_inside(path) and self._resolve(path).is_dir()

    def list_dir(self, path: str) -> list[str]:
        normalized = self._resolve(path)
        return sorted(
            name for name in os.listdir(normalized) if self._is_inside(f"{normalize_path(path)}/{name}")
        )

    def delete(self, path: str) -> None:
        normalized = self._resolve(path)
        if normalized.is_dir():
            raise IsADirectoryError(path)
        found = self.root / normalize_path(path)
        found.unlink()
        for above in found.parents:  # a directory exists while it has entries
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
