"""Runs programs under a committed seccomp filter, in separate processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fumehood.sandbox_server import seccomp
from fumehood.sandbox_server.seccomp import syscall_policy

FOLDER = Path(seccomp.__file__).parent
MACHINE = os.uname().machine

live = pytest.mark.skipif(MACHINE not in syscall_policy.AUDIT_ARCH, reason=f"no program for {MACHINE}")

PROLOGUE = """
import ctypes, json, mmap, os, sys
from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.inside.jail import seccomp_installer
program = open(sys.argv[1], "rb").read()
def install():
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp_installer.install(program)
"""
UNDER = PROLOGUE + "install(); os.execv(sys.argv[2], sys.argv[2:])"


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
