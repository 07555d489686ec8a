"""How a helper asks the supervisor's leave while it writes.

A helper that wrote until the sandbox's memory is used up would make the kernel end a process: itself first, and
then, as what it wrote is still there, the code's. Only the supervisor sees the cgroup, so the helper asks it before
each few megabytes. The same question is a sign of life, and the last one makes sure that what has arrived is all
there is: a broken upload and a finished one look the same from here.
"""

import errno
import json
import socket
import time
from typing import Any, Literal, NoReturn, Protocol

RESERVE_STEP = 4 << 20
_KEEPALIVE_SECONDS = 1.0
_MAX_ANSWER = 4096

type RefusalKind = Literal["refused", "too_large", "abandoned"]


class FileTaskRefused(Exception):
    """The task cannot be done; the text says why, the kind tells the supervisor how to put it."""

    def __init__(self, text: str, kind: RefusalKind = "refused", number: int = errno.EINVAL) -> None:
        super().__init__(text)
        self.kind: RefusalKind = kind
        self.number = number


class QuotaPermit(Protocol):
    """Whom a helper asks before it writes more."""

    def reserve(self, size: int) -> None:
        """Before that many bytes of memory or disk are used; raises Refused, and then none are taken."""
        ...

    def confirm_complete(self, received: int) -> None:
        """Before what was received counts: raises Refused unless it is the whole."""
        ...


class SupervisorPermit:
    """The supervisor at the other end of a socket; each question waits for its answer."""

    def __init__(self, supervisor: socket.socket) -> None:
        self._supervisor = supervisor
        self._reserved_bytes = 0
        self._asked_at = time.monotonic()

    def reserve(self, size: int) -> None:
        left = self._reserved_bytes - size
        if left < 0 or time.monotonic() - self._asked_at > _KEEPALIVE_SECONDS:
            wanted = max(0, -left)
            wanted += -wanted % RESERVE_STEP
            self._request({"ask": "room", "size": wanted})
            left += wanted
        self._reserved_bytes = left

    def confirm_complete(self, received: int) -> None:
        self._request({"ask": "whole", "size": received})

    def _request(self, question: dict[str, Any]) -> None:
        self._supervisor.send(json.dumps(question).encode())
        body = self._supervisor.recv(_MAX_ANSWER)
        if not body:
            _raise_abandoned()
        answer = json.loads(body)
        if not answer["granted"]:
            raise FileTaskRefused(answer["reason"], answer["kind"])
        self._asked_at = time.monotonic()


def _raise_abandoned() -> NoReturn:
    raise FileTaskRefused("whoever sent it went away", "abandoned")
