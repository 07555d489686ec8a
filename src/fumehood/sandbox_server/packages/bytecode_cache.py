"""Keeps bytecode of the packages that sandboxes import, where their installer wrote none.

    <cache>/bytecode/<key>       a complete tree, to be laid over the directory of packages; never changed
    <cache>/bytecode/making-*    work in progress, under the lock
    <cache>/bytecode/lock

Sandboxes see their packages read-only and can write no bytecode themselves. Bytecode is code: what lies here is used
only if nobody but this user and root can have written it. Whether it fits its source Python checks at every import.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from fumehood.sandbox_server.host.python_runtime import PackageDirectory, PythonRuntime
from fumehood.sandbox_server.inside import layout
from fumehood.sandbox_server.packages.layer_store import make_directories

logger = logging.getLogger(__name__)

_COMPILER = Path(__file__).with_name("bytecode_compiler.py")
_CACHE_FORMAT = 1
_MAX_PROCESSES = 4
_COMPILE_TIMEOUT = 300.0
_UNUSED_SECONDS = 30 * 86_400.0


class BytecodeUnavailable(Exception):
    """Why there is no bytecode; the text is a clause."""


def find_uncompiled(runtime: PythonRuntime) -> list[tuple[Path, list[str]]]:
    """The directories and the names in them of packages whose own bytecode is missing or does not fit."""
    found: list[tuple[Path, list[str]]] = []
    for directory in runtime.packages:
        names = [name for name in sorted(directory.visible_names) if _is_uncompiled(directory.path / name)]
        if names:
            found.append((directory.path, names))
    return found


def _is_uncompiled(path: Path) -> bool:
    """Whether the bytecode of a module, or of a package's `__init__.py`, is missing or does not fit.

    An installer compiles all of a package or nothing.
    """
    source = path if path.suffix == ".py" else path / "__init__.py"
    try:
        about = source.stat()
        with open(importlib.util.cache_from_source(str(source)), "rb") as file:
            head = file.read(16)
    except FileNotFoundError:
        return source.is_file()
    except OSError:
        return True
    if len(head) < 16 or head[:4] != importlib.util.MAGIC_NUMBER:
        return True
    is_hashed = head[4] & 1
    time_and_size = struct.pack("<II", int(about.st_mtime) & 0xFFFFFFFF, about.st_size & 0xFFFFFFFF)
    return not is_hashed and head[8:] != time_and_size


def prepare_bytecode(runtime: PythonRuntime, cache: Path) -> Path | None:
    """The tree to lay over the packages, made if there is none; None if they have their own.

    Takes some ten seconds the first time; another process that makes the same one is waited for.
    Raises BytecodeUnavailable.
    """
    uncompiled = find_uncompiled(runtime)
    if not uncompiled:
        return None
    try:
        make_directories(cache)
        base = cache.resolve(strict=True) / "bytecode"  # itself no link: what is old in it is removed
        base.mkdir(mode=0o755, exist_ok=True)
        check_trusted(base)
        tree = base / _cache_key(runtime)
        if not tree.is_dir():
            with _lock_cache(base):
                if not tree.is_dir():  # nobody has made it while we waited
                    _compile(uncompiled, runtime, base, tree)
                    _remove_unused(base, tree)
        check_trusted(tree)
        with contextlib.suppress(OSError):  # it is root's, or on a read-only file system
            os.utime(tree)
    except (OSError, subprocess.SubprocessError) as error:
        raise BytecodeUnavailable(str(error)) from error
    return tree


def check_trusted(path: Path) -> None:
    """Raises BytecodeUnavailable if somebody else than this user or root could have put something there."""
    for directory in (path, *path.parents):
        about = directory.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid not in (0, os.geteuid()):
            raise BytecodeUnavailable(f"{directory} is not a directory of this user or of root")
        # In a sticky directory such as /tmp others cannot replace what is ours; in ours they must not write at all.
        if about.st_mode & 0o022 and (directory == path or not about.st_mode & stat.S_ISVTX):
            raise BytecodeUnavailable(f"others can write to {directory}")


def _cache_key(runtime: PythonRuntime) -> str:
    """Different for each interpreter, each place of packages, and each installation of one of them."""
    installed = [[str(one.path), _read_installed(one)] for one in runtime.packages]
    facts = [_CACHE_FORMAT, sys.implementation.cache_tag, importlib.util.MAGIC_NUMBER.hex(), installed]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read_installed(directory: PackageDirectory) -> list[tuple[str, int]]:
    """An installer writes the list of a distribution's files whenever it installs it."""
    found: list[tuple[str, int]] = []
    for name in sorted(directory.visible_names):
        if name.endswith(".dist-info"):
            with contextlib.suppress(FileNotFoundError):
                found.append((name, (directory.path / name / "RECORD").stat().st_mtime_ns))
    return found


@contextlib.contextmanager
def _lock_cache(base: Path) -> Generator[None]:
    fd = os.open(base / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _compile(
    uncompiled: list[tuple[Path, list[str]]], runtime: PythonRuntime, base: Path, tree: Path
) -> None:
    began = time.monotonic()
    names = sum(len(names) for _, names in uncompiled)
    logger.warning(
        "The packages of sandboxes were installed without bytecode. Compiling %d of them, once; this takes about ten "
        "seconds.",
        names,
    )
    for left in base.glob("making-*"):  # of a process that was killed; whoever makes one holds the lock
        shutil.rmtree(left)
    making = Path(tempfile.mkdtemp(prefix="making-", dir=base))
    try:
        making.chmod(0o755)  # sandboxes read it
        job = {
            "sources": [[str(directory), names] for directory, names in uncompiled],
            "target": str(making),
            "shown": f"{layout.VIRTUALENV}/lib/{runtime.library}/site-packages",
            "processes": min(len(os.sched_getaffinity(0)), _MAX_PROCESSES),
        }
        subprocess.run(
            [sys.executable, "-I", "-S", "-B", str(_COMPILER)],
            input=json.dumps(job).encode(),
            env={},
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_COMPILE_TIMEOUT,
            check=True,
        )
        making.rename(tree)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    logger.info("Bytecode for sandboxes was compiled in %.1f s: %s", time.monotonic() - began, tree)


def _remove_unused(base: Path, tree: Path) -> None:
    """Those that no start has used for a month; one that is still in use then costs speed only."""
    for other in base.iterdir():
        about = other.lstat()
        is_tree = stat.S_ISDIR(about.st_mode) and len(other.name) == len(tree.name)
        if is_tree and other != tree and about.st_mtime < time.time() - _UNUSED_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
