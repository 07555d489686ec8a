"""Workspace sections: prompt sections that copy host files and describe the copies to the model."""

import os
import shutil
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fumehood.client.dbc import require
from fumehood.client.filesystem import Filesystem, HostFilesystem
from fumehood.client.mounts import HostMount, HostMountPreview, copy_mounts, escape_name
from fumehood.client.prompt._types import NoParams, SupportsDataclass
from fumehood.client.prompt.filesystem_tools import FILE_TOOLS_TEXT, file_tools
from fumehood.client.prompt.section import MarkdownSection, format_markdown
from fumehood.client.prompt.tool import AnyTool
from fumehood.client.runtime.session import SessionProtocol
from fumehood.client.type_validation import check_arguments


class WorkspaceSection(MarkdownSection[NoParams]):
    """The base of all workspaces: copies of host files, and the text that says where they are.

    Mounts are copied at once, so that errors are raised at once. `cleanup` removes the copies.

    temp_dir: the directory of the copies, until `cleanup`. is_closed: whether `cleanup` was called.
    """

    @check_arguments
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
        """sync_on_cleanup: copy all files of the workspace, as they are at the end, to `sync_dir`, by default a new
        directory `fumehood-synced-…` among the temporary files, which stays until `remove_synced_files`.
        """
        super().__init__(
            title="Workspace",
            key="workspace",
            template=template,
            tools=tools,
            accepts_overrides=accepts_overrides,
        )
        require(sync_dir is None or sync_on_cleanup, "sync_dir is given, but not sync_on_cleanup=True.")
        self.session = session
        self.mounts = tuple(mounts)
        self.allowed_host_roots = tuple(allowed_host_roots)
        self.sync_on_cleanup = sync_on_cleanup
        self._sync_dir = None if sync_dir is None else Path(sync_dir)
        self._created_sync_dir: Path | None = None
        self.is_closed = False
        self.temp_dir = Path(tempfile.mkdtemp(prefix="fumehood-workspace-"))
        # In case cleanup is never called.
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.temp_dir, ignore_errors=True)
        try:
            self.mount_previews = copy_mounts(mounts, allowed_host_roots, self.temp_dir)
        except BaseException:
            self._finalizer()
            raise

    @property
    def sync_dir(self) -> Path | None:
        """The target directory of `cleanup`; None if files are not synced."""
        if self.sync_on_cleanup and self._sync_dir is None:
            self._sync_dir = self._created_sync_dir = Path(tempfile.mkdtemp(prefix="fumehood-synced-"))
        return self._sync_dir if self.sync_on_cleanup else None

    def remove_synced_files(self) -> None:
        """Remove the directory that `cleanup` has created for synced files; one that was given as `sync_dir` stays."""
        if self._created_sync_dir is not None:
            shutil.rmtree(self._created_sync_dir, ignore_errors=True)
            self._created_sync_dir = None

    @property
    @abstractmethod
    def filesystem(self) -> Filesystem: ...

    @abstractmethod
    def download_all(self, dest: Path) -> None:
        """Copy all files of the workspace, as they are now, to a directory."""

    def cleanup(self) -> None:
        """Sync files if asked to, and remove the local copies. Idempotent."""
        if self.is_closed:
            return
        try:
            if self.sync_dir is not None:
                self.download_all(self.sync_dir)
        finally:
            self.is_closed = True
            self._finalizer()

    def render(self, params: SupportsDataclass | None, depth: int, number: str) -> str:
        _ = params
        # File names may contain anything, so they never pass through a template.
        body = "\n\n".join(part for part in (self.template, *self.notes()) if part)
        return format_markdown(self.title, body, depth, number)

    def notes(self) -> list[str]:
        """Return further paragraphs of its text."""
        return [_format_preview(preview) for preview in self.mount_previews]

    def settings(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "mounts": self.mounts,
            "allowed_host_roots": self.allowed_host_roots,
            "sync_on_cleanup": self.sync_on_cleanup,
            "accepts_overrides": self.accepts_overrides,
            "template": self.template,
        }

    def placeholders(self) -> frozenset[str]:
        return frozenset()


class HostWorkspaceSection(WorkspaceSection):
    """A workspace in a local directory, which the model reaches through file tools.

    The local counterpart of OpenAIContainerWorkspaceSection: one line switches between the two.
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
        shutil.copytree(self.temp_dir, dest, dirs_exist_ok=True, symlinks=True)


def _format_preview(preview: HostMountPreview) -> str:
    head = f"`{escape_name(preview.mount_path)}`: {preview.file_count} file(s), {preview.bytes_copied} bytes"
    names = [escape_name(entry) for entry in preview.entries]
    if not preview.is_directory or not names:
        return head
    more = ["- …"] if preview.entry_count > len(names) else []
    return "\n".join([f"{head}, among them", *(f"- `{name}`" for name in names), *more])
