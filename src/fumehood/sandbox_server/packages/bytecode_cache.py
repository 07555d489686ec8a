"""Caches bytecode of the packages of sandboxes whose installer wrote none.

    <cache>/bytecode/<key>       a complete tree, an overlay for the package directory; never changed
    <cache>/bytecode/making-*    work in progress, under the lock
    <cache>/bytecode/lock

Sandboxes have their packages read-only and cannot write bytecode. Bytecode is code: it is used only if nobody but this
user and root can have written it. Python checks at every import whether it matches its source.
"""

import contextlib
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
from pathlib import Path

from fumehood.sandbox_server.host.python_runtime import PackageDirectory, PythonRuntime
from fumehood.sandbox_server.inside import layout
from fumehood.sandbox_server.packages.layer_store import lock_file, make_directories

logger = logging.getLogger(__name__)

_COMPILER = Path(__file__).with_name("bytecode_compiler.py")
_CACHE_FORMAT = 1
_MAX_PROCESSES = 4
_COMPILE_TIMEOUT = 300.0
_UNUSED_SECONDS = 30 * 86_400.0


class BytecodeUnavailable(Exception):
    """There is no bytecode; the text is a clause that says why."""


def find_uncompiled(runtime: PythonRuntime) -> list[tuple[Path, list[str]]]:
    """Return directories, and the names of packages in them whose bytecode is missing or stale."""
    found: list[tuple[Path, list[str]]] = []
    for directory in runtime.packages:
        names = [name for name in sorted(directory.visible_names) if _is_uncompiled(directory.path / name)]
        if names:
            found.append((directory.path, names))
    return found


def _is_uncompiled(path: Path) -> bool:
    """Whether the bytecode of a module, or of a package's `__init__.py`, is missing or stale.

    Installers compile all of a package or nothing.
    """
    source = path if path.suffix == ".py" else path / "__init__.py"
    try:
        status = source.stat()
        with open(importlib.util.cache_from_source(str(source)), "rb") as file:
            head = file.read(16)
    except FileNotFoundError:
        return source.is_file()
    except OSError:
        return True
    if len(head) < 16 or head[:4] != importlib.util.MAGIC_NUMBER:
        return True
    is_hashed = head[4] & 1
    time_and_size = struct.pack("<II", int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return not is_hashed and head[8:] != time_and_size


def prepare_bytecode(runtime: PythonRuntime, cache: Path) -> Path | None:
    """Return the tree of bytecode, compiled if it is missing; None if all packages have their own.

    Compiling takes about ten seconds; waits for another process that compiles the same tree.
    Raises BytecodeUnavailable.
    """
    uncompiled = find_uncompiled(runtime)
    if not uncompiled:
        return None
    try:
        make_directories(cache)
        base = cache.resolve(strict=True) / "bytecode"  # resolved: old trees in it are removed
        base.mkdir(mode=0o755, exist_ok=True)
        check_trusted(base)
        tree = base / _cache_key(runtime)
        if not tree.is_dir():
            with lock_file(base / "lock"):
                if not tree.is_dir():  # not compiled by another process meanwhile
                    _compile(uncompiled, runtime, base, tree)
                    _remove_unused(base, tree)
        check_trusted(tree)
        with contextlib.suppress(OSError):  # owned by root, or on a read-only file system
            os.utime(tree)
    except (OSError, subprocess.SubprocessError) as error:
        raise BytecodeUnavailable(str(error)) from error
    return tree


def check_trusted(path: Path) -> None:
    """Raise BytecodeUnavailable if anybody but this user or root could have written there."""
    for directory in (path, *path.parents):
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            raise BytecodeUnavailable(f"{directory} is not a directory of this user or of root")
        # In a sticky directory such as /tmp others cannot replace our files; in ours they must not write at all.
        if status.st_mode & 0o022 and (directory == path or not status.st_mode & stat.S_ISVTX):
            raise BytecodeUnavailable(f"others can write to {directory}")


def _cache_key(runtime: PythonRuntime) -> str:
    """Return a key that differs for each interpreter, package directory, and installation of a package."""
    installed = [[str(one.path), _read_installed(one)] for one in runtime.packages]
    facts = [_CACHE_FORMAT, sys.implementation.cache_tag, importlib.util.MAGIC_NUMBER.hex(), installed]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read_installed(directory: PackageDirectory) -> list[tuple[str, int]]:
    """Return the time of each distribution's RECORD, which an installer writes anew."""
    found: list[tuple[str, int]] = []
    for name in sorted(directory.visible_names):
        if name.endswith(".dist-info"):
            with contextlib.suppress(FileNotFoundError):
                found.append((name, (directory.path / name / "RECORD").stat().st_mtime_ns))
    return found


def _compile(
    uncompiled: list[tuple[Path, list[str]]], runtime: PythonRuntime, base: Path, tree: Path
) -> None:
    started_at = time.monotonic()
    names = sum(len(names) for _, names in uncompiled)
    logger.warning(
        "The packages of sandboxes were installed without bytecode. Compiling %d of them, once; this takes about ten "
        "seconds.",
        names,
    )
    for left in base.glob("making-*"):  # of a killed process; its owner would hold the lock
        shutil.rmtree(left)
    making = Path(tempfile.mkdtemp(prefix="making-", dir=base))
    try:
        making.chmod(0o755)  # sandboxes read it
        job = {
            "sources": [[str(directory), names] for directory, names in uncompiled],
            "target": str(making),
            "runtime_directory": f"{layout.VIRTUALENV}/lib/{runtime.library}/site-packages",
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
    logger.info("Bytecode for sandboxes was compiled in %.1f s: %s", time.monotonic() - started_at, tree)


def _remove_unused(base: Path, tree: Path) -> None:
    """Remove trees that no start has used for a month; losing one in use costs only speed."""
    for other in base.iterdir():
        status = other.lstat()
        is_tree = stat.S_ISDIR(status.st_mode) and len(other.name) == len(tree.name)
        if is_tree and other != tree and status.st_mtime < time.time() - _UNUSED_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
