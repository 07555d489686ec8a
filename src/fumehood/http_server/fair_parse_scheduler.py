"""Limits the time per event-loop round that connections spend parsing received data.

uvloop reads up to 8 MB of one connection per round. Parsing that much can take seconds, for instance a million pings.
"""

import asyncio
from collections import deque
from time import perf_counter
from typing import Protocol, override

SLICE_BYTES = 1 << 14
"""Bytes parsed at a time."""

_PARSE_SECONDS_PER_ROUND = 0.01  # for all connections together


class ParsingConnection(Protocol):
    """A connection with unparsed data."""

    def parse_slice(self) -> bool:
        """Parse one slice; return whether there are more. If it raises, the connection is aborted."""
        ...


class FairParseScheduler:
    """Round-robin scheduler: data beyond the time limit of a round is parsed in later rounds, one slice per connection
    at a time.

    spent_seconds: parsing time of this round.
    """

    __slots__ = ("_is_scheduled", "_waiting", "spent_seconds")

    def __init__(self) -> None:
        self.spent_seconds = 0.0
        self._waiting: deque[ParsingConnection] = deque()
        self._is_scheduled = False

    @property
    def is_exhausted(self) -> bool:
        return self.spent_seconds > _PARSE_SECONDS_PER_ROUND

    def schedule(self, connection: ParsingConnection) -> None:
        """Parse the data of a connection in the next rounds."""
        self._waiting.append(connection)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_round)

    def _run_round(self) -> None:
        self.spent_seconds = 0.0
        waiting = self._waiting
        try:
            while waiting and not self.is_exhausted:
                connection = waiting.popleft()
                if connection.parse_slice():
                    waiting.append(connection)
        finally:  # an exception must not stop the others
            self._is_scheduled = bool(waiting)
            if waiting:
                asyncio.get_running_loop().call_soon(self._run_round)


def split_slices(data: bytes, size: int = SLICE_BYTES) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


class SlicedReadProtocol(asyncio.Protocol):
    """Protocol mixin that passes received data to the parsing class in slices.

    slice_bytes: smaller where a byte can cause more work.
    """

    scheduler: FairParseScheduler
    slice_bytes = SLICE_BYTES
    transport: asyncio.Transport
    _unparsed: deque[bytes] | None = None

    @property
    def is_read_paused(self) -> bool:
        """Whether the protocol itself has paused reading."""
        return False

    @property
    def has_unparsed(self) -> bool:
        """Whether reading is paused until the received data is parsed."""
        return bool(self._unparsed)

    @override
    def data_received(self, data: bytes) -> None:
        scheduler = self.scheduler
        if len(data) <= self.slice_bytes and not self._unparsed and not scheduler.is_exhausted:
            began = perf_counter()
            super().data_received(data)
            scheduler.spent_seconds += perf_counter() - began
            return
        if not self._unparsed:
            self._unparsed = deque()
            scheduler.schedule(self)
        self._unparsed.extend(split_slices(data, self.slice_bytes))
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def parse_slice(self) -> bool:
        """See `ParsingConnection`."""
        unparsed = self._unparsed
        if not unparsed:
            return False
        if self.transport.is_closing():
            unparsed.clear()
            return False
        protocol = self.transport.get_protocol()
        if protocol is not self:  # the connection has become a WebSocket
            rest = b"".join(unparsed)
            unparsed.clear()
            self.transport.resume_reading()
            if isinstance(protocol, asyncio.Protocol):
                protocol.data_received(rest)
            return False
        began = perf_counter()
        try:
            super().data_received(unparsed.popleft())
        except BaseException:  # as the event loop does
            unparsed.clear()
            self.transport.abort()
            raise
        finally:
            self.scheduler.spent_seconds += perf_counter() - began
        if unparsed:
            return True
        if not self.is_read_paused and not self.transport.is_closing():
            self.transport.resume_reading()
        return False

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._unparsed:
            self._unparsed.clear()
        super().connection_lost(exc)
