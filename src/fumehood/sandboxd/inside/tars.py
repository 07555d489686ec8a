"""Reads tar archives of untrusted authors from a stream, once and in order; imports only siblings.

The standard library's reader keeps whole headers in memory and has been led astray by forged ones. This one knows
ustar, GNU long names and pax paths and sizes, bounds all of them, and refuses what it does not understand.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fumehood.sandboxd.inside.leave import Refused
from fumehood.sandboxd.inside.members import Sink

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_LONGEST_HEADER = 1 << 20
_REGULAR = b"0\x007"
_WITHOUT_CONTENT = b"123456"  # links, devices, directories, pipes
_DIRECTORY = b"5"
_LONG_NAME, _LONG_LINK = b"L", b"K"
_PAX, _PAX_OF_SOLARIS, _PAX_FOR_ALL = b"x", b"X", b"g"
_SPARSE = b"S"
_HEADERS_EACH = 4


class Exact:
    """Exact amounts out of pieces of any size."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = memoryview(b"")

    def some(self, most: int) -> bytes:
        """The next bytes, at least one; none at the end."""
        while not self._held:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._held = memoryview(piece)
        taken, self._held = self._held[:most], self._held[most:]
        return bytes(taken)

    def content(self, size: int) -> Iterator[bytes]:
        while size:
            piece = self.some(size)
            if not piece:
                raise Refused("the archive is cut short")
            size -= len(piece)
            yield piece

    def exactly(self, size: int) -> bytes:
        return b"".join(self.content(size))

    def skip(self, size: int) -> None:
        for _ in self.content(size):
            pass


@dataclass(slots=True)
class _Extras:
    """What extended headers say of the member that follows them."""

    path: bytes | None = None
    size: int | None = None


@dataclass(slots=True)
class _Header:
    name: bytes
    mode: int
    size: int
    kind: bytes
    extras: _Extras = field(default_factory=_Extras)


def unpack(pieces: Iterator[bytes], sink: Sink) -> None:
    """Hand every member to the sink; raises Refused for anything that is not a sound archive."""
    archive = Exact(pieces)
    extras = _Extras()
    pending = False
    for number in range(_HEADERS_EACH * sink.most_members + 1):
        block = archive.exactly(_BLOCK)
        if block == _ZEROS:
            if pending:
                raise Refused("the archive ends after a header that belongs to a member")
            _check_end(archive)
            return
        header = _parse(block, first=number == 0)
        if header.kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_SOLARIS, _PAX_FOR_ALL):
            _extend(header, archive, extras)
            pending |= header.kind != _PAX_FOR_ALL
            continue
        header.extras = extras
        _member(header, archive, sink)
        extras, pending = _Extras(), False
    raise Refused("the archive has too many headers", "too_large")


def _check_end(archive: Exact) -> None:
    """Two blocks of zeros, and nothing but zeros behind them."""
    if archive.exactly(_BLOCK) != _ZEROS:
        raise Refused("the archive is damaged: half an end in its middle")
    while piece := archive.some(1 << 20):
        if piece.count(0) != len(piece):
            raise Refused("something follows the archive's end")


def _member(header: _Header, archive: Exact, sink: Sink) -> None:
    raw = header.name if header.extras.path is None else header.extras.path
    size = header.size if header.extras.size is None else header.extras.size
    if header.kind == _SPARSE:
        raise Refused("the archive has sparse members; pack it without --sparse")
    if header.kind in _WITHOUT_CONTENT:
        if header.kind == _DIRECTORY:
            sink.directory(raw.decode())
        else:
            sink.skip()
        return
    if header.kind in _REGULAR and raw.endswith(b"/") and not size:
        sink.directory(raw.decode())  # as archives were written before there was a kind for it
    elif header.kind in _REGULAR:
        sink.file(raw.decode(), archive.content(size), executable=bool(header.mode & 0o100))
    else:
        sink.skip()
        archive.skip(size)
    archive.skip(-size % _BLOCK)


def _extend(header: _Header, archive: Exact, extras: _Extras) -> None:
    if header.size > _LONGEST_HEADER:
        raise Refused(f"the archive has a header of {header.size} bytes", "too_large")
    body = archive.exactly(header.size)
    archive.skip(-header.size % _BLOCK)
    if header.kind == _LONG_NAME:
        if extras.path is None:
            extras.path = body.rstrip(b"\0")
    elif header.kind != _LONG_LINK:
        _take_records(body, extras, for_all=header.kind == _PAX_FOR_ALL)


def _take_records(body: bytes, extras: _Extras, *, for_all: bool) -> None:
    """`length key=value` and a line's end, again and again."""
    at = 0
    while at < len(body):
        space = body.find(b" ", at, at + 20)
        digits = body[at : max(space, at)]
        length = int(digits) if digits.isdigit() else 0
        end = at + length
        if length <= len(digits) + 2 or end > len(body) or body[end - 1 : end] != b"\n":
            raise Refused("the archive is damaged: an extended header cannot be read")
        key, equals, value = body[space + 1 : end - 1].partition(b"=")
        if not equals:
            raise Refused("the archive is damaged: an extended header cannot be read")
        _take_record(key, value, extras, for_all=for_all)
        at = end


def _take_record(key: bytes, value: bytes, extras: _Extras, *, for_all: bool) -> None:
    if key.startswith(b"GNU.sparse."):
        raise Refused("the archive has sparse members; pack it without --sparse")
    if key not in (b"path", b"size"):
        return
    if for_all:
        raise Refused(f"the archive gives all its members the same {key.decode()}")
    if key == b"path":
        extras.path = value
    elif value.isdigit() and len(value) < 20:
        extras.size = int(value)
    else:
        raise Refused("the archive is damaged: an extended header cannot be read")


def _parse(block: bytes, *, first: bool) -> _Header:
    if _number(block[148:156]) not in _sums(block):
        said = (
            "this is not a tar archive" if first else "the archive is damaged: a header's checksum is wrong"
        )
        raise Refused(said)
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and block[345] != 0:
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return _Header(name, _number(block[100:108]) or 0, _size(block[124:136]), block[156:157])


def _sums(block: bytes) -> tuple[int, int]:
    """With its own field as spaces; some have added signed bytes."""
    blanked = block[:148] + b" " * 8 + block[156:]
    total = sum(blanked)
    return total, total - 256 * sum(byte > 127 for byte in blanked)


def _size(raw: bytes) -> int:
    size = _number(raw)
    if size is None or size < 0:
        raise Refused("the archive is damaged: a member's size cannot be read")
    return size


def _number(raw: bytes) -> int | None:
    """Octal digits, or GNU's binary form; None for neither."""
    if raw[0] == 0x80:
        return int.from_bytes(raw[1:])
    digits = raw.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    if digits.strip(b"01234567"):
        return None
    return int(digits, 8)
