"""A clock that keeps nobody waiting."""

import asyncio


class RecordingClock:
    """A clock that does not make anybody wait, and knows how long they would have."""

    def __init__(self) -> None:
        self.sleeps: list[float] = []

    def now(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        await asyncio.sleep(0)
