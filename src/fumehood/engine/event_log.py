"""The event log of one run: numbered events for any number of readers.

The run appends and never waits. Events that every reader has read are discarded, so the length of the log is the lag
of its slowest reader.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from fumehood.protocol.openai.api_errors import InternalServerError
from fumehood.protocol.openai.stream_events import StreamEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class LagLimits:
    """How far a reader may lag before the run is cancelled.

    events, seconds: a lag of more than `events` may last `seconds`.
    hard_events: a lag that cancels the run at once.
    """

    events: int = 10_000
    seconds: float = 30.0
    hard_events: int = 50_000


def _noop() -> None:
    pass


class EventLog:
    """The events of one run, for any number of readers.

    recording: False for a blocking run, which has no readers: events are dropped.
    on_overrun: called once, when a reader exceeds the lag limits.
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
        self._first_number = 0  # sequence number of the oldest event that is not discarded
        self._next_number = 0
        self._lagging_since: float | None = None
        self._is_overrun = False
        self._is_closed = False
        self._readers: list[EventLogReader] = []

    def append(self, events: Sequence[StreamEvent]) -> None:
        """Number the events, append them and wake the readers."""
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
        """Mark the log as complete."""
        self._is_closed = True
        self._on_overrun = _noop  # breaks the reference cycle with the run
        self._wake_readers()

    def open_reader(self, after: int, on_available: Callable[[], None]) -> "EventLogReader":
        """Open a reader of the events after sequence number `after`; `on_available` is called when there are more."""
        reader = EventLogReader(self, after + 1, on_available)
        self._readers.append(reader)
        return reader

    async def read(self, after: int) -> AsyncGenerator[Sequence[StreamEvent]]:
        """Yield the events after sequence number `after`, each time all that are available."""
        available = asyncio.Event()
        reader = self.open_reader(after, available.set)
        try:
            while True:
                available.clear()
                batch = reader.read_available()
                if batch:
                    yield batch
                elif reader.is_exhausted:
                    return
                else:
                    await available.wait()
        finally:
            reader.close()

    def _wake_readers(self) -> None:
        for reader in self._readers:
            reader.on_available()

    def read_from(self, position: int) -> Sequence[StreamEvent]:
        """Return the events from `position` on. Raises InternalServerError if they are discarded. For readers."""
        if self._is_overrun or position < self._first_number:
            raise InternalServerError("The events were not read fast enough, and the response was cancelled.")
        if position > self._first_number or len(self._readers) > 1:
            return self._events[position - self._first_number :]
        events, self._events = self._events, []  # the only reader
        self._first_number = self._next_number
        self._lagging_since = None
        return events

    def is_exhausted_at(self, position: int) -> bool:
        return self._is_closed and position >= self._next_number

    def discard_read(self, position: int) -> None:
        """Discard what every reader has read, after one has advanced to `position`."""
        if position == self._first_number:
            return
        slowest = min((reader.position for reader in self._readers), default=self._first_number)
        if slowest >= self._next_number:
            self._events.clear()
        else:
            del self._events[: slowest - self._first_number]
        self._first_number = slowest
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
            # Later: the caller is the run itself, which must not be cancelled inside `append`.
            asyncio.get_running_loop().call_soon(self._on_overrun)


class EventLogReader:
    """See `interfaces.RunEventReader`."""

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
        self.on_available = _noop  # breaks the reference cycle with the owner
