"""One execution in a container, within the time that a response has; imports `interfaces` and `protocol`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from fumehood.interfaces import Container, ContainerEvent
from fumehood.protocol.sandbox import End, EndStatus, ExecuteRequest

RAN = frozenset({"ok", "error"})  # code that raises has run, and so has a command that fails
NOTHING = "(no output)"  # what a model is told of a call that said nothing
_LAST_WORD_SECONDS = 0.5  # the sandbox's own time-out tells more than ours


async def executed(
    container: Container, request: ExecuteRequest, remaining: float
) -> AsyncGenerator[ContainerEvent]:
    """Its events, the `End` last whatever happens, after at most so many seconds. Closing it interrupts the code."""
    if remaining <= 0:
        yield ended("timeout", f"The time for this response was over before the {request.noun} began.")
        return
    request = msgspec.structs.replace(request, timeout_seconds=min(request.timeout_seconds, remaining))
    loop = asyncio.get_running_loop()
    began = loop.time()
    until = began + remaining + _LAST_WORD_SECONDS
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
            if isinstance(event, End):
                return
    if is_over:  # said when closing the events has stopped it
        reason = f"The time for this response is over; the {request.noun} was stopped."
        yield ended("timeout", reason, loop.time() - began)
    else:
        reason = f"The sandbox did not say how the {request.noun} ended."
        yield ended("lost", reason, loop.time() - began)


def ended(status: EndStatus, reason: str, seconds: float = 0.0) -> End:
    """The end of a call that its container does not tell; `seconds` is how long it has taken."""
    return End(status=status, exit_code=-1, duration_ms=round(seconds * 1000), state_kept=True, reason=reason)
