"""Tells a lack of memory or of file descriptors from a fault; imports the standard library and a sibling."""

import errno

from fumehood.protocol.errors import Unavailable

_RETRY_SECONDS = 5.0
_NAMES = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
}


def find_shortage(error: BaseException) -> Unavailable | None:
    """What a caller of the gateway is told of it: the same request may be served later. None for other errors."""
    if isinstance(error, MemoryError):
        lacking = "memory"
    else:
        lacking = _NAMES.get(error.errno or 0) if isinstance(error, OSError) else None
    if lacking is None:
        return None
    return Unavailable(f"The server is short of {lacking}; try again later.", retry_after=_RETRY_SECONDS)
