"""Runs a sandbox server as a child process of this one and connects to it."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from fumehood.interfaces import SandboxRef
from fumehood.protocol.sandbox.sandbox_errors import SandboxError, SandboxGone, SandboxServerUnreachable
from fumehood.protocol.sandbox.sandbox_messages import (
    IsolationMode,
    LimitEnforcement,
    SandboxInfo,
    SandboxSpec,
    ServerHealth,
)
from fumehood.sandbox_client.remote_provider import RemoteSandbox, RemoteSandboxProvider
from fumehood.sandbox_client.server_connection import SandboxConnectionTimeouts

logger = logging.getLogger(__name__)

# Environment variables that the server inherits. Everything else could be a secret.
_INHERITED_ENVIRONMENT = (
    "FUMEHOOD_PACKAGES_DIR",
    "HOME",
    "LANG",
    "LC_ALL",
    "PATH",
    "TMPDIR",
    "TZ",
    "XDG_CACHE_HOME",
    "XDG_RUNTIME_DIR",
)
_DIRECTORY_PREFIX = "fumehood-local-"
_MAX_BASE_PATH_BYTES = 65  # the path of a unix socket has at most 107 bytes
_ABANDONED_SECONDS = 60.0
_STOP_TIMEOUT = 15.0
_KEPT_OUTPUT_LINES = 20
_MAX_LINE_BYTES = 1 << 20
# The server is on this host: a connection comes at once or not at all.
_TIMEOUTS = SandboxConnectionTimeouts(retries=4, backoff=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServerSettings:
    """Options of the sandbox server.

    mode, limits, pool, capacity: the options of `fumehood sandbox` of the same names.
    options: further command-line options.
    environment: variables besides the inherited ones, for example FUMEHOOD_INDEX_URL, which may hold a password.
    start_timeout: seconds until a server that is not ready counts as failed.
    """

    mode: IsolationMode = "namespaces"
    limits: LimitEnforcement = "enforced"
    pool: int = 4
    capacity: int = 256
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    start_timeout: float = 120.0

    def command(self, socket: Path) -> list[str]:
        named: list[tuple[str, object]] = [
            ("--socket", socket),
            ("--mode", self.mode),
            ("--limits", self.limits),
            ("--pool", self.pool),
            ("--capacity", self.capacity),
            ("--log-format", "json"),
            ("--grace", 0),
        ]
        options = [str(part) for option in named for part in option]
        # -P: do not import from the working directory.
        return [
            sys.executable,
            "-P",
            "-m",
            "fumehood",
            "sandbox",
            "--exit-with-stdin",
            *options,
            *self.options,
        ]

    def environ(self) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in _INHERITED_ENVIRONMENT if name in os.environ}
        return {**inherited, **self.environment}


class LocalServerProvider:
    """A `SandboxProvider` that starts its own server on first use, and again after the server has died.

    The server listens on a unix socket that only this user can open. It ends with this process, even if that is killed,
    and its sandboxes end with it: they are then SandboxGone. `async with` starts it at once and closes it.

    A start runs in its own task: a cancelled caller does not cancel it, and all callers wait for the same start. It
    raises SandboxServerUnreachable with the server's output, for example why code cannot be isolated here.
    """

    def __init__(self, settings: LocalServerSettings | None = None) -> None:
        self._settings = settings or LocalServerSettings()
        self._server: _ServerProcess | None = None
        self._start_task: asyncio.Task[_ServerProcess] | None = None
        self._earlier_failures = 0  # of the servers before this one
        self._closed = False
        self._logs_failures = True

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the server now. Raises SandboxServerUnreachable, which is then not logged."""
        self._logs_failures = False
        try:
            await self._running_server()
        finally:
            self._logs_failures = True

    async def create(self, spec: SandboxSpec, name: str | None = None) -> SandboxRef:
        return await (await self._running_server()).remote.create(spec, name)

    async def attach(self, ref: SandboxRef) -> RemoteSandbox:
        return await (await self._running_server()).remote.attach(ref)

    async def destroy(self, ref: SandboxRef) -> None:
        await (await self._running_server()).remote.destroy(ref)

    async def extend_lifetime(self, ref: SandboxRef, until: float) -> None:
        """Do nothing: the server ends sandboxes that are idle, not those of some age."""

    async def list_sandboxes(self) -> list[SandboxInfo]:
        return await (await self._running_server()).remote.list_sandboxes()

    async def health(self) -> ServerHealth:
        return await (await self._running_server()).remote.health()

    async def metrics(self) -> bytes:
        """Return the server's metrics. Raises SandboxServerUnreachable if none runs: this does not start one."""
        server = self._server
        if server is None or not server.is_alive:
            raise SandboxServerUnreachable("No sandbox server runs on this host.")
        return await server.remote.metrics()

    async def close(self) -> None:
        self._closed = True
        if self._start_task is not None:
            self._start_task.cancel()
            await asyncio.gather(self._start_task, return_exceptions=True)
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()

    @property
    def server_pid(self) -> int | None:
        """The process id of the server, while it runs."""
        return None if self._server is None or not self._server.is_alive else self._server.process.pid

    @property
    def failures(self) -> int:
        """Count of requests that did not reach a server, and of servers that died."""
        server = self._server
        if server is None:
            return self._earlier_failures
        return self._earlier_failures + server.remote.failures + (not server.is_alive)

    async def _running_server(self) -> "_ServerProcess":
        """Return the server once it is ready. Raises SandboxServerUnreachable."""
        server = self._server
        if server is not None and server.is_alive and not self._closed:
            return server
        if self._start_task is None:
            self._check_open()
            self._start_task = asyncio.create_task(self._start_server(), name="sandbox server: start")
            self._start_task.add_done_callback(self._on_start_done)
        start_task = self._start_task
        try:
            return await asyncio.shield(start_task)
        except asyncio.CancelledError:
            if start_task.cancelled():  # by `close`, not by the caller
                self._check_open()
            raise

    async def _start_server(self) -> "_ServerProcess":
        dead, self._server = self._server, None
        if dead is not None:
            logger.error("The sandbox server on this host has died; starting another one.")
            self._earlier_failures += dead.remote.failures + 1
            await dead.close()
        self._server = await _ServerProcess.start(self._settings)
        return self._server

    def _on_start_done(self, start_task: "asyncio.Task[_ServerProcess]") -> None:
        self._start_task = None
        if (
            not start_task.cancelled()
            and (error := start_task.exception()) is not None
            and self._logs_failures
        ):
            # Logged here, since the caller may have stopped waiting.
            logger.warning("Could not start the sandbox server on this host: %s", error)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxServerUnreachable("The sandbox server on this host has been closed.")


class _ServerProcess:
    """One server process with its connection and its socket directory."""

    def __init__(self, process: asyncio.subprocess.Process, directory: "_SocketDirectory") -> None:
        self.process = process
        self.remote = RemoteSandboxProvider(
            f"unix:{directory.socket}", timeouts=_TIMEOUTS, explain=self._explain
        )
        self._directory = directory
        self._output_lines: deque[str] = deque(maxlen=_KEPT_OUTPUT_LINES)
        self._stderr_task = asyncio.ensure_future(self._read_stderr())

    @property
    def is_alive(self) -> bool:
        if self.process.returncode is not None:
            return False
        try:  # the event loop may not have reaped it yet
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return ended is None

    @classmethod
    async def start(cls, settings: LocalServerSettings) -> Self:
        directory = await asyncio.to_thread(_SocketDirectory)
        try:
            process = await asyncio.create_subprocess_exec(
                *settings.command(directory.socket),
                stdin=asyncio.subprocess.PIPE,  # the server exits when it is closed
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=settings.environ(),
                cwd="/",
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
        except BaseException:
            await asyncio.to_thread(directory.remove)
            raise
        server = cls(process, directory)
        try:
            await server._wait_ready(settings.start_timeout)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(server.close(immediately=True)))
            raise
        return server

    async def _wait_ready(self, timeout: float) -> None:
        assert self.process.stdout is not None  # noqa: S101 - a pipe was requested
        try:
            async with asyncio.timeout(timeout):
                if await self.process.stdout.readline():
                    return
                await self.process.wait()
                await self._stderr_task
        except TimeoutError:
            raise SandboxServerUnreachable(
                f"The sandbox server on this host was not ready within {timeout:g} s."
            ) from None
        reason = " ".join(self._output_lines) or f"it ended with exit code {self.process.returncode}"
        raise SandboxServerUnreachable(f"The sandbox server on this host cannot start: {reason}")

    def _explain(self, error: SandboxServerUnreachable) -> SandboxError:
        if self.is_alive:
            return error
        return SandboxGone("The sandbox is gone: its server on this host has ended.")

    async def _read_stderr(self) -> None:
        """Forward log lines; keep other output for the error message."""
        assert self.process.stderr is not None  # noqa: S101
        while True:
            try:
                line = await self.process.stderr.readline()
            except ValueError:  # line longer than the limit
                continue
            if not line:
                return
            text = line.decode(errors="replace").strip()
            if text and not _forward_log_line(text):
                self._output_lines.append(text)

    async def close(self, *, immediately: bool = False) -> None:
        """Stop the server by closing its stdin, then by signals; remove its directory.

        immediately: send SIGTERM at once, for a server that never became ready.
        """
        await self.remote.close()
        try:
            if self.process.stdin is not None:
                self.process.stdin.close()
            if immediately:
                self._send_signal(signal.SIGTERM)
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.process.wait(), _STOP_TIMEOUT)
                    break
                self._send_signal(number)
            await self.process.wait()
        finally:
            if self.is_alive:
                self._send_signal(signal.SIGKILL)
            self._stderr_task.cancel()
            await asyncio.gather(self._stderr_task, return_exceptions=True)
            await asyncio.to_thread(self._directory.remove)

    def _send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)  # not reaped yet, so the pid is not reused


def _forward_log_line(text: str) -> bool:
    """Log a line of the server's log; False if it is not one."""
    try:
        line: Any = json.loads(text)
    except ValueError:
        return False
    if not isinstance(line, dict) or "event" not in line:
        return False
    fields = {str(key): value for key, value in cast("dict[Any, Any]", line).items()}
    level = logging.getLevelNamesMapping().get(str(fields.pop("level", "")).upper(), logging.INFO)
    fields.pop("time", None)
    event = str(fields.pop("event"))
    if event == "message":
        logger.log(level, "%s", "\n".join(map(str, fields.values())))
    else:
        logger.log(level, event, extra={"fields": fields})
    return True


class _SocketDirectory:
    """A private directory for the socket, locked while it is in use."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(os.fsencode(base)) > _MAX_BASE_PATH_BYTES:
            base = "/tmp"  # noqa: S108 - mkdtemp creates a private directory
        remove_abandoned_directories(Path(base))
        self.path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=base))
        self.socket = self.path / "socket"
        self._lock = _try_lock(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _try_lock(directory: Path) -> int | None:
    """Lock the directory; None if another process has it."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def remove_abandoned_directories(base: Path) -> None:
    """Remove directories of processes that were killed."""
    for path in base.glob(f"{_DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):
            stat = path.lstat()
            is_old = time.time() - stat.st_mtime > _ABANDONED_SECONDS  # a new one may not be locked yet
            if stat.st_uid == os.geteuid() and is_old and (lock := _try_lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
