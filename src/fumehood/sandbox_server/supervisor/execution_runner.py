"""Runs the executions of one sandbox one after another: installs, deadline, interrupt, end."""

import asyncio
import logging
from typing import Any, Protocol

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed, SandboxGone
from fumehood.protocol.sandbox.sandbox_messages import (
    MEMORY_TIERS,
    ExecutionEnd,
    ExecutionEndStatus,
    MemoryTier,
)
from fumehood.sandbox_server.inside.framing import MessageKind
from fumehood.sandbox_server.packages.sandbox_packages import SandboxPackages
from fumehood.sandbox_server.settings import Settings
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution

logger = logging.getLogger(__name__)

_INTERRUPT_INTERVAL = 0.1
_EXIT_WAIT = 5.0  # seconds a killed sandbox gets to end its last process
_COMMAND_EXIT_WAIT = (
    3.0  # seconds more for an interrupted command, whose runner waits for its child processes
)


class ExecutingSandbox(Protocol):
    """What the runner uses of its sandbox."""

    id: str
    memory: MemoryTier
    packages: SandboxPackages

    @property
    def end_reason(self) -> str | None: ...
    def send_message(self, kind: MessageKind, call_id: bytes, body: dict[str, Any]) -> None: ...
    def send_interrupt(self) -> None: ...
    def count_oom_kills(self) -> int: ...
    async def wait_exited(self, timeout: float) -> None: ...
    def kill(self, reason: str) -> None: ...


class ExecutionRunner:
    """Every submitted execution gets its `ExecutionEnd`, whatever the code does."""

    def __init__(self, sandbox: ExecutingSandbox, settings: Settings) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._lock = asyncio.Lock()
        self._memory_limit_sent = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.running: SandboxExecution | None = None
        self.seen_oom_kills = (
            0  # processes the kernel had killed for lack of memory by the end of the last execution
        )

    def submit(self, execution: SandboxExecution) -> None:
        """Queue an execution; it runs whether or not anybody reads it."""
        task = asyncio.ensure_future(self._run_and_report_end(execution))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def interrupt(self, execution: SandboxExecution | None = None) -> None:
        """Stop an execution, by default the running one, as Ctrl-C would; a queued one never starts."""
        if execution is None:
            execution = self.running
        if execution is not None and not execution.has_ended:
            execution.interrupted_by_caller = True
            if not execution.interrupt_requested.done():
                execution.interrupt_requested.set_result(None)

    def abort(self, reason: str) -> None:
        """The sandbox is gone: the running execution ends as lost."""
        if self.running is not None and not self.running.lost.done():
            self.running.lost.set_result(reason)

    async def _run_and_report_end(self, execution: SandboxExecution) -> None:
        """Append an end even if the supervisor itself fails."""
        try:
            await self._run(execution)
        except Exception as error:
            logger.exception("Execution in sandbox %s failed in the supervisor.", self._sandbox.id)
            self._sandbox.kill(f"the supervisor failed: {error}")
        finally:
            if not execution.has_ended:
                self.running = None
                reason = f"The sandbox was lost: {self._sandbox.end_reason}."
                execution.append(self._build_end(execution, "lost", reason=reason))

    async def _run(self, execution: SandboxExecution) -> None:
        async with self._lock:
            execution.start_clock()
            if self._sandbox.end_reason is not None:
                reason = (
                    f"The sandbox was lost before the {execution.noun} started: {self._sandbox.end_reason}."
                )
                execution.append(self._build_end(execution, "lost", reason=reason))
                return
            if execution.interrupted_by_caller:
                reason = f"The {execution.noun} was interrupted before it started."
                execution.append(self._build_end(execution, "interrupted", reason=reason))
                return
            self.running = execution
            if failed := await self._install_requirements(execution):
                self.running = None
                execution.append(self._build_end(execution, failed[0], reason=failed[1]))
                return
            kind = MessageKind.COMMAND if execution.language == "shell" else MessageKind.EXECUTE
            self._sandbox.send_message(kind, execution.call_id, self._build_request(execution))
            # Counted while the code starts: no process runs out of memory that soon.
            kills_before = self._sandbox.count_oom_kills()
            end = await self._wait_for_end(execution, kills_before)
            self.seen_oom_kills = self._sandbox.count_oom_kills()
            if end.state_kept and self.seen_oom_kills > kills_before:
                execution.append_note(
                    f"A process that the {execution.noun} had started was killed: the sandbox was out of memory "
                    f"({self._sandbox.memory})."
                )
            self.running = None
            execution.append(end)

    async def _install_requirements(
        self, execution: SandboxExecution
    ) -> tuple[ExecutionEndStatus, str] | None:
        """None once the packages are there; otherwise how the execution ends, and why."""
        if not execution.requirements:
            return None
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        install = asyncio.ensure_future(
            self._sandbox.packages.install(execution.requirements, execution.append_note)
        )
        try:
            await asyncio.wait(
                {install, execution.interrupt_requested, execution.lost}, return_when=asyncio.FIRST_COMPLETED
            )
            if execution.lost.done():
                return "lost", f"The sandbox was lost: {execution.lost.result()}."
            if not install.done():
                return (
                    "interrupted",
                    "The call was interrupted while packages were installed; the code did not run.",
                )
            install.result()
        except InstallFailed as error:
            return "install_failed", error.message
        except SandboxGone as error:
            return "lost", error.message
        finally:
            install.cancel()
            await asyncio.gather(install, return_exceptions=True)
            execution.install_seconds = loop.time() - started_at
        execution.start_clock()  # installing does not count against the timeout
        return None

    def _build_request(self, execution: SandboxExecution) -> dict[str, Any]:
        """The first request carries the interpreter's memory limit, which can be set only once."""
        request: dict[str, Any] = {"code": execution.code}
        if not self._memory_limit_sent:
            self._memory_limit_sent = True
            request["data_limit"] = MEMORY_TIERS[self._sandbox.memory] * 9 // 10
        return request

    async def _wait_for_end(self, execution: SandboxExecution, kills_before: int) -> ExecutionEnd:
        """Wait for the runner's end message, the death of the sandbox or the deadline."""
        interrupted = await self._is_running_after(
            execution, execution.timeout, execution.interrupt_requested
        )
        if interrupted:
            await self._interrupt_until_stopped(execution)
        if not execution.reported_end.done() or execution.lost.done():
            return await self._build_lost_end(execution, kills_before, interrupted=interrupted)
        if interrupted and execution.interrupted_by_caller:
            return self._build_end(execution, "interrupted", reason=f"The {execution.noun} was interrupted.")
        if interrupted:
            reason = f"The {execution.noun} ran longer than {execution.timeout:g} s and was interrupted."
            return self._build_end(execution, "timeout", reason=reason)
        exit_code = execution.reported_end.result().exit_code
        return self._build_end(execution, "ok" if exit_code == 0 else "error", exit_code)

    async def _is_running_after(
        self, execution: SandboxExecution, seconds: float, *wakers: asyncio.Future[None]
    ) -> bool:
        """Whether it still runs after `seconds`, or when a waker is done."""
        waiting: set[asyncio.Future[Any]] = {execution.reported_end, execution.lost, *wakers}
        await asyncio.wait(waiting, timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED)
        return not (execution.reported_end.done() or execution.lost.done())

    async def _interrupt_until_stopped(self, execution: SandboxExecution) -> None:
        """Interrupt repeatedly, because a child process may swallow one; then kill."""
        loop = asyncio.get_running_loop()
        grace = self._settings.interrupt_grace
        if execution.language == "shell":
            grace += _COMMAND_EXIT_WAIT
        deadline = loop.time() + grace
        while loop.time() < deadline:
            self._sandbox.send_interrupt()
            if not await self._is_running_after(execution, _INTERRUPT_INTERVAL):
                return
        self._sandbox.kill(f"the {execution.noun} did not stop when it was interrupted")

    async def _build_lost_end(
        self, execution: SandboxExecution, kills_before: int, *, interrupted: bool
    ) -> ExecutionEnd:
        await self._sandbox.wait_exited(_EXIT_WAIT)
        if self._sandbox.count_oom_kills() > kills_before and not interrupted:
            reason = f"The sandbox ran out of memory ({self._sandbox.memory}) and was ended."
            return self._build_end(execution, "out_of_memory", reason=reason)
        if interrupted and execution.interrupted_by_caller:
            reason = f"The {execution.noun} did not stop when it was interrupted and was killed."
            return self._build_end(execution, "interrupted", reason=reason)
        if interrupted:
            reason = (
                f"The {execution.noun} ran longer than {execution.timeout:g} s, did not stop when interrupted and was "
                "killed."
            )
            return self._build_end(execution, "timeout", reason=reason)
        reason = f"The sandbox was lost: {execution.lost.result()}."
        return self._build_end(execution, "lost", reason=reason)

    def _build_end(
        self,
        execution: SandboxExecution,
        status: ExecutionEndStatus,
        exit_code: int = -1,
        *,
        reason: str = "",
    ) -> ExecutionEnd:
        return ExecutionEnd(
            status=status,
            exit_code=exit_code,
            duration_ms=round(execution.elapsed * 1000),
            state_kept=self._sandbox.end_reason is None,
            reason=reason,
            packages_ms=round((execution.install_seconds or 0) * 1000),
        )
