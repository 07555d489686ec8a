"""Runs uv in a jail that has the network and nothing of the host; imports only siblings and the standard library.

What uv reads comes from an index that anybody may publish to. Wheels alone are taken, so nothing of them is executed;
should uv itself be tricked, it finds a cache, an output directory and no rights.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.sandboxd.cgroups import Cgroup, CgroupLimits, CgroupTree
from fumehood.sandboxd.inside import layout
from fumehood.sandboxd.launching import bubblewrap_place, root_entries
from fumehood.sandboxd.packages.index import Index
from fumehood.sandboxd.runtime import Bubblewrap, Runtime

_OUTER_JAIL = Path(__file__).parent.parent / "outer_jail.py"
_ETC = ("resolv.conf", "hosts", "nsswitch.conf", "host.conf", "gai.conf")
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_MEMORY = 2 << 30
_PROCESSES = 256
_OUTPUT_BYTES = 4 << 20
_RESERVE = 1 << 30  # what stays free on the disk, or a twentieth of it
_WATCH_EVERY = 0.25
_ENVIRON = {
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
    "UV_LINK_MODE": "copy",  # a layer never shares an inode with the cache
    "UV_HTTP_RETRIES": "1",
    "UV_HTTP_TIMEOUT": "30",
}


class TookTooLong(Exception):
    """The jail was ended at its time-out."""


class TookTooMuch(Exception):
    """The jail was ended because it left too little space on the disk."""


@dataclass(frozen=True, slots=True)
class Finished:
    code: int
    stdout: str
    stderr: str


@dataclass(slots=True, kw_only=True)
class InstallJail:
    """Runs uv where it can do no harm: with the network, and with no rights.

    uid: as root, the kernel user that the jail runs as; else None, and it is the operator's own.
    """

    runtime: Runtime
    bubblewrap: Bubblewrap
    uv: Path
    index: Index
    cache: Path
    uid: int | None
    tree: CgroupTree | None
    timeout: float
    most_bytes: int
    numbers: "itertools.count[int]"

    @property
    def python(self) -> str:
        """The interpreter inside, under the name that it has in a sandbox: scripts are written for it."""
        return f"{layout.ENVIRONMENT}/bin/python"

    def pyvenv(self) -> str:
        home = "/usr/bin" if self.runtime.prefix is None else f"{layout.PYTHON}/bin"
        return f"home = {home}\ninclude-system-site-packages = false\nversion = {self.runtime.version}\n"

    async def run(self, arguments: Sequence[str], inputs: Path, output: Path | None = None) -> Finished:
        """uv with these arguments; `inputs` is at /in, `output` where a sandbox has its packages.

        Raises TookTooLong, TookTooMuch, and OSError where the jail cannot be made.
        """
        read, write = os.pipe()
        with os.fdopen(read, "rb", buffering=0) as gate, os.fdopen(write, "wb", buffering=0) as opener:
            config = self._config(gate.fileno(), arguments, inputs, output)
            async with self._cgroup() as cgroup:
                # In the loop's own thread: the kernel ends the jail when the thread that started it ends.
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(_OUTER_JAIL), json.dumps(config)),
                    env={**_ENVIRON, **self.index.environment()},
                    cwd="/",
                    pass_fds=(gate.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
                try:
                    if cgroup is not None:
                        cgroup.add(process.pid)
                    opener.write(b"1")
                    return await self._follow(process)
                finally:
                    await _end(process)

    async def _follow(self, process: asyncio.subprocess.Process) -> Finished:
        if process.stdout is None or process.stderr is None:
            raise OSError("the jail has no output")
        watch = asyncio.ensure_future(self._watch_space(process))
        try:
            async with asyncio.timeout(self.timeout):
                stdout, stderr = await asyncio.gather(_read(process.stdout), _read(process.stderr))
                code = await process.wait()
        except TimeoutError:
            raise TookTooLong from None
        finally:
            watch.cancel()
        if watch.done() and not watch.cancelled():
            raise TookTooMuch
        said = stderr.decode(errors="replace")
        if code and ("Traceback (most" in said or said.startswith("bwrap:")):  # not uv's words
            raise OSError(f"the install jail did not start: {said.strip().splitlines()[-1][:300]}")
        return Finished(code, stdout.decode(errors="replace"), said)

    async def _watch_space(self, process: asyncio.subprocess.Process) -> None:
        """End the jail before the disk is full: what a wheel unpacks to is known only afterwards."""
        while True:
            about = os.statvfs(self.cache)
            free = about.f_bavail * about.f_frsize
            if free < min(_RESERVE, about.f_blocks * about.f_frsize // 20):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                return
            await asyncio.sleep(_WATCH_EVERY)

    @contextlib.asynccontextmanager
    async def _cgroup(self) -> AsyncGenerator[Cgroup | None]:
        if self.tree is None:
            yield None
            return
        limits = CgroupLimits(memory=_MEMORY, pids=_PROCESSES, cpus=2.0)
        cgroup = self.tree.create(f"install-{next(self.numbers)}", limits)
        try:
            yield cgroup
        finally:
            await asyncio.to_thread(cgroup.remove)

    def _config(
        self, gate: int, arguments: Sequence[str], inputs: Path, output: Path | None
    ) -> dict[str, Any]:
        """For outer_jail.py: what is staged, as root before the rights are dropped, and bubblewrap's arguments."""
        bubblewrap, program = bubblewrap_place(self.bubblewrap)
        places = {"bubblewrap": bubblewrap, "uv": str(self.uv), "cache": str(self.cache), "in": str(inputs)}
        jail: list[str | list[str]] = [
            *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"),
            *("--die-with-parent", "--cap-drop", "ALL", "--uid", str(layout.USER_ID)),
            *("--gid", str(layout.USER_ID), "--hostname", "install", "--ro-bind", "/usr", "/usr"),
        ]
        for name, link in root_entries().items():
            jail += ["--ro-bind", name, name] if link is None else ["--symlink", link, name]
        jail += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/"]
        jail += [
            "--ro-bind",
            ["uv", ""],
            "/uv",
            "--bind",
            ["cache", ""],
            "/cache",
            "--ro-bind",
            ["in", ""],
            "/in",
        ]
        jail += self._python(places)
        jail += self._network(places)
        if output is not None:
            places["out"] = str(output)
            jail += ["--bind", ["out", ""], layout.PACKAGES]
        if self.index.find_links is not None:
            places["links"] = str(self.index.find_links)
            jail += ["--ro-bind", ["links", ""], "/links"]
        return {
            "gate": gate,
            "drop_to": self.uid,
            "bubblewrap": program,
            "places": places,
            "file_bytes": self.most_bytes,
            "arguments": [*jail, "--", "/uv", *arguments],
        }

    def _python(self, places: dict[str, str]) -> "list[str | list[str]]":
        home = "/usr/bin"
        arguments: list[str | list[str]] = []
        if self.runtime.prefix is not None:
            places["python"] = str(self.runtime.prefix)
            home = f"{layout.PYTHON}/bin"
            arguments += ["--ro-bind", ["python", ""], layout.PYTHON]
            if self.runtime.has_shared_library:
                arguments += ["--setenv", "LD_LIBRARY_PATH", f"{layout.PYTHON}/lib"]
        arguments += ["--dir", f"{layout.ENVIRONMENT}/lib/{self.runtime.library}/site-packages"]
        arguments += ["--symlink", f"{home}/{self.runtime.executable.name}", self.python]
        return [*arguments, "--ro-bind", ["in", "/pyvenv.cfg"], f"{layout.ENVIRONMENT}/pyvenv.cfg"]

    def _network(self, places: dict[str, str]) -> "list[str | list[str]]":
        """Name look-ups and certificates."""
        arguments: list[str | list[str]] = []
        for name in _ETC:
            if os.path.isfile(f"/etc/{name}"):
                places[f"etc-{name}"] = os.path.realpath(f"/etc/{name}")
                arguments += ["--ro-bind", [f"etc-{name}", ""], f"/etc/{name}"]
        chosen = os.environ.get("SSL_CERT_FILE") or self.runtime.certificates
        if chosen and os.path.isfile(chosen):
            places["certificates"] = os.path.realpath(chosen)
            arguments += ["--ro-bind", ["certificates", ""], _CERTIFICATES]
            arguments += ["--setenv", "SSL_CERT_FILE", _CERTIFICATES]
        return arguments


async def _read(stream: asyncio.StreamReader) -> bytes:
    """All of it, of which the first part is kept: a reader that stopped would stop the writer."""
    kept = bytearray()
    while chunk := await stream.read(1 << 16):
        kept += chunk[: _OUTPUT_BYTES - len(kept)]
    return bytes(kept)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Nothing of the jail runs afterwards: its processes end with bubblewrap."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    await process.wait()
