"""Reserves file descriptors for uses other than client connections."""

import logging
import resource
import time
from collections.abc import Callable

_LOG_INTERVAL = 60.0

logger = logging.getLogger(__name__)


class FileDescriptorLimit:
    """Rejects connections when few file descriptors are left; logs it once a minute.

    Responses need descriptors too (model servers, files), and uvloop closes connections silently when there are none.

    limit: returns the descriptor limit of the process; -1 if unlimited.
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
        """Whether a connection with this descriptor is too many: the kernel assigns the lowest free number."""
        limit = self._limit()
        if limit < 0 or descriptor < limit - max(8, min(64, limit // 16)):
            return False
        self._rejected_count += 1
        now = self._monotonic()
        if self._logged_at is None or now - self._logged_at >= _LOG_INTERVAL:
            self._logged_at = now
            number, self._rejected_count = self._rejected_count, 0
            logger.warning(
                "Rejecting connections: nearly all of the %d file descriptors are in use (%d rejected since the last "
                "message). Raise the limit with ulimit -n or LimitNOFILE=.",
                limit,
                number,
            )
        return True
