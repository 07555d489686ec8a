"""Files of the host in a workspace of their own, and the section that shows it to a model; imports `filesystem`,
`prompt`, `errors` and the standard library.
"""

import os
import stat
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.client.errors import WorkspaceBudgetError, WorkspaceSecurityError
from fumehood.client.filesystem import Filesystem, HostFilesystem, matches, normalised
from fumehood.client.prompt._types import NoParams, SupportsDataclass
from fumehood.client.prompt.section import MarkdownSection, markdown
from fumehood.client.prompt.tool import AnyTool
from fumehood.client.prompt.vfs import FILE_TOOLS_TEXT, file_tools
from fumehood.client.runtime.session import SessionProtocol

_SHOWN_ENTRIES = 20
_SHOWN_NAME = 120
_PIECE = 1 << 20


@dataclass(frozen=True)
class HostMount:
    """A file or directory of the host that a workspace gets a copy of.

    mount_path: where in the workspace, by default the last part of `host_path`. Patterns match at any depth, and what
    lies in a directory that matches matches too: `.git/*` excludes `sub/.git/objects/ab`. Without `include_glob`
    everything is included. `max_bytes` is for all files together; None is no limit.
    """

    host_path: str
    mount_path: str | None = None
    include_glob: tuple[str, ...] = ()
    exclude_glob: tuple[str, ...] = ()
    max_bytes: int | None = None
    follow_symlinks: bool = False


@dataclass(frozen=True)
class HostMountPreview:
    """What a mount has become; `entries` are the first names in it, `file_count` is of all."""

    host_path: str
    resolved_host: Path
    mount_path: str
    entries: tuple[str, ...]
    is_directory: bool
    bytes_copied: int
    file_count: int


def materialise(
    mounts: Sequence[HostMount], allowed_host_roots: Sequence[os.PathLike[str] | str], into: Path
) -> tuple[HostMountPreview, ...]:
    """Copy the mounts into a directory. Raises WorkspaceSecurityError, WorkspaceBudgetError, FileNotFoundError."""
    roots = tuple(Path(root).resolve() for root in allowed_host_roots)
    taken: set[str] = set()
    previews: list[HostMountPreview] = []
    for mount in mounts:
        preview = _Copying(mount, roots, into).preview()
        if preview.mount_path in taken:
            raise WorkspaceSecurityError(f"Two mounts have the mount_path {preview.mount_path!r}.")
        taken.add(preview.mount_path)
        previews.append(preview)
    return tuple(previews)


class _Copying:
    """One mount on its way into the workspace."""

    def __init__(self, mount: HostMount, roots: tuple[Path, ...], into: Path) -> None:
        self.mount = mount
        self.roots = roots
        self.source = self._allowed(Path(mount.host_path))
        self.mount_path = normalised(self.source.name if mount.mount_path is None else mount.mount_path)
        if self.mount_path == ".":
            raise WorkspaceSecurityError(
                f"The mount_path {mount.mount_path!r} of {mount.host_path!r} is the workspace itself; name a place."
            )
        self.target = into / self.mount_path
        self.bytes_copied = 0

    def preview(self) -> HostMountPreview:
        is_directory = self.source.is_dir()
        names: list[str] = []
        if is_directory:
            self.target.mkdir(parents=True, exist_ok=True)
            included = not self.mount.include_glob
            for file, relative in self._files(self.source, "", frozenset(), included=included):
                self._copy(file, self.target / relative)
                names.append(relative)
        else:
            self._copy(self.source, self.target)
            names.append(self.source.name)
        entries = sorted({name.split("/")[0] + ("/" if "/" in name else "") for name in names})
        return HostMountPreview(
            host_path=self.mount.host_path,
            resolved_host=self.source,
            mount_path=self.mount_path,
            entries=tuple(entries[:_SHOWN_ENTRIES]),
            is_directory=is_directory,
            bytes_copied=self.bytes_copied,
            file_count=len(names),
        )

    def _allowed(self, path: Path) -> Path:
        """The real path, if a root allows it."""
        real = path.resolve()
        if not any(real.is_relative_to(root) for root in self.roots):
            allowed = ", ".join(map(str, self.roots)) or "nothing"
            raise WorkspaceSecurityError(
                f"The host path {str(path)!r} is outside allowed_host_roots ({allowed}); "
                "add the directory that it lies in, or do not mount it."
            )
        if not real.exists():
            raise FileNotFoundError(f"The host path {str(path)!r} of a mount does not exist.")
        return real

    def _files(
        self, directory: Path, below: str, above: frozenset[Path], *, included: bool
    ) -> Iterator[tuple[Path, str]]:
        """The regular files that the mount wants, with their paths in it.

        included: whether all in here are, because a directory above matches.
        """
        if directory in above:  # a link back to where we come from
            return
        for entry in sorted(os.scandir(directory), key=lambda one: one.name):
            relative = f"{below}{entry.name}"
            path = Path(entry.path)
            if _fits(relative, self.mount.exclude_glob):
                continue
            if entry.is_symlink():
                if not self.mount.follow_symlinks or not path.exists():
                    continue
                path = self._allowed(path)
            wanted = included or _fits(relative, self.mount.include_glob)
            if path.is_dir():
                yield from self._files(path, f"{relative}/", above | {directory}, included=wanted)
            elif wanted and path.is_file():
                yield path, relative

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Between the look at it and this it may have become something else.
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as incoming, open(target, "wb") as outgoing:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise WorkspaceSecurityError(f"{str(source)!r} is no regular file.")
            while piece := incoming.read(_PIECE):
                self.bytes_copied += len(piece)
                self._check_budget()
                outgoing.write(piece)
        target.chmod(stat.S_IMODE(found.st_mode) & 0o777 | 0o600)

    def _check_budget(self) -> None:
        limit = self.mount.max_bytes
        if limit is not None and self.bytes_copied > limit:
            raise WorkspaceBudgetError(
                f"The mount of {self.mount.host_path!r} has more than its max_bytes of {limit}; raise the limit or "
                "leave something out with exclude_glob."
            )


def _fits(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether the path ends in what fits one of the patterns, at any depth."""
    return any(matches(path, f"**/{pattern}") for pattern in patterns)


# --- sections -----------------------------------------------------------------------------------------


class WorkspaceSection(MarkdownSection[NoParams]):
    """Mounted copies of host files, and where they are. What holds for every kind of workspace is here.

    Mounts are copied at once, so that what is wrong with them is known at once. `cleanup` removes the copies.
    """

    def __init__(
        self,
        *,
        session: SessionProtocol,
        mounts: Sequence[HostMount] = (),
        allowed_host_roots: Sequence[os.PathLike[str] | str] = (),
        sync_on_cleanup: bool = False,
        sync_dir: os.PathLike[str] | str | None = None,
        accepts_overrides: bool = False,
        template: str = "",
        tools: Sequence[AnyTool] = (),
    ) -> None:
        """sync_on_cleanup: keep all files of the workspace, as they are at the end, in `sync_dir`, by default a new
        directory that stays.
        """
        super().__init__(
            title="Workspace",
            key="workspace",
            template=template,
            tools=tools,
            accepts_overrides=accepts_overrides,
        )
        self.session = session
        self.mounts = tuple(mounts)
        self.allowed_host_roots = tuple(allowed_host_roots)
        self.sync_on_cleanup = sync_on_cleanup
        self._sync_dir = None if sync_dir is None else Path(sync_dir)
        self._closed = False
        self._temp_dir = _new_directory("fumehood-workspace-")
        self._removal = weakref.finalize(self, _remove, self._temp_dir)  # for who forgets to clean up
        try:
            self._previews = materialise(mounts, allowed_host_roots, self._temp_dir)
        except BaseException:
            self._removal()
            raise

    @property
    def temp_dir(self) -> Path:
        """The directory of the copies, until `cleanup`."""
        return self._temp_dir

    @property
    def sync_dir(self) -> Path | None:
        """Where `cleanup` puts, or has put, the files; None if that was not asked for."""
        if self.sync_on_cleanup and self._sync_dir is None:
            self._sync_dir = _new_directory("fumehood-synced-")
        return self._sync_dir if self.sync_on_cleanup else None

    @property
    def mount_previews(self) -> tuple[HostMountPreview, ...]:
        return self._previews

    @property
    @abstractmethod
    def filesystem(self) -> Filesystem: ...

    @abstractmethod
    def download_all(self, dest: Path) -> None:
        """Put all files of the workspace, as they are now, into a directory."""

    def cleanup(self) -> None:
        """Keep what is to be kept, and remove the local copies. A second time does nothing."""
        if self._closed:
            return
        try:
            if self.sync_dir is not None:
                self.download_all(self.sync_dir)
        finally:
            self._closed = True
            self._removal()

    def render(self, params: SupportsDataclass | None, depth: int, number: str) -> str:
        _ = params
        # What is put in here are names of files, which may contain anything: they never pass through a template.
        body = "\n\n".join(part for part in (self.template, *self.notes()) if part)
        return markdown(self.title, body, depth, number)

    def notes(self) -> list[str]:
        """Further paragraphs of its text."""
        return [_listing(preview) for preview in self._previews]

    def _settings(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "mounts": self.mounts,
            "allowed_host_roots": self.allowed_host_roots,
            "sync_on_cleanup": self.sync_on_cleanup,
            "accepts_overrides": self.accepts_overrides,
        }

    def placeholders(self) -> frozenset[str]:
        return frozenset()


class HostWorkspaceSection(WorkspaceSection):
    """A workspace in a directory of this machine, which the model reaches through file tools.

    The local twin of OpenAIContainerWorkspaceSection: one line switches between the two.
    """

    def __init__(
        self,
        *,
        session: SessionProtocol,
        mounts: Sequence[HostMount] = (),
        allowed_host_roots: Sequence[os.PathLike[str] | str] = (),
        sync_on_cleanup: bool = False,
        sync_dir: os.PathLike[str] | str | None = None,
        accepts_overrides: bool = False,
        template: str = FILE_TOOLS_TEXT,
    ) -> None:
        super().__init__(
            session=session,
            mounts=mounts,
            allowed_host_roots=allowed_host_roots,
            sync_on_cleanup=sync_on_cleanup,
            sync_dir=sync_dir,
            accepts_overrides=accepts_overrides,
            template=template,
        )
        self._filesystem = HostFilesystem(self.temp_dir)
        self._tools = file_tools(self._filesystem)

    @property
    def filesystem(self) -> HostFilesystem:
        return self._filesystem

    def download_all(self, dest: Path) -> None:
        import shutil

        shutil.copytree(self.temp_dir, dest, dirs_exist_ok=True, symlinks=True)

    def clone(self, **kwargs: object) -> "HostWorkspaceSection":
        settings = self._settings()
        settings["template"] = self.template
        settings.update(kwargs)
        return HostWorkspaceSection(**settings)


def shown(name: str) -> str:
    """A file's name as it may stand in a prompt: bounded, in one line, without characters that do not show."""
    plain = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in name)
    return plain if len(plain) <= _SHOWN_NAME else plain[:_SHOWN_NAME] + "…"


def _listing(preview: HostMountPreview) -> str:
    head = f"`{shown(preview.mount_path)}`: {preview.file_count} file(s), {preview.bytes_copied} bytes"
    names = [shown(entry) for entry in preview.entries]
    if not preview.is_directory or not names:
        return head
    more = ["- …"] if len(names) == _SHOWN_ENTRIES else []
    return "\n".join([f"{head}, among them", *(f"- `{name}`" for name in names), *more])


# What most programs that import this never need is imported where it is needed.


def _new_directory(prefix: str) -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix=prefix))


def _remove(directory: Path) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
