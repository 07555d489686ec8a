"""Unpacks archives of untrusted authors into a sandbox's data directory, whole or not at all; imports only siblings.

Runs in a helper: as the sandbox's user, in its cgroup, behind its filter. Members are first written, flat and under
numbers, into a directory of ours; no name of the archive is used before all of it has been read and checked. Then
they are moved into place one by one, each replacing what bears its name, and if one cannot be, all are moved back.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fumehood.sandboxd.inside import decoding, files, staging, syscalls, tars, zips
from fumehood.sandboxd.inside.leave import Leave, Refused
from fumehood.sandboxd.inside.members import member_parts, shown

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
_MOST_REASONS = 20
_HEADER_BYTES = 64 << 20  # what a tar may have besides its members' content

# A file's number, or what is below a directory.
type _Tree = dict[bytes, int | _Tree]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much one archive may unpack to.

    members: files, directories and what is skipped; size: bytes that are written, not those declared.
    """

    members: int
    size: int


@dataclass(frozen=True, slots=True)
class Done:
    """What has been put in place.

    modified_ns: when the last file was written, changed_ns: when all were in place; what is newer, by either, somebody
        else has changed since.
    refused: how many files could not be put in place; reasons: why, of the first of them, by name.
    """

    files: int
    size: int
    skipped: int = 0
    modified_ns: int = field(default=0, compare=False)
    changed_ns: int = field(default=0, compare=False)
    refused: int = 0
    reasons: list[str] = field(default_factory=list[str])


def unpack(data: int, source: int, *, kind: str, into: str, token: str, bounds: Bounds, leave: Leave) -> Done:
    """Unpack what comes from `source` below `into`; on any failure all is as it was."""
    unpacker = Unpacker(data, into, token, bounds, leave)
    arriving = Arriving(source, leave)
    try:
        if kind == "zip":
            _unpack_zip(data, arriving, unpacker, leave)
        else:
            decoded = decoding.DECODERS[kind](arriving.pieces(), leave)
            tars.unpack(decoding.bounded(decoded, bounds.size + _HEADER_BYTES), unpacker)
            leave.settle(arriving.received)
        return unpacker.commit()
    except UnicodeDecodeError as error:
        raise Refused(f"{shown(error.object)}: a name that is not UTF-8") from None
    finally:
        unpacker.discard()


class Arriving:
    """What comes in, counted."""

    def __init__(self, source: int, leave: Leave) -> None:
        self._source = source
        self._leave = leave
        self.received = 0

    def pieces(self) -> Iterator[bytes]:
        for piece in staging.received_from(self._source):
            self.received += len(piece)
            self._leave.take(0)
            yield piece


def _unpack_zip(data: int, arriving: Arriving, unpacker: "Unpacker", leave: Leave) -> None:
    """Its table of contents is at the end: keep it in a file without a name, at the sandbox's expense."""
    try:
        spool = syscalls.openat2(data, b".", os.O_TMPFILE | os.O_RDWR, 0o600, resolve=files.BENEATH)
    except OSError:  # a file system that has no such files
        spool = os.memfd_create("archive")
    try:
        size = staging.save(spool, arriving.pieces(), leave)
        leave.settle(size)
        zips.unpack(spool, size, unpacker)
    finally:
        os.close(spool)


def _mode(executable: bool) -> int:
    return 0o755 if executable else 0o644


class Unpacker:
    """Takes members, keeps them aside, and puts all of them in place at the end.

    partly: what cannot be put in place is told, and the rest is; else there is all or nothing.
    """

    def __init__(
        self, data: int, into: str, token: str, bounds: Bounds, leave: Leave, *, partly: bool = False
    ) -> None:
        self._data = data
        self._into = files.checked(into).split(b"/") if into else []
        self._bounds = bounds
        self.most_members = bounds.members
        self._leave = leave
        self._partly = partly
        self._tree: _Tree = {}
        self._members = self._size = self._skipped = self._name_bytes = self._modified_ns = 0
        self._sizes: list[int] = []  # of the files that are aside, by their numbers
        self._placed = self._placed_size = self._refused = 0
        self._reasons: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._name = staging.staging_name(token)
        os.mkdir(self._name, 0o700, dir_fd=data)
        self._aside = syscalls.openat2(data, self._name, _DIRECTORY, resolve=files.BENEATH)

    def file(self, name: str, content: Iterable[bytes], *, executable: bool) -> None:
        parts = self._member(name)
        if not parts:
            raise Refused(f"{shown(name)}: a file without a name")
        self._settle(parts, lambda: self._save(content, _mode(executable)))

    def plain_file(self, raw: bytes, content: Iterator[bytes], *, executable: bool = False) -> None:
        """A file of exactly that name, as if it were written alone; where that would be refused, it alone is."""
        self._count(len(raw))
        try:
            parts = files.checked(raw.decode(errors="surrogateescape")).split(b"/")
            number = self._save(content, _mode(executable))
            self._settle(parts, lambda: number)
        except (OSError, files.UnsafePath, Refused) as error:
            self._refuse(raw, 1, _refusal(error))
            for _ in content:  # the next one comes behind it
                pass

    def _settle(self, parts: list[bytes], number: Callable[[], int]) -> None:
        above = self._directory(parts[:-1])
        if parts[-1] in above:
            raise Refused(f"{shown(b'/'.join(parts))}: the name is there twice")
        above[parts[-1]] = number()

    def _save(self, content: Iterable[bytes], mode: int) -> int:
        """Write it aside; its number there."""
        number = len(self._sizes)
        name = str(number).encode()
        self._sizes.append(0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        target = syscalls.openat2(self._aside, name, flags, mode, resolve=files.BENEATH)
        try:
            self._sizes[number] = staging.save(target, self._counted(content), self._leave)
            self._modified_ns = max(self._modified_ns, os.fstat(target).st_mtime_ns)
        except BaseException:
            os.unlink(name, dir_fd=self._aside)
            raise
        finally:
            os.close(target)
        return number

    def directory(self, name: str) -> None:
        self._directory(self._member(name))

    def skip(self) -> None:
        """A member that is neither: a link, a device, a pipe."""
        self._count()
        self._skipped += 1

    def _member(self, name: str) -> list[bytes]:
        self._count(len(name))
        return member_parts(name, self._into)

    def _count(self, name_bytes: int = 0) -> None:
        self._leave.take(0)
        self._members += 1
        if self._members > self._bounds.members:
            raise Refused(f"there are more than {self._bounds.members} members", "too_large")
        self._name_bytes += name_bytes
        if self._name_bytes > files.MAX_NAME_BYTES:
            raise Refused("the names are too long together", "too_large")

    def _refuse(self, path: bytes, number: int, refusal: Refused) -> None:
        """So many files are not put in place; raises what tells why, where that is the end of all of them."""
        if not self._partly or refusal.kind != "refused":
            raise refusal
        self._refused += number
        if len(self._reasons) < _MOST_REASONS:
            text = str(refusal)
            self._reasons.append(text if text.startswith(shown(path)) else f"{shown(path)}: {text}")

    def _directory(self, parts: list[bytes]) -> _Tree:
        here = self._tree
        for part in parts:
            below = here.setdefault(part, {})
            if isinstance(below, int):
                raise Refused(f"{shown(b'/'.join(parts))}: a file and a directory at once")
            here = below
        return here

    def _counted(self, content: Iterable[bytes]) -> Iterator[bytes]:
        for piece in content:
            self._size += len(piece)
            if self._size > self._bounds.size:
                raise Refused(f"there are more than {self._bounds.size} bytes", "too_large")
            yield piece

    # ---- into place -------------------------------------------------------------------------------------------

    def commit(self) -> Done:
        try:
            root = syscalls.openat2(self._data, b".", _DIRECTORY, resolve=files.BENEATH)
            try:
                self._place_all(root, b"", self._tree)
            finally:
                os.close(root)
        except BaseException:
            for undo in reversed(self._undo):
                with contextlib.suppress(OSError):  # the code has moved it meanwhile
                    undo()
            raise
        return Done(
            self._placed,
            self._placed_size,
            self._skipped,
            self._modified_ns,
            self._in_place_ns(),
            self._refused,
            self._reasons,
        )

    def _in_place_ns(self) -> int:
        """Now, by the clock of the file system: moving a file has changed its time, and theirs are compared with it."""
        os.utime(self._aside)
        return os.fstat(self._aside).st_ctime_ns

    def _place_all(self, here: int, prefix: bytes, tree: _Tree) -> None:
        """Depth is bounded with the names."""
        for name, below in tree.items():
            self._leave.take(0)
            path = prefix + name
            try:
                if isinstance(below, int):
                    self._place(here, name, path, below)
                    continue
                directory = self._enter(here, name, path)
            except (OSError, Refused) as error:
                self._refuse(path, _files_below(below), _refusal(error, path))
                continue
            try:
                self._place_all(directory, path + b"/", below)
            finally:
                os.close(directory)

    def _enter(self, here: int, name: bytes, path: bytes) -> int:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=here)
            self._undo.append(lambda: self._at(path, os.rmdir))
        return syscalls.openat2(here, name, _DIRECTORY, resolve=files.BENEATH)

    def _place(self, here: int, name: bytes, path: bytes, number: int) -> None:
        old = f"old-{number}"
        try:
            about = os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            about = None
        if about is not None:
            if stat.S_ISDIR(about.st_mode):
                raise Refused(f"{shown(path)}: a directory is there already")
            os.link(name, old, src_dir_fd=here, dst_dir_fd=self._aside, follow_symlinks=False)
        os.rename(str(number), name, src_dir_fd=self._aside, dst_dir_fd=here)
        self._placed += 1
        self._placed_size += self._sizes[number]
        self._undo.append(lambda: self._at(path, os.unlink) if about is None else self._put_back(path, old))

    def _put_back(self, path: bytes, old: str) -> None:
        parent = staging.open_parent(self._data, path)
        try:
            os.rename(old, path.rpartition(b"/")[2], src_dir_fd=self._aside, dst_dir_fd=parent)
        finally:
            os.close(parent)

    def _at(self, path: bytes, remove: Callable[..., None]) -> None:
        parent = staging.open_parent(self._data, path)
        try:
            remove(path.rpartition(b"/")[2], dir_fd=parent)
        finally:
            os.close(parent)

    def discard(self) -> None:
        """What is still aside: everything after a failure, what was replaced after a success."""
        with contextlib.suppress(OSError):
            staging.empty(self._aside, 2 * self._bounds.members)
            os.rmdir(self._name, dir_fd=self._data)
        os.close(self._aside)


def _refusal(error: OSError | files.UnsafePath | Refused, path: bytes | None = None) -> Refused:
    if isinstance(error, Refused):
        return error
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    number = error.errno or 0 if isinstance(error, OSError) else errno.EINVAL
    return Refused(text if path is None else f"{shown(path)}: {text}", number=number)


def _files_below(tree: int | _Tree) -> int:
    return 1 if isinstance(tree, int) else sum(_files_below(below) for below in tree.values())
