"""The executions of one sandbox by their ids: started once, readable again, forgotten in the end."""

import secrets
from collections.abc import AsyncGenerator, Callable
from functools import partial
from sys import getsizeof

from fumehood.protocol.sandbox.sandbox_errors import (
    ExecutionNotFound,
    RetryLater,
    SandboxConflict,
    SandboxGone,
)
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, ExecutionEvent
from fumehood.sandbox_server.settings import Settings
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution, estimate_memory
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance

_MAX_EVICTED_IDS = 1000
_BATCH_BYTES = 256 << 10


class RegisteredExecution:
    """One execution under its id; it goes on whether or not anybody reads it."""

    __slots__ = ("cost", "execution", "id", "request")

    def __init__(self, execution_id: str, request: ExecuteRequest, execution: SandboxExecution) -> None:
        self.id = execution_id
        self.request = request
        self.execution = execution
        self.cost = 0

    async def event_batches(
        self, after: int = -1, *, timeout: float | None = None
    ) -> AsyncGenerator[list[ExecutionEvent]]:
        """The events after number `after` as they come, joined where several are there; [] after a silence."""
        log = self.execution.event_log
        number = after + 1
        while True:
            if number < len(log):
                batch = _next_batch(log, number)
                number += len(batch)
                yield batch
            elif self.execution.has_ended:
                return
            else:
                await self.execution.wait_for_events(timeout)
                if number >= len(log) and not self.execution.has_ended:
                    yield []


def _next_batch(log: list[ExecutionEvent], number: int) -> list[ExecutionEvent]:
    """Some of what there is: a slow reader is not to be given everything at once."""
    size = 0
    for upto in range(number, len(log)):
        size += estimate_memory(log[upto])
        if size > _BATCH_BYTES:
            return log[number : upto + 1]
    return log[number:]


class ExecutionRegistry:
    """What one sandbox runs, is about to run, and ran of late."""

    def __init__(
        self,
        sandbox: SandboxInstance,
        settings: Settings,
        on_end: Callable[[RegisteredExecution, ExecutionEnd], None],
    ) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._on_end = on_end
        self._pending: dict[str, RegisteredExecution] = {}  # the first one has its turn
        self._ended: dict[str, RegisteredExecution] = {}
        self._evicted_ids: dict[str, None] = {}
        self.retained_bytes = 0

    @property
    def pending(self) -> list[RegisteredExecution]:
        return [*self._pending.values()]

    @property
    def running_id(self) -> str | None:
        return next(iter(self._pending), None)

    @property
    def queued_count(self) -> int:
        return max(len(self._pending) - 1, 0)

    @property
    def is_idle(self) -> bool:
        return not self._pending

    def start_or_get(self, request: ExecuteRequest) -> RegisteredExecution:
        """Start a call, or find the one that was started under this id.

        Raises Conflict, TryLater, SandboxGone, and ExecutionNotFound for one that ran and has been forgotten.
        """
        if request.execution_id is not None and (known := self._look_up(request.execution_id)) is not None:
            if known.request != request:
                raise SandboxConflict(
                    f"Execution {request.execution_id} is there already, with another request; choose another id.",
                    param="execution_id",
                )
            return known
        if len(self._pending) > self._settings.queued_executions and self._sandbox.end_reason is None:
            raise RetryLater(
                f"{self.queued_count} executions wait in this sandbox already, as many as may; wait until one ends."
            )
        execution = self._start(request)
        call = RegisteredExecution(request.execution_id or secrets.token_hex(12), request, execution)
        execution.on_end = partial(self._retire, call)
        self._pending[call.id] = call
        return call

    def _start(self, request: ExecuteRequest) -> SandboxExecution:
        return self._sandbox.start_execution(
            request.code,
            timeout=request.timeout_seconds,
            requirements=request.requirements,
            language=request.language,
        )

    def _look_up(self, execution_id: str) -> RegisteredExecution | None:
        call = self._pending.get(execution_id) or self._ended.get(execution_id)
        if call is None and execution_id in self._evicted_ids:
            raise ExecutionNotFound(
                f"Execution {execution_id} has run; its output is not kept any more.", param="execution_id"
            )
        return call

    def get(self, execution_id: str) -> RegisteredExecution:
        """Raises ExecutionNotFound, or SandboxGone if nothing can be asked for any more."""
        call = self._look_up(execution_id)
        if call is None:
            if self._sandbox.end_reason is not None:
                raise SandboxGone(f"The sandbox is gone: {self._sandbox.end_reason}.")
            raise ExecutionNotFound(
                f"There is no execution {execution_id} in this sandbox.", param="execution_id"
            )
        return call

    def interrupt(self, execution_id: str | None) -> bool:
        """Whether there was something to stop."""
        call = self._pending.get(self.running_id or "" if execution_id is None else execution_id)
        if call is None:
            return False
        self._sandbox.interrupt(call.execution)
        return True

    def _retire(self, call: RegisteredExecution, end: ExecutionEnd) -> None:
        del self._pending[call.id]
        call.cost = getsizeof(call.request.code) + sum(map(estimate_memory, call.execution.event_log))
        self._ended[call.id] = call
        self.retained_bytes += call.cost
        while len(self._ended) > 1 and (
            len(self._ended) > self._settings.retained_executions
            or self.retained_bytes > self._settings.retained_output_bytes
        ):
            self._evict(next(iter(self._ended)))
        self._on_end(call, end)

    def _evict(self, execution_id: str) -> None:
        self.retained_bytes -= self._ended.pop(execution_id).cost
        self._evicted_ids[execution_id] = None
        if len(self._evicted_ids) > _MAX_EVICTED_IDS:
            del self._evicted_ids[next(iter(self._evicted_ids))]

    def evict_all(self) -> None:
        """Let go of all output that is kept."""
        for call_id in [*self._ended]:
            self._evict(call_id)
