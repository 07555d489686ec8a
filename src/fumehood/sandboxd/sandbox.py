"""One live sandbox: calls, deadlines, files, its end; imports only `fumehood.protocol.sandbox` and siblings."""

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from fumehood.protocol.sandbox import MEMORY_TIERS, AnyOutput, End, EndStatus, FileEntry, MemoryTier
from fumehood.protocol.sandbox_errors import FileRefused, SandboxGone, SandboxStartFailed
from fumehood.sandboxd.cgroups import Cgroup, joining
from fumehood.sandboxd.disks import Disk
from fumehood.sandboxd.executions import Execution, ProtocolBroken
from fumehood.sandboxd.inside import bounds, files, layout, wire
from fumehood.sandboxd.inside.wire import Kind
from fumehood.sandboxd.packets import Packets
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.zygotes import Zygote

logger = logging.getLogger(__name__)

_INTERRUPT_EVERY = 0.1
_DEATH_WAIT = 1.0
_HELPERS = 2  # at once: they run in the sandbox's share of the processor
_HELPER_TIMEOUT = 30
_HEADROOM = 16 << 20
_NO_DESCRIPTORS = "the supervisor has too few descriptors (Too many open files)"
_MESSAGE_LIMIT = bounds.DISPLAY_LIMIT * 3 // 2


@dataclass(slots=True)
class Place:
    """What the supervisor took for this sandbox and gives back after its end."""

    uid: int
    cgroup: Cgroup | None
    scratch: str | None  # degraded mode: the host directory that holds its files
    directly_readable: (
        bool  # False when the supervisor may not read the files, or could have to wait for a disk
    )
    disk: Disk | None = None  # large tiers: holds its files, which else are in memory

    @property
    def work_directory(self) -> str:
        return layout.DATA if self.scratch is None else f"{self.scratch}/data"

    def environment(self) -> dict[str, str]:
        """What differs from `layout.ENVIRON`."""
        if self.scratch is None:
            return {}
        return {
            "OUTPUT_DIR": self.work_directory,
            "TMPDIR": f"{self.scratch}/tmp",
            "HOME": f"{self.scratch}/home",
        }


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
        next_number: Callable[[], int],
    ) -> None:
        self.id = secrets.token_hex(8)
        self.number = number  # between supervisor and zygote
        self.place = place
        self.memory: MemoryTier = "1g"
        self._settings = settings
        self._zygote = zygote
        self._on_gone = on_gone
        self._next_number = next_number
        self._assembler = wire.Assembler(limit=_MESSAGE_LIMIT)
        self._packets = Packets(
            channel, on_packet=self._packet, on_close=self._channel_closed, accept_fds=True
        )
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._configured: asyncio.Future[None] = loop.create_future()
        self._resized: asyncio.Future[str | None] = loop.create_future()
        self._exited: asyncio.Future[int] = loop.create_future()
        self._pidfd = -1
        self._data = -1
        self._namespace = -1
        self._turn = asyncio.Lock()
        self._running: Execution | None = None
        self._gone: str | None = None
        self._final_oom_kills: int | None = None
        self._noted_oom_kills = 0
        self._helpers = asyncio.Semaphore(_HELPERS)
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life -------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> str | None:
        """Why the sandbox is no more, or None while it lives."""
        return self._gone

    def tell_plan(self, plan: str) -> None:
        """The first thing its first process hears; the zygote in between knows nothing of it."""
        disk = self.place.disk
        self._packets.send(plan.encode(), [] if disk is None else [disk.mount])
        if disk is not None:
            disk.handed_over()

    async def wait_ready(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout)
        except TimeoutError:
            self.kill("it did not start in time")
            raise SandboxStartFailed(f"The sandbox did not start within {timeout:g} s.") from None

    async def hand_over(self, memory: MemoryTier) -> None:
        """Turn a parked sandbox into the caller's: its memory tier, its quota, its limits."""
        self.memory = memory
        size = MEMORY_TIERS[memory]
        if self.place.cgroup is not None:
            try:
                self.place.cgroup.set_memory(size)
            except OSError as error:
                raise SandboxStartFailed(f"The sandbox's memory could not be bounded: {error}.") from error
        if self._settings.mode == "namespaces" and self.place.disk is None:
            quota = {"size": data_quota(memory), "inodes": self._settings.inodes}
            self._zygote.request({"op": "resize", "number": self.number, **quota}, [self._data])
        elif not self._resized.done():
            self._resized.set_result(None)
        body = {
            "data_limit": size * 9 // 10,
            "output_limit": self._settings.output_bytes,
            "display_bytes": self._settings.display_bytes,
            "cwd": self.place.work_directory,
            "environment": self.place.environment(),
        }
        self._send(Kind.CONFIGURE, wire.NO_CALL, body)
        try:
            async with asyncio.timeout(10):
                problem, _ = await asyncio.gather(self._resized, self._configured)
        except TimeoutError:
            self.kill("it did not take its limits")
            raise SandboxStartFailed("The sandbox did not take its limits within 10 s.") from None
        if problem is not None:
            self.kill(problem)
            raise SandboxStartFailed(f"The sandbox's disk quota could not be set: {problem}")

    def kill(self, reason: str) -> None:
        """End it now, with every process in it; a running call ends as lost."""
        if self._gone is None:
            self._gone = reason
        self._end_processes()
        if self._running is not None and not self._running.lost.done():
            self._running.lost.set_result(reason)
        for waiting in (self._ready, self._configured, self._resized):
            if not waiting.done():
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
        for fd in (self._pidfd, self._data, self._namespace):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._data = self._namespace = -1

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
            case "resized":
                if not self._resized.done():
                    self._resized.set_result(event["error"])
            case "exited":
                self.exited(event["code"])
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
        if code == -signal.SIGKILL:
            return "its first process was killed"
        if code > 128:
            with contextlib.suppress(ValueError):
                # Init can only hand on a number, and a program may choose the same one.
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
            return
        match message.kind:
            case Kind.JAILED if self._data < 0 and len(fds) == 2:
                self._data, self._namespace = fds
                fds.clear()
                self._packets.accept_fds = False  # from here on code of others may hold the other end
            case Kind.JAILED if self._data < 0 and len(fds) < 2:
                self.kill(_NO_DESCRIPTORS)
            case Kind.FAILED if not self._ready.done():
                self.kill(message.body.decode(errors="replace"))
            case Kind.READY if not self._ready.done() and self._data >= 0:
                self._ready.set_result(None)
            case Kind.CONFIGURED if not self._configured.done():
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

    def start(self, code: str, *, timeout: float) -> Execution:
        """Queue code behind what runs; the execution goes on whether or not anybody reads it."""
        if self._gone is not None:
            raise SandboxGone(f"The sandbox is gone: {self._gone}.")
        if not 0 < timeout < math.inf:
            raise ValueError(f"a time-out is a positive number of seconds, not {timeout}")
        chosen = self._settings
        execution = Execution(
            code, timeout, output_bytes=chosen.output_bytes, display_bytes=chosen.display_bytes
        )
        self._spawn(self._run_to_its_end(execution))
        return execution

    async def execute(self, code: str, *, timeout: float = 60.0) -> AsyncGenerator[AnyOutput]:
        """Run code and yield its events; abandoning the iterator interrupts the code."""
        execution = self.start(code, timeout=timeout)
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
            execution.wake.set()

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
                reason = f"The sandbox was lost before the code started: {self._gone}."
                execution.append(self._end(execution, "lost", -1, reason=reason))
                return
            if execution.interrupted_by_caller:
                reason = "The code was interrupted before it started."
                execution.append(self._end(execution, "interrupted", -1, reason=reason))
                return
            kills_before = self._oom_kills()
            self._running = execution
            self._send(Kind.EXECUTE, execution.call, {"code": execution.code})
            end = await self._outcome(execution, kills_before)
            if end.state_kept and self._oom_kills() > kills_before:
                execution.note(
                    f"A process that the code had started was killed: the sandbox was out of memory ({self.memory})."
                )
            self._running = None
            self._noted_oom_kills = self._oom_kills()
            execution.append(end)

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

    async def _wait(self, execution: Execution, seconds: float, wake: asyncio.Event | None = None) -> bool:
        """True when neither end nor loss came within the time (or before `wake`)."""
        waiting: set[asyncio.Future[Any]] = {execution.claimed_end, execution.lost}
        waker = None
        if wake is not None:
            waker = asyncio.ensure_future(wake.wait())
            waiting.add(waker)
        await asyncio.wait(waiting, timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED)
        if waker is not None:
            waker.cancel()
        return not (execution.claimed_end.done() or execution.lost.done())

    async def _insist(self, execution: Execution) -> None:
        """Interrupt again and again (a child may swallow one), then kill."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.interrupt_grace
        while loop.time() < until:
            self._signal(signal.SIGINT)
            if not await self._wait(execution, _INTERRUPT_EVERY):
                return
        self.kill("the code did not stop when it was interrupted")

    def _interrupted_end(self, execution: Execution) -> End:
        if execution.interrupted_by_caller:
            reason = "The code was interrupted; variables and files are kept."
            return self._end(execution, "interrupted", -1, reason=reason)
        reason = f"The code ran longer than {execution.timeout:g} s and was interrupted; variables and files are kept."
        return self._end(execution, "timeout", -1, reason=reason)

    async def _lost_end(self, execution: Execution, kills_before: int, *, interrupted: bool) -> End:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), _DEATH_WAIT)
        if self._oom_kills() > kills_before and not interrupted:
            reason = f"The sandbox ran out of memory ({self.memory}) and was ended; variables are gone."
            return self._end(execution, "out_of_memory", -1, reason=reason)
        if interrupted and execution.interrupted_by_caller:
            reason = "The code did not stop when it was interrupted and was killed; variables are gone."
            return self._end(execution, "interrupted", -1, reason=reason)
        if interrupted:
            reason = (
                f"The code ran longer than {execution.timeout:g} s, did not stop when interrupted and was killed; "
                "variables are gone."
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
        )

    def _oom_kills(self) -> int:
        if self._final_oom_kills is not None:
            return self._final_oom_kills
        try:
            return 0 if self.place.cgroup is None else self.place.cgroup.oom_kills()
        except OSError:  # out of descriptors, say: better no word of memory than no word at all
            return self._noted_oom_kills

    # ---- files ------------------------------------------------------------------------------------------------

    async def list_files(self) -> tuple[list[FileEntry], bool]:
        """Regular files below the data directory, and whether there were more than are listed."""
        if self.place.directly_readable:
            # A descriptor of its own: should the sandbox end meanwhile, its number may become a neighbour's.
            data = os.dup(self._live_data())
            found, cut = await asyncio.to_thread(_walk_and_close, data)
        else:
            answer, opened = await self._help({"do": "walk"})
            with os.fdopen(opened.pop(), "rb") as listing:
                listing.seek(0)
                found = [files.Found(*row) for row in json.load(listing)]
            cut = answer["cut"]
        return [
            FileEntry(path=item.path, size=item.size, modified_ns=item.modified_ns) for item in found
        ], cut

    async def read_file(self, path: str, *, limit: int) -> bytes:
        """The content of one regular file of at most `limit` bytes; FileRefused otherwise."""
        try:
            fd = await self._open(path)
        except (OSError, files.UnsafePath) as error:
            raise FileRefused(f"{printable(path)}: {getattr(error, 'strerror', None) or error}") from error
        with os.fdopen(fd, "rb") as file:
            # One byte more than allowed tells a file that is too large, whatever its size claims or becomes.
            content = await asyncio.to_thread(file.read, limit + 1)
        if len(content) > limit:
            raise FileRefused(f"{printable(path)}: larger than {limit} bytes")
        return content

    async def _open(self, path: str) -> int:
        if self.place.directly_readable:
            return files.open_regular(self._live_data(), path)
        _, opened = await self._help({"do": "open", "path": path})
        return opened.pop()

    async def write_file(self, path: str, content: bytes) -> None:
        """Put a file in place, whole or not at all, at the sandbox's expense."""
        self._check_room(path, len(content))
        # Not a pipe: somebody would have to wait at its other end while the sandbox takes its time.
        source = os.memfd_create("upload")
        with os.fdopen(source, "w+b") as file:
            file.write(content)
            file.flush()
            file.seek(0)
            await self._help({"do": "write", "path": path}, source)

    def _check_room(self, path: str, size: int) -> None:
        """Refuse what would make the kernel end a process of the sandbox instead."""
        if self.place.disk is not None:
            if self._gone is None and size > self.place.disk.room():
                raise FileRefused(f"{printable(path)}: {size} bytes do not fit on the sandbox's disk")
            return
        if self.place.cgroup is not None and self._gone is None:
            room = MEMORY_TIERS[self.memory] - self.place.cgroup.memory_current() - _HEADROOM
            if size > room:
                raise FileRefused(
                    f"{printable(path)}: {size} bytes do not fit into the sandbox's memory ({self.memory})"
                )

    async def delete_file(self, path: str) -> None:
        await self._help({"do": "delete", "path": path})

    async def _help(self, task: dict[str, Any], *extra: int) -> tuple[dict[str, Any], list[int]]:
        """Have a helper with the sandbox's user and cgroup do one thing; FileRefused says why not."""
        async with self._helpers:
            return await self._help_now(task, *extra)

    async def _help_now(self, task: dict[str, Any], *extra: int) -> tuple[dict[str, Any], list[int]]:
        if "path" in task:
            try:
                files.checked(task["path"])
            except files.UnsafePath as error:
                raise FileRefused(f"{printable(task['path'])}: {error}") from error
        data = self._live_data()
        number = self._next_number()
        request = {"op": "files", "number": number, "uid": self.place.uid}
        try:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with mine:
                with theirs, joining(self.place.cgroup) as join:
                    self._zygote.request(request, [theirs.fileno(), data, *join])
                mine.setblocking(False)
                socket.send_fds(mine, [json.dumps(task).encode()], extra)
                body, opened = await asyncio.wait_for(_receive(mine), _HELPER_TIMEOUT)
        except TimeoutError:
            self._zygote.request({"op": "signal", "number": number, "signal": int(signal.SIGKILL)})
            raise FileRefused(f"the sandbox's files did not answer within {_HELPER_TIMEOUT} s") from None
        except OSError as error:
            raise FileRefused(f"the sandbox's files cannot be reached: {error.strerror}") from error
        if not body:
            raise FileRefused("the helper ended, probably for want of memory in the sandbox")
        answer = json.loads(body)
        if "error" in answer:
            subject = f"{printable(task['path'])}: " if "path" in task else ""
            full = " (the sandbox's disk quota)" if answer["errno"] in (errno.ENOSPC, errno.EDQUOT) else ""
            raise FileRefused(f"{subject}{answer['error']}{full}")
        return answer, opened

    def _live_data(self) -> int:
        if self._gone is not None or self._data < 0:
            raise SandboxGone(f"The sandbox is gone: {self._gone}.")
        return self._data

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
        self._zygote.request({"op": "signal", "number": self.number, "signal": int(number)})

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def data_quota(memory: MemoryTier) -> int:
    """Files count as memory: at most half of the tier may be files."""
    return MEMORY_TIERS[memory] // 2


def printable(name: str) -> str:
    """A name from a sandbox, fit for messages and logs: bounded, no control or bidirectional characters."""
    shown = "".join(char if char.isprintable() else _escaped(char) for char in name[:200])
    return shown if len(name) <= 200 else shown + "…"


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def _walk_and_close(data: int) -> tuple[list[files.Found], bool]:
    try:
        return files.walk(data)
    finally:
        os.close(data)


async def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: arrived.done() or arrived.set_result(None))
    try:
        await arrived
    finally:
        loop.remove_reader(sock.fileno())
    body, fds, _, _ = socket.recv_fds(sock, 65536, 4)
    return body, fds
