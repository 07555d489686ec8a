"""The supervisor's connection to a zygote: launch, requests, events."""

import asyncio
import base64
import json
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed
from fumehood.sandbox_server.host import jail_launcher
from fumehood.sandbox_server.host.jail_launcher import ZygoteJailProcess, ZygoteLaunchConfig
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packet_channel import PacketChannel

_ATTACH_TIMEOUT = 30
_ADVICE = "Run `fumehood doctor` to see what this machine lacks."


@dataclass(frozen=True, slots=True)
class ZygoteInfo:
    """What a zygote reports when it is ready."""

    python: str
    problems: dict[str, str]
    threads: int
    landlock: int
    has_network: bool = False  # mode `pod`: sandboxes get a network namespace of their own
    memory_limit: int | None = None  # mode `pod`: of the container, if it is known


@dataclass(frozen=True, slots=True)
class SeccompPrograms:
    """The programs for code, for helpers, and for code in a network namespace of its own in a pod."""

    code: bytes
    helpers: bytes
    own_network: bytes = b""

    def to_message(self) -> dict[str, str]:
        programs = {
            "program": self.code,
            "helper_program": self.helpers,
            "network_program": self.own_network,
        }
        return {name: base64.b64encode(program).decode() for name, program in programs.items()}


class ZygoteConnection:
    """A running zygote and its spawner; without namespaces both are one process with one socket.

    on_event: gets what they report about sandboxes.
    on_death: called once, when they have ended.
    """

    def __init__(self, sock: socket.socket, process: ZygoteJailProcess | None) -> None:
        self._process = process
        self._ready: asyncio.Future[ZygoteInfo] = asyncio.get_running_loop().create_future()
        self._spawner_channel = PacketChannel(
            sock, on_packet=self._on_packet, on_close=self._on_close, accept_fds=True
        )
        self._interpreter_channel: PacketChannel | None = None
        self.on_event: Callable[[dict[str, Any], list[int]], None] | None = None
        self.on_death: Callable[[], None] | None = None
        self._end_event = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        return not self._end_event.is_set()

    async def wait_ended(self, seconds: float) -> bool:
        """Wait up to `seconds`; returns whether it has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._end_event.wait()
        return not self.is_alive

    @classmethod
    async def launch(cls, launch: ZygoteLaunchConfig) -> Self:
        """Start a zygote in its jail; raises IsolationUnavailable."""
        try:
            process, sock = await jail_launcher.launch_jail(launch)
        except (OSError, ValueError, EOFError, TimeoutError, subprocess.SubprocessError) as error:
            reason = "; ".join(getattr(error, "__notes__", [])) or f"{type(error).__name__}: {error}"
            raise IsolationUnavailable(f"The jail could not be made: {reason}.", _ADVICE) from error
        zygote = cls(sock, process)
        options = {"optimize_forks": launch.optimizes_forks}
        programs = SeccompPrograms(launch.seccomp_program, launch.helper_seccomp_program)
        await zygote._initialize(programs, launch.preload, launch.timeout, options)
        if zygote.info.threads != 1:
            # A fork copies one thread only: locks held by others would stay locked in every sandbox.
            await zygote.close()
            raise IsolationUnavailable(
                f"The zygote runs {zygote.info.threads} threads after its preload.",
                "Preload fewer packages.",
            )
        return zygote

    @classmethod
    async def connect(
        cls, path: Path, programs: SeccompPrograms, preload: tuple[str, ...], timeout: float
    ) -> Self:
        """Mode `pod`: connect to the zygote in the neighbouring container; raises IsolationUnavailable."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise IsolationUnavailable(
                f"Nothing listens for code on {path}: {error.strerror}.",
                "Start the code container first: `python -m fumehood.sandbox_server.inside.pod_entrypoint PATH`.",
            ) from error
        zygote = cls(sock, None)
        await zygote._initialize(programs, preload, timeout, {"single_use": True})
        return zygote

    async def _initialize(
        self, programs: SeccompPrograms, preload: tuple[str, ...], timeout: float, options: dict[str, Any]
    ) -> None:
        self.send_request({**programs.to_message(), "preload": list(preload), **options})
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout)
        except (TimeoutError, EOFError) as error:
            await self.close()
            reason = (
                (self._process.log_tail() if self._process else "")
                or str(error)
                or "it did not answer in time"
            )
            raise IsolationUnavailable(f"The zygote did not start: {reason}.", _ADVICE) from error
        except BaseException:
            await self.close()
            raise
        if self._process is not None:
            self._process.clear_log()

    @property
    def info(self) -> ZygoteInfo:
        return self._ready.result()

    @property
    def pid(self) -> int | None:
        """The outermost process on this host; None if the zygote runs in another container."""
        return None if self._process is None else self._process.pid

    @property
    def last_log_line(self) -> str:
        """Its last line on standard error since it was ready: why it ended, if it failed by itself."""
        return "" if self._process is None else self._process.log_tail()

    def send_request(self, body: dict[str, Any], fds: list[int] | None = None) -> None:
        self._spawner_channel.send(json.dumps(body).encode(), fds)

    def send_interrupt(self, number: int) -> None:
        """Send SIGINT to the process group of a sandbox's interpreter."""
        body = {"op": "signal", "number": number, "signal": int(signal.SIGINT)}
        (self._interpreter_channel or self._spawner_channel).send(json.dumps(body).encode())

    async def attach_layers(self, number: int, mount_namespace_fd: int, layers: list[str]) -> None:
        """Mount package layers, the first on top, in a sandbox; raises InstallFailed.

        A helper process of the zygote does it; `number` becomes its number.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine:
            with theirs:
                self.send_request({"op": "attach", "number": number}, [theirs.fileno(), mount_namespace_fd])
            mine.setblocking(False)
            mine.send(json.dumps({"layers": layers}).encode())
            body = b""
            with suppress(TimeoutError):
                async with asyncio.timeout(_ATTACH_TIMEOUT):
                    body = await asyncio.get_running_loop().sock_recv(mine, 65536)
        problem = json.loads(body).get("error") if body else "no answer"
        if problem:
            raise InstallFailed(f"The packages were installed, but could not be attached: {problem}.")

    def _on_packet(self, body: bytes, fds: list[int]) -> None:
        event: dict[str, Any] = json.loads(body)
        if event["event"] == "zygote":
            sock = socket.socket(fileno=fds.pop())
            self._interpreter_channel = PacketChannel(
                sock, on_packet=self._on_packet, on_close=self._on_close
            )
        elif event["event"] == "started":
            del event["event"]
            self._ready.set_result(ZygoteInfo(**event))
        elif self.on_event is not None:
            self.on_event(event, fds)

    def _on_close(self) -> None:
        if not self.is_alive:
            return
        self._end_event.set()
        if not self._ready.done():
            self._ready.set_exception(EOFError("it ended while starting"))
            self._ready.exception()  # retrieved, even if nobody waits
        if self.on_death is not None:
            self.on_death()

    async def close(self) -> None:
        """End the zygote and every sandbox forked from it."""
        self._end_event.set()
        self.on_death = None
        self._spawner_channel.close()
        if self._interpreter_channel is not None:
            self._interpreter_channel.close()
        if self._process is not None:
            await self._process.kill()
