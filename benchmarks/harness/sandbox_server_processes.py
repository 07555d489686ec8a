"""Starts sandbox servers for the benchmark, as a user would."""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from benchmarks.harness.raw_http_client import RawHttpClient
from benchmarks.harness.sandbox_targets import HttpTarget

_READY = re.compile(r"Serving sandboxes on (?P<where>.*) \(mode")
_PATIENCE = 60


async def _start(
    directory: Path, *options: str, package: Path | None = None
) -> tuple[asyncio.subprocess.Process, str]:
    """Start a server; returns its process and address once it is ready."""
    environment = {**os.environ, "PYTHONPATH": str(package)} if package else None
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fumehood", "sandbox", *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=(directory / "log").open("ab"),
        cwd=directory,
        env=environment,
    )
    assert process.stdout is not None
    async with asyncio.timeout(_PATIENCE):
        line = (await process.stdout.readline()).decode()
    ready = _READY.match(line)
    if ready is None:
        await process.wait()
        raise RuntimeError(f"the server did not start: {(directory / 'log').read_text()}")
    return process, ready["where"]


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    await process.wait()


@contextlib.asynccontextmanager
async def run_on_unix_socket(
    directory: Path, pool: int, *, package: Path | None = None
) -> AsyncGenerator[HttpTarget]:
    """A server on a unix socket without a token, and a client.

    package: the directory to import `fumehood` from, if not the installed one.
    """
    path = directory / f"pool-{pool}.sock"
    process, _ = await _start(directory, "--socket", str(path), "--pool", str(pool), package=package)
    client = RawHttpClient(socket=str(path))
    try:
        yield HttpTarget("unix socket", f"unix:{path}", client, process.pid)
    finally:
        client.close()
        await _stop(process)


@contextlib.asynccontextmanager
async def run_on_loopback(directory: Path, pool: int) -> AsyncGenerator[HttpTarget]:
    """A server on a TCP port with a token, and a client."""
    token = secrets.token_hex(16)
    file = directory / "token"
    file.write_text(token)
    file.chmod(0o600)
    options = ("--listen", "127.0.0.1:0", "--token-file", str(file), "--pool", str(pool))
    process, where = await _start(directory, *options)
    port = int(where.rstrip("/").rpartition(":")[2])
    client = RawHttpClient(port=port, token=token)
    try:
        yield HttpTarget("TCP, token", f"http://127.0.0.1:{port}", client, process.pid)
    finally:
        client.close()
        await _stop(process)
