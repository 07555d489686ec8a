"""A workspace in a container of the provider."""

import logging
import os
import shutil
import tarfile
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fumehood.client.adapters.openai.config import (
    DEFAULT_MEMORY_LIMIT,
    ContainerConfig,
    OpenAIClientConfig,
    check_client,
)
from fumehood.client.adapters.openai.container import WORKING_DIRECTORY
from fumehood.client.adapters.openai.container_fs import ContainerFilesystem
from fumehood.client.dbc import require
from fumehood.client.deadlines import Deadline
from fumehood.client.mounts import HostMount, escape_name
from fumehood.client.runtime.session import SessionProtocol
from fumehood.client.throttle import ThrottlePolicy
from fumehood.client.type_validation import check_arguments
from fumehood.client.workspace_section import WorkspaceSection

if TYPE_CHECKING:
    from openai import OpenAI

_log = logging.getLogger(__name__)

_TEXT = f"""Python runs in a container whose working directory, `{WORKING_DIRECTORY}`, is the workspace. \
Read and change the files
there with Python; paths below are relative to it."""
# Existing files are not overwritten: they may be newer, and every prompt has these instructions.
_UNPACK_INSTRUCTIONS = """The files may still be packed. Unpack what is missing first:
```python
import os, tarfile
with tarfile.open({archive!r}) as packed:
    missing = [one for one in packed if not os.path.lexists(os.path.join({mount!r}, one.name))]
    packed.extractall({mount!r}, missing, filter="data")
```"""
_MAX_RELOCATED_SHOWN = 20


class OpenAIContainerWorkspaceSection(WorkspaceSection):
    """Host files in a container, where the code interpreter reads and changes them.

    Files are copied and packed at once; the container is created on first use, by an evaluation or through
    `filesystem`.
    """

    @check_arguments
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
        """client: for the container; by default that of the first adapter that evaluates it, or before that one made
        from the environment.
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
        if client is not None:
            check_client(client)
        self._client = client
        self._own_client: OpenAI | None = None
        self._create_client: Callable[[], OpenAI] | None = None
        holds_files = any(preview.file_count for preview in self.mount_previews)
        tarball = _create_archive(self.temp_dir) if holds_files else None
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

    def bind_client(
        self,
        client: "OpenAI",
        *,
        create_client: "Callable[[], OpenAI] | None" = None,
        policy: ThrottlePolicy | None = None,
    ) -> None:
        """Use this client. Raises PromptValidationError if another one is in use.

        create_client: creates an equal client after this one was closed.
        """
        bound = self._client
        own = bound is not None and bound is self._own_client and _is_same_account(bound, client)
        require(
            bound is None or bound is client or own or bound.is_closed(),
            "The workspace and the adapter have different clients, and a container belongs to one: pass the same "
            "client= to both.",
        )
        if not own:
            self._client = client
        self._create_client = create_client
        self._filesystem.policy = policy

    def check_tool_container(self, container: object) -> None:
        """Raise PromptValidationError unless a code interpreter with these settings can use this workspace's container.

        container: as it would be sent; None for no settings.
        """
        require(
            not isinstance(container, str),
            f"The code interpreter names the container {container!r}, and the workspace has its own; leave one of them "
            "out.",
        )
        settings = cast(Mapping[str, object], container or {})
        limit, ours = settings.get("memory_limit", DEFAULT_MEMORY_LIMIT), self.container_config.memory_limit
        require(
            limit in (DEFAULT_MEMORY_LIMIT, ours),
            f"The code interpreter has the memory_limit {limit!r}, and the workspace {ours!r}: they share one "
            "container, so set container_config of the workspace.",
        )
        others = settings.keys() - {"type", "memory_limit", "file_ids"}
        require(
            not others,
            f"The code interpreter sets {min(others, default='')!r} of its container, which is the workspace's.",
        )

    def ensure_container(self, container: object = None, *, deadline: Deadline | None = None) -> str:
        """Return the id of the live container, with the files that a code interpreter's settings name."""
        if isinstance(container, Mapping):
            file_ids = cast(Mapping[str, Sequence[str]], container).get("file_ids", ())
            self._filesystem.attach(*file_ids, deadline=deadline)
        return self._filesystem.ensure_container(deadline=deadline)

    def download_all(self, dest: Path) -> None:
        """Copy all files to a directory. Without a live container, these are the local copies."""
        if self._filesystem.is_alive():
            self._filesystem.download_all(dest)
            return
        if self.container_id is not None:
            _log.warning(
                "The container %s has expired: what code has written there is lost.", self.container_id
            )
        shutil.copytree(self.temp_dir, dest, dirs_exist_ok=True)

    def cleanup(self) -> None:
        """Sync files and remove the local copies. If that fails, `filesystem.download_all` can be tried again."""
        try:
            super().cleanup()
        except Exception as error:
            if self.container_id is not None:
                error.add_note("The container is still there: workspace.filesystem.download_all tries again.")
            raise
        else:
            self._filesystem.cleanup()
            if self._own_client is not None:
                self._own_client.close()
        finally:
            if self._tarball_removal is not None:
                self._tarball_removal()

    def notes(self) -> list[str]:
        archive, moved = self._filesystem.archive, [*self._filesystem.relocated_files.items()]
        notes = (
            [_UNPACK_INSTRUCTIONS.format(archive=WORKING_DIRECTORY + archive, mount=WORKING_DIRECTORY)]
            if archive
            else []
        )
        if moved:
            names = [
                f"- `{escape_name(path)}` is `{escape_name(WORKING_DIRECTORY + relocated)}`"
                for path, relocated in moved[:_MAX_RELOCATED_SHOWN]
            ]
            notes.append("\n".join(["Some files lie elsewhere than their names say:", *names]))
        return [*notes, *super().notes()]

    def settings(self) -> dict[str, Any]:
        own = {"container_config": self.container_config, "client": self._client}
        return {**super().settings(), **own}

    def _bound_client(self) -> "OpenAI":
        if self._client is None or (self._create_client and self._client.is_closed()):
            make = self._create_client or OpenAIClientConfig().create_client
            self._client = self._own_client = make()
        return self._client


def _is_same_account(one: "OpenAI", other: "OpenAI") -> bool:
    names = ("base_url", "api_key", "organization", "project")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _create_archive(directory: Path) -> Path:
    """Create a tar archive of a directory, with nothing of the host but names, modes and times."""
    descriptor, name = tempfile.mkstemp(prefix="fumehood-workspace-", suffix=".tar")
    try:
        with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
            for path in sorted(directory.iterdir()):
                archive.add(path, arcname=path.name, filter=_strip_owner)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)


def _strip_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
