"""The files of a container as a filesystem; imports `container`, `config`, `filesystem` and `errors`."""

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.client.adapters.openai.config import ContainerConfig
from fumehood.client.adapters.openai.container import ARCHIVE_NAME, ContainerManager
from fumehood.client.errors import ContainerExpiredError, WorkspaceSecurityError
from fumehood.client.filesystem import HostFilesystem, ListedFilesystem, normalised, readable, writable
from fumehood.client.runtime.session import SessionProtocol

if TYPE_CHECKING:
    from openai import OpenAI


@dataclass(frozen=True)
class ActiveContainer:
    """The container that a session's workspaces have used last."""

    container_id: str
    memory_limit: str


class ContainerFilesystem(ListedFilesystem):
    """Files in a container that is made when the first of them is touched.

    A container that has expired is made again: with the archive, and with what was written and deleted through here
    since. What code in the container has written is lost with it.

    Where the server does not unpack archives, `local_root` answers for files that the container does not show yet.
    """

    def __init__(
        self,
        *,
        client: "OpenAI | Callable[[], OpenAI]",
        container_config: ContainerConfig,
        tarball_path: Path | None = None,
        local_root: Path | None = None,
        session: SessionProtocol | None = None,
    ) -> None:
        """client may be a function that gives one; session: where mode "auto" looks for a container to take over."""
        self._client = client
        self._config = container_config
        self._tarball = tarball_path
        self._mirror = None if local_root is None else HostFilesystem(local_root)
        self._session = session
        self._container_id: str | None = None
        self._changes: dict[str, bytes | None] = {}
        self._unpacked = True
        self._lock = threading.RLock()

    @property
    def container_id(self) -> str | None:
        return self._container_id

    @property
    def is_packed(self) -> bool:
        """Whether the files came as an archive that code has to unpack."""
        return not self._unpacked

    def ensure_container(self) -> str:
        """The id of a container that is alive and filled. Raises ContainerExpiredError if it cannot be made again."""
        with self._lock:
            if self._container_id is None:
                return self._fill(self._found_or_made())
            return self._container_id if self.is_alive() else self.renew_container()

    def is_alive(self) -> bool:
        """Whether the container is there, without making one."""
        return self._container_id is not None and self._manager.is_alive(self._container_id)

    def renew_container(self) -> str:
        """Another container instead of one that has expired, filled as that was."""
        with self._lock:
            gone = self._container_id or "(none)"
            try:
                return self._fill(self._manager.create())
            except Exception as error:
                raise ContainerExpiredError(gone, error) from error

    def paths(self) -> Collection[str]:
        return self._ids().keys() | self._mirrored()

    def read(self, path: str) -> bytes:
        ids = self._ids()
        place = readable(path, ids.keys() | self._mirrored())
        file_id = ids.get(place)
        if file_id is None and self._mirror is not None:
            return self._mirror.read(place)
        return self._on_container(lambda container: self._manager.read(container, file_id or ""))

    def write(self, path: str, content: bytes) -> None:
        ids = self._ids()
        place = writable(path, ids.keys() | self._mirrored())
        before = ids.get(place)
        made = self._on_container(lambda container: self._manager.put(container, place, content))
        if before not in (None, made.id):
            self._forget(before or "")
        self._changes[place] = bytes(content)
        if self._mirror is not None:
            self._mirror.write(place, content)

    def delete(self, path: str) -> None:
        ids = self._ids()
        place = readable(path, ids.keys() | self._mirrored())
        if file_id := ids.get(place):
            self._forget(file_id)
        self._changes[place] = None
        if self._mirror is not None and self._mirror.is_file(place):
            self._mirror.delete(place)

    def download_all(self, dest: Path) -> None:
        """Put all files into a directory of this machine. Names that would lead out of it are refused."""
        target = HostFilesystem(dest)
        for path in sorted(self.paths()):
            target.write(path, self.read(path))

    def cleanup(self) -> None:
        """Let go of the container, which expires by itself."""
        self._container_id = None
        self._changes.clear()

    # ---- the container --------------------------------------------------------------------------------------

    @property
    def client(self) -> "OpenAI":
        return self._client() if callable(self._client) else self._client

    @property
    def _manager(self) -> ContainerManager:
        return ContainerManager(self.client, self._config)

    def _found_or_made(self) -> str:
        size = self._config.memory_limit
        if self._config.mode == "auto" and self._session is not None:
            last = self._session[ActiveContainer].latest()
            if last and last.memory_limit == size and self._manager.is_alive(last.container_id):
                return last.container_id
        return self._manager.create()

    def _fill(self, container_id: str) -> str:
        """Put everything there that belongs there; only then is it ours."""
        manager = self._manager
        if self._tarball is not None:
            self._unpacked = manager.unpack(container_id, self._tarball.read_bytes())
        for path, content in self._changes.items():
            if content is not None:
                manager.put(container_id, path, content)
        deleted = {path for path, content in self._changes.items() if content is None}
        if deleted:
            for file in manager.files(container_id):
                if file.path in deleted:
                    manager.delete(container_id, file.id)
        self._container_id = container_id
        if self._session is not None:
            self._session[ActiveContainer].seed(ActiveContainer(container_id, self._config.memory_limit))
        return container_id

    def _on_container[T](self, act: Callable[[str], T]) -> T:
        """Do it; and once more, on another container, if this one turns out to be gone."""
        with self._lock:
            container_id = self._container_id or self.ensure_container()
        try:
            return act(container_id)
        except ContainerExpiredError:
            return act(self.renew_container())

    def _ids(self) -> dict[str, str]:
        """The ids of the container's files by path; of two with one path, the later."""
        found: dict[str, str] = {}
        for file in self._on_container(self._manager.files):
            if self.is_packed and file.path == ARCHIVE_NAME:
                continue
            try:
                found[normalised(file.path)] = file.id
            except WorkspaceSecurityError:  # code can name files as it likes; such ones have no place here
                continue
        return found

    def _mirrored(self) -> set[str]:
        if self._mirror is None or not self.is_packed:
            return set()
        return {*self._mirror.glob("**")}

    def _forget(self, file_id: str) -> None:
        self._on_container(lambda container: self._manager.delete(container, file_id))
