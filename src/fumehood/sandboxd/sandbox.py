"""One live sandbox: calls, deadlines, its end; imports only `fumehood.protocol.sandbox` and siblings."""

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

from fumehood.protocol.sandbox import MEMORY_TIERS, AnyOutput, End, EndStatus, Language, MemoryTier
from fumehood.protocol.sandbox_errors import SandboxGone, SandboxStartFailed
from fumehood.sandboxd.egress.control import Access as NetworkAccess
from fumehood.sandboxd.egress.control import admit
from fumehood.sandboxd.executions import Execution, ProtocolBroken
from fumehood.sandboxd.files import Access, SandboxFiles
from fumehood.sandboxd.helpers import Helpers
from fumehood.sandboxd.inside import bounds, wire
from fumehood.sandboxd.inside.wire import Kind
from fumehood.sandboxd.packages import attached, calls
from fumehood.sandboxd.packets import Packets
from fumehood.sandboxd.places import Place, data_quota
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.zygotes import Zygote

logger = logging.getLogger(__name__)

_INTERRUPT_EVERY = 0.1
_DEATH_WAIT = 5.0  # of a sandbox that was killed, for its last process
_COMMAND_DEATH_WAIT = 3.0  # of an interrupted command, whose runner waits for the last process it started
_HAND_OVER = 10
_HEADROOM = 16 << 20
_MUCH_OUTPUT = 1 << 20  # of one call that runs: less is not worth a look at all of them
# Descriptors that come with JAILED: the data directory and the namespace, and then the listeners for egress and pip.
_HANDLES = 2
_HANDLES_AND_LISTENERS = 4
_NO_DESCRIPTORS = "the supervisor has too few descriptors (Too many open files)"
_MESSAGE_LIMIT = bounds.DISPLAY_LIMIT * 3 // 2


class LocalSandbox:
    """Made by `Supervisor.create`; calls are serialised; every call gets its `End`, whatever the code does."""

    def __init__(
        self,
        number: int,
        zygote: Zygote,
        channel: socket.socket,
        place: Place,
        settings: Settings,
        on_gone: Callable[["LocalSandbox"], None],
        on_output: Callable[[], None],
        next_number: Callable[[], int],
    ) -> None:
        self.id = secrets.token_hex(8)
        self.number = number  # between supervisor and zygote
        self.place = place
        self.memory: MemoryTier = "1g"
        self.warm = False  # it was waiting when it was asked for
        self._settings = settings
        self.zygote = zygote
        self._on_gone = on_gone
        self._on_output = on_output
        self._next_number = next_number
        self._helpers = Helpers(zygote, place.uid, place.cgroup, next_number)
        self.files = SandboxFiles(
            Access(
                helpers=self._helpers,
                data=self._live_data,
                room=self._room,
                directly=place.directly_readable,
                settings=settings,
            )
        )
        self._assembler = wire.Assembler(limit=_MESSAGE_LIMIT)
        self._packets = Packets(
            channel, on_packet=self._packet, on_close=self._channel_closed, accept_fds=True
        )
        loop = asyncio.get_running_loop()
        # Its life: ready once it was configured for the first time; of another quota, unless `_resized` says why not;
        # gone for a reason; ended with the code of its interpreter, which its first process outlives.
        self._ready = False
        self._configured: asyncio.Future[None] = loop.create_future()
        self._resized: asyncio.Future[str | None] | None = None
        self._gone: str | None = None
        self._interpreter_code: int | None = None
        self._exited: asyncio.Future[int] = loop.create_future()
        # Descriptors of it that are held here; -1 is none.
        self._pidfd = -1
        self._data = -1
        self._namespace = -1
        self._listeners: list[int] = []  # on the sandbox's loopback, for services of this side
        self.offer_packages(None)
        self._access: NetworkAccess | None = None
        # Its calls, one after another.
        self._turn = asyncio.Lock()
        self._running: Execution | None = None
        self._bounded = False  # whether the interpreter was told how much memory it may have
        # Processes that the kernel has killed for want of memory: as of the last call, and when it had exited.
        self._noted_oom_kills = 0
        self._final_oom_kills: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life -------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> str | None:
        """Why the sandbox is no more, or None while it lives."""
        return self._gone

    def begin(self, plan: bytes, memory: MemoryTier) -> None:
        """The first things it hears: its first process the plan, its interpreter the limits of its output."""
        disk = self.place.disk
        self.memory = memory
        self._packets.send(plan, [] if disk is None else [disk.mount])
        if disk is not None:
            disk.handed_over()
        self._configure()

    def _configure(self, access: NetworkAccess | None = None) -> None:
        body: dict[str, Any] = {
            "output_limit": self._settings.output_bytes,
            "display_bytes": self._settings.display_bytes,
            "cwd": self.place.work_directory,
            "environment": self.place.environment() | (access.environment if access else {}),
            "trust": access.trust if access else "",
        }
        self._send(Kind.CONFIGURE, wire.NO_CALL, body)

    async def wait_ready(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(self._configured), timeout)
        except TimeoutError:
            self.kill("it did not start in time")
            raise SandboxStartFailed(f"The sandbox did not start within {timeout:g} s.") from None

    async def hand_over(self, memory: MemoryTier, access: NetworkAccess | None = None) -> None:
        """Turn a sandbox that waited into the caller's: what differs from what it began with, and its network."""
        loop = asyncio.get_running_loop()
        problem = None
        if self.warm and self._packets.ended:  # it died while it waited, and the word of it is under way
            self.kill("it ended while it waited")
            raise SandboxStartFailed("The sandbox ended while it waited.")
        self._access = admit(access, self._listeners, self.id)
        try:
            async with asyncio.timeout(_HAND_OVER):
                if memory != self.memory:
                    problem = await self._resize(memory)
                if self.warm or access is not None:  # one that waited has to show that it lives
                    self._configured = loop.create_future()
                    self._configure(access)
                    await self._configured
        except TimeoutError:
            self.kill("it did not take its limits")
            raise SandboxStartFailed(f"The sandbox did not take its limits within {_HAND_OVER} s.") from None
        if problem is not None:
            self.kill(problem)
            raise SandboxStartFailed(f"The sandbox's disk quota could not be set: {problem}")
        if self._gone is not None:
            raise SandboxStartFailed(f"The sandbox ended: {self._gone}")
        if self._listeners:
            self.packages.listen(self._listeners.pop())

    async def _resize(self, memory: MemoryTier) -> str | None:
        """Another tier than it began with; what went wrong with its quota of files."""
        self.memory = memory
        if self.place.cgroup is not None:
            try:
                self.place.cgroup.set_memory(MEMORY_TIERS[memory])
            except OSError as error:
                raise SandboxStartFailed(f"The sandbox's memory could not be bounded: {error}.") from error
        if self._settings.mode != "namespaces" or self.place.disk is not None:
            return None
        quota = {"size": data_quota(memory), "inodes": self._settings.inodes}
        self._resized = asyncio.get_running_loop().create_future()
        self.zygote.request({"op": "resize", "number": self.number, **quota}, [self._data])
        return await self._resized

    def offer_packages(
        self, installer: attached.Installer | None, *, unavailable: str = attached.NOT_OFFERED
    ) -> None:
        """Before it is handed over: from where it may have further packages, or why from nowhere."""
        self.packages = attached.SandboxPackages(installer, self._attach, unavailable=unavailable)

    async def _attach(self, layers: list[str]) -> None:
        self._live_data()
        await attached.attach(self.zygote, self._next_number(), self._namespace, layers)

    # As a `hoards.Holder`:

    def processes(self) -> list[int]:
        return [] if self.place.cgroup is None else self.place.cgroup.processes()

    def first_process(self) -> int | None:
        return _pid_of(self._pidfd) if self._settings.mode == "namespaces" and self._pidfd >= 0 else None

    def own_device(self) -> int | None:
        if self._settings.mode == "namespaces" and self._data >= 0:
            with contextlib.suppress(OSError):  # it ends just now
                return os.fstat(self._data).st_dev
        return None

    @property
    def output_held(self) -> int:
        """Bytes of the server's own memory that the output of the running call takes, about."""
        return 0 if self._running is None or self._gone is not None else self._running.held

    def memory_held(self) -> int:
        return 0 if self.place.cgroup is None else self.place.cgroup.memory_held()

    def kill(self, reason: str) -> None:
        """End it now, with every process in it; a running call ends as lost."""
        if self._gone is None:
            self._gone = reason
        self._let_go()
        self._end_processes()
        self._helpers.kill()
        if self._running is not None and not self._running.lost.done():
            self._running.lost.set_result(reason)
        for waiting in (self._configured, self._resized):
            if waiting is not None and not waiting.done():
                waiting.set_exception(SandboxStartFailed(f"The sandbox ended: {reason}"))
                waiting.exception()  # it may be that nobody waits

    def _end_processes(self) -> None:
        if self._settings.mode == "namespaces":
            self._signal(signal.SIGKILL)  # of PID 1: the kernel takes the rest of the namespace along
            return
        self._signal(signal.SIGTERM)  # init ends its descendants and then itself
        if self.place.cgroup is not None:
            self.place.cgroup.kill(seconds=0)

    async def destroy(self) -> None:
        """End it and wait until nothing of it runs any more."""
        self.kill(self._gone or "it was deleted")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), 5)
        self.release()

    def release(self) -> None:
        """Close what is open towards the sandbox; the process has ended or is beyond reach."""
        self._packets.close()
        self._let_go()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _let_go(self) -> None:
        """Whoever holds the last of these takes the namespaces apart, which takes time: its dying processes do it."""
        self.packages.close()
        if self._access is not None:
            self._access.close()
        for fd in (self._data, self._namespace, *self._listeners):
            if fd >= 0:
                os.close(fd)
        self._data = self._namespace = -1
        self._listeners.clear()

    # ---- what zygote and sandbox report -----------------------------------------------------------------------

    def zygote_event(self, event: dict[str, Any], fds: list[int]) -> None:
        match event["event"]:
            case "spawned":
                if fds:
                    self._pidfd = fds.pop()
                else:  # the kernel had to drop it
                    self.kill(_NO_DESCRIPTORS)
                if self._gone is not None:
                    self._end_processes()
            case "refused":
                self.kill(event["error"])
                self.exited(-1)
            case "unborn":  # its first process is there, and ends now
                self.kill(event["error"])
            case "resized":
                if self._resized is not None and not self._resized.done():
                    self._resized.set_result(event["error"])
            case "ended":
                self._packets.drain()  # its last words may not have been read yet
                self._interpreter_code = event["code"]
                self.kill(self._gone or self._describe_end(event["code"]))
            case "exited":
                self.exited(event["code"] if self._interpreter_code is None else self._interpreter_code)
            case unknown:
                raise AssertionError(f"unknown event {unknown!r} from the zygote")

    def exited(self, code: int) -> None:
        """The zygote has seen the sandbox end, or has ended itself (code -1)."""
        if self._exited.done():
            return
        self._packets.drain()  # its last words may not have been read yet
        self._final_oom_kills = self._oom_kills()  # the cgroup goes with the sandbox
        self._exited.set_result(code)
        self.kill(self._gone or self._describe_end(code))
        self._on_gone(self)

    def _describe_end(self, code: int) -> str:
        if code == -1:
            return "the process that makes sandboxes ended"
        if self._oom_kills() > self._noted_oom_kills:
            return f"it ran out of memory ({self.memory})"
        if self._interpreter_code is None and code == -signal.SIGKILL:
            return "its first process was killed"
        if code < 0:
            return f"the interpreter was ended by {signal.Signals(-code).name}"
        if code > 128:
            with contextlib.suppress(ValueError):
                # Without namespaces the first process can only hand on a number, which a program may choose too.
                return f"the interpreter ended with code {code}, as after {signal.Signals(code - 128).name}"
        return f"the interpreter exited with code {code}"

    def _packet(self, packet: bytes, fds: list[int]) -> None:
        try:
            if self._gone is not None:
                return  # what is still in the socket changes nothing any more
            if self._running is None and self._configured.done():
                raise ProtocolBroken("it spoke while nothing ran")
            message = self._assembler.feed(packet)
            if message is not None:
                self._message(message, fds)
        except (wire.FrameError, ProtocolBroken) as error:
            self.kill(f"it broke the protocol: {error}")
        finally:
            for fd in fds:
                os.close(fd)

    def _message(self, message: wire.Message, fds: list[int]) -> None:
        if self._running is not None:
            self._running.accept(message)
            if message.kind is Kind.END:
                self._running = None
            elif self._running.held > _MUCH_OUTPUT:
                self._on_output()
            return
        handles = _HANDLES_AND_LISTENERS if self._settings.mode == "namespaces" else _HANDLES
        match message.kind:
            case Kind.JAILED if self._data < 0 and len(fds) == handles:
                self._data, self._namespace, *self._listeners = fds
                fds.clear()
                self._packets.accept_fds = False  # from here on code of others may hold the other end
            case Kind.JAILED if self._data < 0 and len(fds) < handles:
                self.kill(_NO_DESCRIPTORS)
            case Kind.FAILED if not self._ready:
                self.kill(message.body.decode(errors="replace"))
            case Kind.CONFIGURED if self._data >= 0 and not self._configured.done():
                self._ready = True
                self._configured.set_result(None)
            case unexpected:
                raise ProtocolBroken(f"an unsolicited {unexpected.name} message")

    def _channel_closed(self) -> None:
        self._spawn(self._explain_closed_channel())

    async def _explain_closed_channel(self) -> None:
        """The usual cause is that the process ended: the zygote's word on how comes a moment later."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), 0.3)
        if self._gone is None:
            self.kill("it closed its channel to the supervisor")

    # ---- calls ------------------------------------------------------------------------------------------------

    def start(
        self, code: str, *, timeout: float, requirements: Sequence[str] = (), language: Language = "python"
    ) -> Execution:
        """Queue code, and packages to install first, behind what runs; it goes on whether or not anybody reads it."""
        if self._gone is not None:
            raise SandboxGone(f"The sandbox is gone: {self._gone}.")
        if not 0 < timeout < math.inf:
            raise ValueError(f"a time-out is a positive number of seconds, not {timeout}")
        chosen = self._settings
        execution = Execution(
            code,
            timeout,
            output_bytes=chosen.output_bytes,
            display_bytes=chosen.display_bytes,
            language=language,
        )
        execution.requirements = requirements
        self._spawn(self._run_to_its_end(execution))
        return execution

    async def execute(
        self, code: str, *, timeout: float = 60.0, language: Language = "python"
    ) -> AsyncGenerator[AnyOutput]:
        """Run code and yield its events; abandoning the iterator interrupts the code."""
        execution = self.start(code, timeout=timeout, language=language)
        try:
            async for event in execution.events():
                yield event
        finally:
            if not execution.ended:
                self.interrupt(execution)

    def interrupt(self, execution: Execution | None = None) -> None:
        """Stop a call as a keyboard interrupt would, or the running one; one that still waits never starts."""
        if execution is None:
            execution = self._running
        if execution is not None and not execution.ended:
            execution.interrupted_by_caller = True
            if not execution.wake.done():
                execution.wake.set_result(None)

    async def _run_to_its_end(self, execution: Execution) -> None:
        """Whatever goes wrong here, whoever waits for the call gets its end."""
        try:
            await self._run(execution)
        except Exception as error:
            logger.exception("A call in sandbox %s could not be followed.", self.id)
            self.kill(f"the supervisor failed: {error}")
        finally:
            if not execution.ended:
                self._running = None
                reason = f"The sandbox was lost: {self._gone}."
                execution.append(self._end(execution, "lost", -1, reason=reason))

    async def _run(self, execution: Execution) -> None:
        async with self._turn:
            execution.begin()
            if self._gone is not None:
                reason = f"The sandbox was lost before the {execution.noun} started: {self._gone}."
                execution.append(self._end(execution, "lost", -1, reason=reason))
                return
            if execution.interrupted_by_caller:
                reason = f"The {execution.noun} was interrupted before it started."
                execution.append(self._end(execution, "interrupted", -1, reason=reason))
                return
            self._running = execution
            if failed := await calls.install_for(execution, self.packages):
                self._running = None
                execution.append(self._end(execution, failed[0], -1, reason=failed[1]))
                return
            kind = Kind.COMMAND if execution.language == "shell" else Kind.EXECUTE
            self._send(kind, execution.call, self._request(execution))
            # Counted while the code begins: no process is out of memory as soon as that.
            kills_before = self._oom_kills()
            end = await self._outcome(execution, kills_before)
            self._noted_oom_kills = self._oom_kills()
            if end.state_kept and self._noted_oom_kills > kills_before:
                execution.note(
                    f"A process that the {execution.noun} had started was killed: the sandbox was out of memory "
                    f"({self.memory})."
                )
            self._running = None
            execution.append(end)

    def _request(self, execution: Execution) -> dict[str, Any]:
        """With the first call comes the bound of the interpreter's own memory: it can be set only once."""
        request: dict[str, Any] = {"code": execution.code}
        if not self._bounded:
            self._bounded = True
            request["data_limit"] = MEMORY_TIERS[self.memory] * 9 // 10
        return request

    async def _outcome(self, execution: Execution, kills_before: int) -> End:
        """Wait for the first of: the runner's word, the sandbox's death, the deadline."""
        overtime = await self._wait(execution, execution.timeout, execution.wake)
        interrupted = overtime
        if overtime:
            await self._insist(execution)
        if execution.claimed_end.done() and not execution.lost.done():
            claim = execution.claimed_end.result()
            if interrupted:
                return self._interrupted_end(execution)
            status: EndStatus = "ok" if claim.exit_code == 0 else "error"
            return self._end(execution, status, claim.exit_code)
        return await self._lost_end(execution, kills_before, interrupted=interrupted)

    async def _wait(self, execution: Execution, seconds: float, *wakers: asyncio.Future[None]) -> bool:
        """True when neither end nor loss came within the time (or before a waker)."""
        waiting: set[asyncio.Future[Any]] = {execution.claimed_end, execution.lost, *wakers}
        await asyncio.wait(waiting, timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED)
        return not (execution.claimed_end.done() or execution.lost.done())

    async def _insist(self, execution: Execution) -> None:
        """Interrupt again and again (a child may swallow one), then kill."""
        loop = asyncio.get_running_loop()
        grace = self._settings.interrupt_grace
        if execution.language == "shell":
            grace += _COMMAND_DEATH_WAIT
        until = loop.time() + grace
        while loop.time() < until:
            self.zygote.interrupt(self.number)
            if not await self._wait(execution, _INTERRUPT_EVERY):
                return
        self.kill(f"the {execution.noun} did not stop when it was interrupted")

    def _interrupted_end(self, execution: Execution) -> End:
        """The reasons of ends say what happened; what is kept of it, `state_kept` says and the caller knows."""
        if execution.interrupted_by_caller:
            return self._end(execution, "interrupted", -1, reason=f"The {execution.noun} was interrupted.")
        reason = f"The {execution.noun} ran longer than {execution.timeout:g} s and was interrupted."
        return self._end(execution, "timeout", -1, reason=reason)

    async def _lost_end(self, execution: Execution, kills_before: int, *, interrupted: bool) -> End:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), _DEATH_WAIT)
        if self._oom_kills() > kills_before and not interrupted:
            reason = f"The sandbox ran out of memory ({self.memory}) and was ended."
            return self._end(execution, "out_of_memory", -1, reason=reason)
        if interrupted and execution.interrupted_by_caller:
            reason = f"The {execution.noun} did not stop when it was interrupted and was killed."
            return self._end(execution, "interrupted", -1, reason=reason)
        if interrupted:
            reason = (
                f"The {execution.noun} ran longer than {execution.timeout:g} s, did not stop when interrupted and was "
                "killed."
            )
            return self._end(execution, "timeout", -1, reason=reason)
        return self._end(execution, "lost", -1, reason=f"The sandbox was lost: {execution.lost.result()}.")

    def _end(self, execution: Execution, status: EndStatus, exit_code: int, *, reason: str = "") -> End:
        return End(
            status=status,
            exit_code=exit_code,
            duration_ms=round(execution.elapsed * 1000),
            state_kept=self._gone is None,
            reason=reason,
            packages_ms=round((execution.install_seconds or 0) * 1000),
        )

    def _oom_kills(self) -> int:
        if self._final_oom_kills is not None:
            return self._final_oom_kills
        try:
            return 0 if self.place.cgroup is None else self.place.cgroup.oom_kills()
        except OSError:  # out of descriptors, say: better no word of memory than no word at all
            return self._noted_oom_kills

    # ---- files ------------------------------------------------------------------------------------------------

    def _live_data(self) -> int:
        if self._gone is not None or self._data < 0:
            raise SandboxGone(f"The sandbox is gone: {self._gone}.")
        return self._data

    def _room(self) -> int | None:
        """What may still be written before the kernel ends a process of the sandbox instead."""
        if self.place.cgroup is None or self.place.disk is not None:  # a disk says itself when it is full
            return None
        try:
            return MEMORY_TIERS[self.memory] - self.place.cgroup.memory_held() - _HEADROOM
        except OSError:  # the cgroup went with the sandbox
            return 0

    # ---- small things -----------------------------------------------------------------------------------------

    def _send(self, kind: Kind, call: bytes, body: dict[str, Any]) -> None:
        for packet in wire.packets(wire.Message(kind, call, json.dumps(body).encode())):
            self._packets.send(packet)

    def _signal(self, number: signal.Signals) -> None:
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
        self.zygote.request({"op": "signal", "number": self.number, "signal": int(number)})

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _pid_of(pidfd: int) -> int | None:
    """None when the process has ended, or is not to be seen from here."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                return max(int(line.removeprefix("Pid:")), 0) or None
    return None
