"""The files of a container as a filesystem."""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.client.adapters.openai.config import ContainerConfig, check_client
from fumehood.client.adapters.openai.container import ContainerFileEntry, ContainerLink, ContainerManager
from fumehood.client.dbc import require
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import (
    ContainerExpiredError,
    ContainerNotFoundError,
    DeadlineExceededError,
    PromptEvaluationError,
    WorkspaceSecurityError,
)
from fumehood.client.filesystem import (
    HostFilesystem,
    ListingFilesystem,
    check_parents,
    normalize_path,
    resolve_existing,
    resolve_writable,
)
from fumehood.client.parallel import WorkerCancellation, run_parallel
from fumehood.client.runtime.session import SessionProtocol
from fumehood.client.throttle import ThrottlePolicy
from fumehood.client.type_validation import check_arguments

if TYPE_CHECKING:
    from openai import OpenAI

_log = logging.getLogger(__name__)

_MAX_DOWNLOADS = 8


@dataclass(frozen=True)
class SharedContainer:
    """The container that workspaces of mode "auto" share in a session."""

    container_id: str
    memory_limit: str


class ContainerFilesystem(ListingFilesystem):
    """Files in a container that is created on first use.

    An expired container is recreated with the archive and with all writes and deletions made here. Files that code in
    the container has written are lost. (The evaluation recreates it for model requests, this class for file access.)

    If the server does not unpack archives, files that the container does not show yet are read from `local_root`.

    archive: the archive that code has to unpack, if any.
    relocated_files: paths in the container of files that the server has renamed.
    """

    @check_arguments
    def __init__(
        self,
        *,
        client: "OpenAI | Callable[[], OpenAI]",
        container_config: ContainerConfig,
        tarball_path: Path | None = None,
        local_root: Path | None = None,
        session: SessionProtocol | None = None,
    ) -> None:
        """client: a client, or a function that returns one. session: where mode "auto" finds a container to reuse."""
        self.policy: ThrottlePolicy | None = None
        if not callable(client):
            check_client(client)
        self._client = client
        self._config = container_config
        self._tarball = tarball_path
        self._mirror = None if local_root is None else HostFilesystem(local_root)
        self._session = session
        self.container_id: str | None = None
        self._changes: dict[str, bytes | None] = {}
        self.archive: str | None = None
        # Ids of our files, because a server may rename them, and their paths if it does.
        self._uploaded_paths: dict[str, str] = {}
        self.relocated_files: dict[str, str] = {}
        self._attached_ids: list[str] = []
        self._closed = False
        self._lock = threading.RLock()

    def ensure_container(self, *, deadline: Deadline | None = None) -> str:
        """Return the id of a live, filled container. Raises ContainerExpiredError if it cannot be recreated."""
        with self._lock:
            self._check_open()
            if self.container_id is None:
                return self._reuse_or_create(self._manager(deadline))
            if self._manager(deadline).is_alive(self.container_id):
                return self.container_id
            return self.renew_container(deadline=deadline)

    def attach(self, *file_ids: str, deadline: Deadline | None = None) -> None:
        """Add files that were uploaded to the provider, also to every container that replaces this one."""
        with self._lock:
            self._check_open()
            added = [one for one in dict.fromkeys(file_ids) if one not in self._attached_ids]
            if self.container_id is not None:
                manager = self._manager(deadline)
                for file_id in added:
                    self._with_container(partial(manager.attach, file_id=file_id))
            self._attached_ids += added

    def is_alive(self) -> bool:
        """Whether the container exists; never creates one."""
        return self.container_id is not None and self._manager().is_alive(self.container_id)

    def renew_container(self, expired_id: str | None = None, *, deadline: Deadline | None = None) -> str:
        """Replace an expired container by a new one with the same files.

        expired_id: the expired one, in case another thread has replaced it already.
        """
        with self._lock:
            self._check_open()
            known = self.container_id
            if known is not None and expired_id not in (None, known):
                return known
            try:
                return self._create(self._manager(deadline))
            except DeadlineExceededError:
                raise
            except Exception as error:
                raise ContainerExpiredError(known or "(none)", error) from error

    def paths(self) -> Collection[str]:
        return self._with_container(self._list_ids).keys() | self._mirror_paths()

    def read(self, path: str) -> bytes:
        def act(container: str) -> bytes:
            normalized, file_id = self._locate(container, path)
            if file_id is None and self._mirror is not None:
                return self._mirror.read(normalized)
            return self._manager().read_file(container, file_id or "")

        return self._with_container(act)

    def write(self, path: str, content: bytes) -> None:
        def act(container: str) -> str:
            ids = self._list_ids(container)
            normalized = resolve_writable(path, ids.keys() | self._mirror_paths())
            made, before = self._upload(container, normalized, content, self._manager()), ids.get(normalized)
            # Keep the unpacked copy beside a relocated file; otherwise it would be unpacked again.
            replaced = before in self._uploaded_paths or normalized not in self.relocated_files
            if before not in (None, made) and replaced:
                self._manager().delete_file(container, before)
            return normalized

        normalized = self._with_container(act)
        self._changes[normalized] = bytes(content)
        if self._mirror is not None:
            self._mirror.write(normalized, content)

    def delete(self, path: str) -> None:
        def act(container: str) -> str:
            normalized, file_id = self._locate(container, path)
            if file_id is not None:
                self._manager().delete_file(container, file_id)
            return normalized

        normalized = self._with_container(act)
        self.relocated_files.pop(normalized, None)
        self._changes[normalized] = None
        if self._mirror is not None and self._mirror.is_file(normalized):
            self._mirror.delete(normalized)

    def download_all(self, dest: Path) -> None:
        """Download all files to a local directory in parallel, then create the symbolic links among them.

        Names that would leave the directory are skipped, and links that lead out of it; a warning names them.
        Raises OSError if this machine cannot store some of the files; all others are there then. Any other error ends
        it at once; some files may be missing then, but none is partial.
        """
        dest.mkdir(parents=True, exist_ok=True)
        failed = self._with_container(lambda container: self._download(container, HostFilesystem(dest)))
        if failed:
            path, error = failed[0]
            raise OSError(
                f"{len(failed)} file(s) could not be brought back, among them {path[:200]!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def cleanup(self) -> None:
        """Release the container, which expires by itself."""
        self._closed = True
        self.container_id = None
        self._changes.clear()

    # ---- the container --------------------------------------------------------------------------------------

    @property
    def client(self) -> "OpenAI":
        return self._client() if callable(self._client) else self._client

    def _manager(
        self, deadline: Deadline | None = None, token: WorkerCancellation | None = None
    ) -> ContainerManager:
        return ContainerManager(self.client, self._config, policy=self.policy, deadline=deadline, token=token)

    def _check_open(self) -> None:
        require(not self._closed, "The workspace was cleaned up, and its files are gone; make another one.")

    def _reuse_or_create(self, manager: ContainerManager) -> str:
        if self._config.mode == "auto" and self._session is not None:
            last = self._session[SharedContainer].latest()
            same_size = last is not None and last.memory_limit == self._config.memory_limit
            if last is not None and same_size and manager.is_alive(last.container_id):
                return self._fill(last.container_id, manager)
        return self._create(manager)

    def _create(self, manager: ContainerManager) -> str:
        container_id = manager.create()
        try:
            return self._fill(container_id, manager)
        except Exception:
            manager.delete_container(container_id)  # otherwise it would be orphaned
            raise

    def _fill(self, container_id: str, manager: ContainerManager) -> str:
        """Upload everything; only then is the container used."""
        self._uploaded_paths.clear()
        self.relocated_files.clear()
        if self._tarball is not None:
            archive = self._unpack_archive(container_id, self._tarball, manager)
            self.archive = None if archive is None else archive.path
        deleted = {path for path, content in self._changes.items() if content is None}
        if deleted:  # first: their paths may have been reused
            for file in manager.list_files(container_id):
                if file.path in deleted:
                    manager.delete_file(container_id, file.id)
        for path, content in self._changes.items():
            if content is not None:
                self._upload(container_id, path, content, manager)
        for file_id in self._attached_ids:
            manager.attach(container_id, file_id)
        self.container_id = container_id
        if self._session is not None and self._config.mode == "auto":
            self._session[SharedContainer].seed(SharedContainer(container_id, self._config.memory_limit))
        return container_id

    def _unpack_archive(
        self, container_id: str, tarball: Path, manager: ContainerManager
    ) -> ContainerFileEntry | None:
        try:
            return manager.unpack(container_id, tarball)
        except PromptEvaluationError as error:
            if type(error) is PromptEvaluationError:  # rejected, and not just late
                error.message += (
                    " (These are the files of a workspace: the exclude_glob of a mount leaves some out.)"
                )
            raise

    def _with_container[T](self, act: Callable[[str], T]) -> T:
        """Run an operation; repeat it once on a new container if this one is gone."""
        with self._lock:
            container_id = self.container_id or self.ensure_container()
        try:
            return act(container_id)
        except (ContainerExpiredError, ContainerNotFoundError):
            return act(self.renew_container(container_id))

    # ---- its files ------------------------------------------------------------------------------------------

    def _list_ids(self, container_id: str) -> dict[str, str]:
        """Return ids of the container's files by path; the later of two files with one path."""
        found: dict[str, str] = {}
        for file in self._manager().list_files(container_id):
            if file.path == self.archive:
                continue
            try:
                found[self._uploaded_paths.get(file.id) or normalize_path(file.path)] = file.id
            except WorkspaceSecurityError:  # code can use any names; these are not valid paths here
                _log.warning("The file %.200r has a name that is no path here; it is left out.", file.path)
        return found

    def _locate(self, container_id: str, path: str) -> tuple[str, str | None]:
        """Return the normalised path of a file, and its id if the container shows it already."""
        ids = self._list_ids(container_id)
        normalized = resolve_existing(path, ids.keys() | self._mirror_paths())
        return normalized, ids.get(normalized)

    def _upload(self, container_id: str, path: str, content: bytes, manager: ContainerManager) -> str:
        made = manager.upload_unchecked(container_id, path, content)
        self._uploaded_paths[made.id] = path
        self.relocated_files.pop(path, None)
        if made.path != path:
            self.relocated_files[path] = made.path
        return made.id

    def _mirror_paths(self) -> set[str]:
        return {*self._mirror.glob("**")} if self._mirror is not None and self.archive else set()

    def _download(self, container_id: str, target: HostFilesystem) -> list[tuple[str, OSError]]:
        """Download all files; return those that failed."""
        token = WorkerCancellation()
        ids, manager, mirror = self._list_ids(container_id), self._manager(token=token), self._mirror
        paths = sorted(ids.keys() | self._mirror_paths())
        files = frozenset(paths)

        def bring(path: str) -> OSError | None:
            try:
                check_parents(path, files)  # whichever raises first
                local_path = target.prepare_path(path)
                if (file_id := ids.get(path)) is not None:
                    manager.download_file(container_id, file_id, local_path)
                elif mirror is not None:
                    with token.partial_file(local_path) as part:
                        part.write_bytes(mirror.read(path))
            except OSError as error:
                token.check()  # not the fault of the file
                _log.warning("The file %.200r could not be brought back: %r", path, error)
                return error
            return None

        errors = run_parallel(bring, paths, token, max_workers=_MAX_DOWNLOADS, name="fumehood download")
        failed = [(path, error) for path, error in zip(paths, errors, strict=True) if error is not None]
        others = manager.find_unlisted_files(container_id)
        missing = OSError("the container does not list it: too many files, or written after the last call")
        failed += [(path, missing) for path in others.paths]
        if others.truncated:
            failed.append(("(without a name)", missing))
        # Links last, so that no file is written through one.
        return [*failed, *_create_links(others.links, target)]


def _create_links(links: Sequence[ContainerLink], target: HostFilesystem) -> list[tuple[str, OSError]]:
    """Create symbolic links in a local directory; return those that failed."""
    failed: list[tuple[str, OSError]] = []
    outside: list[str] = []
    for link in links:
        try:
            target.link(link.path, link.destination)
        except WorkspaceSecurityError:
            outside.append(link.path)
        except OSError as error:
            failed.append((link.path, error))
    if outside:
        _log.warning(
            "%d link(s) lead out of the workspace and were not brought back, among them %.200r.",
            len(outside),
            outside[0],
        )
    return failed
