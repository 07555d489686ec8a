"""Reads zip archives of untrusted authors from a file; imports only the standard library and siblings.

Only what is unambiguous: the table of contents and the members' own headers must agree, members must not overlap,
nothing may follow the archive, and what comes out must have the size and checksum that were declared.
"""

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from fumehood.sandboxd.inside.decoding import inflate
from fumehood.sandboxd.inside.leave import Refused
from fumehood.sandboxd.inside.members import Sink

_CHUNK = 1 << 20
_END = struct.Struct("<4x4H2LH")
_END64 = struct.Struct("<4xQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4xLQL")
_CENTRAL = struct.Struct("<4x6H3L5H2L")
_LOCAL = struct.Struct("<4x5H3L2H")
_SIGNATURE_END, _SIGNATURE_END64, _SIGNATURE_LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_SIGNATURE_CENTRAL, _SIGNATURE_LOCAL = b"PK\1\2", b"PK\3\4"
_LONGEST_COMMENT = 0xFFFF
_FARTHEST = 1 << 62  # offsets are signed in the kernel
_UNKNOWN16, _UNKNOWN32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_SIZES_FOLLOW = 0x0008
_UTF8 = 0x0800
_STORED, _DEFLATED = 0, 8
_METHODS = {9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstd", 95: "xz", 98: "ppmd", 99: "encryption"}
_UNIX_SYSTEMS = (3, 19)


@dataclass(frozen=True, slots=True)
class _Entry:
    raw_name: bytes
    system: int
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    attributes: int
    offset: int

    @property
    def name(self) -> str:
        """UTF-8 where it is said or so; else the code page of the first PCs, as the format has it."""
        if self.flags & _UTF8:
            return self.raw_name.decode()
        try:
            return self.raw_name.decode()
        except UnicodeDecodeError:
            return self.raw_name.decode("cp437")

    @property
    def mode(self) -> int:
        return self.attributes >> 16 if self.system in _UNIX_SYSTEMS else 0


@dataclass(frozen=True, slots=True)
class _Contents:
    count: int
    start: int
    end: int


def unpack(file: int, size: int, sink: Sink) -> None:
    """Hand every member to the sink; raises Refused for anything that is not a sound archive."""
    contents = _find_contents(file, size)
    entries = _entries(file, contents, sink.most_members)
    places = _places(file, entries, contents.start)
    for entry, start in zip(entries, places, strict=True):
        kind = stat.S_IFMT(entry.mode)
        if entry.name.endswith("/") or kind == stat.S_IFDIR:
            if entry.size:
                raise _damaged("a directory with content")
            sink.directory(entry.name)
        elif kind not in (0, stat.S_IFREG):
            sink.skip()
        else:
            content = _content(file, entry, start)
            sink.file(entry.name, content, executable=bool(entry.mode & 0o100))


def _damaged(what: str) -> Refused:
    return Refused(f"the archive is damaged: {what}")


# ---- the table of contents --------------------------------------------------------------------------------------


def _find_contents(file: int, size: int) -> _Contents:
    tail_at = max(0, size - _END.size - _LONGEST_COMMENT)
    tail = os.pread(file, size - tail_at, tail_at)
    at = tail.rfind(_SIGNATURE_END)
    while at >= 0:
        # The comment must end with the file: else the signature stands in a comment, or something follows.
        if len(tail) - at >= _END.size:
            fields = _END.unpack_from(tail, at)
            if at + _END.size + fields[6] == len(tail):
                return _contents(file, tail_at + at, fields)
        at = tail.rfind(_SIGNATURE_END, 0, at)
    raise Refused("this is not a zip archive, or it is cut short, or something follows it")


def _contents(file: int, end_at: int, fields: tuple[int, ...]) -> _Contents:
    disk, first_disk, here, count, length, start, _ = fields
    table_end = end_at
    if _UNKNOWN16 in (disk, first_disk, here, count) or _UNKNOWN32 in (length, start):
        table_end, (disk, first_disk, here, count, length, start) = _contents64(file, end_at)
    if disk or first_disk or here != count:
        raise Refused("the archive is one of several parts")
    if start + length != table_end:
        raise _damaged("its table of contents is not where it says, or something precedes the archive")
    return _Contents(count, start, table_end)


def _contents64(file: int, end_at: int) -> tuple[int, tuple[int, ...]]:
    missing = "its long table of contents is missing"
    _, at, _ = _pread(file, _LOCATOR64, end_at - _LOCATOR64.size, _SIGNATURE_LOCATOR64, missing)
    length, _, _, *contents = _pread(file, _END64, at, _SIGNATURE_END64, missing)
    if at + 12 + length != end_at - _LOCATOR64.size:
        raise _damaged(missing)
    return at, tuple(contents)


def _pread(file: int, form: struct.Struct, at: int, signature: bytes, otherwise: str) -> tuple[int, ...]:
    raw = os.pread(file, form.size, at) if 0 <= at < _FARTHEST else b""
    if len(raw) < form.size or raw[:4] != signature:
        raise _damaged(otherwise)
    return form.unpack(raw)


def _entries(file: int, contents: _Contents, most: int) -> list[_Entry]:
    if contents.count > most:
        raise Refused(f"the archive has more than {most} members", "too_large")
    entries: list[_Entry] = []
    at = contents.start
    for _ in range(contents.count):
        entry, at = _entry(file, at)
        if at > contents.end:
            raise _damaged("its table of contents is longer than it says")
        entries.append(entry)
    if at != contents.end:
        raise _damaged("something hides in its table of contents")
    return entries


def _entry(file: int, at: int) -> tuple[_Entry, int]:
    fields = _pread(file, _CENTRAL, at, _SIGNATURE_CENTRAL, "its table of contents cannot be read")
    made, _, flags, method, _, _, crc, packed, size, named, extra, comment, disk, _, attributes, offset = (
        fields
    )
    variable = os.pread(file, named + extra, at + _CENTRAL.size)
    if len(variable) < named + extra:
        raise _damaged("it is cut short")
    size, packed, offset = _wide(variable[named:], [size, packed, offset])
    if disk not in (0, _UNKNOWN16):
        raise Refused("the archive is one of several parts")
    entry = _Entry(variable[:named], made >> 8, flags, method, crc, packed, size, attributes, offset)
    _check(entry)
    return entry, at + _CENTRAL.size + named + extra + comment


def _wide(extra: bytes, values: list[int]) -> list[int]:
    """Those of the values that are too large for their field stand, in this order, in an extra one."""
    if _UNKNOWN32 not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack(f"<{length // 8}Q", extra[at + 4 : at + 4 + length // 8 * 8]))
            try:
                return [next(wide) if value == _UNKNOWN32 else value for value in values]
            except StopIteration:
                break
        at += 4 + length
    raise _damaged("a member's sizes are missing")


def _check(entry: _Entry) -> None:
    if entry.flags & _ENCRYPTED:
        raise Refused("the archive is encrypted; unpack it where its password is known")
    if b"\0" in entry.raw_name:
        raise Refused("a name in the archive has a NUL")
    if entry.method not in (_STORED, _DEFLATED):
        method = _METHODS.get(entry.method, f"method {entry.method}")
        raise Refused(f"the archive is packed with {method}; only stored and deflated members are unpacked")
    if entry.method == _STORED and entry.packed != entry.size:
        raise _damaged("a stored member has two sizes")


# ---- members ----------------------------------------------------------------------------------------------------


def _places(file: int, entries: list[_Entry], table: int) -> list[int]:
    """Where each member's content starts; no two share a byte, and none reaches into the table of contents."""
    starts = [_content_start(file, entry) for entry in entries]
    covered = 0
    order = sorted(range(len(entries)), key=lambda number: entries[number].offset)
    for number in order:
        entry = entries[number]
        if entry.offset < covered:
            raise Refused("members of the archive overlap")
        covered = starts[number] + entry.packed
        if covered > table:
            raise _damaged("a member reaches beyond the archive")
    return starts


def _content_start(file: int, entry: _Entry) -> int:
    misplaced = "a member is not where the table of contents says"
    fields = _pread(file, _LOCAL, entry.offset, _SIGNATURE_LOCAL, misplaced)
    _, flags, method, _, _, crc, packed, size, named, extra = fields
    name = os.pread(file, named, entry.offset + _LOCAL.size)
    same = (name, method, flags & _ENCRYPTED) == (entry.raw_name, entry.method, 0)
    if not flags & _SIZES_FOLLOW:
        same = same and crc == entry.crc
        same = same and packed in (entry.packed, _UNKNOWN32) and size in (entry.size, _UNKNOWN32)
    if not same:
        raise _damaged("a member and the table of contents disagree")
    return entry.offset + _LOCAL.size + named + extra


def _content(file: int, entry: _Entry, start: int) -> Iterator[bytes]:
    size = crc = 0
    pieces = _packed(file, start, entry.packed)
    for piece in pieces if entry.method == _STORED else _inflated(pieces):
        size += len(piece)
        crc = zlib.crc32(piece, crc)
        if size > entry.size:
            raise _damaged("a member is larger than it says")
        yield piece
    if size != entry.size or crc != entry.crc:
        raise _damaged("a member's size or checksum is wrong")


def _packed(file: int, at: int, size: int) -> Iterator[bytes]:
    while size:
        piece = os.pread(file, min(size, _CHUNK), at)
        if not piece:
            raise _damaged("it is cut short")
        at += len(piece)
        size -= len(piece)
        yield piece


def _inflated(pieces: Iterator[bytes]) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=-15)
    for piece in pieces:
        yield from inflate(decoder, piece)
        if decoder.eof:
            break
    if not decoder.eof or decoder.unused_data or next(pieces, None):
        raise _damaged("a member ends before or after its content")
