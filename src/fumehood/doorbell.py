"""Lets one task wait for something that the event loop hears of, and go on at once; imports the standard library.

A future wakes its task in the next round of the event loop. For a stream of small events that round costs as much as
what is done with an event.
"""

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any

type _Resume = Callable[[Any], object]


class Doorbell:
    """Awaited by one task at a time, as often as it likes. What asyncio asks of a future, a task finds here.

    waiting: whether a task does.
    """

    __slots__ = ("_asyncio_future_blocking", "_cancelled", "_context", "_loop", "_resume")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._resume: _Resume | None = None
        self._context: Context | None = None
        self._cancelled: asyncio.CancelledError | None = None

    @property
    def waiting(self) -> bool:
        return self._resume is not None

    def ring(self) -> None:
        """Whoever waits goes on before this returns, if it is the event loop that calls and not another task."""
        resume, context = self._resume, self._context
        if resume is None or context is None:
            return
        self._resume = None
        if asyncio.current_task(self._loop) is None:
            context.run(resume, self)
        else:
            self._loop.call_soon(resume, self, context=context)

    def __await__(self) -> Generator["Doorbell"]:
        if self._resume is not None:
            raise RuntimeError("Somebody else is waiting here.")
        self._cancelled = None
        self._asyncio_future_blocking = True
        yield self

    # ---- what a task asks of a future -------------------------------------------------------------------------

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, resume: _Resume, *, context: Context) -> None:
        self._resume, self._context = resume, context

    def result(self) -> None:
        if self._cancelled is not None:
            raise self._cancelled

    def cancel(self, msg: object = None) -> bool:
        """By whoever cancels the task: another one, mostly, in whose place it cannot go on."""
        resume, self._resume = self._resume, None
        if resume is None:
            return False
        self._cancelled = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        self._loop.call_soon(resume, self, context=self._context)
        return True
