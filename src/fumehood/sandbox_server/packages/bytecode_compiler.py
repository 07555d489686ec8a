"""Compiles Python sources into a tree of bytecode.

A separate program, run by path with an empty environment. It reads a JSON object from standard input: `sources`, pairs
of a directory and the names in it to compile; `target`, an empty directory; `runtime_directory`, where the sources are
at run time; `processes`. It parses the sources and runs none.
"""

import json
import os
import py_compile
import sys
from collections.abc import Iterator
from importlib.util import cache_from_source

_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "tests"})  # nothing imports tests


def find_sources(directory: str, names: list[str]) -> Iterator[str]:
    """Yield the sources of these packages and modules, relative to the directory."""
    for name in names:
        path = os.path.join(directory, name)
        if name.endswith(".py") and os.path.isfile(path):
            yield name
        elif os.path.isdir(path):
            for parent, below, files in os.walk(path):
                below[:] = sorted(set(below) - _SKIPPED_DIRECTORIES)
                relative = os.path.relpath(parent, directory)
                yield from (f"{relative}/{file}" for file in sorted(files) if file.endswith(".py"))


def compile_source(directory: str, relative: str, target: str, runtime_directory: str) -> None:
    """Write the bytecode of a source where Python looks for it, without this host's path in it."""
    compiled = os.path.join(target, cache_from_source(relative))
    os.makedirs(os.path.dirname(compiled), mode=0o755, exist_ok=True)
    try:
        py_compile.compile(
            os.path.join(directory, relative),
            cfile=compiled,
            dfile=os.path.join(runtime_directory, relative),
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
        )
    except (py_compile.PyCompileError, UnicodeDecodeError, RecursionError):
        return  # a template, or for another Python: importing it would fail too
    os.chmod(compiled, 0o644)


def main() -> int:
    """Compile in several processes; returns the exit status."""
    job = json.load(sys.stdin)
    sys.dont_write_bytecode = True
    os.umask(0o022)
    found: dict[str, str] = {}  # the first directory wins, as on the path
    for directory, names in job["sources"]:
        for relative in find_sources(directory, names):
            found.setdefault(relative, directory)
    work = sorted(found.items())
    children: list[int] = []
    for number in range(job["processes"]):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                for relative, directory in work[number :: job["processes"]]:
                    compile_source(directory, relative, job["target"], job["runtime_directory"])
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    failed = [pid for pid in children if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
