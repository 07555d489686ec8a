"""Asks the supervisor, before each few megabytes, whether the sandbox has memory left for them.

A helper that fills the sandbox's memory would trigger the OOM killer: it kills the helper and then, since the files are
still there, the code. Only the supervisor sees the cgroup. The requests are also keepalives. The last one asks whether
the upload is complete, because the helper sees only the end of the stream, broken or not.
"""

import errno
import json
import socket
import time
from typing import Any, Literal

RESERVE_STEP = 4 << 20
_KEEPALIVE_SECONDS = 1.0
_MAX_ANSWER = 4096

type RefusalKind = Literal["refused", "too_large", "abandoned"]


class FileTaskRefused(Exception):
    """The task cannot be performed; the text says why, `kind` selects the supervisor's error, `number` is an errno."""

    def __init__(self, text: str, kind: RefusalKind = "refused", number: int = errno.EINVAL) -> None:
        super().__init__(text)
        self.kind: RefusalKind = kind
        self.number = number


class WriteQuota:
    """Grants a helper what it writes: asks the supervisor over a socket, one request at a time."""

    def __init__(self, supervisor: socket.socket) -> None:
        self._supervisor = supervisor
        self._reserved_bytes = 0
        self._requested_at = time.monotonic()

    def reserve(self, size: int) -> None:
        """Reserve bytes before they are written. Raises FileTaskRefused, and then none are reserved."""
        remaining = self._reserved_bytes - size
        if remaining < 0 or time.monotonic() - self._requested_at > _KEEPALIVE_SECONDS:
            needed = max(0, -remaining)
            needed += -needed % RESERVE_STEP
            self._request({"permit": "reserve", "size": needed})
            remaining += needed
        self._reserved_bytes = remaining

    def confirm_complete(self, received: int) -> None:
        """Check that the received bytes are the whole upload. Raises FileTaskRefused."""
        self._request({"permit": "confirm_complete", "size": received})

    def _request(self, request: dict[str, Any]) -> None:
        self._supervisor.send(json.dumps(request).encode())
        body = self._supervisor.recv(_MAX_ANSWER)
        if not body:
            raise FileTaskRefused("the client went away", "abandoned")
        answer = json.loads(body)
        if not answer["granted"]:
            raise FileTaskRefused(answer["reason"], answer["kind"])
        self._requested_at = time.monotonic()
