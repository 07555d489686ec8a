"""One execution in a container, within the time that a response has."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from fumehood.interfaces import Container, ContainerEvent
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, ExecutionEndStatus

RAN_STATUSES = frozenset({"ok", "error"})  # code that raises has run, and so has a command that fails
NO_OUTPUT = "(no output)"  # what a model is told of a call that said nothing
_TIMEOUT_GRACE_SECONDS = 0.5  # the sandbox's own time-out tells more than ours


async def execute_within(
    container: Container, request: ExecuteRequest, timeout: float
) -> AsyncGenerator[ContainerEvent]:
    """Its events, the `End` last whatever happens, after at most so many seconds. Closing it interrupts the code."""
    if timeout <= 0:
        yield make_end("timeout", f"The time for this response was over before the {request.noun} began.")
        return
    request = msgspec.structs.replace(request, timeout_seconds=min(request.timeout_seconds, timeout))
    loop = asyncio.get_running_loop()
    began = loop.time()
    until = began + timeout + _TIMEOUT_GRACE_SECONDS
    is_over = False
    async with aclosing(container.execute(request)) as events:
        while not is_over:
            try:
                async with asyncio.timeout_at(until):
                    event = await anext(events)
            except StopAsyncIteration:
                break
            except TimeoutError:
                is_over = True
                continue
            yield event
            if isinstance(event, ExecutionEnd):
                return
    if is_over:  # said when closing the events has stopped it
        reason = f"The time for this response is over; the {request.noun} was stopped."
        yield make_end("timeout", reason, loop.time() - began)
    else:
        reason = f"The sandbox did not say how the {request.noun} ended."
        yield make_end("lost", reason, loop.time() - began)


def make_end(status: ExecutionEndStatus, reason: str, seconds: float = 0.0) -> ExecutionEnd:
    """The end of a call that its container does not tell; `seconds` is how long it has taken."""
    return ExecutionEnd(
        status=status, exit_code=-1, duration_ms=round(seconds * 1000), state_kept=True, reason=reason
    )
