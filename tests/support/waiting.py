"""Waits for conditions that nothing announces."""

import asyncio
import time
from collections.abc import Callable


async def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def becomes_true(condition: Callable[[], object], seconds: float = 20) -> bool:
    """Wait without an event loop; returns whether the condition came to hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
