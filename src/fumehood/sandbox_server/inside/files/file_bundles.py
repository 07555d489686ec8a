"""Many small files in one stream, into the data directory and out of it.

`fumehood.protocol.sandbox.bundle_encoding` draws the two forms. What comes in is written aside first, as the members of
an archive are: until all of it has arrived nothing is in place, and then each file replaces what bears its name, or is
refused for itself.
"""

import errno
import os
import struct
from collections.abc import Iterator, Sequence

from fumehood.sandbox_server.inside.files import data_directory
from fumehood.sandbox_server.inside.files.archive_unpacker import (
    ArchiveUnpacker,
    CountedSource,
    UnpackLimits,
    UnpackOutcome,
)
from fumehood.sandbox_server.inside.files.quota_permit import FileTaskRefused, QuotaPermit
from fumehood.sandbox_server.inside.files.tar_reader import ExactReader

# The protocol's numbers once more: it is not to be found in the jail. A test compares them.
MAX_FILE_BYTES = 1 << 20
FILE_HEADER = struct.Struct("!BHI")
CONTENT_HEADER = struct.Struct("!BI")
PLAIN, EXECUTABLE = 1, 2
CONTENT, NOT_FOUND, REFUSED, TOO_LARGE = range(4)

_FLUSH_BYTES = 256 * 1024


def receive_files(
    data: int, source: int, *, token: str, limits: UnpackLimits, permit: QuotaPermit
) -> UnpackOutcome:
    """Put in place what comes from `source`; what cannot be is told, the rest is there. Raises Refused for a stream
    that is not sound, and then nothing is.
    """
    unpacker = ArchiveUnpacker(data, "", token, limits, permit, allow_partial=True)
    arriving = CountedSource(source, permit)
    stream = ExactReader(arriving.iter_chunks())
    try:
        while (header := FILE_HEADER.unpack(stream.read_exactly(FILE_HEADER.size)))[0] in (PLAIN, EXECUTABLE):
            kind, length, size = header
            name = stream.read_exactly(length)
            unpacker.add_plain_file(name, stream.iter_content(size), executable=kind == EXECUTABLE)
        if any(header) or stream.read_some(1):
            raise FileTaskRefused("the stream does not end as it should")
        permit.confirm_complete(arriving.received_bytes)
        return unpacker.commit()
    finally:
        unpacker.discard()


def stream_contents(data: int, paths: Sequence[str]) -> Iterator[bytes]:
    """The content of each, or why there is none; some at a time."""
    held: list[bytes] = []
    size = 0
    for path in paths:
        outcome, content = _read_content(data, path)
        held += (CONTENT_HEADER.pack(outcome, len(content)), content)
        size += CONTENT_HEADER.size + len(content)
        if size >= _FLUSH_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _read_content(data: int, path: str) -> tuple[int, bytes]:
    try:
        fd = data_directory.open_regular_file(data, path)
    except data_directory.UnsafePath:
        return REFUSED, b""
    except OSError as error:
        return (NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else REFUSED), b""
    try:
        size = os.fstat(fd).st_size
        return (TOO_LARGE, b"") if size > MAX_FILE_BYTES else (CONTENT, _read_size(fd, size))
    except OSError:
        return REFUSED, b""
    finally:
        os.close(fd)


def _read_size(fd: int, size: int) -> bytes:
    """As it was when it was opened: what is appended meanwhile is left out, what is cut off is missing."""
    content = os.read(fd, size)
    while len(content) < size and (more := os.read(fd, size - len(content))):
        content += more
    return content
