"""The executions of one sandbox by their ids: started once, readable again, forgotten in the end; imports siblings."""

import secrets
from collections.abc import AsyncGenerator, Callable
from functools import partial
from sys import getsizeof

from fumehood.protocol.sandbox import AnyOutput, End, ExecuteRequest
from fumehood.protocol.sandbox_errors import Conflict, ExecutionNotFound, SandboxGone, TryLater
from fumehood.sandboxd.executions import Execution, weight
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.settings import Settings

_REMEMBERED_IDS = 1000
_BATCH = 256 << 10


class Call:
    """One execution under its id; it goes on whether or not anybody reads it."""

    __slots__ = ("cost", "execution", "id", "request")

    def __init__(self, call_id: str, request: ExecuteRequest, execution: Execution) -> None:
        self.id = call_id
        self.request = request
        self.execution = execution
        self.cost = 0

    async def batches(
        self, after: int = -1, *, patience: float | None = None
    ) -> AsyncGenerator[list[AnyOutput]]:
        """The events after number `after` as they come, joined where several are there; [] after a silence."""
        log = self.execution.log
        number = after + 1
        while True:
            if number < len(log):
                batch = _batch(log, number)
                number += len(batch)
                yield batch
            elif self.execution.ended:
                return
            else:
                await self.execution.wait_for_more(patience)
                if number >= len(log) and not self.execution.ended:
                    yield []


def _batch(log: list[AnyOutput], number: int) -> list[AnyOutput]:
    """Some of what there is: a slow reader is not to be given everything at once."""
    size = 0
    for upto in range(number, len(log)):
        size += weight(log[upto])
        if size > _BATCH:
            return log[number : upto + 1]
    return log[number:]


class Calls:
    """What one sandbox runs, is about to run, and ran of late."""

    def __init__(
        self,
        sandbox: LocalSandbox,
        settings: Settings,
        on_end: Callable[[Call, End], None],
    ) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._on_end = on_end
        self._pending: dict[str, Call] = {}  # the first one has its turn
        self._ended: dict[str, Call] = {}
        self._forgotten: dict[str, None] = {}
        self.kept_bytes = 0

    @property
    def pending(self) -> list[Call]:
        return [*self._pending.values()]

    @property
    def running(self) -> str | None:
        return next(iter(self._pending), None)

    @property
    def waiting(self) -> int:
        return max(len(self._pending) - 1, 0)

    @property
    def idle(self) -> bool:
        return not self._pending

    def begin(self, request: ExecuteRequest) -> Call:
        """Start a call, or find the one that was started under this id.

        Raises Conflict, TryLater, SandboxGone, and ExecutionNotFound for one that ran and has been forgotten.
        """
        if request.execution_id is not None and (known := self._known(request.execution_id)) is not None:
            if known.request != request:
                raise Conflict(
                    f"Execution {request.execution_id} is there already, with another request; choose another id.",
                    param="execution_id",
                )
            return known
        if len(self._pending) > self._settings.waiting_calls and self._sandbox.gone is None:
            raise TryLater(
                f"{self.waiting} executions wait in this sandbox already, as many as may; wait until one ends."
            )
        execution = self._start(request)
        call = Call(request.execution_id or secrets.token_hex(12), request, execution)
        execution.on_end = partial(self._finished, call)
        self._pending[call.id] = call
        return call

    def _start(self, request: ExecuteRequest) -> Execution:
        return self._sandbox.start(
            request.code,
            timeout=request.timeout_seconds,
            requirements=request.requirements,
            language=request.language,
        )

    def _known(self, call_id: str) -> Call | None:
        call = self._pending.get(call_id) or self._ended.get(call_id)
        if call is None and call_id in self._forgotten:
            raise ExecutionNotFound(
                f"Execution {call_id} has run; its output is not kept any more.", param="execution_id"
            )
        return call

    def find(self, call_id: str) -> Call:
        """Raises ExecutionNotFound, or SandboxGone if nothing can be asked for any more."""
        call = self._known(call_id)
        if call is None:
            if self._sandbox.gone is not None:
                raise SandboxGone(f"The sandbox is gone: {self._sandbox.gone}.")
            raise ExecutionNotFound(f"There is no execution {call_id} in this sandbox.", param="execution_id")
        return call

    def interrupt(self, call_id: str | None) -> bool:
        """Whether there was something to stop."""
        call = self._pending.get(self.running or "" if call_id is None else call_id)
        if call is None:
            return False
        self._sandbox.interrupt(call.execution)
        return True

    def _finished(self, call: Call, end: End) -> None:
        del self._pending[call.id]
        call.cost = getsizeof(call.request.code) + sum(map(weight, call.execution.log))
        self._ended[call.id] = call
        self.kept_bytes += call.cost
        while len(self._ended) > 1 and (
            len(self._ended) > self._settings.kept_calls or self.kept_bytes > self._settings.kept_bytes
        ):
            self._forget(next(iter(self._ended)))
        self._on_end(call, end)

    def _forget(self, call_id: str) -> None:
        self.kept_bytes -= self._ended.pop(call_id).cost
        self._forgotten[call_id] = None
        if len(self._forgotten) > _REMEMBERED_IDS:
            del self._forgotten[next(iter(self._forgotten))]

    def forget_all(self) -> None:
        """Let go of all output that is kept."""
        for call_id in [*self._ended]:
            self._forget(call_id)
