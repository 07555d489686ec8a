"""Runs uv in the container `egress` of a pod, which is the jail: see decision 0080.

The container has neither the server's token nor the socket of the code, no capability, a read-only root, and limits of
memory and processes from its pod. This adds limits of time, of disk space and of the size of a file.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fumehood.sandbox_server.packages.install_jail import (
    UV_ENVIRONMENT,
    DiskSpaceExhausted,
    InstallTimeout,
    UvResult,
    read_bounded,
)
from fumehood.sandbox_server.packages.installed_tree_check import measure_disk_usage
from fumehood.sandbox_server.packages.package_index_config import PackageIndexConfig

_WATCH_SECONDS = 0.5
_PASSED_ENVIRONMENT = ("SSL_CERT_FILE", "SSL_CERT_DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class UvContainer:
    """A `UvRunner` whose paths are those of the container.

    scratch: everything that is written, and measured: cache, staging, layers.
    max_bytes: the limit of a file and of `scratch`.
    """

    uv: Path
    index: PackageIndexConfig
    scratch: Path
    cache: Path
    timeout: float
    max_bytes: int
    uid: int | None = None

    @property
    def python(self) -> str:
        """The interpreter of the image, which is that of the code too."""
        return sys.executable

    @property
    def links_path(self) -> str:
        return str(self.index.find_links)

    def inputs_path(self, inputs: Path) -> str:
        return str(inputs)

    def output_path(self, output: Path) -> str:
        return str(output)

    def pyvenv_config(self) -> str:
        return ""  # the interpreter has its own

    def with_timeout(self, seconds: float) -> "UvContainer":
        return replace(self, timeout=seconds)

    async def run(self, arguments: Sequence[str], inputs: Path, output: Path | None = None) -> UvResult:
        """Run uv and whatever it starts; all of it has ended afterwards.

        Raises InstallTimeout, DiskSpaceExhausted, OSError.
        """
        del output
        environment = {**UV_ENVIRONMENT, "HOME": str(inputs), "TMPDIR": str(inputs)}
        environment |= {"UV_CACHE_DIR": str(self.cache), **self.index.environment()}
        environment |= {name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            str(self.uv),
            *arguments,
            env=environment,
            cwd=inputs,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (self.max_bytes, self.max_bytes))
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            return await self._collect_output(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _collect_output(self, process: asyncio.subprocess.Process) -> UvResult:
        if process.stdout is None or process.stderr is None:
            raise OSError("uv has no output")
        watch = asyncio.ensure_future(self._watch_disk_space(process.pid))
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
        return UvResult(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    async def _watch_disk_space(self, process_group: int) -> None:
        """Kill uv before the volume exceeds its limit, for which the whole pod would be evicted."""
        while await asyncio.to_thread(measure_disk_usage, self.scratch) <= self.max_bytes:  # noqa: ASYNC110
            await asyncio.sleep(_WATCH_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process_group, signal.SIGKILL)
