"""One call in a container: its time limit, how far its code has come, and how it ends."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import Self

import msgspec

from fumehood.containers.container_runtime_state import ContainerContext
from fumehood.interfaces import Sandbox
from fumehood.protocol.sandbox.sandbox_errors import (
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEndStatus,
    ExecutionEvent,
    make_execution_end,
)
from fumehood.timed_steps import start_timing

logger = logging.getLogger(__name__)

_TIMEOUT_GRACE_SECONDS = 0.5  # lets the timeout of the sandbox come first: it reports more
_STOP_TIMEOUT = 10.0


class RunningCall:
    """A call from its request to its end. `with` counts it.

    request: with an id, and with a timeout that the call allows.
    end: how it ended, None until then.
    may_have_run: whether the code may have begun.
    """

    def __init__(self, context: ContainerContext, request: ExecuteRequest, timeout: float) -> None:
        self.request = msgspec.structs.replace(
            request,
            execution_id=request.execution_id or secrets.token_hex(12),
            timeout_seconds=min(request.timeout_seconds, timeout),
        )
        self.end: ExecutionEnd | None = None
        self.may_have_run = False
        self._clock = context.clock
        self._stats = context.stats
        self._loop = asyncio.get_running_loop()
        self._called_at = self._started_at = self._loop.time()
        self._deadline = self._called_at + timeout + _TIMEOUT_GRACE_SECONDS
        self._received = 0
        self._runs = False  # the code may be running

    def __enter__(self) -> Self:
        self._stats.running_calls += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._stats.running_calls -= 1
        self._stats.ended_calls["abandoned" if self.end is None else self.end.status] += 1

    async def wait_for[T](self, step: Awaitable[T]) -> T:
        """Return the result of a step. Raises TimeoutError if the call takes too long."""
        async with asyncio.timeout_at(self._deadline):
            return await step

    # ---- the code ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the request is now sent to a sandbox."""
        self._runs = True
        self._started_at = self._loop.time()
        self._clock_started_at = self._clock.monotonic()
        self._timing = start_timing("run")

    async def next_event(self, events: AsyncGenerator[ExecutionEvent]) -> ExecutionEvent:
        """Return the next event of the code. Raises SandboxError, TimeoutError."""
        try:
            async with asyncio.timeout_at(self._deadline):
                event = await anext(events, None)
        except TimeoutError:
            self._set_status("timeout")
            raise
        if event is None:
            raise SandboxServerUnreachable("The events of an execution ended early.")
        self._received += 1
        self.may_have_run = True
        self._runs = not isinstance(event, ExecutionEnd)
        return event

    def fail(self, error: SandboxError) -> None:
        """Note that no further events come."""
        self.may_have_run = self.may_have_run or not error.nothing_started
        self._runs = isinstance(error, SandboxServerUnreachable)

    def measure(self, end: ExecutionEnd) -> None:
        """Record how long the code ran."""
        self._stats.run_seconds.observe(self._clock.monotonic() - self._clock_started_at)
        self._timing.split_off_start(
            "packages", end.packages_ms * 1_000_000, end.status if end.status == "install_failed" else ""
        )
        self._timing.set_attribute("exit_code", end.exit_code)
        self._set_status(end.status)
        self._timing.end()

    def _set_status(self, status: ExecutionEndStatus) -> None:
        """Note how the code ended. Code that raises has run: that is no error of the step."""
        self._timing.set_attribute("status", status)
        self._timing.error = "" if status in ("ok", "error") else status

    async def stop(self, sandbox: Sandbox) -> None:
        """Interrupt the code if it may be running, and wait for its end, so that `end` may say that it was stopped."""
        if "status" not in self._timing.attributes:
            self._set_status("interrupted")
        self._timing.end()
        if not self._runs:
            return
        self._runs = False
        execution_id = str(self.request.execution_id)
        with suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT):
                if await sandbox.interrupt(execution_id):
                    async with aclosing(sandbox.follow(execution_id, after=self._received - 1)) as events:
                        async for _ in events:
                            pass

    # ---- ends that no sandbox reports -------------------------------------------------------------------

    def timeout_end(self) -> ExecutionEnd:
        reason = f"The time for this response is over; the {self.request.noun} was stopped."
        return make_execution_end("timeout", reason, self._loop.time() - self._called_at)

    def lost_end(self, error: SandboxError) -> ExecutionEnd:
        """Return the end of a call that was lost or could not start. Its reason names no server: models read it."""
        is_gone = isinstance(error, SandboxGone | SandboxNotFound)
        if is_gone:
            reason = "The sandbox was lost."
        elif error.status < 500:
            reason = f"The sandbox refused: {error.message}"
        elif self.may_have_run:
            reason = "The connection to the sandbox was lost and could not be restored."
        else:
            reason = "The sandboxes cannot be reached at the moment; try again later."
        seconds = 0.0
        if self.may_have_run:
            seconds = (error.disconnected_at or self._loop.time()) - self._started_at
            reason += (
                f" The {self.request.noun} may have run, in part or to its end: check what it did before you run it "
                "again."
            )
        elif is_gone or error.status >= 500:
            reason += f" The {self.request.noun} did not run."
        logger.warning("A call was lost: %s: %s", type(error).__name__, error.message)
        return make_execution_end("lost", reason, seconds, state_kept=not is_gone)
