"""Compressed streams of untrusted authors, decoded in bounded pieces."""

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fumehood.sandbox_server.inside.files import atomic_writes
from fumehood.sandbox_server.inside.files.quota_permit import FileTaskRefused, QuotaPermit

_ZSTD_WINDOW_LOG = 25
_ZSTD_MODULES = ("compression.zstd", "backports.zstd")


def _pass_through(pieces: Iterator[bytes], permit: QuotaPermit) -> Iterator[bytes]:
    del permit
    return pieces


def gunzip(pieces: Iterator[bytes], permit: QuotaPermit) -> Iterator[bytes]:
    """All members one after another, as gzip does; zeros may follow the last."""
    return _decompress_members(pieces, permit, _GzipDecompressor)


def _decompress_zstd(pieces: Iterator[bytes], permit: QuotaPermit) -> Iterator[bytes]:
    zstd = _find_zstd()
    permit.reserve(1 << _ZSTD_WINDOW_LOG)  # what the largest window that is let in takes
    options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
    return _decompress_members(pieces, permit, lambda: _ZstdDecompressor(zstd, options))


def _find_zstd() -> Any:
    for name in _ZSTD_MODULES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise FileTaskRefused(
        "tar.zst cannot be unpacked here: the sandbox's Python has no zstd; use tar.gz or zip"
    )


class ZlibDecompressor(Protocol):
    """What `zlib.decompressobj` gives; its type has no public name."""

    @property
    def eof(self) -> bool: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Decompressor(Protocol):
    def feed(self, piece: bytes) -> Iterator[bytes]: ...

    def trailing_data(self) -> bytes | None:
        """What follows the end; None if that has not come."""
        ...


class _GzipDecompressor:
    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        return inflate(self._decoder, piece)

    def trailing_data(self) -> bytes | None:
        return self._decoder.unused_data if self._decoder.eof else None


class _ZstdDecompressor:
    def __init__(self, zstd: Any, options: Any) -> None:
        self._error: type[Exception] = zstd.ZstdError
        self._decoder = zstd.ZstdDecompressor(options=options)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        while True:
            try:
                out: bytes = self._decoder.decompress(piece, atomic_writes.CHUNK_BYTES)
            except self._error as error:
                raise FileTaskRefused(f"the archive is damaged: {error}") from None
            if out:
                yield out
            piece = b""
            if self._decoder.eof or self._decoder.needs_input:
                return

    def trailing_data(self) -> bytes | None:
        return self._decoder.unused_data if self._decoder.eof else None


def inflate(decoder: ZlibDecompressor, piece: bytes) -> Iterator[bytes]:
    """What a piece gives, in bounded pieces."""
    while True:
        try:
            out = decoder.decompress(piece, atomic_writes.CHUNK_BYTES)
        except zlib.error as error:
            raise FileTaskRefused(f"the archive is damaged: {error}") from None
        if out:
            yield out
        piece = decoder.unconsumed_tail
        if decoder.eof or (not piece and len(out) < atomic_writes.CHUNK_BYTES):
            return


def _decompress_members(
    pieces: Iterator[bytes], permit: QuotaPermit, start: Callable[[], _Decompressor]
) -> Iterator[bytes]:
    decoder: _Decompressor | None = start()
    for piece in pieces:
        while piece:
            permit.reserve(0)
            if decoder is None:
                if piece[0] == 0:
                    yield from _check_zero_padding(piece, pieces)
                    return
                decoder = start()
            yield from decoder.feed(piece)
            rest = decoder.trailing_data()
            piece = rest or b""
            if rest is not None:
                decoder = None
    if decoder is not None:
        raise FileTaskRefused("the archive is cut short")


def _check_zero_padding(piece: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for padding in (piece, *pieces):
        if padding.count(0) != len(padding):
            raise FileTaskRefused("something follows the archive's end")
    yield from ()


def limit_size(pieces: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    for piece in pieces:
        max_bytes -= len(piece)
        if max_bytes < 0:
            raise FileTaskRefused("the archive holds more than may be unpacked", "too_large")
        yield piece


# What a tar may come in.
DECOMPRESSORS: dict[str, Callable[[Iterator[bytes], QuotaPermit], Iterator[bytes]]] = {
    "tar": _pass_through,
    "tar.gz": gunzip,
    "tar.zst": _decompress_zstd,
}
