"""Asks a model again for a turn that has not begun, and counts turns; imports `interfaces`, `figures` and siblings."""

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from fumehood.figures import TurnFigures
from fumehood.interfaces import Clock, ModelBackend, Take
from fumehood.models.upstream_errors import NO_CREDIT_CODE
from fumehood.protocol.errors import (
    ModelError,
    ModelRateLimited,
    ModelRefused,
    ModelTimeout,
    ModelUnreachable,
)
from fumehood.protocol.models import AnyModelEvent, ModelProfile, ModelRequest

_FIRST_WAIT = 0.25
_LONGEST_WAIT = 10.0
_KINDS: dict[type[ModelError], str] = {
    ModelRefused: "refused",
    ModelRateLimited: "rate_limited",
    ModelUnreachable: "unreachable",
    ModelTimeout: "timeout",
}


class Retrying:
    """A `ModelBackend` around another.

    A turn is asked for again when the server could not be reached or was busy, `retries` times at most, and never once
    anything of it was given on. The waits double and are spread, so that those who failed together do not come back
    together. A server that says when to come back is believed, unless that is longer than a caller should wait.
    """

    def __init__(
        self,
        backend: ModelBackend,
        retries: int,
        clock: Clock,
        *,
        spread: Callable[[], float] = random.random,
        figures: TurnFigures | None = None,
    ) -> None:
        self._backend = backend
        self._retries = retries
        self._clock = clock
        self._spread = spread
        self._figures = figures or TurnFigures()

    async def stream(
        self, request: ModelRequest, take: Take | None = None
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        turn = _Turn(self._figures, self._clock)
        attempt = 0
        try:
            while True:
                try:
                    async with aclosing(self._backend.stream(request, take)) as batches:
                        async for batch in batches:
                            if not turn.begun:
                                turn.begin()
                            yield batch
                    turn.outcome = "ended"
                    return
                except ModelError as error:
                    kind = turn.failed(error)
                    attempt += 1
                    wait = self._wait(error, attempt)
                    if turn.begun or attempt > self._retries or wait is None:
                        turn.outcome = kind
                        raise
                self._figures.retries += 1
                await self._clock.sleep(wait)
        finally:
            turn.end()

    def _wait(self, error: ModelError, attempt: int) -> float | None:
        """Seconds before the next attempt; None if it would be no use."""
        if not isinstance(error, ModelUnreachable | ModelRateLimited) or error.wire_code == NO_CREDIT_CODE:
            return None
        usual = min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT) * (0.5 + self._spread() / 2)
        if error.retry_after is None:
            return usual
        return max(error.retry_after, usual) if error.retry_after <= _LONGEST_WAIT else None

    def check(self, request: ModelRequest) -> None:
        self._backend.check(request)

    async def count(self, request: ModelRequest) -> tuple[int, bool]:
        return await self._backend.count(request)

    def profile(self, model: str) -> ModelProfile:
        return self._backend.profile(model)

    async def close(self) -> None:
        await self._backend.close()


class _Turn:
    """One turn, as it is counted.

    begun: whether anything of it has come. outcome: by how it ended; nothing else was said, so somebody left it.
    """

    __slots__ = ("_asked_at", "_clock", "_figures", "begun", "outcome")

    def __init__(self, figures: TurnFigures, clock: Clock) -> None:
        self._figures = figures
        self._clock = clock
        self._asked_at = clock.monotonic()
        self.begun = False
        self.outcome = "cancelled"
        figures.running += 1

    def begin(self) -> None:
        self.begun = True
        self._figures.first_piece.add(self._clock.monotonic() - self._asked_at)

    def failed(self, error: ModelError) -> str:
        """The kind of what went wrong this time."""
        kind = _KINDS.get(type(error), "failed")
        self._figures.errors[kind] += 1
        return kind

    def end(self) -> None:
        self._figures.running -= 1
        self._figures.ended[self.outcome] += 1
        self._figures.seconds.add(self._clock.monotonic() - self._asked_at)
