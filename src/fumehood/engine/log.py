"""The log of one run: numbered events, read by whoever subscribes; imports `protocol` and the standard library.

The run appends and never waits. What every reader of a foreground run has taken is forgotten, so a log is as long as
its slowest reader is behind.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from fumehood.protocol.errors import ServerFault
from fumehood.protocol.events import StreamEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class LagLimits:
    """
    events: how many a reader may be behind.
    seconds: how long it may be further behind than that.
    hard_events: how many are too many at once.
    """

    events: int = 10_000
    seconds: float = 30.0
    hard_events: int = 50_000


class EventLog:
    """
    kept: False for a run that nobody will ever subscribe to: events are numbered and dropped.
    on_overrun: called once, when a reader is too far behind.
    """

    def __init__(
        self, *, kept: bool, limits: LagLimits, monotonic: Callable[[], float], on_overrun: Callable[[], None]
    ) -> None:
        self._kept = kept
        self._limits = limits
        self._monotonic = monotonic
        self._on_overrun = on_overrun
        self._events: list[StreamEvent] = []
        self._first = 0  # the number of the first event that is still here
        self._next = 0
        self._behind_since: float | None = None
        self._overrun = False
        self._closed = False
        self._readers: dict[object, int] = {}
        self._sleepers: list[asyncio.Future[None]] = []

    @property
    def next_number(self) -> int:
        return self._next

    def extend(self, events: Sequence[StreamEvent]) -> None:
        """Number these, keep them, and wake the readers."""
        number = self._next
        for event in events:
            event.sequence_number = number
            number += 1
        self._next = number
        if not self._kept:
            self._first = number
            return
        self._events.extend(events)
        if self._sleepers:
            self._wake()
        if len(self._events) > self._limits.events:
            self._watch_the_lag()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._wake()

    async def read(self, after: int) -> AsyncGenerator[Sequence[StreamEvent]]:
        """The events after that number, in batches of all that are there."""
        reader = object()
        self._readers[reader] = position = after + 1
        try:
            while True:
                if self._overrun or position < self._first:
                    raise ServerFault("The events were not read fast enough, and the response was cancelled.")
                if position < self._next:
                    batch = self._events[position - self._first :]
                    self._readers[reader] = position = self._next
                    self._forget()
                    yield batch
                elif self._closed:
                    return
                else:
                    await self._sleep()
        finally:
            del self._readers[reader]

    async def _sleep(self) -> None:
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers.append(sleeper)
        await sleeper

    def _wake(self) -> None:
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)
        self._sleepers.clear()

    def _forget(self) -> None:
        """Drop what every reader has taken."""
        done = min(self._readers.values())
        if done > self._first:
            del self._events[: done - self._first]
            self._first = done
        if len(self._events) <= self._limits.events:
            self._behind_since = None

    def _watch_the_lag(self) -> None:
        now = self._monotonic()
        if self._behind_since is None:
            self._behind_since = now
        too_long = now - self._behind_since > self._limits.seconds
        if (too_long or len(self._events) > self._limits.hard_events) and not self._overrun:
            self._overrun = True
            self._events.clear()
            self._first = self._next
            self._wake()
            # Not at once: it is the run itself that appends, and it must not be cancelled by its own hand.
            asyncio.get_running_loop().call_soon(self._on_overrun)
