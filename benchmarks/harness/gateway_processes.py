"""Starts the gateway as a user would, the reference relay, and the model server behind both."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.gateway_client import BenchmarkTarget
from benchmarks.harness.raw_http_client import RawHttpClient

_START_TIMEOUT = 60
_KEY = "BENCHMARK_MODEL_SERVER_KEY"
EXPORT_SECONDS = (
    6.5  # seconds until a gateway has sent what it has to tell: half a second, and five of the SDK's
)


class StartError(Exception):
    """A server did not begin to serve; says which, how it ended and what it said."""


@dataclass(frozen=True)
class BenchmarkProcess:
    """A server's command and where what it says is kept."""

    name: str
    argv: Sequence[str]
    log: Path

    @contextlib.asynccontextmanager
    async def running(
        self, environment: dict[str, str] | None = None
    ) -> AsyncGenerator[asyncio.subprocess.Process]:
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if environment is None else log,
                stderr=log,
                env=environment,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()

    def failure(self, process: asyncio.subprocess.Process) -> StartError:
        how = "does not answer" if process.returncode is None else f"ended with status {process.returncode}"
        said = read_log_tail(self.log)
        return StartError(
            f"{self.name} could not be started. `{' '.join(self.argv)}` {how} and said:\n{said}"
        )


def read_log_tail(log: Path) -> str:
    """The end of what a server has said."""
    return log.read_text(errors="replace").strip()[-3000:] or "nothing"


@contextlib.asynccontextmanager
async def _start_and_read_address(
    name: str, directory: Path, module: str, *arguments: str
) -> AsyncGenerator[tuple[int, str]]:
    """A program of the harness that prints its address: its process and that address."""
    argv = (sys.executable, "-m", f"benchmarks.harness.{module}", *arguments)
    program = BenchmarkProcess(name, argv, directory / f"{module}.log")
    async with program.running() as process:
        assert process.stdout is not None
        async with asyncio.timeout(_START_TIMEOUT):
            address = (await process.stdout.readline()).decode().strip()
        if not address:
            await process.wait()
            raise program.failure(process)
        yield process.pid, address


def _parse_port(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextlib.asynccontextmanager
async def run_model_server(directory: Path) -> AsyncGenerator[tuple[str, RawHttpClient]]:
    """The model server's address and a client of it."""
    async with _start_and_read_address("The model server", directory, "model_server") as (_, address):
        client = RawHttpClient(port=_parse_port(address))
        with contextlib.closing(client):
            yield address, client


@contextlib.asynccontextmanager
async def run_relay(directory: Path, upstream: str) -> AsyncGenerator[BenchmarkTarget]:
    async with _start_and_read_address("The relay", directory, "relay", upstream) as (pid, address):
        client = RawHttpClient(port=_parse_port(address))
        with contextlib.closing(client):
            yield BenchmarkTarget("relay", pid, client)


def write_configuration(directory: Path, upstream: str, port: int, otlp: str | None = None) -> dict[str, Any]:
    """What an operator would write: storage on disk, metrics, the interpreter; room for all our streams.

    otlp: where telemetry goes.
    """
    model = {
        "match": "*",
        "backend": "chat_completions",
        "base_url": f"{upstream}/v1",
        "api_key_env": _KEY,
        "context_window": 1_000_000,
    }
    return {
        "server": {"host": "127.0.0.1", "port": port},
        "models": [model],
        "storage": {"url": f"sqlite:///{database_path(directory)}", "blobs": str(directory / "blobs")},
        "auth": {"required": True},
        "providers": {"code_interpreter": {"enabled": True}},
        "limits": {"concurrent_total": 256},
        "telemetry": {"metrics": True, "otlp": otlp},
    }


def database_path(directory: Path) -> Path:
    return directory / "fumehood.db"


def log_path(directory: Path) -> Path:
    return directory / "gateway.log"


@contextlib.asynccontextmanager
async def run_gateway(
    directory: Path, upstream: str, otlp: str | None = None
) -> AsyncGenerator[BenchmarkTarget]:
    """`fumehood serve` with a configuration file, once it says that it is ready."""
    port = _free_port()
    file = directory / "fumehood.yaml"
    settings = write_configuration(directory, upstream, port, otlp)
    file.write_text(json.dumps(settings, indent=2))  # JSON is YAML
    argv = (sys.executable, "-m", "fumehood", "serve", "--config", str(file))
    program = BenchmarkProcess("The gateway", argv, log_path(directory))
    environment = {**_without_telemetry(), _KEY: secrets.token_hex(16)}
    async with program.running(environment) as process:
        client = RawHttpClient(port=port, token=f"sk-{secrets.token_hex(16)}")  # every client sends one
        with contextlib.closing(client):
            if not await wait_until_ready(process, client):
                raise program.failure(process)
            yield BenchmarkTarget("fumehood", process.pid, client)


@contextlib.asynccontextmanager
async def telemetry_pair(
    directory: Path, upstream: str
) -> AsyncGenerator[tuple[BenchmarkTarget, BenchmarkTarget]]:
    """Two more gateways, equally young, with directories of their own: one sends its telemetry to where it is thrown
    away, the other sends none.
    """
    telling, silent = (Path(tempfile.mkdtemp(prefix=name, dir=directory)) for name in ("telling-", "silent-"))
    async with (
        _start_and_read_address("The collector", telling, "otlp_sink") as (_, address),
        run_gateway(telling, upstream, address) as told,
        run_gateway(silent, upstream) as untold,
    ):
        yield told, untold


def _without_telemetry() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}


async def wait_until_ready(process: asyncio.subprocess.Process, client: RawHttpClient) -> bool:
    for _ in range(_START_TIMEOUT * 20):
        if process.returncode is not None:
            return False
        with contextlib.suppress(OSError):
            if (await client.request("GET", "/readyz")).status == 200:
                return True
        await asyncio.sleep(0.05)
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
