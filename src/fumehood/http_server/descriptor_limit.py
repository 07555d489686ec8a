"""Keeps some file descriptors for what a server needs besides connections."""

import logging
import resource
import time
from collections.abc import Callable

_LOG_INTERVAL = 60.0

logger = logging.getLogger(__name__)


class FileDescriptorLimit:
    """Refuses connections that would take the last descriptors of the process.

    uvloop accepts connections that there is no descriptor for, and closes them without a word to anybody; and an
    answer needs descriptors, too: for a model server, for files. The operator is told once a minute.

    limit: how many there are, -1 for as many as one likes.
    """

    def __init__(
        self,
        limit: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._monotonic = monotonic
        self._rejected_count = 0
        self._logged_at: float | None = None

    def rejects(self, descriptor: int) -> bool:
        """Whether a connection with that number is one too many: a process gets the lowest number that is free."""
        limit = self._limit()
        if limit < 0 or descriptor < limit - max(8, min(64, limit // 16)):
            return False
        self._rejected_count += 1
        now = self._monotonic()
        if self._logged_at is None or now - self._logged_at >= _LOG_INTERVAL:
            self._logged_at = now
            number, self._rejected_count = self._rejected_count, 0
            logger.warning(
                "Refusing connections: nearly all of the %d file descriptors are in use (%d refused since the last "
                "such line). Raise the limit with ulimit -n or LimitNOFILE=.",
                limit,
                number,
            )
        return True
