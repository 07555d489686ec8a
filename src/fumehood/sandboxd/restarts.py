"""How soon a zygote that ended may be followed by another; imports only the standard library.

One death is an accident and is made good at once. One that follows soon upon another points to something that the
next zygote would meet as well, and starting one costs a second of processor time: the pause doubles up to a bound.
"""

import time
from collections import deque
from collections.abc import Callable

_WINDOW = 60.0  # seconds after which a death is forgotten
_FREE = 2  # this many within the window are made good at once
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


class Restarts:
    """Remembers the deaths of zygotes, and how long the next start should wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=16)

    def died(self) -> None:
        self._deaths.append(self._clock())

    @property
    def recent(self) -> int:
        """How many ended within the last minute."""
        return sum(self._clock() - death < _WINDOW for death in self._deaths)

    def pause(self) -> float:
        """Seconds until the next may be started; 0 at once."""
        excess = self.recent - _FREE
        if excess <= 0:
            return 0.0
        length = min(_FIRST_PAUSE * 2 ** (excess - 1), _LONGEST_PAUSE)
        return max(0.0, self._deaths[-1] + length - self._clock())
