"""How soon a zygote that ended may be followed by another.

One death is an accident and is made good at once. One that follows soon upon another points to something that the
next zygote would meet as well, and starting one costs a second of processor time: the pause doubles up to a bound.
"""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_SECONDS = 60.0  # seconds after which a death is forgotten
_IMMEDIATE_RESTARTS = 2  # this many within the window are made good at once
_INITIAL_DELAY = 1.0
_MAX_DELAY = 30.0


class RestartBackoff:
    """Remembers the deaths of zygotes, and how long the next start should wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=16)

    def record_failure(self) -> None:
        self._failures.append(self._clock())

    @property
    def recent_failures(self) -> int:
        """How many ended within the last minute."""
        return sum(self._clock() - death < _WINDOW_SECONDS for death in self._failures)

    def delay(self) -> float:
        """Seconds until the next may be started; 0 at once."""
        excess = self.recent_failures - _IMMEDIATE_RESTARTS
        if excess <= 0:
            return 0.0
        length = min(_INITIAL_DELAY * 2 ** (excess - 1), _MAX_DELAY)
        return max(0.0, self._failures[-1] + length - self._clock())
