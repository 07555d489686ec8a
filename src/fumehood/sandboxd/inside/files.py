"""Work on a sandbox's files that trusts neither names nor types nor timing; imports only the standard library.

The same functions serve the supervisor, for reading, and the short-lived helper that runs as the sandbox's
user in its cgroup, for writing: root cannot create files on that tmpfs (its owner is not mapped there), and
pages must count against the sandbox that asked for them.
"""

import contextlib
import errno
import json
import os
import socket
import stat
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from fumehood.sandboxd.inside import filters, jail, syscalls

MAX_DEPTH = 32
MAX_ENTRIES = 10_000
_CHUNK = 1 << 20
_MAX_TASK = 64 * 1024
_OOM_SCORE = 1000  # before anything of the sandbox itself
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_XDEV
_BUSY_TRIES = 5


class UnsafePath(ValueError):
    """A name that could mean anything but a plain path below the data directory."""


@dataclass(frozen=True, slots=True)
class Found:
    path: str
    size: int
    modified_ns: int


def checked(path: str) -> bytes:
    """A relative path as bytes, or UnsafePath: no `..`, no empty parts, no NUL, bounded."""
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        raise UnsafePath("the path is not valid text") from None
    parts = raw.split(b"/")
    if not raw or len(raw) > 4096 or b"\0" in raw or any(part in (b"", b".", b"..") for part in parts):
        raise UnsafePath("a path is relative, without empty parts, '.' or '..'")
    if len(parts) > MAX_DEPTH or any(len(part) > 255 for part in parts):
        raise UnsafePath(f"a path has at most {MAX_DEPTH} parts of at most 255 bytes")
    return raw


def open_regular(data: int, path: str) -> int:
    """Open a regular file below `data` for reading; never blocks, never leaves the tree, never follows a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    for attempt in range(_BUSY_TRIES):
        try:
            fd = syscalls.openat2(data, checked(path), flags, resolve=_BENEATH)
            break
        except OSError as error:
            # EAGAIN: a rename raced with the look-up, or somebody holds a lease on the file.
            if error.errno != errno.EAGAIN or attempt == _BUSY_TRIES - 1:
                raise
    else:
        raise AssertionError("unreachable")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd


def walk(data: int) -> tuple[list[Found], bool]:
    """Regular files below `data`, sorted by path, and whether some are left out: too many, too deep, no text.

    Iterative, by descriptors: a directory moved or replaced meanwhile leads nowhere else.
    """
    found: list[Found] = []
    cut = False
    entries = 0
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            directory = _open_directory(data, prefix)
        except OSError:
            continue  # gone or unreadable since it was seen
        try:
            with os.scandir(directory) as listing:
                for entry in listing:
                    entries += 1
                    if entries > MAX_ENTRIES:
                        return sorted(found, key=lambda item: item.path), True
                    path = f"{prefix}{entry.name}"
                    if not _is_text(entry.name):
                        cut = True  # nobody could ask for it: the wire speaks UTF-8
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        deep = path.count("/") + 1 >= MAX_DEPTH
                        cut |= deep
                        if not deep:
                            pending.append(path + "/")
                    elif entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):  # removed since it was seen
                            about = entry.stat(follow_symlinks=False)
                            found.append(Found(path, about.st_size, about.st_mtime_ns))
        except OSError:
            continue
        finally:
            os.close(directory)
    return sorted(found, key=lambda item: item.path), cut


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open_directory(data: int, prefix: str) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
    if not prefix:
        # A descriptor of its own: reading through a shared one would move everybody's position.
        return syscalls.openat2(data, b".", flags, resolve=_BENEATH)
    return syscalls.openat2(data, os.fsencode(prefix[:-1]), flags, resolve=_BENEATH)


def write(data: int, path: str, source: int) -> int:
    """Copy everything from `source` into `path`, replacing it whole; parents are made. Returns the size."""
    raw = checked(path)
    parent = _make_parents(data, raw)
    temporary = f".fumehood-{os.getpid()}-{time.monotonic_ns()}".encode()
    try:
        target = syscalls.openat2(
            parent, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, resolve=_BENEATH
        )
        try:
            size = _copy(source, target)
            os.rename(temporary, raw.rsplit(b"/", 1)[-1], src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            os.unlink(temporary, dir_fd=parent)
            raise
        finally:
            os.close(target)
    finally:
        os.close(parent)
    return size


def _copy(source: int, target: int) -> int:
    size = 0
    while chunk := os.read(source, _CHUNK):
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]
        size += len(chunk)
    return size


def _make_parents(data: int, raw: bytes) -> int:
    here = syscalls.openat2(data, b".", os.O_RDONLY | os.O_DIRECTORY, resolve=_BENEATH)
    for part in raw.split(b"/")[:-1]:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=here)
            below = syscalls.openat2(here, part, os.O_RDONLY | os.O_DIRECTORY, resolve=_BENEATH)
        finally:
            os.close(here)
        here = below
    return here


def delete(data: int, path: str) -> None:
    """Remove one file, or whatever else bears that name and is not a directory."""
    raw = checked(path)
    parent, _, name = raw.rpartition(b"/")
    directory = syscalls.openat2(data, parent or b".", os.O_RDONLY | os.O_DIRECTORY, resolve=_BENEATH)
    try:
        os.unlink(name, dir_fd=directory)
    finally:
        os.close(directory)


def help_with(uid: int, program: bytes, supervisor: socket.socket, data: int, cgroups: list[int]) -> NoReturn:
    """The helper's whole life: become the sandbox's user in its cgroup, hear the task, do it, answer, end."""
    answer: dict[str, Any]
    opened: list[int] = []
    try:
        jail.join_cgroups(cgroups)
        jail.prefer_for_oom(_OOM_SCORE)
        jail.take_user(uid)
        jail.renounce()
        filters.install(program)
        body, fds, _, _ = socket.recv_fds(supervisor, _MAX_TASK, 1)
        answer = _perform(json.loads(body), data, fds[0] if fds else -1, opened)
    except UnsafePath as error:
        answer = {"error": str(error), "errno": errno.EINVAL}
    except OSError as error:
        answer = {"error": error.strerror or str(error), "errno": error.errno}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}", "errno": errno.EIO}
    body = json.dumps(answer).encode()
    socket.send_fds(supervisor, [body], opened)
    os._exit(0)


def _perform(task: dict[str, Any], data: int, source: int, opened: list[int]) -> dict[str, Any]:
    match task["do"]:
        case "write":
            return {"size": write(data, task["path"], source)}
        case "delete":
            delete(data, task["path"])
            return {}
        case "open":
            opened.append(open_regular(data, task["path"]))
            return {}
        case "walk":
            # A listing can be longer than a packet.
            found, cut = walk(data)
            listing = os.memfd_create("listing")
            os.write(
                listing, json.dumps([[item.path, item.size, item.modified_ns] for item in found]).encode()
            )
            opened.append(listing)
            return {"cut": cut}
        case unknown:
            raise ValueError(f"unknown task {unknown!r}")
