"""Executes code or a command in a container within the time limit of the response."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from fumehood.interfaces import Container, ContainerEvent
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, ExecutionEndStatus

RAN_STATUSES = frozenset({"ok", "error"})  # also code that raises and a command that fails
NO_OUTPUT = "(no output)"  # shown to the model
_TIMEOUT_GRACE_SECONDS = 0.5  # lets the timeout of the sandbox come first: it reports more


async def execute_within(
    container: Container, request: ExecuteRequest, timeout: float
) -> AsyncGenerator[ContainerEvent]:
    """Yield the events of an execution, always with `ExecutionEnd` last. Closing the generator interrupts the code."""
    if timeout <= 0:
        yield make_end("timeout", f"The time for this response was over before the {request.noun} began.")
        return
    request = msgspec.structs.replace(request, timeout_seconds=min(request.timeout_seconds, timeout))
    loop = asyncio.get_running_loop()
    started = loop.time()
    deadline = started + timeout + _TIMEOUT_GRACE_SECONDS
    timed_out = False
    async with aclosing(container.execute(request)) as events:
        while not timed_out:
            try:
                async with asyncio.timeout_at(deadline):
                    event = await anext(events)
            except StopAsyncIteration:
                break
            except TimeoutError:
                timed_out = True
                continue
            yield event
            if isinstance(event, ExecutionEnd):
                return
    if timed_out:  # reported after closing the events, which stops the code
        reason = f"The time for this response is over; the {request.noun} was stopped."
        yield make_end("timeout", reason, loop.time() - started)
    else:
        reason = f"The sandbox did not say how the {request.noun} ended."
        yield make_end("lost", reason, loop.time() - started)


def make_end(status: ExecutionEndStatus, reason: str, seconds: float = 0.0) -> ExecutionEnd:
    """Make the end of an execution that its container did not report, after `seconds`."""
    return ExecutionEnd(
        status=status, exit_code=-1, duration_ms=round(seconds * 1000), state_kept=True, reason=reason
    )
