"""Bundles: many small files in one HTTP body, into a sandbox and out of it.

    in  = file … end     file = kind (1 byte) | length of the path (2 bytes) | length of the content (4 bytes)
                                | path | content
                         kind = 1, or 2 for an executable file
                         end  = 0 | 0 | 0, of the same widths; nothing follows it
    out = answer …       answer = outcome (1 byte) | length of the content (4 bytes) | content

Numbers are big-endian, paths UTF-8. There is one answer for each requested path, in the same order.
"""

import struct
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from enum import IntEnum

from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxError,
    SandboxFileNotFound,
    SandboxPayloadTooLarge,
)

MAX_BUNDLED_FILE_BYTES = 1 << 20

# Path, content, and whether the file is executable (default: no).
type BundledFile = tuple[str, bytes] | tuple[str, bytes, bool]
# The content of a file, or why it could not be read.
type BundleContent = bytes | SandboxError

FILE_HEADER = struct.Struct("!BHI")
ANSWER_HEADER = struct.Struct("!BI")
PLAIN_FILE, EXECUTABLE_FILE = 1, 2
_MAX_PATH_BYTES = 4097  # longer than any valid path, so that the server rejects it
_END_MARKER = bytes(FILE_HEADER.size)


class BundleReadStatus(IntEnum):
    """What the response to a read request has for one file."""

    CONTENT = 0
    NOT_FOUND = 1
    REFUSED = 2
    TOO_LARGE = 3


class InvalidBundle(ValueError):
    """The body is not a valid bundle; the message says why."""


async def encode_bundle(files: AsyncIterable[Sequence[BundledFile]]) -> AsyncGenerator[bytes]:
    """Encode files as a body to write into a sandbox."""
    async for batch in files:
        yield _encode_files(batch)
    yield _END_MARKER


def _encode_files(files: Iterable[BundledFile]) -> bytes:
    parts: list[bytes] = []
    for path, content, *executable in files:
        name = path.encode("utf-8", "surrogatepass")[:_MAX_PATH_BYTES]
        kind = EXECUTABLE_FILE if any(executable) else PLAIN_FILE
        parts += (FILE_HEADER.pack(kind, len(name), len(content)), name, content)
    return b"".join(parts)


class ReadFilesResponseDecoder:
    """Decodes the response to a read request as it arrives."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._answered_count = 0
        self._buffer = bytearray()

    @property
    def missing_count(self) -> int:
        return len(self._paths) - self._answered_count

    def feed(self, chunk: bytes) -> list[BundleContent]:
        """Return the contents that are complete now, in order. Raises InvalidBundle."""
        buffer = self._buffer
        buffer += chunk
        contents: list[BundleContent] = []
        position = 0
        while position + ANSWER_HEADER.size <= len(buffer):
            outcome, size = ANSWER_HEADER.unpack_from(buffer, position)
            if (
                not self.missing_count
                or size > MAX_BUNDLED_FILE_BYTES
                or outcome > max(BundleReadStatus)
                or (outcome and size)
            ):
                raise InvalidBundle(
                    f"answer {outcome} with {size} bytes, {self.missing_count} answers expected"
                )
            end = position + ANSWER_HEADER.size + size
            if end > len(buffer):
                break
            content = bytes(buffer[position + ANSWER_HEADER.size : end])
            contents.append(self._to_content(BundleReadStatus(outcome), content))
            self._answered_count += 1
            position = end
        del buffer[:position]
        return contents

    def finish(self) -> None:
        """Raise InvalidBundle if answers are missing."""
        if self.missing_count or self._buffer:
            raise InvalidBundle(f"the body ended with {self.missing_count} answers missing")

    def _to_content(self, outcome: BundleReadStatus, content: bytes) -> BundleContent:
        path = self._paths[self._answered_count]
        match outcome:
            case BundleReadStatus.CONTENT:
                return content
            case BundleReadStatus.NOT_FOUND:
                return SandboxFileNotFound(f"There is no file {path[:200]!r}.")
            case BundleReadStatus.REFUSED:
                return FileRefused(f"{path[:200]!r} is not a regular file.")
            case BundleReadStatus.TOO_LARGE:
                return SandboxPayloadTooLarge(
                    f"{path[:200]!r} is larger than {MAX_BUNDLED_FILE_BYTES} bytes."
                )
