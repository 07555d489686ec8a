"""Divides the event loop's time among connections that always have something to parse.

uvloop reads up to 256 KB at a time, and up to 8 MB of one connection in one round of the loop, for as long as there is
something to read. What all that means may take seconds to find out: it may be a million pings.
"""

import asyncio
from collections import deque
from time import perf_counter
from typing import Protocol, override

SLICE_BYTES = 1 << 14
"""Bytes that are parsed at once."""

_PARSE_SECONDS_PER_ROUND = (
    0.01  # of parsing, for all connections together, between two rounds of the event loop
)


class ParsingConnection(Protocol):
    """A connection with bytes that have yet to be parsed."""

    def parse_slice(self) -> bool:
        """Parse some of them; whether there are more. One that raises has ended its connection."""
        ...


class ReadScheduler:
    """Bytes are parsed in slices. Once the slices of all connections have taken their time, the rest waits for the next
    round of the event loop, where each connection has one slice at a time.

    spent: seconds of parsing in this round.
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
        """Have it parse what it holds, when it is its turn."""
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
        finally:  # what one of them raises must not keep the others waiting
            self._is_scheduled = bool(waiting)
            if waiting:
                asyncio.get_running_loop().call_soon(self._run_round)


def split_slices(data: bytes, size: int = SLICE_BYTES) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


class SlicedReadProtocol(asyncio.Protocol):
    """A part of a server's protocol, before the class that parses: gives it what came in slices, as the share allows.

    slice_bytes: fewer where a byte may mean more work.
    """

    scheduler: ReadScheduler
    slice_bytes = SLICE_BYTES
    transport: asyncio.Transport
    _unparsed: deque[bytes] | None = None

    @property
    def is_read_paused(self) -> bool:
        """Whether the protocol itself wants nothing more to be read now."""
        return False

    @property
    def has_unparsed(self) -> bool:
        """Whether nothing more may be read until something is parsed; then that goes on by itself."""
        return bool(self._unparsed)

    @override
    def data_received(self, data: bytes) -> None:
        share = self.scheduler
        if len(data) <= self.slice_bytes and not self._unparsed and not share.is_exhausted:
            began = perf_counter()
            super().data_received(data)
            share.spent_seconds += perf_counter() - began
            return
        if not self._unparsed:
            self._unparsed = deque()
            share.schedule(self)
        self._unparsed.extend(split_slices(data, self.slice_bytes))
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def parse_slice(self) -> bool:
        """See `Parsing`."""
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
        except BaseException:  # as the event loop does where it calls
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
