"""Runs programs under a committed system-call filter, in processes of their own; imports `fumehood.sandboxd`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fumehood.sandboxd import seccomp
from fumehood.sandboxd.inside import filters
from fumehood.sandboxd.seccomp import policy

FOLDER = Path(seccomp.__file__).parent
MACHINE = os.uname().machine

live = pytest.mark.skipif(MACHINE not in policy.AUDIT_ARCH, reason=f"no program for {MACHINE}")

# Loads filters.py by its path, as the jail does, and so shows that it needs nothing of the package.
PROLOGUE = f"""
import ctypes, importlib.util, json, mmap, os, sys
spec = importlib.util.spec_from_file_location("filters", {filters.__file__!r})
filters = importlib.util.module_from_spec(spec)
spec.loader.exec_module(filters)
program = open(sys.argv[1], "rb").read()
"""
UNDER = (
    PROLOGUE
    + "filters.forbid_new_privileges(); filters.install(program); os.execv(sys.argv[2], sys.argv[2:])"
)


def python(code: str, name: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `code` after the prologue, in an interpreter of its own."""
    blob = str(FOLDER / f"{name}.{MACHINE}.bpf")
    command = [sys.executable, "-c", PROLOGUE + code, blob, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


def under(name: str, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program with the filter on."""
    blob = str(FOLDER / f"{name}.{MACHINE}.bpf")
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(cwd),
        "TMPDIR": str(cwd),
        "LANG": "C.UTF-8",
        "MPLBACKEND": "Agg",
    }
    whole = [sys.executable, "-c", UNDER, blob, *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=300, cwd=cwd, env=env)
