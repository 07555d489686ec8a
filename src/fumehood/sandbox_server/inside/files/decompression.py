"""Decompresses untrusted streams in chunks of limited size."""

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from fumehood.sandbox_server.inside.files import atomic_writes
from fumehood.sandbox_server.inside.files.quota_requests import FileTaskRefused, WriteQuota

_ZSTD_WINDOW_LOG = 25
_ZSTD_MODULES = ("compression.zstd", "backports.zstd")


def _pass_through(chunks: Iterator[bytes], permit: WriteQuota) -> Iterator[bytes]:
    del permit
    return chunks


def gunzip(chunks: Iterator[bytes], permit: WriteQuota) -> Iterator[bytes]:
    """Decompress all members, as gzip does; zeros may follow the last."""
    return _decompress_members(chunks, permit, lambda: zlib.decompressobj(wbits=31), inflate)


def _decompress_zstd(chunks: Iterator[bytes], permit: WriteQuota) -> Iterator[bytes]:
    zstd = _find_zstd()
    permit.reserve(1 << _ZSTD_WINDOW_LOG)  # the largest window that is accepted
    options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
    return _decompress_members(
        chunks,
        permit,
        lambda: zstd.ZstdDecompressor(options=options),
        lambda decoder, chunk: _decompress_frame(decoder, chunk, zstd.ZstdError),
    )


def _find_zstd() -> Any:
    for name in _ZSTD_MODULES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise FileTaskRefused(
        "tar.zst cannot be unpacked here: the sandbox's Python has no zstd; use tar.gz or zip"
    )


def inflate(
    decoder: "zlib._Decompress",  # pyright: ignore[reportPrivateUsage] (of `zlib.decompressobj()`; it has no other)
    chunk: bytes,
) -> Iterator[bytes]:
    """Decompress a chunk into chunks of limited size. Raises FileTaskRefused."""
    while True:
        try:
            out = decoder.decompress(chunk, atomic_writes.CHUNK_BYTES)
        except zlib.error as error:
            raise FileTaskRefused(f"the archive is damaged: {error}") from None
        if out:
            yield out
        chunk = decoder.unconsumed_tail
        if decoder.eof or (not chunk and len(out) < atomic_writes.CHUNK_BYTES):
            return


def _decompress_frame(decoder: Any, chunk: bytes, zstd_error: type[Exception]) -> Iterator[bytes]:
    while True:
        try:
            out: bytes = decoder.decompress(chunk, atomic_writes.CHUNK_BYTES)
        except zstd_error as error:
            raise FileTaskRefused(f"the archive is damaged: {error}") from None
        if out:
            yield out
        chunk = b""
        if decoder.eof or decoder.needs_input:
            return


def _decompress_members(
    chunks: Iterator[bytes],
    permit: WriteQuota,
    start: Callable[[], Any],
    feed: Callable[[Any, bytes], Iterator[bytes]],
) -> Iterator[bytes]:
    """Decompress members one after another; `start` returns a decoder, `feed` passes a chunk to it."""
    decoder = start()
    for chunk in chunks:
        while chunk:
            permit.reserve(0)
            if decoder is None:
                if chunk[0] == 0:
                    yield from _check_zero_padding(chunk, chunks)
                    return
                decoder = start()
            yield from feed(decoder, chunk)
            chunk = b""
            if decoder.eof:
                chunk = decoder.unused_data
                decoder = None
    if decoder is not None:
        raise FileTaskRefused("the archive is cut short")


def _check_zero_padding(chunk: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    for padding in (chunk, *chunks):
        if padding.count(0) != len(padding):
            raise FileTaskRefused("something follows the archive's end")
    yield from ()


def limit_size(chunks: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the chunks. Raises FileTaskRefused once there are more than `max_bytes`."""
    for chunk in chunks:
        max_bytes -= len(chunk)
        if max_bytes < 0:
            raise FileTaskRefused("the archive holds more than may be unpacked", "too_large")
        yield chunk


# By the kind of a tar archive.
DECOMPRESSORS: dict[str, Callable[[Iterator[bytes], WriteQuota], Iterator[bytes]]] = {
    "tar": _pass_through,
    "tar.gz": gunzip,
    "tar.zst": _decompress_zstd,
}
