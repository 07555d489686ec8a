"""Pods of containers that are processes, with the commands, users and volumes of the pods in a cluster."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from tests.support.sandbox_server import SandboxApiClient

ROOT = Path(__file__).parents[2]
TOKEN = "the-token-of-all-pods"
_CONTAINER = str(ROOT / "tests/support/pod_container.py")
_PROGRAMS = Path(sys.executable).parent
_GROUP = 10000
_READY_SECONDS = 60
_WRITABLE = ("/mnt/data", "/tmp", "/home/user", "/dev/shm")


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """allow_unshare: whether code may get a network namespace of its own.

    environment: of the server; egress_environment: of the container `egress`. options: further ones of the server.
    """

    memory: str | None = "1g"
    preload: str = ""
    allow_unshare: bool = False
    has_egress: bool = False
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    egress_environment: Mapping[str, str] = field(default_factory=dict[str, str])


class Pod:
    """One pod, in a directory of its own; `start` waits until it is ready."""

    def __init__(self, directory: Path, options: PodOptions) -> None:
        self.directory = directory
        self._options = options
        self.containers: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""
        self._logs: dict[str, IO[bytes]] = {}
        for name in ("token", "code-socket", "egress-socket", "state", "packages"):
            (directory / name).mkdir()
            (directory / name).chmod(0o777)
        token = directory / "token" / "token"
        token.write_text(TOKEN)
        token.chmod(0o440)
        if os.geteuid() == 0:
            os.chown(token, 0, _GROUP)
        else:
            token.chmod(0o400)

    async def start(self) -> Self:
        """Start all containers at once, as a kubelet does."""
        self.start_container("code")
        if self._options.has_egress:
            self.start_container("egress")
        self.start_container("server")
        await self.wait_ready()
        return self

    async def wait_ready(self) -> None:
        server = self.containers["server"]
        assert server.stdout is not None
        async with asyncio.timeout(_READY_SECONDS):
            line = (await asyncio.to_thread(server.stdout.readline)).decode()
        assert line.startswith("Serving sandboxes on "), self.read_log("server")
        self.url = line.split()[3]

    def start_container(self, name: str) -> None:
        command, volumes, user = self._describe(name)
        arguments = [f"--uid={user}", f"--gid={_GROUP}", f"--hide={self.directory}"]
        arguments += [f"--volume={self.directory}/{volume}" for volume in volumes]
        if name == "code":
            arguments += [f"--tmpfs={path}" for path in _WRITABLE]
            arguments += ["--allow-unshare"] if self._options.allow_unshare else []
        self._close_output(name)
        self._logs[name] = open(self.directory / f"{name}.log", "ab")  # noqa: SIM115 - see _close_output
        self.containers[name] = subprocess.Popen(
            [sys.executable, _CONTAINER, *arguments, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if name == "server" else self._logs[name],
            stderr=self._logs[name],
            env=self._environment(name),
            start_new_session=True,
        )

    def _describe(self, name: str) -> tuple[list[str], list[str], int]:
        """Command, volumes and user, as in deploy/kubernetes."""
        match name:
            case "server":
                command = [
                    *(str(_PROGRAMS / "fumehood"), "sandbox", "--mode", "pod", "--listen", "127.0.0.1:0"),
                    *("--token-file", "/run/secrets/fumehood/token"),
                    *("--guest-socket", "/run/fumehood/code/guest.sock", "--log-format", "json"),
                    *("--preload", self._options.preload, *self._options.options),
                ]
                volumes = ["token:/run/secrets/fumehood:ro", "code-socket:/run/fumehood/code"]
                volumes += ["state:/run/fumehood/state", "egress-socket:/run/fumehood/egress"]
                return command, volumes, 10001
            case "egress":
                command = [sys.executable, "-m", "fumehood.sandbox_server.pod.egress_entrypoint"]
                volumes = ["egress-socket:/run/fumehood/egress", "packages:/opt/packages"]
                return [*command, "/run/fumehood/egress/egress.sock"], volumes, 10002
            case _:
                command = [sys.executable, "-m", "fumehood.sandbox_server.inside.pod_entrypoint"]
                volumes = ["code-socket:/run/fumehood/code", "packages:/opt/packages:ro"]
                return [*command, "/run/fumehood/code/guest.sock"], volumes, 10003

    def _environment(self, name: str) -> dict[str, str]:
        own = {"PATH": f"{_PROGRAMS}:/usr/bin:/bin"}
        if name == "server":
            own["FUMEHOOD_SANDBOX_STATE_DIR"] = "/run/fumehood/state"
            if self._options.memory is not None:
                own["FUMEHOOD_SANDBOX_POD_MEMORY"] = self._options.memory
            if self._options.has_egress:
                own["FUMEHOOD_SANDBOX_EGRESS_SOCKET"] = "/run/fumehood/egress/egress.sock"
            return own | dict(self._options.environment)
        return own | (dict(self._options.egress_environment) if name == "egress" else {})

    def read_log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    async def wait_ended(self, name: str, seconds: float = 20) -> int:
        """Wait for the end of a container; returns its exit code."""
        return await asyncio.to_thread(self.containers[name].wait, seconds)

    async def stop(self) -> None:
        """End what runs, as the deletion of a pod does."""
        for process in self.containers.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for name, process in self.containers.items():
            await asyncio.to_thread(process.wait)
            self._close_output(name)

    def _close_output(self, name: str) -> None:
        if name in self.containers and (stdout := self.containers[name].stdout) is not None:
            stdout.close()
        if name in self._logs:
            self._logs[name].close()


def make_pod(directory: Path, **options: object) -> Pod:
    """Return a pod that is not started, below a directory of the test."""
    own = directory / f"pod-{secrets.token_hex(4)}"
    own.mkdir()
    own.chmod(0o755)
    return Pod(own, PodOptions(**options))  # type: ignore[arg-type]


@asynccontextmanager
async def run_pod(directory: Path, **options: object) -> AsyncGenerator[tuple[Pod, SandboxApiClient]]:
    """Run a pod for the block, with a client that has its token."""
    pod = make_pod(directory, **options)
    try:
        client = SandboxApiClient((await pod.start()).url, TOKEN)
        try:
            yield pod, client
        finally:
            await client.session.close()
    finally:
        await pod.stop()
