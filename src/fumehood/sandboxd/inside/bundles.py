"""Many small files in one stream, into the data directory and out of it; imports only siblings.

`fumehood.protocol.sandbox_bundles` draws the two forms. What comes in is written aside first, as the members of an
archive are: until all of it has arrived nothing is in place, and then each file replaces what bears its name, or is
refused for itself.
"""

import errno
import os
import struct
from collections.abc import Iterator, Sequence

from fumehood.sandboxd.inside import files
from fumehood.sandboxd.inside.archives import Arriving, Bounds, Done, Unpacker
from fumehood.sandboxd.inside.leave import Leave, Refused
from fumehood.sandboxd.inside.tars import Exact

# The protocol's numbers once more: it is not to be found in the jail. A test compares them.
SMALL = 1 << 20
FILE = struct.Struct("!BHI")
ANSWER = struct.Struct("!BI")
PLAIN, EXECUTABLE = 1, 2
CONTENT, NOT_THERE, REFUSED, TOO_LARGE = range(4)

_AT_ONCE = 256 * 1024


def receive(data: int, source: int, *, token: str, bounds: Bounds, leave: Leave) -> Done:
    """Put in place what comes from `source`; what cannot be is told, the rest is there. Raises Refused for a stream
    that is not sound, and then nothing is.
    """
    unpacker = Unpacker(data, "", token, bounds, leave, partly=True)
    arriving = Arriving(source, leave)
    stream = Exact(arriving.pieces())
    try:
        while (header := FILE.unpack(stream.exactly(FILE.size)))[0] in (PLAIN, EXECUTABLE):
            kind, length, size = header
            name = stream.exactly(length)
            unpacker.plain_file(name, stream.content(size), executable=kind == EXECUTABLE)
        if any(header) or stream.some(1):
            raise Refused("the stream does not end as it should")
        leave.settle(arriving.received)
        return unpacker.commit()
    finally:
        unpacker.discard()


def answers(data: int, paths: Sequence[str]) -> Iterator[bytes]:
    """The content of each, or why there is none; some at a time."""
    held: list[bytes] = []
    size = 0
    for path in paths:
        outcome, content = _content(data, path)
        held += (ANSWER.pack(outcome, len(content)), content)
        size += ANSWER.size + len(content)
        if size >= _AT_ONCE:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _content(data: int, path: str) -> tuple[int, bytes]:
    try:
        fd = files.open_regular(data, path)
    except files.UnsafePath:
        return REFUSED, b""
    except OSError as error:
        return (NOT_THERE if error.errno in (errno.ENOENT, errno.ENOTDIR) else REFUSED), b""
    try:
        size = os.fstat(fd).st_size
        return (TOO_LARGE, b"") if size > SMALL else (CONTENT, _read(fd, size))
    except OSError:
        return REFUSED, b""
    finally:
        os.close(fd)


def _read(fd: int, size: int) -> bytes:
    """As it was when it was opened: what is appended meanwhile is left out, what is cut off is missing."""
    content = os.read(fd, size)
    while len(content) < size and (more := os.read(fd, size - len(content))):
        content += more
    return content
