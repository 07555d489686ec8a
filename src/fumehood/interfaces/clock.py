"""Time, as a seam that tests control."""

from typing import Protocol


class Clock(Protocol):
    """Wall-clock time, monotonic time and sleep. No method raises."""

    def now(self) -> float:
        """Return the Unix time in seconds."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go backwards, for deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait.

        seconds: how long; 0 or less yields to other tasks once.
        """
        ...
