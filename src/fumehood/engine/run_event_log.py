"""The event log of one run: numbered events for any number of readers.

The run appends and never waits. Events that every reader has read are discarded, unless they are retained for readers
that come later.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from fumehood.protocol.openai.api_errors import InternalServerError
from fumehood.protocol.openai.stream_events import StreamEvent

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLagLimits:
    """How far a reader may lag before it is dropped.

    events, seconds: a lag of more than `events` may last `seconds`.
    hard_events: a lag that drops the reader at once.
    """

    events: int = 10_000
    seconds: float = 30.0
    hard_events: int = 50_000


def _noop() -> None:
    pass


class EventLog:
    """The events of one run in progress, in memory, for any number of readers.

    recording: False for a blocking run, which has no readers: events are dropped.
    on_overrun: called once, when the last reader was dropped for its lag, or nobody reads for as long.
    retain_bytes: encoded size up to which events are kept for readers that come later.
    """

    def __init__(
        self,
        *,
        recording: bool,
        limits: ReaderLagLimits,
        monotonic: Callable[[], float],
        on_overrun: Callable[[], None],
        retain_bytes: int = 0,
    ) -> None:
        self._is_recording = recording
        self._limits = limits
        self._monotonic = monotonic
        self._on_overrun = on_overrun
        self._retain_bytes = retain_bytes  # what is left of it
        self._events: list[StreamEvent] = []
        self._first_number = 0  # sequence number of the oldest event that is not discarded
        self._next_number = 0
        self._unread_number = 0  # where the last reader closed, while there is none
        self._lagging_since: float | None = None
        self._is_overrun = False
        self._is_closed = False
        self._readers: list[EventLogReader] = []

    @property
    def holds_all_events(self) -> bool:
        return self._first_number == 0

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
        if self._retain_bytes > 0:
            self._retain_bytes -= sum([len(_encode(event)) for event in events])
        for reader in self._readers:
            reader.on_available()
        if len(self._events) > self._limits.events:
            self._check_lag()

    def close(self) -> None:
        """Mark the log as complete."""
        self._is_closed = True
        self._on_overrun = _noop  # breaks the reference cycle with the run
        for reader in self._readers:
            reader.on_available()

    def open_reader(self, on_available: Callable[[], None]) -> "EventLogReader":
        """Open a reader, from the first event on; `on_available` is called when there are more."""
        reader = EventLogReader(self, on_available)
        self._readers.append(reader)
        return reader

    def read_from(self, position: int) -> Sequence[StreamEvent]:
        """Return the events from `position` on. Raises InternalServerError if they are discarded. For readers."""
        if position < self._first_number:
            raise InternalServerError("The events were not read fast enough.")
        if position > self._first_number or len(self._readers) > 1 or self._retain_bytes > 0:
            return self._events[position - self._first_number :]
        events, self._events = self._events, []  # the only reader
        self._first_number = self._next_number
        self._lagging_since = None
        return events

    def is_exhausted_at(self, position: int) -> bool:
        return self._is_closed and position >= self._next_number

    def discard_read(self, position: int) -> None:
        """Discard what every reader has read, after one has advanced to `position`."""
        if position == self._first_number or self._retain_bytes > 0:
            return
        slowest = self._slowest_position()
        if slowest >= self._next_number:
            self._events.clear()
        else:
            del self._events[: slowest - self._first_number]
        self._first_number = slowest
        if len(self._events) <= self._limits.events:
            self._lagging_since = None

    def _slowest_position(self) -> int:
        return min([reader.position for reader in self._readers], default=self._unread_number)

    def remove_reader(self, reader: "EventLogReader") -> None:
        if reader in self._readers:  # it may have been dropped
            self._readers.remove(reader)
            self._unread_number = reader.position

    def _check_lag(self) -> None:
        """Drop readers that exceed the limits; call `on_overrun` if none is left."""
        lag = self._next_number - self._slowest_position()
        if lag <= self._limits.events:
            self._lagging_since = None
            return
        now = self._monotonic()
        if self._lagging_since is None:
            self._lagging_since = now
        if lag <= self._limits.hard_events and now - self._lagging_since <= self._limits.seconds:
            return
        self._lagging_since = None
        for reader in [*self._readers]:
            if self._next_number - reader.position > self._limits.events:
                self._readers.remove(reader)
                reader.drop()
        if not self._readers and not self._is_overrun:
            self._is_overrun = True
            self._events.clear()
            self._first_number = self._unread_number = self._next_number
            # Later: the caller is the run itself, which must not be cancelled inside `append`.
            asyncio.get_running_loop().call_soon(self._on_overrun)


class EventLogReader:
    """See `interfaces.RunEventReader`."""

    __slots__ = ("_log", "on_available", "position")

    def __init__(self, log: EventLog, on_available: Callable[[], None]) -> None:
        self._log = log
        self.position = 0  # sequence number of the next event; -1 after `drop`
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

    def drop(self) -> None:
        """Make the next read fail."""
        self.position = -1
        self.on_available()

    def close(self) -> None:
        self._log.remove_reader(self)
        self.on_available = _noop  # breaks the reference cycle with the owner
