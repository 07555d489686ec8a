"""Readiness check: whether the sandbox server answers."""

import asyncio
import math
from typing import Protocol

from fumehood.interfaces import Clock
from fumehood.protocol.sandbox.sandbox_errors import SandboxError

_CACHE_SECONDS = 0.5
_MIN_CHECK_INTERVAL = 0.1  # even if calls fail all the time
_HEALTH_TIMEOUT = 1.5
_NOT_READY = "The sandbox server does not answer, so no code can be run."


class HealthCheckedProvider(Protocol):
    """A provider whose health can be checked.

    failures: count of requests that failed; if it rises, a cached result is not used any more.
    """

    @property
    def failures(self) -> int: ...

    async def health(self) -> object:
        """Raises SandboxError if no code can be run."""
        ...


class SandboxReadiness:
    """Returns why no code can run now, or None.

    Results are cached for half a second, less after a failed call. A server that has died or hangs is noticed within
    two seconds.
    """

    def __init__(self, provider: HealthCheckedProvider, clock: Clock) -> None:
        self._provider = provider
        self._clock = clock
        self._checked_at = -math.inf
        self._failures = 0
        self._reason: str | None = None
        self._lock = asyncio.Lock()

    async def __call__(self) -> str | None:
        async with self._lock:
            if not self._is_fresh():
                self._reason = await self._check_health()
                self._checked_at = self._clock.monotonic()
                self._failures = self._provider.failures
        return self._reason

    def _is_fresh(self) -> bool:
        age = self._clock.monotonic() - self._checked_at
        return age < (_CACHE_SECONDS if self._provider.failures == self._failures else _MIN_CHECK_INTERVAL)

    async def _check_health(self) -> str | None:
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT):
                await self._provider.health()
        except (SandboxError, TimeoutError):
            return _NOT_READY
        return None
