"""Leaves readers that take next to nothing of what is sent to them; imports the standard library."""

import asyncio
import logging
from collections.abc import Callable
from typing import override

# A reader for whom answers wait takes at least this much in this time, or is gone.
_SECONDS = 60.0
_BYTES = 64 << 10

logger = logging.getLogger(__name__)


def nobody() -> None:
    """Does not want to know."""


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
