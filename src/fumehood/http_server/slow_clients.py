"""Timeouts for clients that read or send too slowly."""

import asyncio
import logging
from collections.abc import Callable
from typing import override

# A client with a full write buffer must read at least _STALL_BYTES in _STALL_SECONDS.
_STALL_SECONDS = 60.0
_STALL_BYTES = 64 << 10

MIN_BYTES_PER_SECOND = 1024
"""Minimum average rate of a sender."""

logger = logging.getLogger(__name__)


def do_nothing() -> None:
    """The default callback."""


class TransferDeadline:
    """How long to wait for a sender. Waiting uses up the time and received bytes extend it, so that a pause is
    tolerated and a trickle is not.

    max_pause: seconds without data.
    min_bytes_per_second: bytes that extend the time by a second; 0 if any byte restores all of it.
    """

    __slots__ = ("_max_pause", "_min_bytes_per_second", "remaining_seconds")

    def __init__(self, max_pause: float, min_bytes_per_second: int = MIN_BYTES_PER_SECOND) -> None:
        self.remaining_seconds = self._max_pause = max_pause
        self._min_bytes_per_second = min_bytes_per_second

    def extend(self, size: int, waited: float = 0.0) -> None:
        earned = size / self._min_bytes_per_second if self._min_bytes_per_second else self._max_pause
        self.remaining_seconds = min(self._max_pause, max(self.remaining_seconds - waited, 0.0) + earned)


class StalledClientMixin(asyncio.Protocol):
    """Protocol mixin that aborts the connection of a client that stops reading.

    on_stalled: called when that happens.
    """

    on_stalled: Callable[[], None] = staticmethod(do_nothing)
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _stall_timer: "_StallTimer | None" = None

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = _StallTimer(self.loop, self.transport, self.on_stalled)

    @override
    def resume_writing(self) -> None:
        self.cancel_stall_timer()
        super().resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.cancel_stall_timer()
        super().connection_lost(exc)

    def cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


class _StallTimer:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, on_stalled: Callable[[], None]
    ) -> None:
        self._on_stalled = on_stalled
        self._loop = loop
        self._transport = transport
        self._schedule()

    def _schedule(self) -> None:
        self._buffered_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(_STALL_SECONDS, self._check)

    def _check(self) -> None:
        if self._transport.get_write_buffer_size() > self._buffered_bytes - _STALL_BYTES:
            logger.info("Disconnected a client that does not read.")
            self._on_stalled()
            self._transport.abort()  # close() would wait for the client
        else:
            self._schedule()

    def cancel(self) -> None:
        self._timer.cancel()
