"""Reads untrusted zip archives from a file.

Only unambiguous archives are accepted: central directory and local headers agree, members do not overlap, nothing
follows the archive, and the content has the declared size and checksum.
"""

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from fumehood.sandbox_server.inside.files.archive_members import MemberSink
from fumehood.sandbox_server.inside.files.decompression import inflate
from fumehood.sandbox_server.inside.files.quota_requests import FileTaskRefused

_CHUNK = 1 << 20
_END = struct.Struct("<4x4H2LH")
_END64 = struct.Struct("<4xQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4xLQL")
_CENTRAL = struct.Struct("<4x6H3L5H2L")
_LOCAL = struct.Struct("<4x5H3L2H")
_SIGNATURE_END, _SIGNATURE_END64, _SIGNATURE_LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_SIGNATURE_CENTRAL, _SIGNATURE_LOCAL = b"PK\1\2", b"PK\3\4"
_MAX_COMMENT = 0xFFFF
_MAX_OFFSET = 1 << 62  # the kernel's offsets are signed
_UNKNOWN16, _UNKNOWN32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_SIZES_FOLLOW = 0x0008
_UTF8 = 0x0800
_STORED, _DEFLATED = 0, 8
_METHODS = {9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstd", 95: "xz", 98: "ppmd", 99: "encryption"}
_UNIX_SYSTEMS = (3, 19)


@dataclass(frozen=True, slots=True)
class _ZipEntry:
    raw_name: bytes
    system: int
    flags: int
    method: int
    crc: int
    packed_size: int
    size: int
    attributes: int
    offset: int

    @property
    def name(self) -> str:
        """The decoded name: UTF-8 if flagged or valid, otherwise code page 437, as the format says."""
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
class _CentralDirectory:
    count: int
    start: int
    end: int


def unpack_zip(file: int, size: int, sink: MemberSink) -> None:
    """Pass every member to the sink. Raises FileTaskRefused for an invalid archive."""
    directory = _find_central_directory(file, size)
    entries = _read_entries(file, directory, sink.max_members)
    starts = _locate_members(file, entries, directory.start)
    for entry, start in zip(entries, starts, strict=True):
        kind = stat.S_IFMT(entry.mode)
        if entry.name.endswith("/") or kind == stat.S_IFDIR:
            if entry.size:
                raise _damage_error("a directory with content")
            sink.add_directory(entry.name)
        elif kind not in (0, stat.S_IFREG):
            sink.skip()
        else:
            content = _iter_content(file, entry, start)
            sink.add_file(entry.name, content, executable=bool(entry.mode & 0o100))


def _damage_error(what: str) -> FileTaskRefused:
    return FileTaskRefused(f"the archive is damaged: {what}")


# ---- the central directory --------------------------------------------------------------------------------------


def _find_central_directory(file: int, size: int) -> _CentralDirectory:
    tail_at = max(0, size - _END.size - _MAX_COMMENT)
    tail = os.pread(file, size - tail_at, tail_at)
    at = tail.rfind(_SIGNATURE_END)
    while at >= 0:
        # The comment must end with the file, else the signature is part of a comment, or something follows.
        if len(tail) - at >= _END.size:
            fields = _END.unpack_from(tail, at)
            if at + _END.size + fields[6] == len(tail):
                return _read_end_record(file, tail_at + at, fields)
        at = tail.rfind(_SIGNATURE_END, 0, at)
    raise FileTaskRefused("this is not a zip archive, or it is cut short, or something follows it")


def _read_end_record(file: int, end_at: int, fields: tuple[int, ...]) -> _CentralDirectory:
    disk, first_disk, here, count, length, start, _ = fields
    table_end = end_at
    if _UNKNOWN16 in (disk, first_disk, here, count) or _UNKNOWN32 in (length, start):
        table_end, (disk, first_disk, here, count, length, start) = _read_zip64_end_record(file, end_at)
    if disk or first_disk or here != count:
        raise FileTaskRefused("the archive is one of several parts")
    if start + length != table_end:
        raise _damage_error("its central directory is not where it says, or something precedes the archive")
    return _CentralDirectory(count, start, table_end)


def _read_zip64_end_record(file: int, end_at: int) -> tuple[int, tuple[int, ...]]:
    missing = "its zip64 central directory is missing"
    _, at, _ = _read_struct(file, _LOCATOR64, end_at - _LOCATOR64.size, _SIGNATURE_LOCATOR64, missing)
    length, _, _, *fields = _read_struct(file, _END64, at, _SIGNATURE_END64, missing)
    if at + 12 + length != end_at - _LOCATOR64.size:
        raise _damage_error(missing)
    return at, tuple(fields)


def _read_struct(file: int, form: struct.Struct, at: int, signature: bytes, damage: str) -> tuple[int, ...]:
    raw = os.pread(file, form.size, at) if 0 <= at < _MAX_OFFSET else b""
    if len(raw) < form.size or raw[:4] != signature:
        raise _damage_error(damage)
    return form.unpack(raw)


def _read_entries(file: int, directory: _CentralDirectory, max_members: int) -> list[_ZipEntry]:
    if directory.count > max_members:
        raise FileTaskRefused(f"the archive has more than {max_members} members", "too_large")
    entries: list[_ZipEntry] = []
    at = directory.start
    for _ in range(directory.count):
        entry, at = _read_entry(file, at)
        if at > directory.end:
            raise _damage_error("its central directory is longer than it says")
        entries.append(entry)
    if at != directory.end:
        raise _damage_error("its central directory has hidden data")
    return entries


def _read_entry(file: int, at: int) -> tuple[_ZipEntry, int]:
    fields = _read_struct(file, _CENTRAL, at, _SIGNATURE_CENTRAL, "its central directory is unreadable")
    version, _, flags, method, _, _, crc, packed, size, *lengths, disk, _, attributes, offset = fields
    name_length, extra, comment = lengths
    variable = os.pread(file, name_length + extra, at + _CENTRAL.size)
    if len(variable) < name_length + extra:
        raise _damage_error("it is cut short")
    size, packed, offset = _read_zip64_values(variable[name_length:], [size, packed, offset])
    if disk not in (0, _UNKNOWN16):
        raise FileTaskRefused("the archive is one of several parts")
    entry = _ZipEntry(
        variable[:name_length], version >> 8, flags, method, crc, packed, size, attributes, offset
    )
    _check_entry(entry)
    return entry, at + _CENTRAL.size + name_length + extra + comment


def _read_zip64_values(extra: bytes, values: list[int]) -> list[int]:
    """Replace values that are too large for their field by those of the zip64 extra field, in this order."""
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
    raise _damage_error("a member's sizes are missing")


def _check_entry(entry: _ZipEntry) -> None:
    if entry.flags & _ENCRYPTED:
        raise FileTaskRefused("the archive is encrypted; decrypt it before the upload")
    if b"\0" in entry.raw_name:
        raise FileTaskRefused("a name in the archive contains NUL")
    if entry.method not in (_STORED, _DEFLATED):
        method = _METHODS.get(entry.method, f"method {entry.method}")
        raise FileTaskRefused(
            f"the archive is packed with {method}; only stored and deflated members are unpacked"
        )
    if entry.method == _STORED and entry.packed_size != entry.size:
        raise _damage_error("a stored member has two sizes")


# ---- members ----------------------------------------------------------------------------------------------------


def _locate_members(file: int, entries: list[_ZipEntry], directory_start: int) -> list[int]:
    """Return where each member's content starts; no two overlap, and none reaches the central directory."""
    starts = [_content_start(file, entry) for entry in entries]
    covered = 0
    order = sorted(range(len(entries)), key=lambda number: entries[number].offset)
    for number in order:
        entry = entries[number]
        if entry.offset < covered:
            raise FileTaskRefused("members of the archive overlap")
        covered = starts[number] + entry.packed_size
        if covered > directory_start:
            raise _damage_error("a member reaches beyond the archive")
    return starts


def _content_start(file: int, entry: _ZipEntry) -> int:
    misplaced = "a member is not where the central directory says"
    fields = _read_struct(file, _LOCAL, entry.offset, _SIGNATURE_LOCAL, misplaced)
    _, flags, method, _, _, crc, packed, size, name_length, extra = fields
    name = os.pread(file, name_length, entry.offset + _LOCAL.size)
    same = (name, method, flags & _ENCRYPTED) == (entry.raw_name, entry.method, 0)
    if not flags & _SIZES_FOLLOW:
        same = same and crc == entry.crc
        same = same and packed in (entry.packed_size, _UNKNOWN32) and size in (entry.size, _UNKNOWN32)
    if not same:
        raise _damage_error("a member's header and the central directory disagree")
    return entry.offset + _LOCAL.size + name_length + extra


def _iter_content(file: int, entry: _ZipEntry, start: int) -> Iterator[bytes]:
    size = crc = 0
    chunks = _iter_packed(file, start, entry.packed_size)
    for chunk in chunks if entry.method == _STORED else _iter_inflated(chunks):
        size += len(chunk)
        crc = zlib.crc32(chunk, crc)
        if size > entry.size:
            raise _damage_error("a member is larger than it says")
        yield chunk
    if size != entry.size or crc != entry.crc:
        raise _damage_error("a member's size or checksum is wrong")


def _iter_packed(file: int, at: int, size: int) -> Iterator[bytes]:
    while size:
        chunk = os.pread(file, min(size, _CHUNK), at)
        if not chunk:
            raise _damage_error("it is cut short")
        at += len(chunk)
        size -= len(chunk)
        yield chunk


def _iter_inflated(chunks: Iterator[bytes]) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=-15)
    for chunk in chunks:
        yield from inflate(decoder, chunk)
        if decoder.eof:
            break
    if not decoder.eof or decoder.unused_data or next(chunks, None):
        raise _damage_error("a member ends before or after its content")
