"""The supervisor's end of a zygote: starting it, asking it, hearing from it; imports only siblings."""

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

from fumehood.sandboxd import launching
from fumehood.sandboxd.errors import IsolationUnavailable
from fumehood.sandboxd.launching import JailProcess, Launch
from fumehood.sandboxd.packets import Packets

_ADVICE = "Run `fumehood doctor` to see what this machine lacks."


@dataclass(frozen=True, slots=True)
class About:
    """What the zygote said of itself when it was ready."""

    python: str
    problems: dict[str, str]
    threads: int
    landlock: int


class Zygote:
    """A running zygote with its warden; `on_event` gets what they report about sandboxes, `on_death` their end, once.

    Without namespaces both are one process, and one socket leads to it.
    """

    def __init__(self, sock: socket.socket, process: JailProcess | None) -> None:
        self._process = process
        self._ready: asyncio.Future[About] = asyncio.get_running_loop().create_future()
        self._warden = Packets(sock, on_packet=self._arrived, on_close=self._ended, accept_fds=True)
        self._interpreters: Packets | None = None
        self.on_event: Callable[[dict[str, Any], list[int]], None] | None = None
        self.on_death: Callable[[], None] | None = None
        self._end = asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self._end.is_set()

    async def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, or does in that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._end.wait()
        return not self.alive

    @classmethod
    async def launch(cls, launch: Launch) -> Self:
        """Start one in its jail; IsolationUnavailable says why it cannot be."""
        try:
            process, sock = await launching.start(launch)
        except (OSError, ValueError, EOFError, TimeoutError, subprocess.SubprocessError) as error:
            said = "; ".join(getattr(error, "__notes__", [])) or f"{type(error).__name__}: {error}"
            raise IsolationUnavailable(f"The jail could not be made: {said}.", _ADVICE) from error
        zygote = cls(sock, process)
        special = {"common": launch.common and launch.common._asdict(), "thorough": launch.thorough}
        programs = (launch.program, launch.helper_program)
        await zygote._prepare(programs, launch.preload, launch.timeout, special)
        if zygote.about.threads != 1:
            # A fork copies one thread only: the locks of the others would stay locked in every sandbox.
            await zygote.close()
            raise IsolationUnavailable(
                f"The zygote runs {zygote.about.threads} threads after its preload.",
                "Preload fewer packages.",
            )
        return zygote

    @classmethod
    async def connect(
        cls, path: Path, programs: tuple[bytes, bytes], preload: tuple[str, ...], timeout: float
    ) -> Self:
        """Mode `pod`: the zygote runs in the neighbouring container and listens on a socket."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise IsolationUnavailable(
                f"Nothing listens for code on {path}: {error.strerror}.",
                "Start the code container first: `python -m fumehood.sandboxd.inside.guest PATH`.",
            ) from error
        zygote = cls(sock, None)
        await zygote._prepare(programs, preload, timeout, {"single": True})
        return zygote

    async def _prepare(
        self, programs: tuple[bytes, bytes], preload: tuple[str, ...], timeout: float, special: dict[str, Any]
    ) -> None:
        """`programs` are the filters of the code and of helpers."""
        code, helpers = (base64.b64encode(program).decode() for program in programs)
        self.request({"program": code, "helper_program": helpers, "preload": list(preload), **special})
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout)
        except (TimeoutError, EOFError) as error:
            await self.close()
            said = (
                (self._process.log_tail() if self._process else "")
                or str(error)
                or "it did not answer in time"
            )
            raise IsolationUnavailable(f"The zygote did not start: {said}.", _ADVICE) from error
        except BaseException:
            await self.close()
            raise
        if self._process is not None:
            self._process.forget()

    @property
    def about(self) -> About:
        return self._ready.result()

    @property
    def pid(self) -> int | None:
        """The outermost process on this host, None where the zygote runs in another container."""
        return None if self._process is None else self._process.pid

    @property
    def last_words(self) -> str:
        """What it said last since it was ready: why it ended, if that was its own doing."""
        return "" if self._process is None else self._process.log_tail()

    def request(self, body: dict[str, Any], fds: list[int] | None = None) -> None:
        self._warden.send(json.dumps(body).encode(), fds)

    def interrupt(self, number: int) -> None:
        """SIGINT for the process group of a sandbox's interpreter."""
        body = {"op": "signal", "number": number, "signal": int(signal.SIGINT)}
        (self._interpreters or self._warden).send(json.dumps(body).encode())

    def _arrived(self, body: bytes, fds: list[int]) -> None:
        event: dict[str, Any] = json.loads(body)
        if event["event"] == "zygote":
            sock = socket.socket(fileno=fds.pop())
            self._interpreters = Packets(sock, on_packet=self._arrived, on_close=self._ended)
        elif event["event"] == "started":
            del event["event"]
            self._ready.set_result(About(**event))
        elif self.on_event is not None:
            self.on_event(event, fds)

    def _ended(self) -> None:
        if not self.alive:
            return
        self._end.set()
        if not self._ready.done():
            self._ready.set_exception(EOFError("it ended while starting"))
            self._ready.exception()  # seen, even if nobody waits any more
        if self.on_death is not None:
            self.on_death()

    async def close(self) -> None:
        """End the zygote and with it every sandbox it made."""
        self._end.set()
        self.on_death = None
        self._warden.close()
        if self._interpreters is not None:
            self._interpreters.close()
        if self._process is not None:
            await self._process.end()
