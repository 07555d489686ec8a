"""One sandbox: its claim, use, channel, descriptors and exit; its parts run executions, reach files, add packages."""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from fumehood.protocol.sandbox.sandbox_errors import SandboxGone, SandboxStartFailed
from fumehood.protocol.sandbox.sandbox_messages import MEMORY_TIERS, MemoryTier, SandboxInfo, SandboxSpec
from fumehood.sandbox_server.egress.proxy_control import SandboxNetworkAccess, open_access
from fumehood.sandbox_server.host.resource_allocator import SandboxResources, file_quota_bytes
from fumehood.sandbox_server.inside import framing
from fumehood.sandbox_server.inside.framing import MessageKind
from fumehood.sandbox_server.inside.runner import output_limits
from fumehood.sandbox_server.packages.installer import PackageInstaller
from fumehood.sandbox_server.packages.sandbox_package_manager import (
    NO_INSTALLER,
    AttachLayers,
    SandboxPackageManager,
)
from fumehood.sandbox_server.packet_channel import PacketChannel
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.execution_queue import ExecutionQueue
from fumehood.sandbox_server.supervisor.file_helper_processes import FileHelperSpawner
from fumehood.sandbox_server.supervisor.sandbox_execution import ProtocolViolation
from fumehood.sandbox_server.supervisor.sandbox_files import SandboxFiles
from fumehood.sandbox_server.supervisor.zygote_connection import ZygoteConnection

logger = logging.getLogger(__name__)

_DESTROY_WAIT = 5.0
_CHANNEL_CLOSED_WAIT = 0.3  # the zygote usually reports the exit a moment after the channel closes
_CLAIM_TIMEOUT = 10
_MEMORY_HEADROOM = 16 << 20
_LARGE_OUTPUT_BYTES = 1 << 20  # of one execution; below this the total is not checked
_NO_DESCRIPTORS = "the supervisor has too few descriptors (Too many open files)"
_MESSAGE_LIMIT = output_limits.MAX_DISPLAY_BYTES * 3 // 2


class SandboxInstance:
    """Created by `Supervisor.create`.

    name: what callers call it; the service sets it.
    """

    def __init__(
        self,
        number: int,
        zygote: ZygoteConnection,
        channel_socket: socket.socket,
        resources: SandboxResources,
        settings: SandboxServerSettings,
        on_exit: Callable[["SandboxInstance"], None],
        on_output_growth: Callable[[], None],
        next_number: Callable[[], int],
    ) -> None:
        self.id = self.name = secrets.token_hex(8)
        self.number = number  # its id between supervisor and zygote
        self.resources = resources
        self.spec = SandboxSpec()
        self.memory: MemoryTier = "1g"  # until the claim, another than that of the spec
        self.warm = False  # whether it came from the pool
        self._settings = settings
        self.zygote = zygote
        self._on_exit = on_exit
        self._on_output_growth = on_output_growth
        self._next_number = next_number
        self._helpers = FileHelperSpawner(zygote, resources.uid, resources.cgroup, next_number)
        self.files = SandboxFiles(
            self._helpers,
            settings,
            require_data_fd=self._require_data_fd,
            free_memory=self._free_memory,
            reads_directly=resources.directly_readable,
        )
        self._assembler = framing.MessageAssembler(limit=_MESSAGE_LIMIT)
        self._channel = PacketChannel(
            channel_socket, on_packet=self._on_packet, on_close=self._on_channel_closed, accept_fds=True
        )
        loop = asyncio.get_running_loop()
        # `_resized` gets an error message or None; `_exited` the exit code of the interpreter, which init outlives.
        self._ready = False
        self._configured: asyncio.Future[None] = loop.create_future()
        self._resized: asyncio.Future[str | None] | None = None
        self.end_reason: str | None = None  # why it ended; None while it is alive
        self._interpreter_exit_code: int | None = None
        self._exited: asyncio.Future[int] = loop.create_future()
        # Descriptors held here; -1 is none.
        self._pidfd = -1
        self._data_fd = -1
        self._namespace_fd = -1
        self._listener_fds: list[int] = []  # on the sandbox's loopback, for the proxy and pip
        self.offer_packages(None)
        self._network_access: SandboxNetworkAccess | None = None
        self.executions = ExecutionQueue(self, settings)
        self._final_oom_kills: int | None = None  # set at exit, because the cgroup goes with the sandbox
        self._active_uses = 0
        self.created_at = time.time()
        self.touch()

    # ---- start and end ----------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raises SandboxGone."""
        if self.end_reason is not None:
            raise SandboxGone(f"The sandbox is gone: {self.end_reason}.")

    def send_plan(self, plan: bytes, memory: MemoryTier) -> None:
        """Send the first messages: the plan for init, then the configuration for the interpreter."""
        disk = self.resources.disk
        self.memory = memory
        self._channel.send(plan, [] if disk is None else [disk.mount_fd])
        if disk is not None:
            disk.close_mount()
        self._send_configuration()

    def _send_configuration(self, access: SandboxNetworkAccess | None = None) -> None:
        body: dict[str, Any] = {
            "output_limit": self._settings.output_bytes,
            "display_bytes": self._settings.display_bytes,
            "cwd": self.resources.work_directory,
            "environment": self.resources.environment_overrides()
            | (access.grant.environment if access else {}),
            "ca_certificates": access.grant.ca_certificates if access else "",
        }
        self.send_message(MessageKind.CONFIGURE, framing.NO_CALL, body)

    async def wait_ready(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(self._configured), timeout)
        except TimeoutError:
            self.kill("it did not start in time")
            raise SandboxStartFailed(f"The sandbox did not start within {timeout:g} s.") from None

    async def claim(self, spec: SandboxSpec, access: SandboxNetworkAccess | None = None) -> None:
        """Give a started sandbox to a caller: set its memory tier and its network access.

        Raises SandboxStartFailed.
        """
        loop = asyncio.get_running_loop()
        self.spec = spec
        problem = None
        if (
            self.warm and self._channel.has_peer_closed
        ):  # it died in the pool; the zygote's report is under way
            self.kill("it ended while it waited")
            raise SandboxStartFailed("The sandbox ended while it waited.")
        egress_listener = self._take_egress_listener()
        self._network_access = open_access(access, egress_listener, self.id)
        try:
            async with asyncio.timeout(_CLAIM_TIMEOUT):
                if spec.memory != self.memory:
                    problem = await self._resize(spec.memory)
                if self.warm or access is not None:  # a pooled one has to prove that it is alive
                    self._configured = loop.create_future()
                    self._send_configuration(access)
                    await self._configured
        except TimeoutError:
            self.kill("it did not take its limits")
            raise SandboxStartFailed(
                f"The sandbox did not take its limits within {_CLAIM_TIMEOUT} s."
            ) from None
        if problem is not None:
            self.kill(problem)
            raise SandboxStartFailed(f"The sandbox's disk quota could not be set: {problem}")
        if self.end_reason is not None:
            raise SandboxStartFailed(f"The sandbox ended: {self.end_reason}")
        if self._listener_fds:
            self.packages.serve_pip(self._listener_fds.pop())
        self.packages.tenant = spec.tenant
        self.created_at = time.time()
        self.touch()

    def _take_egress_listener(self) -> int | None:
        has_one = self._settings.mode == "namespaces" or self.zygote.info.has_network
        return self._listener_fds.pop(0) if has_one and self._listener_fds else None

    async def _resize(self, memory: MemoryTier) -> str | None:
        """Change the memory tier; returns an error message if the file quota could not be set."""
        self.memory = memory
        if self.resources.cgroup is not None:
            try:
                self.resources.cgroup.set_memory(MEMORY_TIERS[memory])
            except OSError as error:
                raise SandboxStartFailed(f"The sandbox's memory could not be bounded: {error}.") from error
        if self._settings.mode != "namespaces" or self.resources.disk is not None:
            return None
        quota = {"size": file_quota_bytes(memory), "inodes": self._settings.inodes}
        self._resized = asyncio.get_running_loop().create_future()
        self.zygote.send_request({"op": "resize", "number": self.number, **quota}, [self._data_fd])
        return await self._resized

    def offer_packages(
        self,
        installer: PackageInstaller | None,
        *,
        unavailable: str = NO_INSTALLER,
        attach: AttachLayers | None = None,
    ) -> None:
        """Set the installer for packages, or the reason why there is none; `attach` replaces mounting them."""
        self.packages = SandboxPackageManager(
            installer, attach or self._attach_layers, unavailable=unavailable
        )

    async def _attach_layers(self, layers: list[str]) -> None:
        self._require_data_fd()
        await self.zygote.attach_layers(self._next_number(), self._namespace_fd, layers)

    # ---- as a `host_exhaustion_watchdog.WatchedSandbox` --------------------------------------------------------------

    def processes(self) -> list[int]:
        return [] if self.resources.cgroup is None else self.resources.cgroup.processes()

    def init_pid(self) -> int | None:
        return _read_pid(self._pidfd) if self._settings.mode == "namespaces" and self._pidfd >= 0 else None

    def device_number(self) -> int | None:
        if self._settings.mode == "namespaces" and self._data_fd >= 0:
            with contextlib.suppress(OSError):  # it is ending
                return os.fstat(self._data_fd).st_dev
        return None

    @property
    def buffered_output_bytes(self) -> int:
        """Approximate bytes of the supervisor's memory that the output of the running execution takes."""
        return (
            0
            if self.executions.running is None or self.end_reason is not None
            else self.executions.running.log_bytes
        )

    def unreclaimable_memory(self) -> int:
        return 0 if self.resources.cgroup is None else self.resources.cgroup.unreclaimable_memory()

    def kill(self, reason: str) -> None:
        """End all its processes now; a running execution ends as lost."""
        if self.end_reason is None:
            self.end_reason = reason
        self._close_descriptors()
        self._kill_processes()
        self._helpers.kill_all()
        self.executions.abort(reason)
        for waiting in (self._configured, self._resized):
            if waiting is not None and not waiting.done():
                waiting.set_exception(SandboxStartFailed(f"The sandbox ended: {reason}"))
                waiting.exception()  # retrieved, even if nobody waits

    def _kill_processes(self) -> None:
        if self._settings.mode == "namespaces":
            self._send_signal(signal.SIGKILL)  # PID 1: the kernel kills the rest of the namespace
            return
        self._send_signal(signal.SIGTERM)  # init ends its descendants, then itself
        if self.resources.cgroup is not None:
            self.resources.cgroup.kill(seconds=0)

    async def destroy(self) -> None:
        """End it and wait until no process of it runs."""
        self.kill(self.end_reason or "it was deleted")
        await self.wait_exited(_DESTROY_WAIT)
        self.close_connections()

    def close_connections(self) -> None:
        """Close all connections; the process has ended or is out of reach."""
        self._channel.close()
        self._close_descriptors()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _close_descriptors(self) -> None:
        """Close early: the last holder tears the namespaces down, which takes time. Its dying processes shall do it."""
        self.packages.close()
        if self._network_access is not None:
            self._network_access.close()
        for fd in (self._data_fd, self._namespace_fd, *self._listener_fds):
            if fd >= 0:
                os.close(fd)
        self._data_fd = self._namespace_fd = -1
        self._listener_fds.clear()

    # ---- events of zygote and sandbox -------------------------------------------------------------------------

    def handle_zygote_event(self, event: dict[str, Any], fds: list[int]) -> None:
        match event["event"]:
            case "spawned":
                if fds:
                    self._pidfd = fds.pop()
                elif event.get("has_pidfd", True):  # the kernel dropped it
                    self.kill(_NO_DESCRIPTORS)
                if self.end_reason is not None:
                    self._kill_processes()
            case "refused":
                self.kill(event["error"])
                self.handle_exit(-1)
            case "fork_failed":  # init runs, and ends now
                self.kill(event["error"])
            case "resized":
                if self._resized is not None and not self._resized.done():
                    self._resized.set_result(event["error"])
            case "ended":
                self._channel.drain()  # its last messages may not have been read yet
                self._interpreter_exit_code = event["code"]
                self.kill(self.end_reason or self._describe_exit(event["code"]))
            case "exited":
                if self._settings.mode == "pod":
                    self._final_oom_kills = event["oom_kills"]
                self.handle_exit(
                    event["code"] if self._interpreter_exit_code is None else self._interpreter_exit_code
                )
            case unknown:
                raise AssertionError(f"unknown event {unknown!r} from the zygote")

    def handle_exit(self, code: int) -> None:
        """The zygote reported the exit of the sandbox, or ended itself (code -1)."""
        if self._exited.done():
            return
        self._channel.drain()  # its last messages may not have been read yet
        self._final_oom_kills = self.count_oom_kills()  # the cgroup goes with the sandbox
        self._exited.set_result(code)
        self.kill(self.end_reason or self._describe_exit(code))
        self._on_exit(self)

    def _describe_exit(self, code: int) -> str:
        if code == -1:
            if self._settings.mode == "pod":
                return "the container of the code ended: it was stopped, or ran out of memory"
            return "its zygote ended"
        if self.count_oom_kills() > self.executions.seen_oom_kills:
            return f"it ran out of memory ({self.memory})"
        if self._interpreter_exit_code is None and code == -signal.SIGKILL:
            return "its first process was killed"
        if code < 0:
            return f"the interpreter was ended by {signal.Signals(-code).name}"
        if code > 128:
            with contextlib.suppress(ValueError):
                # Without namespaces init can only pass on a number, which a program may also choose.
                return f"the interpreter ended with code {code}, as after {signal.Signals(code - 128).name}"
        return f"the interpreter exited with code {code}"

    def _on_packet(self, packet: bytes, fds: list[int]) -> None:
        try:
            if self.end_reason is not None:
                return
            if self.executions.running is None and self._configured.done():
                raise ProtocolViolation("a message while nothing ran")
            message = self._assembler.feed(packet)
            if message is None:
                return
            if (execution := self.executions.running) is None:
                self._handle_start_message(message, fds)
                return
            execution.accept(message)
            if message.kind is MessageKind.END:
                self.executions.running = None
            elif execution.log_bytes > _LARGE_OUTPUT_BYTES:
                self._on_output_growth()
        except (framing.FrameError, ProtocolViolation) as error:
            self.kill(f"it broke the protocol: {error}")
        finally:
            for fd in fds:
                os.close(fd)

    def _handle_start_message(self, message: framing.ChannelMessage, fds: list[int]) -> None:
        """Handle a message that the sandbox sends before its first execution."""
        expected = self._count_expected_descriptors()
        match message.kind:
            case MessageKind.JAILED if self._data_fd < 0 and len(fds) == expected:
                self._data_fd = fds.pop(0)
                if self._settings.mode == "namespaces":
                    self._namespace_fd = fds.pop(0)
                self._listener_fds = [*fds]
                fds.clear()
                self._channel.accept_fds = False  # from here on untrusted code may hold the other end
            case MessageKind.JAILED if self._data_fd < 0 and len(fds) < expected:
                self.kill(_NO_DESCRIPTORS)
            case MessageKind.FAILED if not self._ready:
                self.kill(message.body.decode(errors="replace"))
            case MessageKind.CONFIGURED if self._data_fd >= 0 and not self._configured.done():
                self._ready = True
                self._configured.set_result(None)
            case unexpected:
                raise ProtocolViolation(f"an unsolicited {unexpected.name} message")

    def _count_expected_descriptors(self) -> int:
        """Descriptors that come with JAILED: data directory, namespace, then the listeners for egress and pip."""
        match self._settings.mode:
            case "namespaces":
                return 4
            case "pod":
                return 3 if self.zygote.info.has_network else 2
            case "unsafe-degraded":
                return 1

    def _on_channel_closed(self) -> None:
        """Usually the process has ended, and the zygote reports how a moment later."""
        asyncio.get_running_loop().call_later(_CHANNEL_CLOSED_WAIT, self._kill_without_channel)

    def _kill_without_channel(self) -> None:
        if self.end_reason is None:
            self.kill("it closed its channel to the supervisor")

    # ---- use --------------------------------------------------------------------------------------------------

    def info(self) -> SandboxInfo:
        return SandboxInfo(
            id=self.name,
            memory=self.spec.memory,
            tenant=self.spec.tenant,
            created_at=self.created_at,
            last_used_at=self.last_used_at,
            running=self.executions.running_id,
            waiting=self.executions.queued_count,
            warm=self.warm,
        )

    def idle_seconds(self) -> float:
        """Seconds since the last use; 0 while it is in use."""
        if self._active_uses or self.executions.pending:
            return 0
        return time.monotonic() - self._last_used_monotonic

    def touch(self) -> None:
        self.last_used_at = time.time()
        self._last_used_monotonic = time.monotonic()

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """Not idle for the block."""
        self._active_uses += 1
        try:
            yield
        finally:
            self._active_uses -= 1
            self.touch()

    # ---- for the execution queue ------------------------------------------------------------------------------

    def send_message(self, kind: MessageKind, call_id: bytes, body: dict[str, Any]) -> None:
        message = framing.ChannelMessage(kind, call_id, json.dumps(body).encode())
        for packet in framing.encode_packets(message):
            self._channel.send(packet)

    async def wait_exited(self, timeout: float) -> None:
        """Return when the last process has ended, or after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), timeout)

    def count_oom_kills(self) -> int:
        if self._final_oom_kills is not None:
            return self._final_oom_kills
        try:
            return 0 if self.resources.cgroup is None else self.resources.cgroup.oom_kills()
        except OSError:  # for example out of descriptors: the end is still reported, without the cause
            return self.executions.seen_oom_kills

    # ---- files ------------------------------------------------------------------------------------------------

    def _require_data_fd(self) -> int:
        self.check_alive()
        return self._data_fd

    def _free_memory(self) -> int | None:
        """Bytes that may still be written before the kernel would kill a process of the sandbox; None without limit."""
        if self.resources.cgroup is None or self.resources.disk is not None:  # a full disk gives ENOSPC
            return None
        try:
            return MEMORY_TIERS[self.memory] - self.resources.cgroup.unreclaimable_memory() - _MEMORY_HEADROOM
        except OSError:  # the cgroup is gone with the sandbox
            return 0

    # ---- internal ---------------------------------------------------------------------------------------------

    def _send_signal(self, number: signal.Signals) -> None:
        if self._exited.done():
            return
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)
                return
        except ProcessLookupError:
            return
        except OSError:  # another user's process or another PID namespace: its parent may
            pass
        self.zygote.send_request({"op": "signal", "number": self.number, "signal": int(number)})


def _read_pid(pidfd: int) -> int | None:
    """None if the process has ended or is not visible from here."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                return max(int(line.removeprefix("Pid:")), 0) or None
    return None
