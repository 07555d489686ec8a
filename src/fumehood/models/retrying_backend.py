"""Retries turns that failed before their first event, and records turn metrics."""

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from fumehood.gateway_stats import ModelStats
from fumehood.interfaces import AcceptBatch, Clock, ModelBackend
from fumehood.models.upstream.upstream_errors import INSUFFICIENT_QUOTA
from fumehood.protocol.model_turns import AnyModelEvent, ModelRequest
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


class RetryingBackend:
    """A `ModelBackend` that retries another one with exponential backoff and jitter.

    It retries at most `retries` times, if the server is unreachable or rate-limits, and only before the first event.
    It follows Retry-After, unless that exceeds the longest backoff; then it gives up.
    """

    def __init__(
        self,
        backend: ModelBackend,
        retries: int,
        clock: Clock,
        *,
        jitter: Callable[[], float] = random.random,
        stats: ModelStats | None = None,
    ) -> None:
        self._backend = backend
        self._retries = retries
        self._clock = clock
        self._jitter = jitter
        self._stats = stats or ModelStats()
        self.validate_request = backend.validate_request
        self.count_tokens = backend.count_tokens
        self.get_profile = backend.get_profile
        self.close = backend.close

    async def stream(
        self, request: ModelRequest, accept_batch: AcceptBatch | None = None
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        stats, clock = self._stats, self._clock
        requested_at = clock.monotonic()
        has_started, outcome = False, "cancelled"
        attempt = 0
        stats.running_turns += 1
        try:
            while True:
                try:
                    async with aclosing(self._backend.stream(request, accept_batch)) as batches:
                        async for batch in batches:
                            if not has_started:
                                has_started = True
                                stats.first_event_seconds.observe(clock.monotonic() - requested_at)
                            yield batch
                    outcome = "ended"
                    return
                except ModelError as error:
                    kind = _ERROR_KINDS.get(type(error), "failed")
                    stats.errors[kind] += 1
                    attempt += 1
                    wait = self._backoff(error, attempt)
                    if has_started or attempt > self._retries or wait is None:
                        outcome = kind
                        raise
                stats.retries += 1
                await clock.sleep(wait)
        finally:
            stats.running_turns -= 1
            stats.ended_turns[outcome] += 1
            stats.turn_seconds.observe(clock.monotonic() - requested_at)

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
