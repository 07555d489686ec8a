"""A clock that tests control."""

import asyncio
import heapq
import itertools


class FakeClock:
    """A `Clock` that moves by `advance` alone."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._elapsed = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._elapsed

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed + seconds, next(self._order), woken))
        await woken

    def advance(self, seconds: float) -> None:
        """Move the time. Due sleepers wake in order, and run when the caller next awaits."""
        self._now += seconds
        self._elapsed += seconds
        while self._sleepers and self._sleepers[0][0] <= self._elapsed:
            woken = heapq.heappop(self._sleepers)[2]
            if not woken.done():
                woken.set_result(None)
