"""Copies of host files for a workspace, restricted to allowed roots."""

import errno
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fumehood.client.dbc import require
from fumehood.client.errors import WorkspaceBudgetError, WorkspaceSecurityError
from fumehood.client.filesystem import matches_glob, normalize_path
from fumehood.client.type_validation import require_field_types

_MAX_PREVIEW_ENTRIES = 20
_MAX_NAME_LENGTH = 120
_COPY_CHUNK = 1 << 20
_MAX_DEPTH = 200  # directories; creating and removing archives recurses


@dataclass(frozen=True)
class HostMount:
    """A file or directory of the host that is copied into a workspace.

    mount_path: path in the workspace, by default the last part of `host_path`. Globs match at any depth, and a
    directory
    that matches includes all below it: `.git/*` excludes `sub/.git/objects/ab`. Without `include_glob` everything is
    included. max_bytes: limit for all files together; None for no limit.
    """

    host_path: "os.PathLike[str] | str"
    mount_path: str | None = None
    include_glob: tuple[str, ...] = ()
    exclude_glob: tuple[str, ...] = ()
    max_bytes: int | None = None
    follow_symlinks: bool = False

    def __post_init__(self) -> None:
        require_field_types(self)
        for name in ("include_glob", "exclude_glob"):
            require(all(getattr(self, name)), f"{name} has an empty pattern, which would fit everything.")
        limit = self.max_bytes
        require(limit is None or limit >= 0, f"max_bytes is {limit}; it cannot be negative.")


@dataclass(frozen=True)
class HostMountPreview:
    """A copied mount: `entries` are the first names of `entry_count`; `file_count` counts files at any depth."""

    host_path: str
    resolved_host: Path
    mount_path: str
    entries: tuple[str, ...]
    is_directory: bool
    bytes_copied: int
    file_count: int
    entry_count: int = 0


def copy_mounts(
    mounts: Sequence[HostMount], allowed_host_roots: Sequence[os.PathLike[str] | str], target: Path
) -> tuple[HostMountPreview, ...]:
    """Copy the mounts into a directory. Raises WorkspaceSecurityError, WorkspaceBudgetError, OSError."""
    roots = tuple(_resolve(Path(root), "entry of allowed_host_roots") for root in allowed_host_roots)
    taken: set[str] = set()
    previews: list[HostMountPreview] = []
    for mount in mounts:
        copying = _MountCopy(mount, roots, target)
        if copying.mount_path in taken:
            raise WorkspaceSecurityError(f"Two mounts have the mount_path {copying.mount_path!r}.")
        taken.add(copying.mount_path)
        previews.append(copying.copy())
    return tuple(previews)


def _resolve(path: Path, kind: str) -> Path:
    """Return the real path. Raises WorkspaceSecurityError for a loop of links, and for an invalid name."""
    try:
        real = path.resolve()
        real.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise WorkspaceSecurityError(
            f"The {kind} {escape_name(str(path))!r} cannot be followed: {type(error).__name__}."
        ) from error
    return real


class _MountCopy:
    """Copies one mount.

    Another process may change files while they are copied. So every path component is opened relative to its parent,
    and none of them may be a symbolic link.
    """

    def __init__(self, mount: HostMount, roots: tuple[Path, ...], into: Path) -> None:
        self.mount = mount
        self.roots = roots
        self.source = self._resolve_allowed(Path(mount.host_path))
        self.mount_path = normalize_path(self.source.name if mount.mount_path is None else mount.mount_path)
        if self.mount_path == ".":
            raise WorkspaceSecurityError(
                f"The mount_path {mount.mount_path!r} of {mount.host_path!r} is the workspace itself; name a path."
            )
        self.target = into
        self.bytes_copied = 0

    def copy(self) -> HostMountPreview:
        is_directory = self.source.is_dir()
        if is_directory:
            self._make_directory(self.target / self.mount_path)
            names = [*self._copy_directory()]
        else:
            with self._open_without_links(self.source) as file:
                self._copy_file(file, "")
            names = [self.source.name]
        entries = sorted({name.split("/")[0] + ("/" if "/" in name else "") for name in names})
        return HostMountPreview(
            host_path=str(self.mount.host_path),
            resolved_host=self.source,
            mount_path=self.mount_path,
            entries=tuple(entries[:_MAX_PREVIEW_ENTRIES]),
            is_directory=is_directory,
            bytes_copied=self.bytes_copied,
            file_count=len(names),
            entry_count=len(entries),
        )

    def _resolve_allowed(self, path: Path) -> Path:
        """Return the real path if it is below an allowed root. Raises WorkspaceSecurityError."""
        real = _resolve(path, "host path")
        if not any(real.is_relative_to(root) for root in self.roots):
            allowed = ", ".join(map(str, self.roots)) or "nothing"
            raise WorkspaceSecurityError(
                f"The host path {str(path)!r} is outside allowed_host_roots ({allowed}); "
                "add the directory that it lies in, or do not mount it."
            )
        if not real.exists():
            raise FileNotFoundError(f"The host path {str(path)!r} of a mount does not exist.")
        return real

    def _copy_directory(self) -> Iterator[str]:
        """Copy the selected regular files and yield their paths in the mount."""
        waiting = [_MountEntry(self.source, "", included=not self.mount.include_glob)]
        while waiting:
            path = waiting.pop()
            if path.prefix.count("/") > _MAX_DEPTH:
                raise WorkspaceBudgetError(
                    f"The mount of {self.mount.host_path!r} is deeper than {_MAX_DEPTH} directories; leave something "
                    "out with exclude_glob."
                )
            with self._open_without_links(path.path, os.O_DIRECTORY) as directory:
                for entry in sorted(os.scandir(directory), key=lambda one: one.name):
                    if _matches_any(f"{path.prefix}{entry.name}", self.mount.exclude_glob):
                        continue
                    found = self._resolve_entry(entry, path)
                    if found is None:
                        continue
                    if found.is_directory:
                        waiting.append(found)
                    elif found.included and self._copy_if_present(found):
                        yield found.relative

    def _resolve_entry(self, entry: "os.DirEntry[str]", directory: "_MountEntry") -> "_MountEntry | None":
        """Classify a directory entry; None if it is not a regular file or directory."""
        relative = f"{directory.prefix}{entry.name}"
        path = directory.path / entry.name
        included = directory.included or _matches_any(relative, self.mount.include_glob)
        if not entry.is_symlink():
            is_directory = entry.is_dir(follow_symlinks=False)
            if not is_directory and not entry.is_file(follow_symlinks=False):
                return None
            return directory.child(path, relative, is_directory=is_directory, included=included)
        if not self.mount.follow_symlinks or not path.exists():
            return None
        real = self._resolve_allowed(path)
        leads_back = real in (directory.path, *directory.above)
        if leads_back or not (real.is_dir() or real.is_file()):
            return None
        return directory.child(real, relative, is_directory=real.is_dir(), included=included)

    def _copy_if_present(self, found: "_MountEntry") -> bool:
        """Copy a file; return False if it has disappeared meanwhile."""
        try:
            with self._open_without_links(found.path) as file:
                self._copy_file(file, found.relative)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def _open_without_links(self, real: Path, flags: int = 0) -> Generator[int]:
        """Open a path without following symbolic links, and yield the descriptor."""
        root = next(root for root in self.roots if real.is_relative_to(root))
        last = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        between = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
        parts = real.relative_to(root).parts
        descriptor = -1
        try:
            descriptor = os.open(root, (between if parts else last | flags) & ~os.O_NOFOLLOW)
            for path, part in enumerate(parts, 1):
                opened = os.open(part, last | flags if path == len(parts) else between, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = opened
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise _describe_open_error(error, real) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _copy_file(self, descriptor: int, relative: str) -> None:
        target = self.target / self.mount_path / relative
        self._make_directory(target.parent)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise WorkspaceSecurityError(f"{self.mount.host_path!r}: {relative!r} is no regular file.")
        try:
            made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise self._overlap_error(target) from error
        with open(descriptor, "rb", closefd=False) as incoming, open(made, "wb") as outgoing:
            while chunk := incoming.read(_COPY_CHUNK):
                self.bytes_copied += len(chunk)
                self._check_budget()
                outgoing.write(chunk)
        target.chmod(stat.S_IMODE(found.st_mode) & 0o777 | 0o600)

    def _make_directory(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise self._overlap_error(path) from error

    def _overlap_error(self, target: Path) -> WorkspaceSecurityError:
        path = target.relative_to(self.target).as_posix()
        return WorkspaceSecurityError(
            f"Two mounts, or two names that this machine takes for one, lead to {path!r}; "
            "give the mounts other paths."
        )

    def _check_budget(self) -> None:
        limit = self.mount.max_bytes
        if limit is not None and self.bytes_copied > limit:
            raise WorkspaceBudgetError(
                f"The mount of {self.mount.host_path!r} has more than its max_bytes of {limit}; raise the limit or "
                "leave something out with exclude_glob."
            )


@dataclass(frozen=True)
class _MountEntry:
    """A file or directory below a mount.

    relative: path in the mount. included: whether it or a directory above it matches. above: the directories above it.
    """

    path: Path
    relative: str
    included: bool
    is_directory: bool = True
    above: frozenset[Path] = frozenset()

    @property
    def prefix(self) -> str:
        return f"{self.relative}/" if self.relative else ""

    def child(self, path: Path, relative: str, *, is_directory: bool, included: bool) -> "_MountEntry":
        return _MountEntry(path, relative, included, is_directory, self.above | {self.path})


def _describe_open_error(error: OSError, path: Path) -> Exception:
    """Return the error with the full path and a hint."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return WorkspaceSecurityError(
            f"{str(path)!r}, or a directory above it, became a link while it was being copied."
        )
    hint = "; leave it out with exclude_glob" if isinstance(error, PermissionError) else ""
    return OSError(error.errno, f"{error.strerror}{hint}", str(path))


def _matches_any(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether the end of the path matches one of the patterns."""
    return any(matches_glob(path, f"**/{pattern}") for pattern in patterns)


def escape_name(name: str) -> str:
    """Return a file name for a prompt, between backticks: bounded, in one line, control characters escaped."""
    plain = "".join(char if char.isprintable() and char != "`" else f"\\x{ord(char):02x}" for char in name)
    return plain if len(plain) <= _MAX_NAME_LENGTH else plain[:_MAX_NAME_LENGTH] + "…"
