"""Which requests to a model server are repeated and when, and the metrics of each."""

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager

from fumehood.gateway_stats import ModelStats
from fumehood.interfaces import Clock
from fumehood.models.upstream.upstream_errors import INSUFFICIENT_QUOTA
from fumehood.protocol.openai.api_errors import (
    ModelError,
    ModelRateLimited,
    ModelRejectedRequest,
    ModelTimeout,
    ModelUnreachable,
)

_INITIAL_BACKOFF = 0.25
_MAX_BACKOFF = 10.0
_ERROR_KINDS: dict[type[ModelError], str] = {
    ModelRejectedRequest: "refused",
    ModelRateLimited: "rate_limited",
    ModelUnreachable: "unreachable",
    ModelTimeout: "timeout",
}


class TurnRetries:
    """Exponential backoff with jitter, for requests whose response has not started.

    It retries at most `retries` times, if the server is unreachable or rate-limits. It follows Retry-After, unless that
    exceeds the longest backoff; then it gives up.
    """

    def __init__(
        self,
        retries: int,
        clock: Clock,
        *,
        jitter: Callable[[], float] = random.random,
        stats: ModelStats | None = None,
    ) -> None:
        self._retries = retries
        self._clock = clock
        self._jitter = jitter
        self._stats = stats or ModelStats()

    @contextmanager
    def record_turn(self) -> "Generator[RecordedTurn]":
        """Count a request in the metrics while the block runs."""
        stats, clock = self._stats, self._clock
        turn = RecordedTurn(stats, clock)
        stats.running_turns += 1
        try:
            yield turn
        finally:
            stats.running_turns -= 1
            stats.ended_turns[turn.outcome] += 1
            stats.turn_seconds.observe(clock.monotonic() - turn.requested_at)

    async def wait_or_raise(self, turn: "RecordedTurn", error: ModelError) -> None:
        """Wait until the request may be repeated. Raises the error if it may not."""
        turn.fail(error)
        turn.attempts += 1
        wait = self._backoff(error, turn.attempts)
        if turn.has_started or turn.attempts > self._retries or wait is None:
            raise error
        turn.outcome = "cancelled"
        self._stats.retries += 1
        await self._clock.sleep(wait)

    def _backoff(self, error: ModelError, attempt: int) -> float | None:
        """Seconds until the next attempt; None if the error is not worth a retry."""
        if (
            not isinstance(error, ModelUnreachable | ModelRateLimited)
            or error.wire_code == INSUFFICIENT_QUOTA
        ):
            return None
        backoff = min(_INITIAL_BACKOFF * 2 ** (attempt - 1), _MAX_BACKOFF) * (0.5 + self._jitter() / 2)
        if error.retry_after is None:
            return backoff
        return max(error.retry_after, backoff) if error.retry_after <= _MAX_BACKOFF else None


class RecordedTurn:
    """One request and its attempts.

    has_started: whether something of the response was passed on. outcome: `cancelled` until it is known.
    """

    __slots__ = ("_clock", "_stats", "attempts", "has_started", "outcome", "requested_at")

    def __init__(self, stats: ModelStats, clock: Clock) -> None:
        self._stats = stats
        self._clock = clock
        self.requested_at = clock.monotonic()
        self.has_started = False
        self.outcome = "cancelled"
        self.attempts = 0

    def mark_started(self) -> None:
        """Record the time to the first event, once."""
        if not self.has_started:
            self.has_started = True
            self._stats.first_event_seconds.observe(self._clock.monotonic() - self.requested_at)

    def fail(self, error: ModelError) -> None:
        """Count an error of the server; it is the outcome unless another attempt follows."""
        self.outcome = _ERROR_KINDS.get(type(error), "failed")
        self._stats.errors[self.outcome] += 1
