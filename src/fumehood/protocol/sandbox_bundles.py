"""Many small files in one body, on their way into a sandbox and out of it; imports `sandbox_errors`.

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

from fumehood.protocol.sandbox_errors import FileNotFound, FileRefused, SandboxError, TooLarge

SMALL = 1 << 20  # bytes of one file that travels with others

# A path and its content, and whether the file may be executed; it may not where nothing is said.
type WholeFile = tuple[str, bytes] | tuple[str, bytes, bool]
# What is in a file, or why that is not known.
type Content = bytes | SandboxError

FILE = struct.Struct("!BHI")
ANSWER = struct.Struct("!BI")
PLAIN, EXECUTABLE = 1, 2
_LONGEST_PATH = 4097  # of which no path is that long, so it is refused as what it is
_END = bytes(FILE.size)


class Outcome(IntEnum):
    CONTENT = 0
    NOT_THERE = 1
    REFUSED = 2
    TOO_LARGE = 3


class NotABundle(ValueError):
    """What came is not what was asked for; says why."""


async def bundled(files: AsyncIterable[Sequence[WholeFile]]) -> AsyncGenerator[bytes]:
    """A body on its way in."""
    async for some in files:
        yield _packed(some)
    yield _END


def _packed(files: Iterable[WholeFile]) -> bytes:
    parts: list[bytes] = []
    for path, content, *executable in files:
        name = path.encode("utf-8", "surrogatepass")[:_LONGEST_PATH]
        kind = EXECUTABLE if any(executable) else PLAIN
        parts += (FILE.pack(kind, len(name), len(content)), name, content)
    return b"".join(parts)


class Answers:
    """A body on its way out, read as it comes."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._answered = 0
        self._held = bytearray()

    @property
    def missing(self) -> int:
        return len(self._paths) - self._answered

    def feed(self, piece: bytes) -> list[Content]:
        """What has become whole, in order; raises NotABundle."""
        held = self._held
        held += piece
        found: list[Content] = []
        at = 0
        while at + ANSWER.size <= len(held):
            number, size = ANSWER.unpack_from(held, at)
            if not self.missing or size > SMALL or number > max(Outcome) or (number and size):
                raise NotABundle(f"an answer {number} of {size} bytes, and {self.missing} were to come")
            end = at + ANSWER.size + size
            if end > len(held):
                break
            found.append(self._answer(Outcome(number), bytes(held[at + ANSWER.size : end])))
            self._answered += 1
            at = end
        del held[:at]
        return found

    def end(self) -> None:
        """Nothing more comes; raises NotABundle if something should."""
        if self.missing or self._held:
            raise NotABundle(f"it ended, and {self.missing} answers were to come")

    def _answer(self, outcome: Outcome, content: bytes) -> Content:
        path = self._paths[self._answered]
        match outcome:
            case Outcome.CONTENT:
                return content
            case Outcome.NOT_THERE:
                return FileNotFound(f"There is no file {path[:200]!r}.")
            case Outcome.REFUSED:
                return FileRefused(f"{path[:200]!r} is not a regular file.")
            case Outcome.TOO_LARGE:
                return TooLarge(f"{path[:200]!r} is larger than {SMALL} bytes.")
