"""The executions of one sandbox by id: each starts once and can be read again until it is evicted."""

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
    """An execution, its id and the request that started it."""

    __slots__ = ("cost", "execution", "id", "request")

    def __init__(self, execution_id: str, request: ExecuteRequest, execution: SandboxExecution) -> None:
        self.id = execution_id
        self.request = request
        self.execution = execution
        self.cost = 0

    async def event_batches(
        self, after: int = -1, *, timeout: float | None = None
    ) -> AsyncGenerator[list[ExecutionEvent]]:
        """The events after number `after` in batches, as they come; an empty batch after `timeout` idle seconds."""
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
    """A bounded batch: a slow reader does not get the whole log at once."""
    size = 0
    for last in range(number, len(log)):
        size += estimate_memory(log[last])
        if size > _BATCH_BYTES:
            return log[number : last + 1]
    return log[number:]


class ExecutionRegistry:
    """Running, queued and recently ended executions of one sandbox."""

    def __init__(
        self,
        sandbox: SandboxInstance,
        settings: Settings,
        on_end: Callable[[RegisteredExecution, ExecutionEnd], None],
    ) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._on_end = on_end
        self._pending: dict[str, RegisteredExecution] = {}  # the first one runs
        self._ended: dict[str, RegisteredExecution] = {}
        self._evicted_ids: dict[str, None] = {}
        self.retained_bytes = 0

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
        """Start an execution, or return the one that was started under this id.

        Raises SandboxConflict, RetryLater, SandboxGone, and ExecutionNotFound for one that has been evicted.
        """
        if request.execution_id is not None and (known := self._look_up(request.execution_id)) is not None:
            if known.request != request:
                raise SandboxConflict(
                    f"Execution id {request.execution_id} is in use with another request; choose another id.",
                    param="execution_id",
                )
            return known
        if len(self._pending) > self._settings.queued_executions and self._sandbox.end_reason is None:
            raise RetryLater(
                f"Execution queue full: {self.queued_count} executions wait in this sandbox. Retry when one has ended."
            )
        execution = self._start(request)
        registered = RegisteredExecution(request.execution_id or secrets.token_hex(12), request, execution)
        execution.on_end = partial(self._retire, registered)
        self._pending[registered.id] = registered
        return registered

    def _start(self, request: ExecuteRequest) -> SandboxExecution:
        return self._sandbox.start_execution(
            request.code,
            timeout=request.timeout_seconds,
            requirements=request.requirements,
            language=request.language,
        )

    def _look_up(self, execution_id: str) -> RegisteredExecution | None:
        registered = self._pending.get(execution_id) or self._ended.get(execution_id)
        if registered is None and execution_id in self._evicted_ids:
            raise ExecutionNotFound(
                f"Execution {execution_id} has run; its output is no longer retained.", param="execution_id"
            )
        return registered

    def get(self, execution_id: str) -> RegisteredExecution:
        """Raises ExecutionNotFound, or SandboxGone if the sandbox has ended."""
        registered = self._look_up(execution_id)
        if registered is None:
            if self._sandbox.end_reason is not None:
                raise SandboxGone(f"The sandbox is gone: {self._sandbox.end_reason}.")
            raise ExecutionNotFound(
                f"There is no execution {execution_id} in this sandbox.", param="execution_id"
            )
        return registered

    def interrupt(self, execution_id: str | None) -> bool:
        """Interrupt an execution, by default the running one; returns whether there was one."""
        registered = self._pending.get(self.running_id or "" if execution_id is None else execution_id)
        if registered is None:
            return False
        self._sandbox.interrupt(registered.execution)
        return True

    def _retire(self, registered: RegisteredExecution, end: ExecutionEnd) -> None:
        del self._pending[registered.id]
        registered.cost = getsizeof(registered.request.code) + sum(
            map(estimate_memory, registered.execution.event_log)
        )
        self._ended[registered.id] = registered
        self.retained_bytes += registered.cost
        while len(self._ended) > 1 and (
            len(self._ended) > self._settings.retained_executions
            or self.retained_bytes > self._settings.retained_output_bytes
        ):
            self._evict(next(iter(self._ended)))
        self._on_end(registered, end)

    def _evict(self, execution_id: str) -> None:
        self.retained_bytes -= self._ended.pop(execution_id).cost
        self._evicted_ids[execution_id] = None
        if len(self._evicted_ids) > _MAX_EVICTED_IDS:
            del self._evicted_ids[next(iter(self._evicted_ids))]

    def evict_all(self) -> None:
        """Drop all retained output."""
        for execution_id in [*self._ended]:
            self._evict(execution_id)
