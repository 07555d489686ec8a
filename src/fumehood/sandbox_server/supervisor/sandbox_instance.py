"""One live sandbox: calls, deadlines, its end."""

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from fumehood.protocol.sandbox.sandbox_errors import SandboxGone, SandboxStartFailed
from fumehood.protocol.sandbox.sandbox_messages import (
    MEMORY_TIERS,
    ExecutionEnd,
    ExecutionEndStatus,
    ExecutionEvent,
    ExecutionLanguage,
    MemoryTier,
)
from fumehood.sandbox_server.egress.proxy_control import NetworkAccess as NetworkAccess
from fumehood.sandbox_server.egress.proxy_control import open_access
from fumehood.sandbox_server.host.host_resources import SandboxResources, file_quota_bytes
from fumehood.sandbox_server.inside import framing
from fumehood.sandbox_server.inside.framing import MessageKind
from fumehood.sandbox_server.inside.runner import output_limits
from fumehood.sandbox_server.packages import sandbox_packages as attached
from fumehood.sandbox_server.packages import sandbox_packages as calls
from fumehood.sandbox_server.packet_channel import PacketChannel
from fumehood.sandbox_server.settings import Settings
from fumehood.sandbox_server.supervisor.helper_processes import HelperSpawner
from fumehood.sandbox_server.supervisor.sandbox_execution import ProtocolViolation, SandboxExecution
from fumehood.sandbox_server.supervisor.sandbox_files import FileAccess, SandboxFiles
from fumehood.sandbox_server.supervisor.zygote_connection import ZygoteConnection

logger = logging.getLogger(__name__)

_INTERRUPT_INTERVAL = 0.1
_EXIT_WAIT = 5.0  # of a sandbox that was killed, for its last process
_COMMAND_EXIT_WAIT = 3.0  # of an interrupted command, whose runner waits for the last process it started
_CLAIM_TIMEOUT = 10
_MEMORY_HEADROOM = 16 << 20
_LARGE_OUTPUT_BYTES = 1 << 20  # of one call that runs: less is not worth a look at all of them
# Descriptors that come with JAILED: the data directory and the namespace, and then the listeners for egress and pip.
_DESCRIPTORS = 2
_DESCRIPTORS_AND_LISTENERS = 4
_NO_DESCRIPTORS = "the supervisor has too few descriptors (Too many open files)"
_MESSAGE_LIMIT = output_limits.MAX_DISPLAY_BYTES * 3 // 2


class SandboxInstance:
    """Made by `Supervisor.create`; calls are serialised; every call gets its `End`, whatever the code does."""

    def __init__(
        self,
        number: int,
        zygote: ZygoteConnection,
        channel_socket: socket.socket,
        resources: SandboxResources,
        settings: Settings,
        on_exit: Callable[["SandboxInstance"], None],
        on_output_growth: Callable[[], None],
        next_number: Callable[[], int],
    ) -> None:
        self.id = secrets.token_hex(8)
        self.number = number  # between supervisor and zygote
        self.resources = resources
        self.memory: MemoryTier = "1g"
        self.warm = False  # it was waiting when it was asked for
        self._settings = settings
        self.zygote = zygote
        self._on_exit = on_exit
        self._on_output_growth = on_output_growth
        self._next_number = next_number
        self._helpers = HelperSpawner(zygote, resources.uid, resources.cgroup, next_number)
        self.files = SandboxFiles(
            FileAccess(
                helpers=self._helpers,
                require_data_fd=self._require_data_fd,
                free_memory=self._free_memory,
                reads_directly=resources.directly_readable,
                settings=settings,
            )
        )
        self._assembler = framing.MessageAssembler(limit=_MESSAGE_LIMIT)
        self._channel = PacketChannel(
            channel_socket, on_packet=self._on_packet, on_close=self._on_channel_closed, accept_fds=True
        )
        loop = asyncio.get_running_loop()
        # Its life: ready once it was configured for the first time; of another quota, unless `_resized` says why not;
        # gone for a reason; ended with the code of its interpreter, which its first process outlives.
        self._ready = False
        self._configured: asyncio.Future[None] = loop.create_future()
        self._resized: asyncio.Future[str | None] | None = None
        self._end_reason: str | None = None
        self._interpreter_exit_code: int | None = None
        self._exited: asyncio.Future[int] = loop.create_future()
        # Descriptors of it that are held here; -1 is none.
        self._pidfd = -1
        self._data_fd = -1
        self._namespace_fd = -1
        self._listener_fds: list[int] = []  # on the sandbox's loopback, for services of this side
        self.offer_packages(None)
        self._network_access: NetworkAccess | None = None
        # Its calls, one after another.
        self._execution_lock = asyncio.Lock()
        self._running: SandboxExecution | None = None
        self._memory_limit_sent = False  # whether the interpreter was told how much memory it may have
        # Processes that the kernel has killed for want of memory: as of the last call, and when it had exited.
        self._seen_oom_kills = 0
        self._final_oom_kills: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life -------------------------------------------------------------------------------------------------

    @property
    def end_reason(self) -> str | None:
        """Why the sandbox is no more, or None while it lives."""
        return self._end_reason

    def send_plan(self, plan: bytes, memory: MemoryTier) -> None:
        """The first things it hears: its first process the plan, its interpreter the limits of its output."""
        disk = self.resources.disk
        self.memory = memory
        self._channel.send(plan, [] if disk is None else [disk.mount_fd])
        if disk is not None:
            disk.close_mount()
        self._send_configuration()

    def _send_configuration(self, access: NetworkAccess | None = None) -> None:
        body: dict[str, Any] = {
            "output_limit": self._settings.output_bytes,
            "display_bytes": self._settings.display_bytes,
            "cwd": self.resources.work_directory,
            "environment": self.resources.environment_overrides() | (access.environment if access else {}),
            "ca_certificates": access.ca_certificates if access else "",
        }
        self._send(MessageKind.CONFIGURE, framing.NO_CALL, body)

    async def wait_ready(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(self._configured), timeout)
        except TimeoutError:
            self.kill("it did not start in time")
            raise SandboxStartFailed(f"The sandbox did not start within {timeout:g} s.") from None

    async def claim(self, memory: MemoryTier, access: NetworkAccess | None = None) -> None:
        """Turn a sandbox that waited into the caller's: what differs from what it began with, and its network."""
        loop = asyncio.get_running_loop()
        problem = None
        if (
            self.warm and self._channel.has_peer_closed
        ):  # it died while it waited, and the word of it is under way
            self.kill("it ended while it waited")
            raise SandboxStartFailed("The sandbox ended while it waited.")
        self._network_access = open_access(access, self._listener_fds, self.id)
        try:
            async with asyncio.timeout(_CLAIM_TIMEOUT):
                if memory != self.memory:
                    problem = await self._resize(memory)
                if self.warm or access is not None:  # one that waited has to show that it lives
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
        if self._end_reason is not None:
            raise SandboxStartFailed(f"The sandbox ended: {self._end_reason}")
        if self._listener_fds:
            self.packages.serve_pip(self._listener_fds.pop())

    async def _resize(self, memory: MemoryTier) -> str | None:
        """Another tier than it began with; what went wrong with its quota of files."""
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
        self, installer: attached.Installer | None, *, unavailable: str = attached.NO_INSTALLER
    ) -> None:
        """Before it is handed over: from where it may have further packages, or why from nowhere."""
        self.packages = attached.SandboxPackages(installer, self._attach_layers, unavailable=unavailable)

    async def _attach_layers(self, layers: list[str]) -> None:
        self._require_data_fd()
        await attached.attach_layers(self.zygote, self._next_number(), self._namespace_fd, layers)

    # As a `hoards.Holder`:

    def processes(self) -> list[int]:
        return [] if self.resources.cgroup is None else self.resources.cgroup.processes()

    def init_pid(self) -> int | None:
        return _read_pid(self._pidfd) if self._settings.mode == "namespaces" and self._pidfd >= 0 else None

    def device_number(self) -> int | None:
        if self._settings.mode == "namespaces" and self._data_fd >= 0:
            with contextlib.suppress(OSError):  # it ends just now
                return os.fstat(self._data_fd).st_dev
        return None

    @property
    def buffered_output_bytes(self) -> int:
        """Bytes of the server's own memory that the output of the running call takes, about."""
        return 0 if self._running is None or self._end_reason is not None else self._running.log_bytes

    def unreclaimable_memory(self) -> int:
        return 0 if self.resources.cgroup is None else self.resources.cgroup.unreclaimable_memory()

    def kill(self, reason: str) -> None:
        """End it now, with every process in it; a running call ends as lost."""
        if self._end_reason is None:
            self._end_reason = reason
        self._close_descriptors()
        self._kill_processes()
        self._helpers.kill_all()
        if self._running is not None and not self._running.lost.done():
            self._running.lost.set_result(reason)
        for waiting in (self._configured, self._resized):
            if waiting is not None and not waiting.done():
                waiting.set_exception(SandboxStartFailed(f"The sandbox ended: {reason}"))
                waiting.exception()  # it may be that nobody waits

    def _kill_processes(self) -> None:
        if self._settings.mode == "namespaces":
            self._send_signal(signal.SIGKILL)  # of PID 1: the kernel takes the rest of the namespace along
            return
        self._send_signal(signal.SIGTERM)  # init ends its descendants and then itself
        if self.resources.cgroup is not None:
            self.resources.cgroup.kill(seconds=0)

    async def destroy(self) -> None:
        """End it and wait until nothing of it runs any more."""
        self.kill(self._end_reason or "it was deleted")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), 5)
        self.close_connections()

    def close_connections(self) -> None:
        """Close what is open towards the sandbox; the process has ended or is beyond reach."""
        self._channel.close()
        self._close_descriptors()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _close_descriptors(self) -> None:
        """Whoever holds the last of these takes the namespaces apart, which takes time: its dying processes do it."""
        self.packages.close()
        if self._network_access is not None:
            self._network_access.close()
        for fd in (self._data_fd, self._namespace_fd, *self._listener_fds):
            if fd >= 0:
                os.close(fd)
        self._data_fd = self._namespace_fd = -1
        self._listener_fds.clear()

    # ---- what zygote and sandbox report -----------------------------------------------------------------------

    def handle_zygote_event(self, event: dict[str, Any], fds: list[int]) -> None:
        match event["event"]:
            case "spawned":
                if fds:
                    self._pidfd = fds.pop()
                else:  # the kernel had to drop it
                    self.kill(_NO_DESCRIPTORS)
                if self._end_reason is not None:
                    self._kill_processes()
            case "refused":
                self.kill(event["error"])
                self.handle_exit(-1)
            case "fork_failed":  # its first process is there, and ends now
                self.kill(event["error"])
            case "resized":
                if self._resized is not None and not self._resized.done():
                    self._resized.set_result(event["error"])
            case "ended":
                self._channel.drain()  # its last words may not have been read yet
                self._interpreter_exit_code = event["code"]
                self.kill(self._end_reason or self._describe_exit(event["code"]))
            case "exited":
                self.handle_exit(
                    event["code"] if self._interpreter_exit_code is None else self._interpreter_exit_code
                )
            case unknown:
                raise AssertionError(f"unknown event {unknown!r} from the zygote")

    def handle_exit(self, code: int) -> None:
        """The zygote has seen the sandbox end, or has ended itself (code -1)."""
        if self._exited.done():
            return
        self._channel.drain()  # its last words may not have been read yet
        self._final_oom_kills = self._count_oom_kills()  # the cgroup goes with the sandbox
        self._exited.set_result(code)
        self.kill(self._end_reason or self._describe_exit(code))
        self._on_exit(self)

    def _describe_exit(self, code: int) -> str:
        if code == -1:
            return "the process that makes sandboxes ended"
        if self._count_oom_kills() > self._seen_oom_kills:
            return f"it ran out of memory ({self.memory})"
        if self._interpreter_exit_code is None and code == -signal.SIGKILL:
            return "its first process was killed"
        if code < 0:
            return f"the interpreter was ended by {signal.Signals(-code).name}"
        if code > 128:
            with contextlib.suppress(ValueError):
                # Without namespaces the first process can only hand on a number, which a program may choose too.
                return f"the interpreter ended with code {code}, as after {signal.Signals(code - 128).name}"
        return f"the interpreter exited with code {code}"

    def _on_packet(self, packet: bytes, fds: list[int]) -> None:
        try:
            if self._end_reason is not None:
                return  # what is still in the socket changes nothing any more
            if self._running is None and self._configured.done():
                raise ProtocolViolation("it spoke while nothing ran")
            message = self._assembler.feed(packet)
            if message is not None:
                self._handle_message(message, fds)
        except (framing.FrameError, ProtocolViolation) as error:
            self.kill(f"it broke the protocol: {error}")
        finally:
            for fd in fds:
                os.close(fd)

    def _handle_message(self, message: framing.RunnerMessage, fds: list[int]) -> None:
        if self._running is not None:
            self._running.accept(message)
            if message.kind is MessageKind.END:
                self._running = None
            elif self._running.log_bytes > _LARGE_OUTPUT_BYTES:
                self._on_output_growth()
            return
        handles = _DESCRIPTORS_AND_LISTENERS if self._settings.mode == "namespaces" else _DESCRIPTORS
        match message.kind:
            case MessageKind.JAILED if self._data_fd < 0 and len(fds) == handles:
                self._data_fd, self._namespace_fd, *self._listener_fds = fds
                fds.clear()
                self._channel.accept_fds = False  # from here on code of others may hold the other end
            case MessageKind.JAILED if self._data_fd < 0 and len(fds) < handles:
                self.kill(_NO_DESCRIPTORS)
            case MessageKind.FAILED if not self._ready:
                self.kill(message.body.decode(errors="replace"))
            case MessageKind.CONFIGURED if self._data_fd >= 0 and not self._configured.done():
                self._ready = True
                self._configured.set_result(None)
            case unexpected:
                raise ProtocolViolation(f"an unsolicited {unexpected.name} message")

    def _on_channel_closed(self) -> None:
        self._run_in_background(self._explain_closed_channel())

    async def _explain_closed_channel(self) -> None:
        """The usual cause is that the process ended: the zygote's word on how comes a moment later."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), 0.3)
        if self._end_reason is None:
            self.kill("it closed its channel to the supervisor")

    # ---- calls ------------------------------------------------------------------------------------------------

    def start_execution(
        self,
        code: str,
        *,
        timeout: float,
        requirements: Sequence[str] = (),
        language: ExecutionLanguage = "python",
    ) -> SandboxExecution:
        """Queue code, and packages to install first, behind what runs; it goes on whether or not anybody reads it."""
        if self._end_reason is not None:
            raise SandboxGone(f"The sandbox is gone: {self._end_reason}.")
        if not 0 < timeout < math.inf:
            raise ValueError(f"a time-out is a positive number of seconds, not {timeout}")
        chosen = self._settings
        execution = SandboxExecution(
            code,
            timeout,
            output_bytes=chosen.output_bytes,
            display_bytes=chosen.display_bytes,
            language=language,
        )
        execution.requirements = requirements
        self._run_in_background(self._run_and_report_end(execution))
        return execution

    async def execute(
        self, code: str, *, timeout: float = 60.0, language: ExecutionLanguage = "python"
    ) -> AsyncGenerator[ExecutionEvent]:
        """Run code and yield its events; abandoning the iterator interrupts the code."""
        execution = self.start_execution(code, timeout=timeout, language=language)
        try:
            async for event in execution.events():
                yield event
        finally:
            if not execution.has_ended:
                self.interrupt(execution)

    def interrupt(self, execution: SandboxExecution | None = None) -> None:
        """Stop a call as a keyboard interrupt would, or the running one; one that still waits never starts."""
        if execution is None:
            execution = self._running
        if execution is not None and not execution.has_ended:
            execution.interrupted_by_caller = True
            if not execution.interrupt_requested.done():
                execution.interrupt_requested.set_result(None)

    async def _run_and_report_end(self, execution: SandboxExecution) -> None:
        """Whatever goes wrong here, whoever waits for the call gets its end."""
        try:
            await self._run(execution)
        except Exception as error:
            logger.exception("A call in sandbox %s could not be followed.", self.id)
            self.kill(f"the supervisor failed: {error}")
        finally:
            if not execution.has_ended:
                self._running = None
                reason = f"The sandbox was lost: {self._end_reason}."
                execution.append(self._build_end(execution, "lost", -1, reason=reason))

    async def _run(self, execution: SandboxExecution) -> None:
        async with self._execution_lock:
            execution.start_clock()
            if self._end_reason is not None:
                reason = f"The sandbox was lost before the {execution.noun} started: {self._end_reason}."
                execution.append(self._build_end(execution, "lost", -1, reason=reason))
                return
            if execution.interrupted_by_caller:
                reason = f"The {execution.noun} was interrupted before it started."
                execution.append(self._build_end(execution, "interrupted", -1, reason=reason))
                return
            self._running = execution
            if failed := await calls.install_requirements(execution, self.packages):
                self._running = None
                execution.append(self._build_end(execution, failed[0], -1, reason=failed[1]))
                return
            kind = MessageKind.COMMAND if execution.language == "shell" else MessageKind.EXECUTE
            self._send(kind, execution.call_id, self._build_request(execution))
            # Counted while the code begins: no process is out of memory as soon as that.
            kills_before = self._count_oom_kills()
            end = await self._wait_for_end(execution, kills_before)
            self._seen_oom_kills = self._count_oom_kills()
            if end.state_kept and self._seen_oom_kills > kills_before:
                execution.append_note(
                    f"A process that the {execution.noun} had started was killed: the sandbox was out of memory "
                    f"({self.memory})."
                )
            self._running = None
            execution.append(end)

    def _build_request(self, execution: SandboxExecution) -> dict[str, Any]:
        """With the first call comes the bound of the interpreter's own memory: it can be set only once."""
        request: dict[str, Any] = {"code": execution.code}
        if not self._memory_limit_sent:
            self._memory_limit_sent = True
            request["data_limit"] = MEMORY_TIERS[self.memory] * 9 // 10
        return request

    async def _wait_for_end(self, execution: SandboxExecution, kills_before: int) -> ExecutionEnd:
        """Wait for the first of: the runner's word, the sandbox's death, the deadline."""
        overtime = await self._is_running_after(execution, execution.timeout, execution.interrupt_requested)
        interrupted = overtime
        if overtime:
            await self._interrupt_until_stopped(execution)
        if execution.reported_end.done() and not execution.lost.done():
            claim = execution.reported_end.result()
            if interrupted:
                return self._build_interrupted_end(execution)
            status: ExecutionEndStatus = "ok" if claim.exit_code == 0 else "error"
            return self._build_end(execution, status, claim.exit_code)
        return await self._build_lost_end(execution, kills_before, interrupted=interrupted)

    async def _is_running_after(
        self, execution: SandboxExecution, seconds: float, *wakers: asyncio.Future[None]
    ) -> bool:
        """True when neither end nor loss came within the time (or before a waker)."""
        waiting: set[asyncio.Future[Any]] = {execution.reported_end, execution.lost, *wakers}
        await asyncio.wait(waiting, timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED)
        return not (execution.reported_end.done() or execution.lost.done())

    async def _interrupt_until_stopped(self, execution: SandboxExecution) -> None:
        """Interrupt again and again (a child may swallow one), then kill."""
        loop = asyncio.get_running_loop()
        grace = self._settings.interrupt_grace
        if execution.language == "shell":
            grace += _COMMAND_EXIT_WAIT
        until = loop.time() + grace
        while loop.time() < until:
            self.zygote.send_interrupt(self.number)
            if not await self._is_running_after(execution, _INTERRUPT_INTERVAL):
                return
        self.kill(f"the {execution.noun} did not stop when it was interrupted")

    def _build_interrupted_end(self, execution: SandboxExecution) -> ExecutionEnd:
        """The reasons of ends say what happened; what is kept of it, `state_kept` says and the caller knows."""
        if execution.interrupted_by_caller:
            return self._build_end(
                execution, "interrupted", -1, reason=f"The {execution.noun} was interrupted."
            )
        reason = f"The {execution.noun} ran longer than {execution.timeout:g} s and was interrupted."
        return self._build_end(execution, "timeout", -1, reason=reason)

    async def _build_lost_end(
        self, execution: SandboxExecution, kills_before: int, *, interrupted: bool
    ) -> ExecutionEnd:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), _EXIT_WAIT)
        if self._count_oom_kills() > kills_before and not interrupted:
            reason = f"The sandbox ran out of memory ({self.memory}) and was ended."
            return self._build_end(execution, "out_of_memory", -1, reason=reason)
        if interrupted and execution.interrupted_by_caller:
            reason = f"The {execution.noun} did not stop when it was interrupted and was killed."
            return self._build_end(execution, "interrupted", -1, reason=reason)
        if interrupted:
            reason = (
                f"The {execution.noun} ran longer than {execution.timeout:g} s, did not stop when interrupted and was "
                "killed."
            )
            return self._build_end(execution, "timeout", -1, reason=reason)
        return self._build_end(
            execution, "lost", -1, reason=f"The sandbox was lost: {execution.lost.result()}."
        )

    def _build_end(
        self, execution: SandboxExecution, status: ExecutionEndStatus, exit_code: int, *, reason: str = ""
    ) -> ExecutionEnd:
        return ExecutionEnd(
            status=status,
            exit_code=exit_code,
            duration_ms=round(execution.elapsed * 1000),
            state_kept=self._end_reason is None,
            reason=reason,
            packages_ms=round((execution.install_seconds or 0) * 1000),
        )

    def _count_oom_kills(self) -> int:
        if self._final_oom_kills is not None:
            return self._final_oom_kills
        try:
            return 0 if self.resources.cgroup is None else self.resources.cgroup.oom_kills()
        except OSError:  # out of descriptors, say: better no word of memory than no word at all
            return self._seen_oom_kills

    # ---- files ------------------------------------------------------------------------------------------------

    def _require_data_fd(self) -> int:
        if self._end_reason is not None or self._data_fd < 0:
            raise SandboxGone(f"The sandbox is gone: {self._end_reason}.")
        return self._data_fd

    def _free_memory(self) -> int | None:
        """What may still be written before the kernel ends a process of the sandbox instead."""
        if (
            self.resources.cgroup is None or self.resources.disk is not None
        ):  # a disk says itself when it is full
            return None
        try:
            return MEMORY_TIERS[self.memory] - self.resources.cgroup.unreclaimable_memory() - _MEMORY_HEADROOM
        except OSError:  # the cgroup went with the sandbox
            return 0

    # ---- small things -----------------------------------------------------------------------------------------

    def _send(self, kind: MessageKind, call: bytes, body: dict[str, Any]) -> None:
        for packet in framing.encode_packets(framing.RunnerMessage(kind, call, json.dumps(body).encode())):
            self._channel.send(packet)

    def _send_signal(self, number: signal.Signals) -> None:
        if self._exited.done():
            return
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)
                return
        except ProcessLookupError:
            return
        except OSError:  # another user's process, or another PID namespace's: its parent may
            pass
        self.zygote.send_request({"op": "signal", "number": self.number, "signal": int(number)})

    def _run_in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _read_pid(pidfd: int) -> int | None:
    """None when the process has ended, or is not to be seen from here."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                return max(int(line.removeprefix("Pid:")), 0) or None
    return None
