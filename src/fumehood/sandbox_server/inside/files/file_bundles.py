"""Receives and sends many small files in one stream.

`fumehood.protocol.sandbox.bundle_encoding` describes the format. Received files are staged like members of an archive;
once all have arrived, each one replaces the file of its name or is refused individually.
"""

import contextlib
import errno
import os
import struct
from collections.abc import Iterator, Sequence

from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.inside.files import untrusted_files
from fumehood.sandbox_server.inside.files.archive_unpacker import (
    CountedSource,
    StagedFileWriter,
    UnpackLimits,
    UnpackOutcome,
)
from fumehood.sandbox_server.inside.files.quota_requests import FileTaskRefused, WriteQuota
from fumehood.sandbox_server.inside.files.tar_reader import ExactReader

# Copied from the protocol, which is not in the jail. A test compares them.
MAX_FILE_BYTES = 1 << 20
FILE_HEADER = struct.Struct("!BHI")
CONTENT_HEADER = struct.Struct("!BI")
PLAIN, EXECUTABLE = 1, 2
CONTENT, NOT_FOUND, REFUSED, TOO_LARGE = range(4)

_FLUSH_BYTES = 256 * 1024


def receive_files(
    data: int, source: int, *, token: str, limits: UnpackLimits, permit: WriteQuota
) -> UnpackOutcome:
    """Receive a bundle; the outcome lists files that were refused.

    Raises FileTaskRefused for an invalid stream, and then no file is written.
    """
    unpacker = StagedFileWriter(data, "", token, limits, permit, allow_partial=True)
    counted = CountedSource(source, permit)
    stream = ExactReader(counted.iter_chunks())
    try:
        while (header := FILE_HEADER.unpack(stream.read_exactly(FILE_HEADER.size)))[0] in (PLAIN, EXECUTABLE):
            kind, length, size = header
            name = stream.read_exactly(length)
            unpacker.add_plain_file(name, stream.iter_content(size), executable=kind == EXECUTABLE)
        if any(header) or stream.read_some(1):
            raise FileTaskRefused("the stream has no valid end")
        permit.confirm_complete(counted.received_bytes)
        return unpacker.commit()
    finally:
        unpacker.discard()


def stream_contents(data: int, paths: Sequence[str]) -> Iterator[bytes]:
    """Yield the encoded content of each file, or why there is none, in chunks of several files."""
    chunk: list[bytes] = []
    size = 0
    for path in paths:
        outcome, content = _read_content(data, path)
        chunk += (CONTENT_HEADER.pack(outcome, len(content)), content)
        size += CONTENT_HEADER.size + len(content)
        if size >= _FLUSH_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
    if chunk:
        yield b"".join(chunk)


def _read_content(data: int, path: str) -> tuple[int, bytes]:
    try:
        fd = untrusted_files.open_regular_file(data, path)
    except untrusted_files.UnsafePath:
        return REFUSED, b""
    except OSError as error:
        return (NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else REFUSED), b""
    with syscalls.closing_fd(fd), contextlib.suppress(OSError):
        size = os.fstat(fd).st_size
        return (TOO_LARGE, b"") if size > MAX_FILE_BYTES else (CONTENT, _read_size(fd, size))
    return REFUSED, b""


def _read_size(fd: int, size: int) -> bytes:
    """Read at most the size at opening: later appends are ignored, a truncated file is shorter."""
    content = os.read(fd, size)
    while len(content) < size and (more := os.read(fd, size - len(content))):
        content += more
    return content
