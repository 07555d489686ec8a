"""Compressed streams of untrusted authors, decoded in bounded pieces; imports only siblings."""

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fumehood.sandboxd.inside import staging
from fumehood.sandboxd.inside.leave import Leave, Refused

_ZSTD_WINDOW_LOG = 25
_ZSTD_MODULES = ("compression.zstd", "backports.zstd")


def _plain(pieces: Iterator[bytes], leave: Leave) -> Iterator[bytes]:
    del leave
    return pieces


def gunzipped(pieces: Iterator[bytes], leave: Leave) -> Iterator[bytes]:
    """All members one after another, as gzip does; zeros may follow the last."""
    return _decoded(pieces, leave, _Inflater)


def _unzstd(pieces: Iterator[bytes], leave: Leave) -> Iterator[bytes]:
    zstd = _find_zstd()
    leave.take(1 << _ZSTD_WINDOW_LOG)  # what the largest window that is let in takes
    options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
    return _decoded(pieces, leave, lambda: _Zstd(zstd, options))


def _find_zstd() -> Any:
    for name in _ZSTD_MODULES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise Refused("tar.zst cannot be unpacked here: the sandbox's Python has no zstd; use tar.gz or zip")


class Zlib(Protocol):
    """What `zlib.decompressobj` gives; its type has no public name."""

    @property
    def eof(self) -> bool: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Decoder(Protocol):
    def feed(self, piece: bytes) -> Iterator[bytes]: ...

    def rest(self) -> bytes | None:
        """What follows the end; None if that has not come."""
        ...


class _Inflater:
    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        return inflate(self._decoder, piece)

    def rest(self) -> bytes | None:
        return self._decoder.unused_data if self._decoder.eof else None


class _Zstd:
    def __init__(self, zstd: Any, options: Any) -> None:
        self._error: type[Exception] = zstd.ZstdError
        self._decoder = zstd.ZstdDecompressor(options=options)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        while True:
            try:
                out: bytes = self._decoder.decompress(piece, staging.CHUNK)
            except self._error as error:
                raise Refused(f"the archive is damaged: {error}") from None
            if out:
                yield out
            piece = b""
            if self._decoder.eof or self._decoder.needs_input:
                return

    def rest(self) -> bytes | None:
        return self._decoder.unused_data if self._decoder.eof else None


def inflate(decoder: Zlib, piece: bytes) -> Iterator[bytes]:
    """What a piece gives, in bounded pieces."""
    while True:
        try:
            out = decoder.decompress(piece, staging.CHUNK)
        except zlib.error as error:
            raise Refused(f"the archive is damaged: {error}") from None
        if out:
            yield out
        piece = decoder.unconsumed_tail
        if decoder.eof or (not piece and len(out) < staging.CHUNK):
            return


def _decoded(pieces: Iterator[bytes], leave: Leave, start: Callable[[], _Decoder]) -> Iterator[bytes]:
    decoder: _Decoder | None = start()
    for piece in pieces:
        while piece:
            leave.take(0)
            if decoder is None:
                if piece[0] == 0:
                    yield from _only_zeros(piece, pieces)
                    return
                decoder = start()
            yield from decoder.feed(piece)
            rest = decoder.rest()
            piece = rest or b""
            if rest is not None:
                decoder = None
    if decoder is not None:
        raise Refused("the archive is cut short")


def _only_zeros(piece: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for padding in (piece, *pieces):
        if padding.count(0) != len(padding):
            raise Refused("something follows the archive's end")
    yield from ()


def bounded(pieces: Iterator[bytes], most: int) -> Iterator[bytes]:
    for piece in pieces:
        most -= len(piece)
        if most < 0:
            raise Refused("the archive holds more than may be unpacked", "too_large")
        yield piece


# What a tar may come in.
DECODERS: dict[str, Callable[[Iterator[bytes], Leave], Iterator[bytes]]] = {
    "tar": _plain,
    "tar.gz": gunzipped,
    "tar.zst": _unzstd,
}
