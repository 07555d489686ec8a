"""Asks a model again for a turn that has not begun; imports `interfaces`, siblings and the standard library."""

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from fumehood.interfaces import Clock, ModelBackend, Take
from fumehood.models.upstream_errors import NO_CREDIT_CODE
from fumehood.protocol.errors import ModelError, ModelRateLimited, ModelUnreachable
from fumehood.protocol.models import AnyModelEvent, ModelProfile, ModelRequest

_FIRST_WAIT = 0.25
_LONGEST_WAIT = 10.0


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
    ) -> None:
        self._backend = backend
        self._retries = retries
        self._clock = clock
        self._spread = spread

    async def stream(
        self, request: ModelRequest, take: Take | None = None
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        attempt = 0
        while True:
            begun = False
            try:
                async with aclosing(self._backend.stream(request, take)) as batches:
                    async for batch in batches:
                        begun = True
                        yield batch
                return
            except (ModelUnreachable, ModelRateLimited) as error:
                attempt += 1
                wait = self._wait(error, attempt)
                if begun or attempt > self._retries or wait is None:
                    raise
            await self._clock.sleep(wait)

    def _wait(self, error: ModelError, attempt: int) -> float | None:
        """Seconds before the next attempt; None if it would be no use."""
        if error.wire_code == NO_CREDIT_CODE:
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
