"""Cuts a stream of bytes into lines, however it arrives; imports the standard library."""


class LineTooLong(ValueError):
    """A line that does not end within what one may hold."""


class LineSplitter:
    """Give it pieces, take the lines that are complete, without their newline.

    The work is linear in the bytes: a line of many megabytes that comes in small pieces is joined once, at its end.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._held: list[bytes] = []
        self._length = 0

    @property
    def held(self) -> int:
        """How many bytes of an unfinished line have come."""
        return self._length

    def feed(self, piece: bytes) -> list[bytes]:
        first, *others = piece.split(b"\n")
        self._hold(first)
        lines: list[bytes] = []
        for part in others:
            lines.append(b"".join(self._held))
            self._held.clear()
            self._length = 0
            self._hold(part)
        return lines

    def _hold(self, part: bytes) -> None:
        self._length += len(part)
        if self._length > self._longest:
            raise LineTooLong(f"a line of more than {self._longest} bytes")
        if part:
            self._held.append(part)
