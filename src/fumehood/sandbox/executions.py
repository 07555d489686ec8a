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
_PAUSE_SECONDS = 0.15
_STOP_SECONDS = 10.0


async def followed(
    sandbox: Sandbox, request: ExecuteRequest, execution_id: str, clock: Clock
) -> AsyncGenerator[AnyOutput]:
    """The events of a call, and an `End` in any case; nothing runs twice. Leaving it interrupts the code.

    Only where the sandbox was gone before the call could begin it raises SandboxGone or SandboxNotFound.

    A provider that has tried to resume the call itself says so, and is not asked again; another one is asked a few
    times, for about two seconds.
    """
    seen = failures = 0
    ended = False
    progress = _Progress()
    events = sandbox.execute(request)
    running = phase("run")
    try:
        while True:
            try:
                async with aclosing(events):
                    async for event in events:
                        seen += 1
                        failures = 0
                        progress.advance()
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
            progress.break_off(trouble)
            if failures > _RECONNECTS or not _worth_another_try(trouble, seen):
                ended = not isinstance(trouble, Unreachable)
                end = lost(trouble, request.noun, progress)
                _tell(running, end)
                yield end
                return
            await clock.sleep(_PAUSE_SECONDS * 2 ** (failures - 1))
            # What never arrived is sent again; what the server has forgotten it refuses to run.
            missing = isinstance(trouble, ExecutionNotFound)
            events = sandbox.execute(request) if missing else sandbox.follow(execution_id, after=seen - 1)
    finally:
        running.end()
        if not ended:
            await _stop(sandbox, execution_id, seen - 1)


class _Progress:
    """How far a call has come.

    may_have_run: whether the code may have begun; False only where the server has never had the request.
    duration_ms: from the request until the connection broke, or until now.
    """

    def __init__(self) -> None:
        self.may_have_run = False
        self._began = asyncio.get_running_loop().time()
        self._broke: float | None = None

    def advance(self) -> None:
        self.may_have_run = True
        self._broke = None

    def break_off(self, trouble: SandboxError) -> None:
        self.may_have_run = self.may_have_run or not trouble.refused
        if self._broke is None:
            self._broke = trouble.broke_at or asyncio.get_running_loop().time()

    @property
    def duration_ms(self) -> int:
        until = asyncio.get_running_loop().time() if self._broke is None else self._broke
        return round((until - self._began) * 1000)


def _tell(running: Phase, end: End) -> None:
    running.began_with("packages", end.packages_ms * 1_000_000)
    running.note("status", end.status)
    running.end()


def _worth_another_try(trouble: SandboxError, seen: int) -> bool:
    if trouble.given_up:
        return False
    return isinstance(trouble, Unreachable) or (isinstance(trouble, ExecutionNotFound) and not seen)


async def _stop(sandbox: Sandbox, execution_id: str, after: int) -> None:
    """Interrupt a call and wait for its end: whoever goes on may say that the code was stopped."""
    with suppress(SandboxError, TimeoutError):
        async with asyncio.timeout(_STOP_SECONDS):
            if await sandbox.interrupt(execution_id):
                async with aclosing(sandbox.follow(execution_id, after=after)) as events:
                    async for _ in events:
                        pass


def lost(trouble: SandboxError, noun: str, progress: _Progress | None = None) -> End:
    """The end of a call that could not begin, or was lost. Models are not told what servers are called.

    noun: what was to run, `code` or `command`. progress: None for a call that has not begun.
    """
    gone = isinstance(trouble, SandboxGone | SandboxNotFound)
    may_have_run = progress is not None and progress.may_have_run
    if gone:
        reason = "The sandbox was lost."
    elif trouble.status < 500:
        reason = f"The sandbox refused: {trouble.message}"
    elif may_have_run:
        reason = "The connection to the sandbox was lost and could not be restored."
    else:
        reason = "The sandboxes cannot be reached at the moment; try again later."
    if may_have_run:
        reason += (
            f" The {noun} may have run, in part or to its end: check what it did before you run it again."
        )
    elif gone or trouble.status >= 500:
        reason += f" The {noun} did not run."
    logger.warning("A call of code was lost: %s: %s", type(trouble).__name__, trouble.message)
    duration = progress.duration_ms if progress is not None and may_have_run else 0
    return End(status="lost", exit_code=-1, duration_ms=duration, state_kept=not gone, reason=reason)
