"""Reads untrusted tar archives from a stream, in one pass.

The standard library's reader keeps whole headers in memory and has had bugs with forged ones. This one reads ustar, GNU
long names, and pax paths and sizes; it limits their size and refuses everything else.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fumehood.sandbox_server.inside.files.archive_members import MemberSink
from fumehood.sandbox_server.inside.files.quota_requests import FileTaskRefused

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_MAX_HEADER_BYTES = 1 << 20
_REGULAR = b"0\x007"
_WITHOUT_CONTENT = b"123456"  # links, devices, directories, pipes
_DIRECTORY = b"5"
_LONG_NAME, _LONG_LINK = b"L", b"K"
_PAX, _PAX_OF_SOLARIS, _PAX_FOR_ALL = b"x", b"X", b"g"
_SPARSE = b"S"
_MAX_HEADERS_PER_MEMBER = 4


class ExactReader:
    """Reads exact amounts from chunks of any size."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = memoryview(b"")

    def read_some(self, max_bytes: int) -> bytes:
        """Return the next bytes, at least one; b"" at the end."""
        while not self._buffer:
            chunk = next(self._chunks, None)
            if chunk is None:
                return b""
            self._buffer = memoryview(chunk)
        data, self._buffer = self._buffer[:max_bytes], self._buffer[max_bytes:]
        return bytes(data)

    def iter_content(self, size: int) -> Iterator[bytes]:
        """Yield exactly `size` bytes. Raises FileTaskRefused if there are fewer."""
        while size:
            chunk = self.read_some(size)
            if not chunk:
                raise FileTaskRefused("the archive is cut short")
            size -= len(chunk)
            yield chunk

    def read_exactly(self, size: int) -> bytes:
        return b"".join(self.iter_content(size))

    def skip(self, size: int) -> None:
        for _ in self.iter_content(size):
            pass


@dataclass(slots=True)
class _PaxOverrides:
    """Values of extended headers for the member that follows them."""

    path: bytes | None = None
    size: int | None = None


@dataclass(slots=True)
class _TarHeader:
    name: bytes
    mode: int
    size: int
    kind: bytes


def unpack_tar(chunks: Iterator[bytes], sink: MemberSink) -> None:
    """Pass every member to the sink. Raises FileTaskRefused for an invalid archive."""
    archive = ExactReader(chunks)
    overrides = _PaxOverrides()
    pending = False
    for number in range(_MAX_HEADERS_PER_MEMBER * sink.max_members + 1):
        block = archive.read_exactly(_BLOCK)
        if block == _ZEROS:
            if pending:
                raise FileTaskRefused("the archive ends after a header that belongs to a member")
            _check_end(archive)
            return
        header = _parse_header(block, first=number == 0)
        if header.kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_SOLARIS, _PAX_FOR_ALL):
            _read_extended_header(header, archive, overrides)
            pending |= header.kind != _PAX_FOR_ALL
            continue
        _handle_member(header, overrides, archive, sink)
        overrides, pending = _PaxOverrides(), False
    raise FileTaskRefused("the archive has too many headers", "too_large")


def _check_end(archive: ExactReader) -> None:
    """Check for two blocks of zeros, followed by nothing but zeros."""
    if archive.read_exactly(_BLOCK) != _ZEROS:
        raise FileTaskRefused("the archive is damaged: it has an end mark in its middle")
    while chunk := archive.read_some(1 << 20):
        if chunk.count(0) != len(chunk):
            raise FileTaskRefused("something follows the archive's end")


def _handle_member(
    header: _TarHeader, overrides: _PaxOverrides, archive: ExactReader, sink: MemberSink
) -> None:
    raw = header.name if overrides.path is None else overrides.path
    size = header.size if overrides.size is None else overrides.size
    if header.kind == _SPARSE:
        raise FileTaskRefused("the archive has sparse members; pack it without --sparse")
    if header.kind in _WITHOUT_CONTENT:
        if header.kind == _DIRECTORY:
            sink.add_directory(raw.decode())
        else:
            sink.skip()
        return
    if header.kind in _REGULAR and raw.endswith(b"/") and not size:
        sink.add_directory(raw.decode())  # old archives have no type for directories
    elif header.kind in _REGULAR:
        sink.add_file(raw.decode(), archive.iter_content(size), executable=bool(header.mode & 0o100))
    else:
        sink.skip()
        archive.skip(size)
    archive.skip(-size % _BLOCK)


def _read_extended_header(header: _TarHeader, archive: ExactReader, overrides: _PaxOverrides) -> None:
    if header.size > _MAX_HEADER_BYTES:
        raise FileTaskRefused(f"the archive has a header of {header.size} bytes", "too_large")
    body = archive.read_exactly(header.size)
    archive.skip(-header.size % _BLOCK)
    if header.kind == _LONG_NAME:
        if overrides.path is None:
            overrides.path = body.rstrip(b"\0")
    elif header.kind != _LONG_LINK:
        _parse_pax_records(body, overrides, for_all=header.kind == _PAX_FOR_ALL)


def _parse_pax_records(body: bytes, overrides: _PaxOverrides, *, for_all: bool) -> None:
    """Parse records of the form `length key=value\\n`."""
    at = 0
    while at < len(body):
        space = body.find(b" ", at, at + 20)
        digits = body[at : max(space, at)]
        length = int(digits) if digits.isdigit() else 0
        end = at + length
        if length <= len(digits) + 2 or end > len(body) or body[end - 1 : end] != b"\n":
            raise FileTaskRefused("the archive is damaged: an extended header is unreadable")
        key, equals, value = body[space + 1 : end - 1].partition(b"=")
        if not equals:
            raise FileTaskRefused("the archive is damaged: an extended header is unreadable")
        _apply_pax_record(key, value, overrides, for_all=for_all)
        at = end


def _apply_pax_record(key: bytes, value: bytes, overrides: _PaxOverrides, *, for_all: bool) -> None:
    if key.startswith(b"GNU.sparse."):
        raise FileTaskRefused("the archive has sparse members; pack it without --sparse")
    if key not in (b"path", b"size"):
        return
    if for_all:
        raise FileTaskRefused(f"the archive gives all its members the same {key.decode()}")
    if key == b"path":
        overrides.path = value
    elif value.isdigit() and len(value) < 20:
        overrides.size = int(value)
    else:
        raise FileTaskRefused("the archive is damaged: an extended header is unreadable")


def _parse_header(block: bytes, *, first: bool) -> _TarHeader:
    if _parse_number(block[148:156]) not in _checksums(block):
        damage = "the archive is damaged: a header's checksum is wrong"
        raise FileTaskRefused("this is not a tar archive" if first else damage)
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and block[345] != 0:
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return _TarHeader(name, _parse_number(block[100:108]) or 0, _parse_size(block[124:136]), block[156:157])


def _checksums(block: bytes) -> tuple[int, int]:
    """Return the checksums of unsigned and of signed bytes, with the checksum field as spaces."""
    blanked = block[:148] + b" " * 8 + block[156:]
    total = sum(blanked)
    return total, total - 256 * sum(byte > 127 for byte in blanked)


def _parse_size(raw: bytes) -> int:
    size = _parse_number(raw)
    if size is None or size < 0:
        raise FileTaskRefused("the archive is damaged: a member's size is unreadable")
    return size


def _parse_number(raw: bytes) -> int | None:
    """Parse octal digits or GNU's binary form; returns None for neither."""
    if raw[0] == 0x80:
        return int.from_bytes(raw[1:])
    digits = raw.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    if digits.strip(b"01234567"):
        return None
    return int(digits, 8)
