"""Archives for tests, honest and forged."""

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable


def make_tar(*members: tuple[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return buffer.getvalue()


def make_tar_of(*members: tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> bytes:
    """Of members without content that may be anything."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for about in members:
            archive.addfile(about)
    return buffer.getvalue()


def special_member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    about = tarfile.TarInfo(name)
    about.type, about.linkname = kind, target
    return about


def tar_header(name: bytes, size: int, kind: bytes = b"0", *, raw_size: bytes | None = None) -> bytes:
    """One block, with a checksum that fits whatever it says."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[124:136] = raw_size if raw_size is not None else f"{size:011o}\0".encode()
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def pad_block(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax_header(*records: tuple[str, str], kind: bytes = b"x") -> bytes:
    """An extended header for what follows it."""
    body = b""
    for key, value in records:
        rest = f" {key}={value}\n".encode()
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length = len(str(length)) + len(rest)
        body += str(length).encode() + rest
    return tar_header(b"pax", len(body), kind) + pad_block(body)


END_OF_TAR = bytes(1024)


def make_zip(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members:
            about = zipfile.ZipInfo(name)
            about.compress_type = method
            about.external_attr = 0o644 << 16
            archive.writestr(about, content)
    return buffer.getvalue()


class ForgedZip:
    """Built by hand, so that every field can lie."""

    def __init__(self) -> None:
        self.body = b""
        self.table = b""
        self.count = 0

    def local(self, name: bytes, content: bytes, *, method: int = 8, flags: int = 0, **lies: int) -> int:
        """A member itself; returns where it is."""
        packed = _deflate(content) if method == 8 else content
        at = len(self.body)
        self.body += struct.pack(
            "<4s5H3L2H",
            b"PK\3\4",
            20,
            flags,
            method,
            0,
            0,
            lies.get("crc", zlib.crc32(content)),
            lies.get("packed", len(packed)),
            lies.get("size", len(content)),
            len(name),
            0,
        )
        self.body += name + packed
        return at

    def entry(
        self,
        name: bytes,
        content: bytes,
        at: int,
        *,
        method: int = 8,
        flags: int = 0,
        mode: int = 0o644,
        **lies: int,
    ) -> None:
        """Its line in the table of contents."""
        packed = _deflate(content) if method == 8 else content
        self.table += struct.pack(
            "<4s6H3L5H2L",
            b"PK\1\2",
            3 << 8 | 20,
            20,
            flags,
            method,
            0,
            0,
            lies.get("crc", zlib.crc32(content)),
            lies.get("packed", len(packed)),
            lies.get("size", len(content)),
            len(name),
            0,
            0,
            0,
            0,
            mode << 16,
            at,
        )
        self.table += name
        self.count += 1

    def add(self, name: bytes, content: bytes, *, method: int = 8, flags: int = 0, mode: int = 0o644) -> None:
        at = self.local(name, content, method=method, flags=flags)
        self.entry(name, content, at, method=method, flags=flags, mode=mode)

    def finish(self, *, comment: bytes = b"", count: int | None = None) -> bytes:
        number = self.count if count is None else count
        end = struct.pack(
            "<4s4H2LH", b"PK\5\6", 0, 0, number, number, len(self.table), len(self.body), len(comment)
        )
        return self.body + self.table + end + comment


def _deflate(content: bytes) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    return compressor.compress(content) + compressor.flush()


def forge_zip(*steps: Callable[[ForgedZip], object]) -> bytes:
    archive = ForgedZip()
    for step in steps:
        step(archive)
    return archive.finish()
