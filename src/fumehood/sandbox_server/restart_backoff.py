"""Backoff between restarts of zygotes and of the egress proxy.

The first failures are retried at once. More within a minute suggest a cause that the next zygote would meet as well,
and a start costs a second of CPU time: the delay doubles up to a maximum.
"""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_SECONDS = 60.0  # older failures do not count
_IMMEDIATE_RESTARTS = 2  # this many within the window without delay
_INITIAL_DELAY = 1.0
_MAX_DELAY = 30.0


class RestartBackoff:
    """Counts recent failures and computes the delay of the next start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=16)

    def record_failure(self) -> None:
        self._failures.append(self._clock())

    @property
    def recent_failures(self) -> int:
        """Number of failures within the last minute."""
        return sum(self._clock() - failure < _WINDOW_SECONDS for failure in self._failures)

    def delay(self) -> float:
        """Seconds until the next start is allowed."""
        excess = self.recent_failures - _IMMEDIATE_RESTARTS
        if excess <= 0:
            return 0.0
        length = min(_INITIAL_DELAY * 2 ** (excess - 1), _MAX_DELAY)
        return max(0.0, self._failures[-1] + length - self._clock())
