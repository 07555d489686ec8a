"""Runs a call to its end, resuming broken event streams."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from fumehood.interfaces import Clock, Sandbox
from fumehood.protocol.sandbox.sandbox_errors import (
    ExecutionNotFound,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, ExecutionEvent
from fumehood.timings import Timing, start_timing

logger = logging.getLogger(__name__)

_MAX_RECONNECTS = 4
_INITIAL_BACKOFF = 0.15
_STOP_TIMEOUT = 10.0


async def execute_with_recovery(
    sandbox: Sandbox, request: ExecuteRequest, execution_id: str, clock: Clock
) -> AsyncGenerator[ExecutionEvent]:
    """Yield the events of a call, with an `ExecutionEnd` in any case. The code never runs twice.

    Closing the generator interrupts the code. Raises SandboxGone or SandboxNotFound only if the sandbox was gone
    before the call could start.

    A stream is resumed a few times within about two seconds, unless the provider says that it has tried already.
    """
    received = failures = 0
    ended = False
    progress = _ExecutionProgress()
    events = sandbox.execute(request)
    timing = start_timing("run")
    try:
        while True:
            try:
                async with aclosing(events):
                    async for event in events:
                        received += 1
                        failures = 0
                        progress.advance()
                        if isinstance(event, ExecutionEnd):
                            ended = True
                            _end_timing(timing, event)
                        yield event
                if ended:
                    return
                failure: SandboxError = SandboxServerUnreachable("The event stream of a call ended early.")
            except (SandboxGone, SandboxNotFound) as error:
                if error.nothing_started and not failures and not received:
                    ended = True
                    raise
                failure = error
            except SandboxError as error:
                failure = error
            failures += 1
            progress.disconnect(failure)
            if failures > _MAX_RECONNECTS or not _is_retryable(failure, received):
                ended = not isinstance(failure, SandboxServerUnreachable)
                end = lost_execution_end(failure, request.noun, progress)
                _end_timing(timing, end)
                yield end
                return
            await clock.sleep(_INITIAL_BACKOFF * 2 ** (failures - 1))
            # A request that never arrived is sent again; the server rejects one that it has forgotten.
            is_unknown = isinstance(failure, ExecutionNotFound)
            events = (
                sandbox.execute(request) if is_unknown else sandbox.follow(execution_id, after=received - 1)
            )
    finally:
        timing.end()
        if not ended:
            await _interrupt_and_wait(sandbox, execution_id, received - 1)


class _ExecutionProgress:
    """How far a call has come.

    may_have_run: whether the code may have started; False only if the server never received the request.
    duration_ms: from the request until the connection broke, or until now.
    """

    def __init__(self) -> None:
        self.may_have_run = False
        self._started_at = asyncio.get_running_loop().time()
        self._disconnected_at: float | None = None

    def advance(self) -> None:
        self.may_have_run = True
        self._disconnected_at = None

    def disconnect(self, error: SandboxError) -> None:
        self.may_have_run = self.may_have_run or not error.nothing_started
        if self._disconnected_at is None:
            self._disconnected_at = error.disconnected_at or asyncio.get_running_loop().time()

    @property
    def duration_ms(self) -> int:
        until = asyncio.get_running_loop().time() if self._disconnected_at is None else self._disconnected_at
        return round((until - self._started_at) * 1000)


def _end_timing(timing: Timing, end: ExecutionEnd) -> None:
    timing.split_off_start("packages", end.packages_ms * 1_000_000)
    timing.set_attribute("status", end.status)
    timing.end()


def _is_retryable(error: SandboxError, received: int) -> bool:
    if error.retries_exhausted:
        return False
    return isinstance(error, SandboxServerUnreachable) or (
        isinstance(error, ExecutionNotFound) and not received
    )


async def _interrupt_and_wait(sandbox: Sandbox, execution_id: str, after: int) -> None:
    """Interrupt a call and wait for its end, so that the caller may say that the code was stopped."""
    with suppress(SandboxError, TimeoutError):
        async with asyncio.timeout(_STOP_TIMEOUT):
            if await sandbox.interrupt(execution_id):
                async with aclosing(sandbox.follow(execution_id, after=after)) as events:
                    async for _ in events:
                        pass


def lost_execution_end(
    error: SandboxError, noun: str, progress: _ExecutionProgress | None = None
) -> ExecutionEnd:
    """Return the end of a call that could not start or was lost. Its reason names no server: models read it.

    noun: what was to run, `code` or `command`. progress: None for a call that has not started.
    """
    gone = isinstance(error, SandboxGone | SandboxNotFound)
    may_have_run = progress is not None and progress.may_have_run
    if gone:
        reason = "The sandbox was lost."
    elif error.status < 500:
        reason = f"The sandbox refused: {error.message}"
    elif may_have_run:
        reason = "The connection to the sandbox was lost and could not be restored."
    else:
        reason = "The sandboxes cannot be reached at the moment; try again later."
    if may_have_run:
        reason += (
            f" The {noun} may have run, in part or to its end: check what it did before you run it again."
        )
    elif gone or error.status >= 500:
        reason += f" The {noun} did not run."
    logger.warning("A call was lost: %s: %s", type(error).__name__, error.message)
    duration = progress.duration_ms if progress is not None and may_have_run else 0
    return ExecutionEnd(status="lost", exit_code=-1, duration_ms=duration, state_kept=not gone, reason=reason)
