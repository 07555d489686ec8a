"""One execution in a container, within the time that a response has; imports `interfaces` and `protocol`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from fumehood.interfaces import Container
from fumehood.protocol.sandbox import AnyOutput, End, EndStatus, ExecuteRequest

RAN = frozenset({"ok", "error"})  # code that raises has run, and so has a command that fails
NOTHING = "(no output)"  # what a model is told of a call that said nothing
_LAST_WORD_SECONDS = 0.5  # the sandbox's own time-out tells more than ours


async def executed(
    container: Container, request: ExecuteRequest, remaining: float
) -> AsyncGenerator[AnyOutput]:
    """Its events, the `End` last whatever happens, after at most so many seconds. Closing it interrupts the code."""
    if remaining <= 0:
        yield ended("timeout", f"The time for this response was over before the {_noun(request)} began.")
        return
    request = msgspec.structs.replace(request, timeout_seconds=min(request.timeout_seconds, remaining))
    until = asyncio.get_running_loop().time() + remaining + _LAST_WORD_SECONDS
    async with aclosing(container.execute(request)) as events:
        while True:
            try:
                async with asyncio.timeout_at(until):
                    event = await anext(events)
            except StopAsyncIteration:
                break
            except TimeoutError:
                yield ended(
                    "timeout", f"The time for this response is over; the {_noun(request)} was stopped."
                )
                return
            yield event
            if isinstance(event, End):
                return
    yield ended("lost", f"The sandbox did not say how the {_noun(request)} ended.")


def ended(status: EndStatus, reason: str) -> End:
    return End(status=status, exit_code=-1, duration_ms=0, state_kept=True, reason=reason)


def _noun(request: ExecuteRequest) -> str:
    return "command" if request.language == "shell" else "code"
