"""Files of a fake sandbox, in memory, with the checks of a real one."""

import importlib
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fumehood.protocol.sandbox.bundle_encoding import MAX_BUNDLED_FILE_BYTES, BundleContent, BundledFile
from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxError,
    SandboxFileNotFound,
    SandboxPayloadTooLarge,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    FileEntry,
    FileListing,
    UnpackSummary,
    WriteFilesSummary,
)

_EPOCH_NS = 1_700_000_000 * 10**9  # times are deterministic
_MAX_PATH_PARTS = 32
_MAX_REASONS = 20


@dataclass(frozen=True, slots=True)
class _MemoryFile:
    content: bytes
    version: int
    executable: bool = False


@dataclass(frozen=True, slots=True)
class _ArchiveMember:
    """A member of an archive. `content` is None unless it is a regular file."""

    name: str
    content: bytes | None
    is_directory: bool = False
    executable: bool = False


class MemorySandboxFiles:
    """The files of one sandbox.

    limit: bytes of one file, and of all files of an archive.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self._limit = limit
        self._files: dict[str, _MemoryFile] = {}
        self._deleted: dict[str, int] = {}
        self._directories: Counter[str] = Counter()  # number of files below each
        self._version = 0

    def list_files(self, since: str | None = None) -> FileListing:
        known = _parse_mark(since)
        complete = known is None or known > self._version
        start = -1 if complete or known is None else known
        return FileListing(
            files=[self._entry(path) for path, file in sorted(self._files.items()) if file.version > start],
            mark=str(self._version),
            deleted=[]
            if complete
            else sorted(path for path, version in self._deleted.items() if version > start),
            complete=complete,
        )

    def read_file(self, path: str) -> bytes:
        validate_path(path)
        if path not in self._files:
            if path in self._directories:
                raise FileRefused(f"{path}: not a regular file", param="path")
            raise SandboxFileNotFound(f"There is no file {path!r}.", param="path")
        return self._files[path].content

    def write_file(self, path: str, content: bytes, *, executable: bool = False) -> FileEntry:
        self.check_path(path)
        if len(content) > self._limit:
            raise SandboxPayloadTooLarge(f"{path}: more than {self._limit} bytes", param="path")
        self._version += 1
        if path not in self._files:
            self._directories.update(_list_parents(path))
        self._files[path] = _MemoryFile(content, self._version, executable)
        self._deleted.pop(path, None)
        return self._entry(path)

    def delete_file(self, path: str) -> None:
        self.read_file(path)  # raises if it cannot be deleted
        del self._files[path]
        self._directories -= Counter(_list_parents(path))
        self._version += 1
        self._deleted[path] = self._version

    def unpack_archive(self, content: bytes, kind: ArchiveFormat, into: str) -> UnpackSummary:
        """Write all members or none. Raises FileRefused, SandboxPayloadTooLarge."""
        if into:
            validate_path(into)
        members = _read_members(content, kind, self._limit)
        prefix = f"{into}/" if into else ""
        files = {validate_path(f"{prefix}{member.name}"): member for member in members}
        wanted = {path: member.content for path, member in files.items() if member.content is not None}
        before = dict(self._files), dict(self._deleted), self._directories.copy()
        try:
            for path, data in wanted.items():
                self.write_file(path, data, executable=files[path].executable)
        except SandboxError:
            self._files, self._deleted, self._directories = before
            raise
        skipped = sum(member.content is None and not member.is_directory for member in members)
        return UnpackSummary(
            files=len(wanted),
            bytes=sum(map(len, wanted.values())),
            skipped=skipped,
            modified_ns=_EPOCH_NS + self._version,
            changed_ns=_EPOCH_NS + self._version,
        )

    def read_small_file(self, path: str) -> BundleContent:
        try:
            content = self.read_file(path)
        except SandboxError as error:
            return error
        return (
            content
            if len(content) <= MAX_BUNDLED_FILE_BYTES
            else SandboxPayloadTooLarge(f"{path}: more than {MAX_BUNDLED_FILE_BYTES} bytes")
        )

    def write_files(self, files: Iterable[BundledFile]) -> WriteFilesSummary:
        """Write the files, and report those that are refused."""
        entries: list[FileEntry] = []
        reasons: list[str] = []
        for path, content, *executable in files:
            try:
                entries.append(self.write_file(path, content, executable=any(executable)))
            except SandboxError as error:
                reasons.append(error.message)
        return WriteFilesSummary(
            files=len(entries),
            bytes=sum(entry.size for entry in entries),
            modified_ns=_EPOCH_NS + self._version,
            changed_ns=_EPOCH_NS + self._version,
            refused=len(reasons),
            reasons=reasons[:_MAX_REASONS],
        )

    def check_path(self, path: str) -> None:
        """Raises FileRefused if no file can be written there."""
        validate_path(path)
        if any(parent in self._files for parent in _list_parents(path)):
            raise FileRefused(f"{path}: its directory is a file", param="path")
        if path in self._directories:
            raise FileRefused(f"{path}: is a directory", param="path")

    def _entry(self, path: str) -> FileEntry:
        file = self._files[path]
        written_ns = _EPOCH_NS + file.version
        return FileEntry(
            path=path,
            size=len(file.content),
            modified_ns=written_ns,
            changed_ns=written_ns,
            inode=1,
            executable=file.executable,
        )


def _list_parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def validate_path(path: str) -> str:
    """Return the path. Raises FileRefused unless it is a plain relative path."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise FileRefused(f"{path!r}: a path is relative, without empty parts, '.' or '..'", param="path")
    try:
        long = max(len(part.encode()) for part in parts) > 255
    except UnicodeEncodeError as error:
        raise FileRefused(
            "The path is not valid text: it cannot be written as UTF-8.", param="path"
        ) from error
    if long or len(parts) > _MAX_PATH_PARTS:
        raise FileRefused(f"A path has at most {_MAX_PATH_PARTS} parts of at most 255 bytes.", param="path")
    return path


def _parse_mark(mark: str | None) -> int | None:
    return int(mark) if mark is not None and mark.isascii() and mark.isdigit() else None


def _read_members(content: bytes, kind: ArchiveFormat, limit: int) -> list[_ArchiveMember]:
    try:
        found = _read_zip_members(content) if kind == "zip" else _read_tar_members(content, kind)
        members: list[_ArchiveMember] = []
        total = 0
        for member in found:
            validate_path(member.name)
            total += len(member.content or b"")
            if total > limit:
                raise SandboxPayloadTooLarge(f"The archive unpacks to more than {limit} bytes.")
            members.append(member)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise FileRefused(f"The archive cannot be read as {kind}: {error}") from error
    except (NotImplementedError, RuntimeError, ValueError) as error:  # encrypted, or of unknown kind
        raise FileRefused(f"The archive cannot be unpacked: {error}") from error
    return members


def _read_zip_members(content: bytes) -> Iterator[_ArchiveMember]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix("/")
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir():
                yield _ArchiveMember(name, None, is_directory=True)
            elif kind in (0, stat.S_IFREG):
                yield _ArchiveMember(
                    name, archive.read(info), executable=bool(info.external_attr >> 16 & 0o100)
                )
            else:
                yield _ArchiveMember(name, None)


def _read_tar_members(content: bytes, kind: ArchiveFormat) -> Iterator[_ArchiveMember]:
    if kind == "tar.gz":
        content = zlib.decompress(content, wbits=31)
    elif kind == "tar.zst":
        content = _decompress_zstd(content)
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for info in archive:
            name = info.name.removeprefix("./").removesuffix("/")
            if info.isfile():
                data = archive.extractfile(info)
                content = b"" if data is None else data.read()
                yield _ArchiveMember(name, content, executable=bool(info.mode & 0o100))
            elif name not in ("", "."):
                yield _ArchiveMember(name, None, is_directory=info.isdir())


def _decompress_zstd(content: bytes) -> bytes:
    zstd = find_zstd()
    if zstd is None:
        raise FileRefused("tar.zst needs Python 3.14 or backports.zstd.")
    try:
        return zstd.decompress(content)
    except zstd.ZstdError as error:
        raise OSError(str(error)) from error


def find_zstd() -> Any:
    """Return the module for zstd, None without one."""
    for module in ("compression.zstd", "backports.zstd"):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(module)
    return None
