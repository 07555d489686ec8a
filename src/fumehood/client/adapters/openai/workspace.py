"""A workspace in a container of the provider; imports `container_fs`, `config` and `fumehood.client.workspace`."""

import logging
import os
import shutil
import tarfile
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.client.adapters.openai.config import ContainerConfig, OpenAIClientConfig
from fumehood.client.adapters.openai.container import ARCHIVE_NAME, MOUNT
from fumehood.client.adapters.openai.container_fs import ContainerFilesystem
from fumehood.client.dbc import require
from fumehood.client.runtime.session import SessionProtocol
from fumehood.client.workspace import HostMount, WorkspaceSection

if TYPE_CHECKING:
    from openai import OpenAI

_log = logging.getLogger(__name__)

_TEXT = f"""Python runs in a container whose working directory, `{MOUNT}`, is the workspace. Read and change the files
there with Python; paths below are relative to it."""
_UNPACK = (
    f"The files are still packed. Unpack them first: "
    f"`import tarfile; tarfile.open('{MOUNT}{ARCHIVE_NAME}').extractall('{MOUNT}', filter='data')`."
)


class OpenAIContainerWorkspaceSection(WorkspaceSection):
    """Host files in a container, where the code interpreter reads and changes them.

    The files are copied and packed at once; the container is made when it is first needed, by an evaluation or through
    `filesystem`.
    """

    def __init__(
        self,
        *,
        session: SessionProtocol,
        mounts: Sequence[HostMount] = (),
        allowed_host_roots: Sequence[os.PathLike[str] | str] = (),
        container_config: ContainerConfig | None = None,
        sync_on_cleanup: bool = False,
        sync_dir: os.PathLike[str] | str | None = None,
        accepts_overrides: bool = False,
        client: "OpenAI | None" = None,
        template: str = _TEXT,
    ) -> None:
        """client: for the container; by default the one of the first adapter that evaluates it, or, before that, the
        one that the environment describes.
        """
        super().__init__(
            session=session,
            mounts=mounts,
            allowed_host_roots=allowed_host_roots,
            sync_on_cleanup=sync_on_cleanup,
            sync_dir=sync_dir,
            accepts_overrides=accepts_overrides,
            template=template,
        )
        self.container_config = container_config or ContainerConfig()
        self._client = client
        holds_files = any(preview.file_count for preview in self.mount_previews)
        tarball = _packed(self.temp_dir) if holds_files else None
        self._tarball_removal = weakref.finalize(self, tarball.unlink, missing_ok=True) if tarball else None
        self._filesystem = ContainerFilesystem(
            client=self._bound_client,
            container_config=self.container_config,
            tarball_path=tarball,
            local_root=self.temp_dir,
            session=session,
        )

    @property
    def filesystem(self) -> ContainerFilesystem:
        return self._filesystem

    @property
    def container_id(self) -> str | None:
        """None before the first use."""
        return self._filesystem.container_id

    def bind_client(self, client: "OpenAI") -> None:
        """Use this client. Raises PromptValidationError if another one is in use."""
        require(
            self._client is None or self._client is client,
            "The workspace and the adapter have different clients, and a container belongs to one: pass the same "
            "client= to both.",
        )
        self._client = client

    def download_all(self, dest: Path) -> None:
        """If there is no container yet, or it has expired, the local copies are all there is."""
        if self._filesystem.is_alive():
            self._filesystem.download_all(dest)
            return
        if self.container_id is not None:
            _log.warning(
                "The container %s has expired: what code has written there is lost.", self.container_id
            )
        shutil.copytree(self.temp_dir, dest, dirs_exist_ok=True)

    def cleanup(self) -> None:
        try:
            super().cleanup()
        finally:
            self._filesystem.cleanup()
            if self._tarball_removal is not None:
                self._tarball_removal()

    def notes(self) -> list[str]:
        return [*([_UNPACK] if self._filesystem.is_packed else []), *super().notes()]

    def clone(self, **kwargs: object) -> "OpenAIContainerWorkspaceSection":
        settings = self._settings()
        settings |= {
            "container_config": self.container_config,
            "client": self._client,
            "template": self.template,
        }
        settings.update(kwargs)
        return OpenAIContainerWorkspaceSection(**settings)

    def _bound_client(self) -> "OpenAI":
        if self._client is None:
            self._client = OpenAIClientConfig().make()
        return self._client


def _packed(directory: Path) -> Path:
    """A tar archive of all that is in a directory; it tells nothing of the host but names, modes and times."""
    descriptor, name = tempfile.mkstemp(prefix="fumehood-workspace-", suffix=".tar")
    with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        for path in sorted(directory.iterdir()):
            archive.add(path, arcname=path.name, filter=_anonymous)
    return Path(name)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
