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
    """How far a reader may fall behind before the run is given up.

    events: how many a reader may be behind.
    seconds: how long it may be further behind than that.
    hard_events: how many are too many at once.
    """

    events: int = 10_000
    seconds: float = 30.0
    hard_events: int = 50_000


def _nobody_cares() -> None:
    pass


class EventLog:
    """The events of one run, for any number of readers.

    kept: False for a run that nobody will ever subscribe to: events are dropped.
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
        self._readers: list[Reader] = []

    def extend(self, events: Sequence[StreamEvent]) -> None:
        """Number these, keep them, and wake the readers."""
        if not self._kept:
            return
        number = self._next
        for event in events:
            event.sequence_number = number
            number += 1
        self._next = number
        self._events.extend(events)
        self._wake()
        if len(self._events) > self._limits.events:
            self._watch_the_lag()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._on_overrun = _nobody_cares  # it leads to the run, and that to this
        self._wake()

    def watch(self, after: int, wake: Callable[[], None]) -> "Reader":
        """A reader of the events after that number."""
        reader = Reader(self, after + 1, wake)
        self._readers.append(reader)
        return reader

    async def read(self, after: int) -> AsyncGenerator[Sequence[StreamEvent]]:
        """The events after that number, in batches of all that are there."""
        news = asyncio.Event()
        reader = self.watch(after, news.set)
        try:
            while True:
                news.clear()
                batch = reader.take()
                if batch:
                    yield batch
                elif reader.over:
                    return
                else:
                    await news.wait()
        finally:
            reader.close()

    def _wake(self) -> None:
        for reader in self._readers:
            reader.wake()

    def taken(self, position: int) -> Sequence[StreamEvent]:
        """What came from that number on; for readers."""
        if self._overrun or position < self._first:
            raise ServerFault("The events were not read fast enough, and the response was cancelled.")
        if position > self._first or len(self._readers) > 1:
            return self._events[position - self._first :]
        events, self._events = self._events, []  # nobody else wants them
        self._first = self._next
        self._behind_since = None
        return events

    def over(self, position: int) -> bool:
        return self._closed and position >= self._next

    def forget(self, position: int) -> None:
        """Drop what every reader has taken, now that one has taken all before that number."""
        if position == self._first:
            return
        done = min((reader.position for reader in self._readers), default=self._first)
        if done >= self._next:
            self._events.clear()
        else:
            del self._events[: done - self._first]
        self._first = done
        if len(self._events) <= self._limits.events:
            self._behind_since = None

    def leave(self, reader: "Reader") -> None:
        self._readers.remove(reader)

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


class Reader:
    """See `interfaces.Reading`."""

    __slots__ = ("_log", "position", "wake")

    def __init__(self, log: EventLog, position: int, wake: Callable[[], None]) -> None:
        self._log = log
        self.position = position
        self.wake = wake

    @property
    def over(self) -> bool:
        return self._log.over(self.position)

    def take(self) -> Sequence[StreamEvent]:
        events = self._log.taken(self.position)
        if events:
            self.position += len(events)
            self._log.forget(self.position)
        return events

    def close(self) -> None:
        self._log.leave(self)
        self.wake = _nobody_cares  # it leads to whoever holds this
