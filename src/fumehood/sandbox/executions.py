"""A call of a sandbox followed to its end, whatever breaks on the way; imports `interfaces` and what is below."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from fumehood.interfaces import Clock, Sandbox
from fumehood.phases import Phase, phase
from fumehood.protocol.sandbox import AnyOutput, End, ExecuteRequest
from fumehood.protocol.sandbox_errors import (
    ExecutionNotFound,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    Unreachable,
)

logger = logging.getLogger(__name__)

_RECONNECTS = 4
_PAUSE_SECONDS = 0.25
_INTERRUPT_SECONDS = 10.0


async def followed(
    sandbox: Sandbox, request: ExecuteRequest, execution_id: str, clock: Clock
) -> AsyncGenerator[AnyOutput]:
    """The events of a call, and an `End` in any case; nothing runs twice. Leaving it interrupts the code.

    Only where the sandbox was gone before the call could begin it raises SandboxGone or SandboxNotFound.

    A provider may have mended broken connections already; one that gives up is asked again a few times.
    """
    seen = failures = 0
    ended = False
    events = sandbox.execute(request)
    running = phase("run")
    try:
        while True:
            try:
                async with aclosing(events):
                    async for event in events:
                        seen += 1
                        failures = 0
                        if isinstance(event, End):
                            ended = True
                            _tell(running, event)
                        yield event
                if ended:
                    return
                trouble: SandboxError = Unreachable("The events of a call ended before their end.")
            except (SandboxGone, SandboxNotFound) as error:
                if error.refused and not failures and not seen:
                    ended = True
                    raise
                trouble = error
            except SandboxError as error:
                trouble = error
            failures += 1
            if failures > _RECONNECTS or not _worth_another_try(trouble, seen):
                ended = not isinstance(trouble, Unreachable)
                end = lost(trouble)
                _tell(running, end)
                yield end
                return
            await clock.sleep(_PAUSE_SECONDS * 2**failures)
            # What never arrived is sent again; what the server has forgotten it refuses to run.
            missing = isinstance(trouble, ExecutionNotFound)
            events = sandbox.execute(request) if missing else sandbox.follow(execution_id, after=seen - 1)
    finally:
        running.end()
        if not ended:
            await _interrupt(sandbox, execution_id)


def _tell(running: Phase, end: End) -> None:
    running.began_with("packages", end.packages_ms * 1_000_000)
    running.note("status", end.status)
    running.end()


def _worth_another_try(trouble: SandboxError, seen: int) -> bool:
    return isinstance(trouble, Unreachable) or (isinstance(trouble, ExecutionNotFound) and not seen)


async def _interrupt(sandbox: Sandbox, execution_id: str) -> None:
    with suppress(SandboxError, TimeoutError):
        async with asyncio.timeout(_INTERRUPT_SECONDS):
            await sandbox.interrupt(execution_id)


def lost(trouble: SandboxError) -> End:
    """The end of a call that was not to be had, or was lost. What servers are called is not for models to know."""
    gone = isinstance(trouble, SandboxGone | SandboxNotFound)
    if gone:
        reason = "The sandbox was lost; variables are gone."
    elif trouble.status >= 500:
        reason = "The sandboxes cannot be reached at the moment; try again later."
    else:
        reason = f"The sandbox refused: {trouble.message}"
    logger.warning("A call of code was lost: %s: %s", type(trouble).__name__, trouble.message)
    return End(status="lost", exit_code=-1, duration_ms=0, state_kept=not gone, reason=reason)
