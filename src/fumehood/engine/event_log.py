"""The log of one run: numbered events, read by whoever subscribes.

The run appends and never waits. What every reader of a foreground run has taken is forgotten, so a log is as long as
its slowest reader is behind.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from fumehood.protocol.openai.api_errors import InternalServerError
from fumehood.protocol.openai.stream_events import StreamEvent


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


def _noop() -> None:
    pass


class EventLog:
    """The events of one run, for any number of readers.

    kept: False for a run that nobody will ever subscribe to: events are dropped.
    on_overrun: called once, when a reader is too far behind.
    """

    def __init__(
        self,
        *,
        recording: bool,
        limits: LagLimits,
        monotonic: Callable[[], float],
        on_overrun: Callable[[], None],
    ) -> None:
        self._is_recording = recording
        self._limits = limits
        self._monotonic = monotonic
        self._on_overrun = on_overrun
        self._events: list[StreamEvent] = []
        self._first_number = 0  # the number of the first event that is still here
        self._next_number = 0
        self._lagging_since: float | None = None
        self._is_overrun = False
        self._is_closed = False
        self._readers: list[EventLogReader] = []

    def append(self, events: Sequence[StreamEvent]) -> None:
        """Number these, keep them, and wake the readers."""
        if not self._is_recording:
            return
        number = self._next_number
        for event in events:
            event.sequence_number = number
            number += 1
        self._next_number = number
        self._events.extend(events)
        self._wake_readers()
        if len(self._events) > self._limits.events:
            self._check_lag()

    def close(self) -> None:
        """Nothing more will come."""
        self._is_closed = True
        self._on_overrun = _noop  # it leads to the run, and that to this
        self._wake_readers()

    def open_reader(self, after: int, on_available: Callable[[], None]) -> "EventLogReader":
        """A reader of the events after that number."""
        reader = EventLogReader(self, after + 1, on_available)
        self._readers.append(reader)
        return reader

    async def read(self, after: int) -> AsyncGenerator[Sequence[StreamEvent]]:
        """The events after that number, in batches of all that are there."""
        news = asyncio.Event()
        reader = self.open_reader(after, news.set)
        try:
            while True:
                news.clear()
                batch = reader.read_available()
                if batch:
                    yield batch
                elif reader.is_exhausted:
                    return
                else:
                    await news.wait()
        finally:
            reader.close()

    def _wake_readers(self) -> None:
        for reader in self._readers:
            reader.on_available()

    def read_from(self, position: int) -> Sequence[StreamEvent]:
        """What came from that number on; for readers."""
        if self._is_overrun or position < self._first_number:
            raise InternalServerError("The events were not read fast enough, and the response was cancelled.")
        if position > self._first_number or len(self._readers) > 1:
            return self._events[position - self._first_number :]
        events, self._events = self._events, []  # nobody else wants them
        self._first_number = self._next_number
        self._lagging_since = None
        return events

    def is_exhausted_at(self, position: int) -> bool:
        return self._is_closed and position >= self._next_number

    def discard_read(self, position: int) -> None:
        """Drop what every reader has taken, now that one has taken all before that number."""
        if position == self._first_number:
            return
        done = min((reader.position for reader in self._readers), default=self._first_number)
        if done >= self._next_number:
            self._events.clear()
        else:
            del self._events[: done - self._first_number]
        self._first_number = done
        if len(self._events) <= self._limits.events:
            self._lagging_since = None

    def remove_reader(self, reader: "EventLogReader") -> None:
        self._readers.remove(reader)

    def _check_lag(self) -> None:
        now = self._monotonic()
        if self._lagging_since is None:
            self._lagging_since = now
        too_long = now - self._lagging_since > self._limits.seconds
        if (too_long or len(self._events) > self._limits.hard_events) and not self._is_overrun:
            self._is_overrun = True
            self._events.clear()
            self._first_number = self._next_number
            self._wake_readers()
            # Not at once: it is the run itself that appends, and it must not be cancelled by its own hand.
            asyncio.get_running_loop().call_soon(self._on_overrun)


class EventLogReader:
    """See `interfaces.Reading`."""

    __slots__ = ("_log", "on_available", "position")

    def __init__(self, log: EventLog, position: int, on_available: Callable[[], None]) -> None:
        self._log = log
        self.position = position
        self.on_available = on_available

    @property
    def is_exhausted(self) -> bool:
        return self._log.is_exhausted_at(self.position)

    def read_available(self) -> Sequence[StreamEvent]:
        events = self._log.read_from(self.position)
        if events:
            self.position += len(events)
            self._log.discard_read(self.position)
        return events

    def close(self) -> None:
        self._log.remove_reader(self)
        self.on_available = _noop  # it leads to whoever holds this
