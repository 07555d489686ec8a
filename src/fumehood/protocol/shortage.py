"""Tells a lack of memory or of file descriptors from a fault; imports the standard library and a sibling."""

import errno

from fumehood.protocol.errors import Unavailable

_RETRY_SECONDS = 5.0
_NAMES = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
}


def name_shortage(error: BaseException) -> str | None:
    """What there was too little of when that was raised; None if it is about something else."""
    if isinstance(error, MemoryError):
        return "memory"
    return _NAMES.get(error.errno or 0) if isinstance(error, OSError) else None


def find_shortage(error: BaseException) -> Unavailable | None:
    """What a caller of the gateway is told of it: the same request may be served later."""
    lacking = name_shortage(error)
    if lacking is None:
        return None
    return Unavailable(f"The server is short of {lacking}; try again later.", retry_after=_RETRY_SECONDS)
