"""Keeps layers of installed packages on disk, shared by supervisors, within a bound.

    layers/<sha256>            an installed tree, complete, read-only, never changed
    manifests/<sha256>.json    what is in it; its time is the layer's last use
    requests/<sha256>.json     which layer a request led to
    staging/<random>           work in progress; the one who works there holds a lock on it
    cache/<uid>                uv's, written by install jails only

A layer in use is locked (shared) by whoever uses it; one that is evicted is locked (exclusively) first.
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

from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packages import install_verification

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_RECORDS = 10_000


class PinnedPackage(msgspec.Struct, frozen=True, order=True):
    """One package as it was resolved; `hashes` are those of the files that may stand for it."""

    name: str
    version: str
    hashes: tuple[str, ...] = ()


class LayerManifest(msgspec.Struct, frozen=True):
    pins: list[PinnedPackage]
    files: int
    bytes: int


class InstallRecord(msgspec.Struct, frozen=True):
    """What a request led to; `layer` None: nothing was missing. `replaced`: in place of what sandboxes have."""

    pins: list[PinnedPackage]
    layer: str | None
    replaced: dict[str, str]
    made_at: float


class PackageLayer:
    """A layer that is in use: it stays while this is open."""

    def __init__(self, key: str, fd: int, manifest: LayerManifest) -> None:
        self.key = key
        self.manifest = manifest
        self._fd = fd

    def share(self) -> "PackageLayer":
        """Another hold on the same layer."""
        return PackageLayer(self.key, os.dup(self._fd), self.manifest)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LayerStore:
    """The layers of packages that are kept on this host."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes

    @property
    def layers_directory(self) -> Path:
        return self.path / "layers"

    def open(self) -> None:
        """Make the directories, and take away what a killed supervisor left."""
        make_directories(self.path)
        about = self.path.stat()
        if about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise IsolationUnavailable(
                f"{self.path} is not a directory that this user alone can write.",
                "Set packages_dir to one that is, or packages to false.",
            )
        for name in ("layers", "manifests", "requests", "staging", "cache"):
            (self.path / name).mkdir(mode=0o755, exist_ok=True)
        self.remove_abandoned_staging()

    def cache_directory(self, uid: int | None) -> Path:
        """uv's own; of the kernel user who writes there."""
        path = self.path / "cache" / str(os.geteuid() if uid is None else uid)
        path.mkdir(mode=0o700, exist_ok=True)
        if uid is not None:
            os.chown(path, uid, uid)
        return path

    def usage(self) -> tuple[int, int]:
        """How many layers there are, and their bytes."""
        sizes = [manifest.bytes for _, manifest, _ in self._manifests()]
        return len(sizes), sum(sizes)

    # ---- work in progress -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def make_staging_directory(self) -> Generator[Path]:
        """A directory to build in, gone afterwards; a lock tells others that somebody works there."""
        path = self.path / "staging" / secrets.token_hex(8)
        with self._lock_staging():  # nobody sweeps between its making and its locking
            path.mkdir(mode=0o755)
            fd = os.open(path, _DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            _remove(path)
            os.close(fd)

    def remove_abandoned_staging(self) -> None:
        """Remove work in progress that nobody works on any more."""
        with self._lock_staging():
            for path in (self.path / "staging").iterdir():
                with _try_lock(path) as free:
                    if free:
                        _remove(path)

    @contextlib.contextmanager
    def _lock_staging(self) -> Generator[None]:
        fd = os.open(self.path / "staging.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    # ---- layers -----------------------------------------------------------------------------------------------

    def open_layer(self, key: str) -> PackageLayer | None:
        """The layer of this key, held; None if there is none."""
        path = self.layers_directory / key
        try:
            fd = os.open(path, _DIRECTORY)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held, named = os.fstat(fd), os.stat(path, follow_symlinks=False)
            manifest_path = self.path / "manifests" / f"{key}.json"
            manifest = msgspec.json.decode(manifest_path.read_bytes(), type=LayerManifest)
            if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
                os.utime(manifest_path)
                return PackageLayer(key, os.dup(fd), manifest)
        except (OSError, msgspec.MsgspecError):
            pass  # it is being evicted
        finally:
            os.close(fd)
        return None

    def add_layer(self, tree: Path, key: str, pins: list[PinnedPackage]) -> PackageLayer:
        """Make a tree that an install jail has written the layer of this key; raises UnfitTree, OSError."""
        size = install_verification.verify_tree(str(tree), max_bytes=self._max_bytes)
        # What Python remembers of a directory it knows by this time: no two layers may have the same.
        os.utime(tree, ns=(time.time_ns(), time.time_ns()))
        self._write_json(f"manifests/{key}.json", LayerManifest(pins, size.files, size.bytes))
        try:
            os.rename(tree, self.layers_directory / key)
        except OSError:
            if not (self.layers_directory / key).is_dir():  # else another supervisor was faster
                raise
        _fsync_directory(self.layers_directory)
        layer = self.open_layer(key)
        if layer is None:
            raise OSError(f"the layer {key} was removed at once")
        return layer

    def evict(self) -> list[str]:
        """Remove the least recently used layers that nobody holds until all are within the bound."""
        found = [(used, manifest.bytes, key) for used, manifest, key in self._manifests()]
        total = sum(size for _, size, _ in found)
        gone: list[str] = []
        for _, size, key in sorted(found):
            if total <= self._max_bytes:
                break
            if self._evict_layer(key):
                total -= size
                gone.append(key)
        self._prune_records()
        return gone

    def _manifests(self) -> Iterator[tuple[float, LayerManifest, str]]:
        """When a layer was last used, what it is, and its key."""
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

    def load_record(self, key: str) -> InstallRecord | None:
        try:
            body = (self.path / "requests" / f"{key}.json").read_bytes()
            return msgspec.json.decode(body, type=InstallRecord)
        except (OSError, msgspec.MsgspecError):
            return None

    def save_record(self, key: str, request: InstallRecord) -> None:
        self._write_json(f"requests/{key}.json", request)

    def _prune_records(self) -> None:
        paths = sorted((self.path / "requests").glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in paths[:-_MAX_RECORDS]:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def try_lock_request(self, key: str) -> Generator[bool]:
        """Whether this request is ours to work on now; another supervisor may be at it."""
        fd = os.open(self.path / "requests" / f"{key[:4]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)

    def _write_json(self, name: str, content: msgspec.Struct) -> None:
        temporary = self.path / f"{name}.{secrets.token_hex(4)}.new"
        temporary.write_bytes(msgspec.json.encode(content))
        os.rename(temporary, self.path / name)


def make_directories(path: Path) -> None:
    """With its parents; those that are made here nobody else can write, whatever the umask would allow."""
    if not path.is_dir():
        make_directories(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)


@contextlib.contextmanager
def _try_lock(path: Path) -> Generator[bool]:
    """Whether nobody else holds this directory; it is ours within."""
    try:
        fd = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        yield False
        return
    try:
        yield True
    finally:
        os.close(fd)


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, _DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Whatever is there; never through a link."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
