"""Notices when the event loop is late; imports `figures` and the standard library."""

import asyncio
from typing import Self

from fumehood.figures import Distribution

_EVERY_SECONDS = 0.25


class LoopLag:
    """In a `with`: asks to be called every so often, and adds by how much later that happens."""

    def __init__(self, lag: Distribution, every: float = _EVERY_SECONDS) -> None:
        self._lag = lag
        self._every = every
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._due = self._loop.time() + self._every
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._lag.add(max(self._loop.time() - self._due, 0.0))
        self._wait()
