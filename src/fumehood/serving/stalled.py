"""Leaves those who take next to nothing of what is sent, or send next to nothing; imports the standard library."""

import asyncio
import logging
from collections.abc import Callable
from typing import override

# A reader for whom answers wait takes at least this much in this time, or is gone.
_SECONDS = 60.0
_BYTES = 64 << 10

SLOWEST = 1024
"""Bytes in a second that a sender has to send, on the whole."""

logger = logging.getLogger(__name__)


def nobody() -> None:
    """Does not want to know."""


class Pace:
    """How many more seconds the sender of something is waited for. They are used up by waiting, and what comes earns
    some of them again; so who pauses is waited for, and who drips is not.

    most: for how long nothing may come.
    slowest: bytes that earn a second; 0 if any of them earns all.
    """

    __slots__ = ("_most", "_slowest", "left")

    def __init__(self, most: float, slowest: int = SLOWEST) -> None:
        self.left = self._most = most
        self._slowest = slowest

    def came(self, size: int, waited: float = 0.0) -> None:
        earned = size / self._slowest if self._slowest else self._most
        self.left = min(self._most, max(self.left - waited, 0.0) + earned)


class LeavesStalled(asyncio.Protocol):
    """A part of a protocol, before the class that does the work: watches its reader while that is behind.

    on_stalled: is told of a reader that was left.
    """

    on_stalled: Callable[[], None] = staticmethod(nobody)
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _watch: "_Watch | None" = None

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch = _Watch(self.loop, self.transport, self.on_stalled)

    @override
    def resume_writing(self) -> None:
        self.stop_watching()
        super().resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_watching()
        super().connection_lost(exc)

    def stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None


class _Watch:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, on_stalled: Callable[[], None]
    ) -> None:
        self._on_stalled = on_stalled
        self._loop = loop
        self._transport = transport
        self._wait()

    def _wait(self) -> None:
        self._waiting_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(_SECONDS, self._look)

    def _look(self) -> None:
        if self._transport.get_write_buffer_size() > self._waiting_bytes - _BYTES:
            logger.info("A client that read nothing was left.")
            self._on_stalled()
            self._transport.abort()  # closing would wait for it
        else:
            self._wait()

    def end(self) -> None:
        self._timer.cancel()
