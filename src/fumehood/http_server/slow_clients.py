"""Leaves those who take next to nothing of what is sent, or send next to nothing."""

import asyncio
import logging
from collections.abc import Callable
from typing import override

# A reader for whom answers wait takes at least this much in this time, or is gone.
_STALL_SECONDS = 60.0
_STALL_BYTES = 64 << 10

MIN_BYTES_PER_SECOND = 1024
"""Bytes in a second that a sender has to send, on the whole."""

logger = logging.getLogger(__name__)


def do_nothing() -> None:
    """Does not want to know."""


class TransferDeadline:
    """How many more seconds the sender of something is waited for. They are used up by waiting, and what comes earns
    some of them again; so who pauses is waited for, and who drips is not.

    most: for how long nothing may come.
    slowest: bytes that earn a second; 0 if any of them earns all.
    """

    __slots__ = ("_max_pause", "_min_bytes_per_second", "remaining_seconds")

    def __init__(self, max_pause: float, min_bytes_per_second: int = MIN_BYTES_PER_SECOND) -> None:
        self.remaining_seconds = self._max_pause = max_pause
        self._min_bytes_per_second = min_bytes_per_second

    def extend(self, size: int, waited: float = 0.0) -> None:
        earned = size / self._min_bytes_per_second if self._min_bytes_per_second else self._max_pause
        self.remaining_seconds = min(self._max_pause, max(self.remaining_seconds - waited, 0.0) + earned)


class StalledClientMixin(asyncio.Protocol):
    """A part of a protocol, before the class that does the work: watches its reader while that is behind.

    on_stalled: is told of a reader that was left.
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
            logger.info("A client that read nothing was left.")
            self._on_stalled()
            self._transport.abort()  # closing would wait for it
        else:
            self._schedule()

    def cancel(self) -> None:
        self._timer.cancel()
