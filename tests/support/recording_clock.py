"""A clock that records sleeps instead of waiting."""

import asyncio


class RecordingClock:
    """A clock whose `sleep` returns at once and is recorded."""

    def __init__(self) -> None:
        self.sleeps: list[float] = []

    def now(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        await asyncio.sleep(0)
