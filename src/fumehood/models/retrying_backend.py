"""Retries turns that failed before their first event, and records turn metrics."""

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from fumehood.gateway_stats import ModelStats
from fumehood.interfaces import AcceptBatch, Clock, ModelBackend
from fumehood.models.upstream.turn_retries import TurnRetries
from fumehood.protocol.model_turns import AnyModelEvent, ModelRequest
from fumehood.protocol.openai.api_errors import ModelError


class RetryingBackend:
    """A `ModelBackend` that retries another one, as `TurnRetries` describes, before the first event only."""

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
        self._retries = TurnRetries(retries, clock, jitter=jitter, stats=stats)
        self.validate_request = backend.validate_request
        self.count_tokens = backend.count_tokens
        self.get_profile = backend.get_profile
        self.close = backend.close

    async def stream(
        self, request: ModelRequest, accept_batch: AcceptBatch | None = None
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        with self._retries.record_turn() as turn:
            while True:
                try:
                    async with aclosing(self._backend.stream(request, accept_batch)) as batches:
                        async for batch in batches:
                            if not turn.has_started:
                                turn.mark_started()
                            yield batch
                    turn.outcome = "ended"
                    return
                except ModelError as error:
                    await self._retries.wait_or_raise(turn, error)
