"""A clock that keeps nobody waiting; imports asyncio."""

import asyncio


class Waits:
    """A clock that does not make anybody wait, and knows how long they would have."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)
