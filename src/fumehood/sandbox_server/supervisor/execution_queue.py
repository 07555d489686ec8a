"""The executions of one sandbox: run one after another, each started once and readable until it is evicted."""

import asyncio
import logging
import math
from collections.abc import Callable
from sys import getsizeof
from typing import TYPE_CHECKING, Any

from fumehood.protocol.sandbox.sandbox_errors import (
    ExecutionNotFound,
    InstallFailed,
    RetryLater,
    SandboxConflict,
    SandboxGone,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    MEMORY_TIERS,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEndStatus,
)
from fumehood.sandbox_server.inside.framing import MessageKind
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution, estimate_memory

if TYPE_CHECKING:
    from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance

logger = logging.getLogger(__name__)

_MAX_EVICTED_IDS = 1000
_INTERRUPT_INTERVAL = 0.1
_EXIT_WAIT = 5.0  # seconds a killed sandbox gets to end its last process
# Seconds more for an interrupted command, whose runner waits for its child processes.
_COMMAND_EXIT_WAIT = 3.0


class ExecutionQueue:
    """Every started execution gets its `ExecutionEnd`, whatever the code does.

    on_end: called with each execution that has ended.
    """

    def __init__(self, sandbox: "SandboxInstance", settings: SandboxServerSettings) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._lock = asyncio.Lock()
        self._memory_limit_sent = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: dict[str, SandboxExecution] = {}
        self._evicted_ids: dict[str, None] = {}
        self.pending: dict[str, SandboxExecution] = {}  # the first one runs
        self.retained_bytes = 0
        self.on_end: Callable[[SandboxExecution, ExecutionEnd], None] | None = None
        self.running: SandboxExecution | None = None
        # Processes that the kernel had killed for lack of memory by the end of the last execution.
        self.seen_oom_kills = 0

    # ---- starting and finding ---------------------------------------------------------------------------------

    @property
    def running_id(self) -> str | None:
        return next(iter(self.pending), None)

    @property
    def queued_count(self) -> int:
        return max(len(self.pending) - 1, 0)

    def start_or_get(self, request: ExecuteRequest) -> SandboxExecution:
        """Queue an execution, or return the one that was started under this id.

        It runs whether or not anybody reads it. Raises SandboxConflict, RetryLater, SandboxGone, ExecutionNotFound for
        one that has been evicted, and ValueError for a timeout that is not positive and finite.
        """
        if request.execution_id is not None and (known := self._look_up(request.execution_id)) is not None:
            if known.request != request:
                raise SandboxConflict(
                    f"Execution id {request.execution_id} is in use with another request; choose another id.",
                    param="execution_id",
                )
            return known
        self._sandbox.check_alive()
        if len(self.pending) > self._settings.queued_executions:
            raise RetryLater(
                f"Execution queue full: {self.queued_count} executions wait in this sandbox. Retry when one has ended."
            )
        if not 0 < request.timeout_seconds < math.inf:
            raise ValueError(f"a time-out is a positive number of seconds, not {request.timeout_seconds}")
        execution = SandboxExecution(request, self._settings)
        execution.on_end = self._retire
        self.pending[execution.id] = execution
        task = asyncio.ensure_future(self._run_and_report_end(execution))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return execution

    def _look_up(self, execution_id: str) -> SandboxExecution | None:
        execution = self.pending.get(execution_id) or self._ended.get(execution_id)
        if execution is None and execution_id in self._evicted_ids:
            raise ExecutionNotFound(
                f"Execution {execution_id} has run; its output is no longer retained.", param="execution_id"
            )
        return execution

    def get(self, execution_id: str) -> SandboxExecution:
        """Raises ExecutionNotFound, or SandboxGone if the sandbox has ended."""
        execution = self._look_up(execution_id)
        if execution is None:
            self._sandbox.check_alive()
            raise ExecutionNotFound(
                f"There is no execution {execution_id} in this sandbox.", param="execution_id"
            )
        return execution

    def interrupt(self, execution_id: str | None = None) -> bool:
        """Interrupt an execution, by default the running one; returns whether there was one."""
        execution = self.pending.get(self.running_id or "" if execution_id is None else execution_id)
        if execution is None:
            return False
        execution.interrupt()
        return True

    def abort(self, reason: str) -> None:
        """The sandbox is gone: the running execution ends as lost."""
        if self.running is not None and not self.running.lost.done():
            self.running.lost.set_result(reason)

    # ---- retaining --------------------------------------------------------------------------------------------

    def _retire(self, execution: SandboxExecution, end: ExecutionEnd) -> None:
        del self.pending[execution.id]
        execution.retained_bytes = getsizeof(execution.request.code) + sum(
            map(estimate_memory, execution.event_log)
        )
        self._ended[execution.id] = execution
        self.retained_bytes += execution.retained_bytes
        while len(self._ended) > 1 and (
            len(self._ended) > self._settings.retained_executions
            or self.retained_bytes > self._settings.retained_output_bytes
        ):
            self._evict(next(iter(self._ended)))
        self._sandbox.touch()
        if self.on_end is not None:
            self.on_end(execution, end)

    def _evict(self, execution_id: str) -> None:
        self.retained_bytes -= self._ended.pop(execution_id).retained_bytes
        self._evicted_ids[execution_id] = None
        if len(self._evicted_ids) > _MAX_EVICTED_IDS:
            del self._evicted_ids[next(iter(self._evicted_ids))]

    def evict_all(self) -> None:
        """Drop all retained output."""
        for execution_id in [*self._ended]:
            self._evict(execution_id)

    # ---- running ----------------------------------------------------------------------------------------------

    async def _run_and_report_end(self, execution: SandboxExecution) -> None:
        """Append an end even if the supervisor itself fails."""
        end: ExecutionEnd | None = None
        try:
            async with self._lock:
                end = await self._run(execution)
        except Exception as error:
            logger.exception("Execution in sandbox %s failed in the supervisor.", self._sandbox.id)
            self._sandbox.kill(f"the supervisor failed: {error}")
        finally:
            self.running = None
            reason = f"The sandbox was lost: {self._sandbox.end_reason}."
            execution.append(end or self._build_end(execution, "lost", reason=reason))

    async def _run(self, execution: SandboxExecution) -> ExecutionEnd:
        noun, end_reason = execution.request.noun, self._sandbox.end_reason
        execution.start_clock()
        if end_reason is not None:
            reason = f"The sandbox was lost before the {noun} started: {end_reason}."
            return self._build_end(execution, "lost", reason=reason)
        if execution.interrupted_by_caller:
            reason = f"The {noun} was interrupted before it started."
            return self._build_end(execution, "interrupted", reason=reason)
        self.running = execution
        if failed := await self._install_requirements(execution):
            return self._build_end(execution, failed[0], reason=failed[1])
        kind = MessageKind.COMMAND if execution.request.language == "shell" else MessageKind.EXECUTE
        self._sandbox.send_message(kind, execution.call_id, self._build_request(execution))
        # Counted while the code starts: no process runs out of memory that soon.
        kills_before = self._sandbox.count_oom_kills()
        end = await self._wait_for_end(execution, kills_before)
        self.seen_oom_kills = self._sandbox.count_oom_kills()
        if end.state_kept and self.seen_oom_kills > kills_before:
            execution.append_note(
                f"A process that the {noun} had started was killed: the sandbox was out of memory "
                f"({self._sandbox.memory})."
            )
        return end

    async def _install_requirements(
        self, execution: SandboxExecution
    ) -> tuple[ExecutionEndStatus, str] | None:
        """None once the packages are there; otherwise how the execution ends, and why."""
        if not execution.request.requirements:
            return None
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        install = asyncio.ensure_future(
            self._sandbox.packages.install(execution.request.requirements, execution.append_note)
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
        request: dict[str, Any] = {"code": execution.request.code}
        if not self._memory_limit_sent:
            self._memory_limit_sent = True
            request["data_limit"] = MEMORY_TIERS[self._sandbox.memory] * 9 // 10
        return request

    async def _wait_for_end(self, execution: SandboxExecution, kills_before: int) -> ExecutionEnd:
        """Wait for the runner's end message, the death of the sandbox or the deadline."""
        interrupted = await self._is_running_after(
            execution, execution.request.timeout_seconds, execution.interrupt_requested
        )
        if interrupted:
            await self._interrupt_until_stopped(execution)
        if not execution.reported_end.done() or execution.lost.done():
            return await self._build_lost_end(execution, kills_before, interrupted=interrupted)
        if interrupted and execution.interrupted_by_caller:
            return self._build_end(
                execution, "interrupted", reason=f"The {execution.request.noun} was interrupted."
            )
        if interrupted:
            reason = f"{_describe_timeout(execution)} and was interrupted."
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
        if execution.request.language == "shell":
            grace += _COMMAND_EXIT_WAIT
        deadline = loop.time() + grace
        while loop.time() < deadline:
            self._sandbox.zygote.send_interrupt(self._sandbox.number)
            if not await self._is_running_after(execution, _INTERRUPT_INTERVAL):
                return
        self._sandbox.kill(f"the {execution.request.noun} did not stop when it was interrupted")

    async def _build_lost_end(
        self, execution: SandboxExecution, kills_before: int, *, interrupted: bool
    ) -> ExecutionEnd:
        await self._sandbox.wait_exited(_EXIT_WAIT)
        if self._sandbox.count_oom_kills() > kills_before and not interrupted:
            reason = f"The sandbox ran out of memory ({self._sandbox.memory}) and was ended."
            return self._build_end(execution, "out_of_memory", reason=reason)
        if interrupted and execution.interrupted_by_caller:
            reason = f"The {execution.request.noun} did not stop when it was interrupted and was killed."
            return self._build_end(execution, "interrupted", reason=reason)
        if interrupted:
            reason = f"{_describe_timeout(execution)}, did not stop when interrupted and was killed."
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


def _describe_timeout(execution: SandboxExecution) -> str:
    return f"The {execution.request.noun} ran longer than {execution.request.timeout_seconds:g} s"
