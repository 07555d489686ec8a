"""Runs uv in a jail that has the network and nothing of the host.

uv reads files of an index to which anybody may publish. Only wheels are installed, so none of their code runs; if uv
itself is exploited, it has a cache, an output directory and no privileges.
"""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fumehood.sandbox_server.host.cgroups import Cgroup, CgroupLimits, CgroupTree
from fumehood.sandbox_server.host.jail_launcher import (
    list_system_mounts,
    outer_jail_command,
    read_root_links,
    send_jail_config,
)
from fumehood.sandbox_server.host.outer_jail import FAILURE_PREFIX
from fumehood.sandbox_server.host.python_runtime import PythonRuntime
from fumehood.sandbox_server.inside import layout
from fumehood.sandbox_server.packages.package_index_config import PackageIndexConfig

_ETC = ("resolv.conf", "hosts", "nsswitch.conf", "host.conf", "gai.conf")
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_MAX_MEMORY = 2 << 30
_MAX_PROCESSES = 256
_MAX_OUTPUT_BYTES = 4 << 20
_MIN_FREE_BYTES = 1 << 30  # kept free on the disk, or a twentieth of it
_WATCH_SECONDS = 0.25
UV_ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "UV_CACHE_DIR": "/cache",
    "UV_NO_CONFIG": "1",
    "UV_NO_PROGRESS": "1",
    "UV_NO_ENV_FILE": "1",
    "UV_PYTHON_DOWNLOADS": "never",
    "UV_KEYRING_PROVIDER": "disabled",
    "UV_LINK_MODE": "copy",  # layers must not share inodes with the cache
    "UV_HTTP_RETRIES": "1",
    "UV_HTTP_TIMEOUT": "30",
}


class InstallTimeout(Exception):
    """uv was killed at the timeout."""


class DiskSpaceExhausted(Exception):
    """uv was killed because the disk had too little free space."""


@dataclass(frozen=True, slots=True)
class UvResult:
    exit_code: int
    stdout: str
    stderr: str


@dataclass(slots=True, kw_only=True)
class InstallJail:
    """Runs uv with network access and without privileges.

    uid: as root, the user of the jail; else None, and it is the operator's.
    tree: where to create cgroups, if possible.
    max_bytes: the size limit of a file.
    """

    runtime: PythonRuntime
    uv: Path
    index: PackageIndexConfig
    cache: Path
    uid: int | None
    tree: CgroupTree | None
    timeout: float
    max_bytes: int
    cgroup_numbers: "itertools.count[int]"

    @property
    def python(self) -> str:
        """The path of the interpreter in sandboxes, which installed scripts name."""
        return f"{layout.VIRTUALENV}/bin/python"

    links_path = "/links"

    def inputs_path(self, inputs: Path) -> str:
        """Return where uv sees the directory of its inputs."""
        del inputs
        return "/in"

    def output_path(self, output: Path) -> str:
        del output
        return layout.ATTACHED_PACKAGES

    def with_timeout(self, seconds: float) -> "InstallJail":
        return replace(self, timeout=seconds)

    def pyvenv_config(self) -> str:
        """Return the content of pyvenv.cfg."""
        home = "/usr/bin" if self.runtime.prefix is None else f"{layout.PYTHON_PREFIX}/bin"
        return f"home = {home}\ninclude-system-site-packages = false\nversion = {self.runtime.version}\n"

    async def run(self, arguments: Sequence[str], inputs: Path, output: Path | None = None) -> UvResult:
        """Run uv with these arguments; `inputs` is mounted at /in, `output` at /opt/packages.

        Raises InstallTimeout, DiskSpaceExhausted, and OSError if the jail cannot be created.
        """
        read, write = os.pipe()
        with os.fdopen(read, "rb", buffering=0) as pipe, os.fdopen(write, "wb", buffering=0) as sender:
            config = self._jail_config(arguments, inputs, output)
            async with self._cgroup() as cgroup:
                # In the event loop's thread: the kernel kills the jail when the thread that started it ends.
                process = await asyncio.create_subprocess_exec(
                    *outer_jail_command(pipe.fileno()),
                    env={**UV_ENVIRONMENT, **self.index.environment()},
                    cwd="/",
                    pass_fds=(pipe.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
                try:
                    if cgroup is not None:
                        cgroup.add(process.pid)
                    send_jail_config(sender, config)
                    return await self._collect_output(process)
                finally:
                    await _kill(process)

    async def _collect_output(self, process: asyncio.subprocess.Process) -> UvResult:
        if process.stdout is None or process.stderr is None:
            raise OSError("the jail has no output")
        watch = asyncio.ensure_future(self._watch_disk_space(process))
        try:
            async with asyncio.timeout(self.timeout):
                stdout, stderr = await asyncio.gather(
                    read_bounded(process.stdout), read_bounded(process.stderr)
                )
                code = await process.wait()
        except TimeoutError:
            raise InstallTimeout from None
        finally:
            watch.cancel()
        if watch.done() and not watch.cancelled():
            raise DiskSpaceExhausted
        error = stderr.decode(errors="replace")
        if code and (
            "Traceback (most" in error or error.startswith(FAILURE_PREFIX)
        ):  # of the jail, not of uv
            raise OSError(f"the install jail did not start: {error.strip().splitlines()[-1][:300]}")
        return UvResult(code, stdout.decode(errors="replace"), error)

    async def _watch_disk_space(self, process: asyncio.subprocess.Process) -> None:
        """Kill uv before the disk is full: the unpacked size of a wheel is not known before."""
        while True:
            disk = os.statvfs(self.cache)
            free = disk.f_bavail * disk.f_frsize
            if free < min(_MIN_FREE_BYTES, disk.f_blocks * disk.f_frsize // 20):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                return
            await asyncio.sleep(_WATCH_SECONDS)

    @contextlib.asynccontextmanager
    async def _cgroup(self) -> AsyncGenerator[Cgroup | None]:
        if self.tree is None:
            yield None
            return
        limits = CgroupLimits(memory=_MAX_MEMORY, pids=_MAX_PROCESSES, cpus=2.0)
        cgroup = self.tree.create(f"install-{next(self.cgroup_numbers)}", limits)
        try:
            yield cgroup
        finally:
            await asyncio.to_thread(cgroup.remove)

    def _jail_config(self, arguments: Sequence[str], inputs: Path, output: Path | None) -> dict[str, Any]:
        """Return the configuration for outer_jail.py: host paths by name, and where they are mounted."""
        roots = read_root_links()
        mounts = {"uv": str(self.uv), "cache": str(self.cache), "in": str(inputs), **list_system_mounts()}
        binds = {"uv": "/uv", "cache": "/cache", "in": "/in", "usr": "/usr"}
        binds |= {f"root-{name[1:]}": name for name, link in roots.items() if link is None}
        home, environ = "/usr/bin", dict[str, str]()
        if self.runtime.prefix is not None:
            mounts["python"], binds["python"] = str(self.runtime.prefix), layout.PYTHON_PREFIX
            home = f"{layout.PYTHON_PREFIX}/bin"
            if self.runtime.has_shared_library:
                environ["LD_LIBRARY_PATH"] = f"{layout.PYTHON_PREFIX}/lib"
        mounts["pyvenv"], binds["pyvenv"] = str(inputs / "pyvenv.cfg"), f"{layout.VIRTUALENV}/pyvenv.cfg"
        if output is not None:
            mounts["out"], binds["out"] = str(output), layout.ATTACHED_PACKAGES
        if self.index.find_links is not None:
            mounts["links"], binds["links"] = str(self.index.find_links), self.links_path
        self._add_network(mounts, binds, environ)
        return {
            "kind": "program",
            "parent": os.getpid(),
            "unshared": None,
            "uid": self.uid,
            "user": layout.USER_ID,
            "hostname": "install",
            "mounts": mounts,
            "writable": ["cache", "out"],
            "binds": binds,
            "directories": [f"{layout.VIRTUALENV}/lib/{self.runtime.library}/site-packages"],
            "links": {
                **{name: link for name, link in roots.items() if link is not None},
                self.python: f"{home}/{self.runtime.executable.name}",
            },
            "environ": environ,
            "file_bytes": self.max_bytes,
            "arguments": ["/uv", *arguments],
        }

    def _add_network(self, mounts: dict[str, str], binds: dict[str, str], environ: dict[str, str]) -> None:
        """Add the files for name resolution, and certificates."""
        for name in _ETC:
            if os.path.isfile(f"/etc/{name}"):
                mounts[f"etc-{name}"], binds[f"etc-{name}"] = os.path.realpath(f"/etc/{name}"), f"/etc/{name}"
        bundle = os.environ.get("SSL_CERT_FILE") or self.runtime.certificates
        if bundle and os.path.isfile(bundle):
            mounts["certificates"], binds["certificates"] = os.path.realpath(bundle), _CERTIFICATES
            environ["SSL_CERT_FILE"] = _CERTIFICATES


async def read_bounded(stream: asyncio.StreamReader) -> bytes:
    """Read to the end and return the first bytes: a reader that stops would block the writer."""
    output = bytearray()
    while chunk := await stream.read(1 << 16):
        output += chunk[: _MAX_OUTPUT_BYTES - len(output)]
    return bytes(output)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the jail: all its processes end with the one that was started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    await process.wait()
