"""The files of a sandbox that is none, in memory, with the refusals of a real one; imports `fumehood.protocol`."""

import importlib
import io
import itertools
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from fumehood.protocol.sandbox import ArchiveFormat, FileEntry, FileListing, Unpacked, Written
from fumehood.protocol.sandbox_bundles import SMALL, Content, WholeFile
from fumehood.protocol.sandbox_errors import FileNotFound, FileRefused, SandboxError, TooLarge

_EPOCH_NS = 1_700_000_000 * 10**9  # a clock of its own: tests see the same times every day
_MOST_PARTS = 32
_MOST_REASONS = 20


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    version: int
    executable: bool = False


@dataclass(frozen=True, slots=True)
class _Member:
    """One entry of an archive; `content` None is something that is neither file nor directory."""

    name: str
    content: bytes | None
    is_directory: bool = False
    executable: bool = False


class MemoryFiles:
    """`limit` bounds one file and what one archive unpacks to."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self._limit = limit
        self._files: dict[str, _File] = {}
        self._deleted: dict[str, int] = {}
        self._directories: Counter[str] = Counter()  # how many files are below each
        self._versions = itertools.count(1)
        self._version = 0

    def listing(self, since: str | None = None) -> FileListing:
        known = _number(since)
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

    def read(self, path: str) -> bytes:
        checked(path)
        if path not in self._files:
            if path in self._directories:
                raise FileRefused(f"{path}: not a regular file", param="path")
            raise FileNotFound(f"There is no file {path!r}.", param="path")
        return self._files[path].content

    def write(self, path: str, content: bytes, *, executable: bool = False) -> FileEntry:
        self.check_place(path)
        if len(content) > self._limit:
            raise TooLarge(f"{path}: more than {self._limit} bytes", param="path")
        self._version = next(self._versions)
        if path not in self._files:
            self._directories.update(_above(path))
        self._files[path] = _File(content, self._version, executable)
        self._deleted.pop(path, None)
        return self._entry(path)

    def delete(self, path: str) -> None:
        self.read(path)  # for its refusals
        del self._files[path]
        self._directories -= Counter(_above(path))
        self._version = next(self._versions)
        self._deleted[path] = self._version

    def unpack(self, content: bytes, kind: ArchiveFormat, into: str) -> Unpacked:
        """All members or none."""
        if into:
            checked(into)
        members = _members(content, kind, self._limit)
        files = {_joined(into, member.name): member for member in members}
        wanted = {path: member.content for path, member in files.items() if member.content is not None}
        before = dict(self._files), dict(self._deleted), self._directories.copy()
        try:
            for path, data in wanted.items():
                self.write(path, data, executable=files[path].executable)
        except SandboxError:
            self._files, self._deleted, self._directories = before
            raise
        skipped = sum(member.content is None and not member.is_directory for member in members)
        return Unpacked(
            files=len(wanted),
            bytes=sum(map(len, wanted.values())),
            skipped=skipped,
            modified_ns=_EPOCH_NS + self._version,
            changed_ns=_EPOCH_NS + self._version,
        )

    def content(self, path: str) -> Content:
        try:
            content = self.read(path)
        except SandboxError as error:
            return error
        return content if len(content) <= SMALL else TooLarge(f"{path}: more than {SMALL} bytes")

    def write_all(self, files: Iterable[WholeFile]) -> Written:
        """As many as can be."""
        entries: list[FileEntry] = []
        reasons: list[str] = []
        for path, content, *executable in files:
            try:
                entries.append(self.write(path, content, executable=any(executable)))
            except SandboxError as error:
                reasons.append(error.message)
        return Written(
            files=len(entries),
            bytes=sum(entry.size for entry in entries),
            modified_ns=_EPOCH_NS + self._version,
            changed_ns=_EPOCH_NS + self._version,
            refused=len(reasons),
            reasons=reasons[:_MOST_REASONS],
        )

    def check_place(self, path: str) -> None:
        """Whether a file could be there, whatever is in it."""
        checked(path)
        if any(above in self._files for above in _above(path)):
            raise FileRefused(f"{path}: a file stands where its directory would be", param="path")
        if path in self._directories:
            raise FileRefused(f"{path}: a directory stands there", param="path")

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


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def checked(path: str) -> str:
    """A relative path without tricks, or FileRefused."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise FileRefused(f"{path!r}: a path is relative, without empty parts, '.' or '..'", param="path")
    try:
        long = max(len(part.encode()) for part in parts) > 255
    except UnicodeEncodeError as error:
        raise FileRefused(
            "The path is not valid text: it cannot be written as UTF-8.", param="path"
        ) from error
    if long or len(parts) > _MOST_PARTS:
        raise FileRefused(f"A path has at most {_MOST_PARTS} parts of at most 255 bytes.", param="path")
    return path


def _joined(into: str, name: str) -> str:
    return checked(f"{into}/{name}" if into else name)


def _number(mark: str | None) -> int | None:
    return int(mark) if mark is not None and mark.isascii() and mark.isdigit() else None


def _members(content: bytes, kind: ArchiveFormat, limit: int) -> list[_Member]:
    try:
        found = _zip_members(content) if kind == "zip" else _tar_members(content, kind)
        members: list[_Member] = []
        total = 0
        for member in found:
            checked(member.name)
            total += len(member.content or b"")
            if total > limit:
                raise TooLarge(f"The archive unpacks to more than {limit} bytes.")
            members.append(member)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise FileRefused(f"The archive cannot be read as {kind}: {error}") from error
    except (NotImplementedError, RuntimeError, ValueError) as error:  # encrypted, of unknown kind
        raise FileRefused(f"The archive cannot be unpacked: {error}") from error
    return members


def _zip_members(content: bytes) -> Iterator[_Member]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix("/")
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir():
                yield _Member(name, None, is_directory=True)
            elif kind in (0, stat.S_IFREG):
                yield _Member(name, archive.read(info), executable=bool(info.external_attr >> 16 & 0o100))
            else:
                yield _Member(name, None)


def _tar_members(content: bytes, kind: ArchiveFormat) -> Iterator[_Member]:
    if kind == "tar.gz":
        content = zlib.decompress(content, wbits=31)
    elif kind == "tar.zst":
        content = _unzstd(content)
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for info in archive:
            name = info.name.removeprefix("./").removesuffix("/")
            if info.isfile():
                data = archive.extractfile(info)
                content = b"" if data is None else data.read()
                yield _Member(name, content, executable=bool(info.mode & 0o100))
            elif name not in ("", "."):
                yield _Member(name, None, is_directory=info.isdir())


def _unzstd(content: bytes) -> bytes:
    for module in ("compression.zstd", "backports.zstd"):
        with suppress(ModuleNotFoundError):
            decompress: Callable[[bytes], bytes] = importlib.import_module(module).decompress
            try:
                return decompress(content)
            except Exception as error:  # of a class of the module's own
                raise OSError(str(error)) from error
    raise FileRefused("tar.zst needs Python 3.14 or backports.zstd.")
