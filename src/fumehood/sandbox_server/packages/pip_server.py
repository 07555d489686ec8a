"""Serves the sandbox's `pip` over its loopback interface.

Clients are untrusted code: each connection is one request line, limited in size and time, and its response lines.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import msgspec

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed, SandboxError
from fumehood.sandbox_server.packages.layer_store import PinnedPackage

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 4
_ACCEPT_INTERVAL = 0.05  # seconds; limits the CPU that a sandbox can use in this process
_ACCEPT_RETRY_SECONDS = 1.0  # after accept() failed, for lack of descriptors say
_MAX_LINE_BYTES = 64 * 1024
_READ_SECONDS = 10
_WRITE_SECONDS = 10
_BURST = 20  # requests at once, then
_REFILL_SECONDS = 3.0  # one per this many seconds


class _PipRequest(msgspec.Struct, forbid_unknown_fields=True):
    requirements: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=1000)]], msgspec.Meta(min_length=1, max_length=1000)
    ]


type InstallFunction = Callable[[Sequence[str], Callable[[str], None]], Awaitable[list[PinnedPackage]]]

_decode = msgspec.json.Decoder(_PipRequest).decode


class PipRequestServer:
    """Accepts on a listening descriptor of the sandbox, which it owns, until `close`."""

    def __init__(self, listener: int, install: InstallFunction) -> None:
        self._install = install
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._rate_tokens = float(_BURST)
        self._refilled_at = self._loop.time()
        self._resume_timer: asyncio.TimerHandle | None = None
        self._resume_accepting()

    def close(self) -> None:
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for task in self._tasks:
            task.cancel()

    def _resume_accepting(self) -> None:
        if len(self._tasks) < _MAX_CONNECTIONS:
            self._loop.add_reader(self._listener.fileno(), self._accept)
        else:
            self._resume_timer = self._loop.call_later(_ACCEPT_INTERVAL, self._resume_accepting)

    def _accept(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        try:
            connection, _ = self._listener.accept()
        except OSError:
            self._resume_timer = self._loop.call_later(_ACCEPT_RETRY_SECONDS, self._resume_accepting)
            return
        self._resume_timer = self._loop.call_later(_ACCEPT_INTERVAL, self._resume_accepting)
        connection.setblocking(False)
        task = asyncio.ensure_future(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                await self._handle_request(connection)
            except (OSError, TimeoutError):
                return  # the client disconnected, or does not read
            except Exception:
                logger.exception("A pip request failed.")

    async def _handle_request(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(_READ_SECONDS):
                request = _decode(await self._read_line(connection))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            await self._send_line(connection, {"error": "the request is malformed or too long"})
            return
        if not self._consume_rate_limit():
            await self._send_line(connection, {"error": "too many requests for packages; wait a little"})
            return
        progress: asyncio.Queue[str] = asyncio.Queue()
        sender = asyncio.ensure_future(self._send_progress(connection, progress))
        try:
            pins = await self._install(request.requirements, progress.put_nowait)
            text = " ".join(f"{pin.name}-{pin.version}" for pin in pins)
            last = {"done": f"Successfully installed {text}" if pins else "Requirement already satisfied"}
        except (InstallFailed, SandboxError) as error:
            last = {"error": error.message}
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
        while not progress.empty():
            await self._send_line(connection, {"progress": progress.get_nowait()})
        await self._send_line(connection, last)

    async def _read_line(self, connection: socket.socket) -> bytes:
        line = b""
        while not line.endswith(b"\n") and len(line) <= _MAX_LINE_BYTES:
            chunk = await self._loop.sock_recv(connection, _MAX_LINE_BYTES + 1 - len(line))
            if not chunk:
                break
            line += chunk
        return line[:_MAX_LINE_BYTES]

    async def _send_progress(self, connection: socket.socket, progress: "asyncio.Queue[str]") -> None:
        with contextlib.suppress(OSError, TimeoutError):
            while True:
                await self._send_line(connection, {"progress": await progress.get()})

    async def _send_line(self, connection: socket.socket, answer: dict[str, str]) -> None:
        async with asyncio.timeout(_WRITE_SECONDS):
            await self._loop.sock_sendall(connection, msgspec.json.encode(answer) + b"\n")

    def _consume_rate_limit(self) -> bool:
        now = self._loop.time()
        self._rate_tokens = min(_BURST, self._rate_tokens + (now - self._refilled_at) / _REFILL_SECONDS)
        self._refilled_at = now
        if self._rate_tokens < 1:
            return False
        self._rate_tokens -= 1
        return True
