"""Stores package layers on disk, shared by supervisors, with a size limit.

    layers/<sha256>            a complete installed tree; never changed
    manifests/<sha256>.json    its contents; the modification time is the layer's last use
    requests/<sha256>.json     the layer of a request
    staging/<random>           work in progress, locked by its owner
    cache/<uid>                uv's cache, written by install jails only

A layer in use has a shared lock; eviction takes an exclusive lock first.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec

from fumehood.sandbox_server.inside.syscalls import closing_fd
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packages import installed_tree_check

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_RECORDS = 10_000


class PinnedPackage(msgspec.Struct, frozen=True, order=True):
    """A resolved package; `hashes` are those of its acceptable files."""

    name: str
    version: str
    hashes: tuple[str, ...] = ()


class LayerManifest(msgspec.Struct, frozen=True):
    """The packages in a layer, and its size."""

    pins: list[PinnedPackage]
    files: int
    bytes: int


class InstallCacheEntry(msgspec.Struct, frozen=True):
    """The cached result of an install request.

    layer: None if nothing was missing. replaced: versions in the layer that replace those of sandboxes.
    """

    pins: list[PinnedPackage]
    layer: str | None
    replaced: dict[str, str]
    made_at: float


class PackageLayerHandle:
    """A layer in use; it is not evicted until `close`."""

    def __init__(self, key: str, fd: int, manifest: LayerManifest) -> None:
        self.key = key
        self.manifest = manifest
        self._fd = fd

    def share(self) -> "PackageLayerHandle":
        """Return another handle of the same layer."""
        return PackageLayerHandle(self.key, os.dup(self._fd), self.manifest)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LayerStore:
    """The package layers of this host; max_bytes limits their total size."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes

    @property
    def layers_directory(self) -> Path:
        return self.path / "layers"

    def open(self) -> None:
        """Create the directories and remove what killed supervisors left. Raises IsolationUnavailable, OSError."""
        make_directories(self.path)
        status = self.path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise IsolationUnavailable(
                f"{self.path} is not a directory that this user alone can write.",
                "Set packages_dir to one that is, or packages to false.",
            )
        for name in ("layers", "manifests", "requests", "staging", "cache"):
            (self.path / name).mkdir(mode=0o755, exist_ok=True)
        self.remove_abandoned_staging()

    def cache_directory(self, uid: int | None) -> Path:
        """Create and return uv's cache directory for the user of install jails."""
        path = self.path / "cache" / str(os.geteuid() if uid is None else uid)
        path.mkdir(mode=0o700, exist_ok=True)
        if uid is not None:
            os.chown(path, uid, uid)
        return path

    def usage(self) -> tuple[int, int]:
        """Return the number of layers and their total bytes."""
        sizes = [manifest.bytes for _, manifest, _ in self._manifests()]
        return len(sizes), sum(sizes)

    # ---- work in progress -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def make_staging_directory(self) -> Generator[Path]:
        """Yield a locked directory to build in; it is removed afterwards."""
        path = self.path / "staging" / secrets.token_hex(8)
        with lock_file(self.path / "staging.lock"):  # so that nobody removes it before it is locked
            path.mkdir(mode=0o755)
            fd = os.open(path, _DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            _remove(path)
            os.close(fd)

    def remove_abandoned_staging(self) -> None:
        """Remove staging directories that nobody has locked."""
        with lock_file(self.path / "staging.lock"):
            for path in (self.path / "staging").iterdir():
                with _try_lock(path) as free:
                    if free:
                        _remove(path)

    # ---- layers -----------------------------------------------------------------------------------------------

    def open_layer(self, key: str) -> PackageLayerHandle | None:
        """Return the layer of this key, locked; None if there is none."""
        path = self.layers_directory / key
        try:
            fd = os.open(path, _DIRECTORY)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            opened, current = os.fstat(fd), os.stat(path, follow_symlinks=False)
            manifest_path = self.path / "manifests" / f"{key}.json"
            manifest = msgspec.json.decode(manifest_path.read_bytes(), type=LayerManifest)
            if (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino):
                os.utime(manifest_path)
                return PackageLayerHandle(key, os.dup(fd), manifest)
        except (OSError, msgspec.MsgspecError):
            pass  # being evicted
        finally:
            os.close(fd)
        return None

    def add_layer(self, tree: Path, key: str, pins: list[PinnedPackage]) -> PackageLayerHandle:
        """Verify the tree of an install jail and move it into the store. Raises InvalidInstallTree, OSError."""
        files, size = installed_tree_check.verify_tree(str(tree), max_bytes=self._max_bytes)
        # Python caches directory listings by this time: no two layers may have the same.
        os.utime(tree, ns=(time.time_ns(), time.time_ns()))
        self._write_json(f"manifests/{key}.json", LayerManifest(pins, files, size))
        try:
            os.rename(tree, self.layers_directory / key)
        except OSError:
            if not (self.layers_directory / key).is_dir():  # else another supervisor has added it
                raise
        _fsync_directory(self.layers_directory)
        layer = self.open_layer(key)
        if layer is None:
            raise OSError(f"the layer {key} was evicted at once")
        return layer

    def evict(self) -> list[str]:
        """Remove least recently used layers that are not in use until the limit is met; returns their keys."""
        found = [(used, manifest.bytes, key) for used, manifest, key in self._manifests()]
        total = sum(size for _, size, _ in found)
        evicted: list[str] = []
        for _, size, key in sorted(found):
            if total <= self._max_bytes:
                break
            if self._evict_layer(key):
                total -= size
                evicted.append(key)
        self._prune_records()
        return evicted

    def _manifests(self) -> Iterator[tuple[float, LayerManifest, str]]:
        """Yield last use, manifest and key of each layer."""
        for path in (self.path / "manifests").glob("*.json"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                manifest = msgspec.json.decode(path.read_bytes(), type=LayerManifest)
                yield path.stat().st_mtime, manifest, path.stem

    def _evict_layer(self, key: str) -> bool:
        path = self.layers_directory / key
        away = self.path / "staging" / f"evicted-{secrets.token_hex(8)}"
        with _try_lock(path) as free:
            if not free:
                return False
            (self.path / "manifests" / f"{key}.json").unlink(missing_ok=True)
            try:
                os.rename(path, away)
            except FileNotFoundError:
                return True
        _remove(away)
        return True

    # ---- requests ---------------------------------------------------------------------------------------------

    def load_record(self, key: str) -> InstallCacheEntry | None:
        """Return the result of an earlier request, if there is one."""
        try:
            body = (self.path / "requests" / f"{key}.json").read_bytes()
            return msgspec.json.decode(body, type=InstallCacheEntry)
        except (OSError, msgspec.MsgspecError):
            return None

    def save_record(self, key: str, record: InstallCacheEntry) -> None:
        """Save the result of a request."""
        self._write_json(f"requests/{key}.json", record)

    def _prune_records(self) -> None:
        paths = sorted((self.path / "requests").glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in paths[:-_MAX_RECORDS]:
            path.unlink(missing_ok=True)

    def _write_json(self, name: str, content: msgspec.Struct) -> None:
        temporary = self.path / f"{name}.{secrets.token_hex(4)}.new"
        temporary.write_bytes(msgspec.json.encode(content))
        os.rename(temporary, self.path / name)


def make_directories(path: Path) -> None:
    """Create a directory and its parents, with mode 0755 whatever the umask allows."""
    if not path.is_dir():
        make_directories(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)


@contextlib.contextmanager
def lock_file(path: Path) -> Generator[None]:
    """Hold an exclusive lock on this file, which is created if it is missing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with closing_fd(os.open(path, flags, 0o600)) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _try_lock(path: Path) -> Generator[bool]:
    """Yield whether this directory is free; it is locked within the context."""
    try:
        fd = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        yield True
        return
    with closing_fd(fd):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except BlockingIOError:
            is_free = False
        yield is_free


def _fsync_directory(path: Path) -> None:
    with closing_fd(os.open(path, _DIRECTORY)) as fd:
        os.fsync(fd)


def _remove(path: Path) -> None:
    """Remove a file or a tree; never follows a link."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
