"""How a helper asks the supervisor's leave while it writes; imports only the standard library.

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

STEP = 4 << 20
_SIGN_OF_LIFE = 1.0
_MAX_ANSWER = 4096

type Kind = Literal["refused", "too_large", "abandoned"]


class Refused(Exception):
    """The task cannot be done; the text says why, the kind tells the supervisor how to put it."""

    def __init__(self, text: str, kind: Kind = "refused", number: int = errno.EINVAL) -> None:
        super().__init__(text)
        self.kind: Kind = kind
        self.number = number


class Leave(Protocol):
    """Whom a helper asks before it writes more."""

    def take(self, size: int) -> None:
        """Before that many bytes of memory or disk are used; raises Refused, and then none are taken."""
        ...

    def settle(self, received: int) -> None:
        """Before what was received counts: raises Refused unless it is the whole."""
        ...


class AskedLeave:
    """The supervisor at the other end of a socket; each question waits for its answer."""

    def __init__(self, supervisor: socket.socket) -> None:
        self._supervisor = supervisor
        self._left = 0
        self._asked_at = time.monotonic()

    def take(self, size: int) -> None:
        left = self._left - size
        if left < 0 or time.monotonic() - self._asked_at > _SIGN_OF_LIFE:
            wanted = max(0, -left)
            wanted += -wanted % STEP
            self._ask({"ask": "room", "size": wanted})
            left += wanted
        self._left = left

    def settle(self, received: int) -> None:
        self._ask({"ask": "whole", "size": received})

    def _ask(self, question: dict[str, Any]) -> None:
        self._supervisor.send(json.dumps(question).encode())
        body = self._supervisor.recv(_MAX_ANSWER)
        if not body:
            _abandoned()
        answer = json.loads(body)
        if not answer["granted"]:
            raise Refused(answer["reason"], answer["kind"])
        self._asked_at = time.monotonic()


def _abandoned() -> NoReturn:
    raise Refused("whoever sent it went away", "abandoned")
