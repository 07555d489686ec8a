"""Runs programs under a committed seccomp filter, in separate processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fumehood.sandbox_server import seccomp
from fumehood.sandbox_server.inside.jail import seccomp_filter
from fumehood.sandbox_server.seccomp import syscall_policy

FOLDER = Path(seccomp.__file__).parent
MACHINE = os.uname().machine

live = pytest.mark.skipif(MACHINE not in syscall_policy.AUDIT_ARCH, reason=f"no program for {MACHINE}")

# Loads seccomp_filter.py by its path, which shows that it needs nothing of the package.
PROLOGUE = f"""
import ctypes, importlib.util, json, mmap, os, sys
spec = importlib.util.spec_from_file_location("filters", {seccomp_filter.__file__!r})
filters = importlib.util.module_from_spec(spec)
spec.loader.exec_module(filters)
program = open(sys.argv[1], "rb").read()
"""
UNDER = PROLOGUE + "filters.set_no_new_privs(); filters.install(program); os.execv(sys.argv[2], sys.argv[2:])"


def run_python_under_filter(code: str, name: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `code` after the prologue, in an interpreter of its own."""
    blob = str(FOLDER / f"{name}.{MACHINE}.bpf")
    command = [sys.executable, "-c", PROLOGUE + code, blob, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


def run_under_filter(name: str, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
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
