"""Unpacks untrusted archives into a sandbox's data directory, completely or not at all.

This runs in a helper: as the sandbox's user, in its cgroup, under a seccomp filter. Members are first written under
numbers into a staging directory; no name of the archive is used before all of it has been read and checked. Then they
are moved to their paths one by one, each replacing the file of its name; if one fails, all are moved back.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.inside.files import (
    atomic_writes,
    decompression,
    tar_reader,
    untrusted_files,
    zip_reader,
)
from fumehood.sandbox_server.inside.files.archive_members import printable_name, split_member_name
from fumehood.sandbox_server.inside.files.quota_requests import FileTaskRefused, WriteQuota

_MAX_REASONS = 20
_MAX_TAR_HEADER_BYTES = 64 << 20  # what a tar may contain besides its members' content

# The number of a staged file, or the entries of a directory.
type _Tree = dict[bytes, int | _Tree]


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """Limits of one archive.

    members: files, directories and skipped members. size: bytes actually written.
    """

    members: int
    size: int


@dataclass(frozen=True, slots=True)
class UnpackOutcome:
    """What was unpacked.

    modified_ns: when the last file was written. changed_ns: when all were moved. A file with a newer time was changed
        by somebody else since.
    refused: how many files were refused. reasons: name and reason of the first of them.
    """

    files: int
    size: int
    skipped: int = 0
    modified_ns: int = field(default=0, compare=False)
    changed_ns: int = field(default=0, compare=False)
    refused: int = 0
    reasons: list[str] = field(default_factory=list[str])


def unpack_archive(
    data: int, source: int, *, kind: str, into: str, token: str, limits: UnpackLimits, permit: WriteQuota
) -> UnpackOutcome:
    """Unpack the archive from `source` below `into`. Raises FileTaskRefused, OSError; then nothing has changed.

    data: the data directory. kind: `zip` or a key of `DECOMPRESSORS`. token: names the staging directory.
    """
    unpacker = StagedFileWriter(data, into, token, limits, permit)
    counted = CountedSource(source, permit)
    try:
        if kind == "zip":
            _unpack_spooled_zip(data, counted, unpacker, permit)
        else:
            decoded = decompression.DECOMPRESSORS[kind](counted.iter_chunks(), permit)
            tar_reader.unpack_tar(
                decompression.limit_size(decoded, limits.size + _MAX_TAR_HEADER_BYTES), unpacker
            )
            permit.confirm_complete(counted.received_bytes)
        return unpacker.commit()
    except UnicodeDecodeError as error:
        raise FileTaskRefused(f"{printable_name(error.object)}: the name is not UTF-8") from None
    finally:
        unpacker.discard()


class CountedSource:
    """Reads the upload and counts its bytes."""

    def __init__(self, source: int, permit: WriteQuota) -> None:
        self._source = source
        self._permit = permit
        self.received_bytes = 0

    def iter_chunks(self) -> Iterator[bytes]:
        for chunk in atomic_writes.read_chunks(self._source):
            self.received_bytes += len(chunk)
            self._permit.reserve(0)
            yield chunk


def _unpack_spooled_zip(
    data: int, source: CountedSource, unpacker: "StagedFileWriter", permit: WriteQuota
) -> None:
    """Spool the zip, whose directory is at its end, to an unnamed file that counts against the sandbox."""
    try:
        spool = syscalls.openat2(
            data, b".", os.O_TMPFILE | os.O_RDWR, 0o600, resolve=untrusted_files.RESOLVE_BENEATH
        )
    except OSError:  # a file system without O_TMPFILE
        spool = os.memfd_create("archive")
    with syscalls.closing_fd(spool):
        size = atomic_writes.write_chunks(spool, source.iter_chunks(), permit)
        permit.confirm_complete(size)
        zip_reader.unpack_zip(spool, size, unpacker)


def _file_mode(executable: bool) -> int:
    return 0o755 if executable else 0o644


class StagedFileWriter:
    """Writes files to a staging directory and moves them to their paths in `commit`.

    allow_partial: report files that cannot be moved and keep the others; otherwise all or nothing.
    """

    def __init__(
        self,
        data: int,
        into: str,
        token: str,
        limits: UnpackLimits,
        permit: WriteQuota,
        *,
        allow_partial: bool = False,
    ) -> None:
        self._data = data
        self._into = untrusted_files.check_path(into).split(b"/") if into else []
        self._limits = limits
        self.max_members = limits.members
        self._permit = permit
        self._allow_partial = allow_partial
        self._tree: _Tree = {}
        self._members = self._size = self._skipped = self._name_bytes = self._modified_ns = 0
        self._sizes: list[int] = []  # of the staged files, by number
        self._moved_files = self._moved_bytes = self._refused = 0
        self._reasons: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._staging_name = atomic_writes.staging_name(token)
        os.mkdir(self._staging_name, 0o700, dir_fd=data)
        self._staging_fd = syscalls.openat2(
            data, self._staging_name, untrusted_files.OPEN_DIRECTORY, resolve=untrusted_files.RESOLVE_BENEATH
        )

    def add_file(self, name: str, content: Iterable[bytes], *, executable: bool) -> None:
        parts = self._member_path(name)
        if not parts:
            raise FileTaskRefused(f"{printable_name(name)}: the file has no name")
        self._add_to_tree(parts, lambda: self._write_staged(content, _file_mode(executable)))

    def add_plain_file(self, raw: bytes, content: Iterator[bytes], *, executable: bool = False) -> None:
        """Add a file by its exact path; if it is refused, the others are not."""
        self._count_member(len(raw))
        try:
            parts = untrusted_files.check_path(raw.decode(errors="surrogateescape")).split(b"/")
            number = self._write_staged(content, _file_mode(executable))
            self._add_to_tree(parts, lambda: number)
        except (OSError, untrusted_files.UnsafePath, FileTaskRefused) as error:
            self._record_refusal(raw, 1, _as_refusal(error))
            for _ in content:  # skip it: the next file follows
                pass

    def _add_to_tree(self, parts: list[bytes], number: Callable[[], int]) -> None:
        directory = self._tree_directory(parts[:-1])
        if parts[-1] in directory:
            raise FileTaskRefused(f"{printable_name(b'/'.join(parts))}: the name appears twice")
        directory[parts[-1]] = number()

    def _write_staged(self, content: Iterable[bytes], mode: int) -> int:
        """Write a file to the staging directory; returns its number."""
        number = len(self._sizes)
        name = str(number).encode()
        self._sizes.append(0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        target = syscalls.openat2(
            self._staging_fd, name, flags, mode, resolve=untrusted_files.RESOLVE_BENEATH
        )
        try:
            self._sizes[number] = atomic_writes.write_chunks(target, self._count_bytes(content), self._permit)
            self._modified_ns = max(self._modified_ns, os.fstat(target).st_mtime_ns)
        except BaseException:
            os.unlink(name, dir_fd=self._staging_fd)
            raise
        finally:
            os.close(target)
        return number

    def add_directory(self, name: str) -> None:
        self._tree_directory(self._member_path(name))

    def skip(self) -> None:
        """Count a member that is neither file nor directory."""
        self._count_member()
        self._skipped += 1

    def _member_path(self, name: str) -> list[bytes]:
        self._count_member(len(name))
        return split_member_name(name, self._into)

    def _count_member(self, name_bytes: int = 0) -> None:
        self._permit.reserve(0)
        self._members += 1
        if self._members > self._limits.members:
            raise FileTaskRefused(f"there are more than {self._limits.members} members", "too_large")
        self._name_bytes += name_bytes
        if self._name_bytes > untrusted_files.MAX_NAME_BYTES:
            raise FileTaskRefused("the names are too long in total", "too_large")

    def _record_refusal(self, path: bytes, count: int, refusal: FileTaskRefused) -> None:
        """Count refused files and keep the reason; raises it if partial results are not allowed."""
        if not self._allow_partial or refusal.kind != "refused":
            raise refusal
        self._refused += count
        if len(self._reasons) < _MAX_REASONS:
            text = str(refusal)
            self._reasons.append(
                text if text.startswith(printable_name(path)) else f"{printable_name(path)}: {text}"
            )

    def _tree_directory(self, parts: list[bytes]) -> _Tree:
        here = self._tree
        for part in parts:
            below = here.setdefault(part, {})
            if isinstance(below, int):
                raise FileTaskRefused(
                    f"{printable_name(b'/'.join(parts))}: it is both a file and a directory"
                )
            here = below
        return here

    def _count_bytes(self, content: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in content:
            self._size += len(chunk)
            if self._size > self._limits.size:
                raise FileTaskRefused(f"there are more than {self._limits.size} bytes", "too_large")
            yield chunk

    # ---- commit -----------------------------------------------------------------------------------------------

    def commit(self) -> UnpackOutcome:
        """Move all members to their paths. Raises FileTaskRefused, OSError; then all are moved back."""
        try:
            with syscalls.closing_fd(
                syscalls.openat2(
                    self._data, b".", untrusted_files.OPEN_DIRECTORY, resolve=untrusted_files.RESOLVE_BENEATH
                )
            ) as root:
                self._move_tree(root, b"", self._tree)
        except BaseException:
            for undo in reversed(self._undo):
                with contextlib.suppress(OSError):  # the code has moved it
                    undo()
            raise
        return UnpackOutcome(
            self._moved_files,
            self._moved_bytes,
            self._skipped,
            self._modified_ns,
            self._file_system_time_ns(),
            self._refused,
            self._reasons,
        )

    def _file_system_time_ns(self) -> int:
        """Return the file system's current time, to compare the change times of the moved files with."""
        os.utime(self._staging_fd)
        return os.fstat(self._staging_fd).st_ctime_ns

    def _move_tree(self, here: int, prefix: bytes, tree: _Tree) -> None:
        """Move a directory's entries; the depth is limited by the check of names."""
        for name, below in tree.items():
            self._permit.reserve(0)
            path = prefix + name
            try:
                if isinstance(below, int):
                    self._move_file(here, name, path, below)
                    continue
                directory = self._enter_directory(here, name, path)
            except (OSError, FileTaskRefused) as error:
                self._record_refusal(path, _count_files(below), _as_refusal(error, path))
                continue
            with syscalls.closing_fd(directory):
                self._move_tree(directory, path + b"/", below)

    def _enter_directory(self, here: int, name: bytes, path: bytes) -> int:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=here)
            self._undo.append(lambda: self._remove_at(path, os.rmdir))
        return syscalls.openat2(
            here, name, untrusted_files.OPEN_DIRECTORY, resolve=untrusted_files.RESOLVE_BENEATH
        )

    def _move_file(self, here: int, name: bytes, path: bytes, number: int) -> None:
        old = f"old-{number}"
        try:
            existing = os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            existing = None
        if existing is not None:
            if stat.S_ISDIR(existing.st_mode):
                raise FileTaskRefused(f"{printable_name(path)}: a directory of that name exists")
            os.link(name, old, src_dir_fd=here, dst_dir_fd=self._staging_fd, follow_symlinks=False)
        os.rename(str(number), name, src_dir_fd=self._staging_fd, dst_dir_fd=here)
        self._moved_files += 1
        self._moved_bytes += self._sizes[number]
        self._undo.append(
            lambda: self._remove_at(path, os.unlink) if existing is None else self._restore_file(path, old)
        )

    def _restore_file(self, path: bytes, old: str) -> None:
        with untrusted_files.open_parent(self._data, path) as parent:
            os.rename(old, path.rpartition(b"/")[2], src_dir_fd=self._staging_fd, dst_dir_fd=parent)

    def _remove_at(self, path: bytes, remove: Callable[..., None]) -> None:
        with untrusted_files.open_parent(self._data, path) as parent:
            remove(path.rpartition(b"/")[2], dir_fd=parent)

    def discard(self) -> None:
        """Remove the staging directory: all members after a failure, replaced files after a success."""
        with contextlib.suppress(OSError):
            atomic_writes.remove_files(self._staging_fd, 2 * self._limits.members)
            os.rmdir(self._staging_name, dir_fd=self._data)
        os.close(self._staging_fd)


def _as_refusal(
    error: OSError | untrusted_files.UnsafePath | FileTaskRefused, path: bytes | None = None
) -> FileTaskRefused:
    if isinstance(error, FileTaskRefused):
        return error
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    number = error.errno or 0 if isinstance(error, OSError) else errno.EINVAL
    return FileTaskRefused(text if path is None else f"{printable_name(path)}: {text}", number=number)


def _count_files(tree: int | _Tree) -> int:
    return 1 if isinstance(tree, int) else sum(_count_files(below) for below in tree.values())
