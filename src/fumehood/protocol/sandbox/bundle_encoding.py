"""Many small files in one body, on their way into a sandbox and out of it.

    in  = file … end     file = kind (1 byte) | length of the path (2 bytes) | length of the content (4 bytes)
                                | path | content
                         kind = 1, or 2 for a file that may be executed
                         end  = 0 | 0 | 0, of the same widths, and nothing behind it
    out = answer …       answer = outcome (1 byte) | length of the content (4 bytes) | content

Numbers are big-endian, paths UTF-8. There is one answer for each path that was asked for, in the same order. Neither
form is JSON or an archive: there is nothing in it to be misread, and a name is as it would be in a single request.
"""

import struct
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from enum import IntEnum

from fumehood.protocol.sandbox.sandbox_errors import (
    FileNotFound,
    FileRefused,
    SandboxError,
    SandboxLimitExceeded,
)

MAX_BUNDLED_FILE_BYTES = 1 << 20  # bytes of one file that travels with others

# A path and its content, and whether the file may be executed; it may not where nothing is said.
type BundledFile = tuple[str, bytes] | tuple[str, bytes, bool]
# What is in a file, or why that is not known.
type BundleContent = bytes | SandboxError

FILE_HEADER = struct.Struct("!BHI")
ANSWER_HEADER = struct.Struct("!BI")
PLAIN_FILE, EXECUTABLE_FILE = 1, 2
_MAX_PATH_BYTES = 4097  # of which no path is that long, so it is refused as what it is
_END_MARKER = bytes(FILE_HEADER.size)


class BundleReadOutcome(IntEnum):
    CONTENT = 0
    NOT_FOUND = 1
    REFUSED = 2
    TOO_LARGE = 3


class InvalidBundle(ValueError):
    """What came is not what was asked for; says why."""


async def encode_bundle(files: AsyncIterable[Sequence[BundledFile]]) -> AsyncGenerator[bytes]:
    """A body on its way in."""
    async for some in files:
        yield _encode_files(some)
    yield _END_MARKER


def _encode_files(files: Iterable[BundledFile]) -> bytes:
    parts: list[bytes] = []
    for path, content, *executable in files:
        name = path.encode("utf-8", "surrogatepass")[:_MAX_PATH_BYTES]
        kind = EXECUTABLE_FILE if any(executable) else PLAIN_FILE
        parts += (FILE_HEADER.pack(kind, len(name), len(content)), name, content)
    return b"".join(parts)


class BundleReader:
    """A body on its way out, read as it comes."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._answered_count = 0
        self._buffer = bytearray()

    @property
    def missing_count(self) -> int:
        return len(self._paths) - self._answered_count

    def feed(self, piece: bytes) -> list[BundleContent]:
        """What has become whole, in order; raises NotABundle."""
        held = self._buffer
        held += piece
        found: list[BundleContent] = []
        at = 0
        while at + ANSWER_HEADER.size <= len(held):
            number, size = ANSWER_HEADER.unpack_from(held, at)
            if (
                not self.missing_count
                or size > MAX_BUNDLED_FILE_BYTES
                or number > max(BundleReadOutcome)
                or (number and size)
            ):
                raise InvalidBundle(
                    f"an answer {number} of {size} bytes, and {self.missing_count} were to come"
                )
            end = at + ANSWER_HEADER.size + size
            if end > len(held):
                break
            found.append(
                self._to_content(BundleReadOutcome(number), bytes(held[at + ANSWER_HEADER.size : end]))
            )
            self._answered_count += 1
            at = end
        del held[:at]
        return found

    def finish(self) -> None:
        """Nothing more comes; raises NotABundle if something should."""
        if self.missing_count or self._buffer:
            raise InvalidBundle(f"it ended, and {self.missing_count} answers were to come")

    def _to_content(self, outcome: BundleReadOutcome, content: bytes) -> BundleContent:
        path = self._paths[self._answered_count]
        match outcome:
            case BundleReadOutcome.CONTENT:
                return content
            case BundleReadOutcome.NOT_FOUND:
                return FileNotFound(f"There is no file {path[:200]!r}.")
            case BundleReadOutcome.REFUSED:
                return FileRefused(f"{path[:200]!r} is not a regular file.")
            case BundleReadOutcome.TOO_LARGE:
                return SandboxLimitExceeded(f"{path[:200]!r} is larger than {MAX_BUNDLED_FILE_BYTES} bytes.")
