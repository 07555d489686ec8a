"""Sends files as downloads, with ranges and ETags.

Content is untrusted: the headers tell browsers to save it and to run nothing of it.
"""

import re
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import quote

from fumehood.gateway.gateway_exchange import ClientConnectionMonitor, GatewayExchange
from fumehood.http_server.asgi_exchange import Headers
from fumehood.protocol.file_types import media_type_for_name
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import ApiError

# Not allowed in the plain `filename` of Content-Disposition.
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9 ._()+=@,-]")
_RANGE_HEADER = re.compile(rb"\s*bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.IGNORECASE)


class RangeNotSatisfiable(ApiError):
    status = 416
    code = "range_not_satisfiable"


@dataclass(frozen=True, slots=True)
class DownloadableFile:
    """A file to send.

    name: its path; the last component is the suggested filename.
    read: yields the bytes from `start` up to `end` (None: the end of the file); raises before the first chunk.
    size: None if unknown; then ranges are not supported.
    etag: identifies the content.
    """

    name: str
    read: Callable[[int, int | None], AsyncGenerator[bytes]]
    size: int | None = None
    etag: str | None = None


async def send_download(exchange: GatewayExchange, download: DownloadableFile) -> int:
    """Send the file, or the requested range. Returns the number of bytes sent. Raises what `read` raises."""
    headers = _make_headers(download)
    if download.etag is not None and _matches_etag(exchange.headers.get(b"if-none-match"), download.etag):
        await exchange.start_response(304, headers[1:])
        await exchange.send(b"", more=False)
        return 0
    byte_range = _parse_range(exchange, download)
    if byte_range is None:
        return await _send_content(exchange, 200, headers, download.read(0, None), download.size)
    start, end = byte_range
    headers.append((b"content-range", b"bytes %d-%d/%d" % (start, end - 1, download.size)))
    return await _send_content(exchange, 206, headers, download.read(start, end), end - start)


async def _send_content(
    exchange: GatewayExchange,
    status: int,
    headers: Headers,
    content: AsyncGenerator[bytes],
    length: int | None,
) -> int:
    """Stops reading when the client disconnects."""
    sent = 0
    async with aclosing(content) as chunks:
        first = await anext(chunks, b"")  # errors are raised before the response starts
        second = await anext(chunks, None) if length is None else b""
        if second is None:
            length, second = len(first), b""
        if length is not None:
            headers = [*headers, (b"content-length", b"%d" % length)]
        await exchange.start_response(status, headers)
        if exchange.method == "HEAD":
            await exchange.send(b"", more=False)
            return 0
        with ClientConnectionMonitor(exchange, lambda: None) as monitor:
            async for chunk in _chain((first, second), chunks):
                await exchange.send(chunk)
                sent += len(chunk)
                if monitor.disconnected:
                    exchange.log_fields["outcome"] = "client disconnected"
                    return sent
    await exchange.send(b"", more=False)
    return sent


async def _chain(first: Iterable[bytes], rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    for chunk in filter(None, first):
        yield chunk
    async for chunk in rest:
        yield chunk


def _parse_range(exchange: GatewayExchange, download: DownloadableFile) -> tuple[int, int] | None:
    """The requested range; None for the whole file, also for several ranges and for invalid ones.

    Raises RangeNotSatisfiable.
    """
    header, size = exchange.headers.get(b"range"), download.size
    condition = exchange.headers.get(b"if-range")
    if header is None or size is None:
        return None
    if condition is not None and (download.etag is None or condition.strip() != _quote_etag(download.etag)):
        return None
    found = _RANGE_HEADER.fullmatch(header)
    if found is None or found[1] == found[2] == b"":
        return None
    if found[1]:
        start, end = int(found[1]), int(found[2] or size) + (found[2] != b"")
        if end <= start and found[2]:  # invalid
            return None
    else:
        start, end = max(size - int(found[2]), 0), size
    if start >= size or start >= end:
        exchange.extra_headers.append((b"content-range", b"bytes */%d" % size))
        raise RangeNotSatisfiable(f"The requested range is outside the file of {size} bytes.")
    return start, min(end, size)


def _matches_etag(header: bytes | None, etag: str) -> bool:
    """Whether an If-None-Match header contains the ETag."""
    if header is None:
        return False
    listed = [each.strip().removeprefix(b"W/") for each in header.split(b",")]
    return b"*" in listed or _quote_etag(etag) in listed


def _quote_etag(etag: str) -> bytes:
    return b'"%b"' % etag.encode()


def _make_headers(download: DownloadableFile) -> Headers:
    name = download.name.rpartition("/")[2]
    headers: Headers = [
        (b"content-type", media_type_for_name(name).encode()),
        (b"content-disposition", _content_disposition(name).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"content-security-policy", b"sandbox; default-src 'none'"),
        (b"cache-control", b"private, no-cache"),
    ]
    if download.size is not None:
        headers.append((b"accept-ranges", b"bytes"))
    if download.etag is not None:
        headers.append((b"etag", _quote_etag(download.etag)))
    return headers


def _content_disposition(name: str) -> str:
    """RFC 6266: a plain filename, and an encoded one if the name has other characters."""
    name = sanitize_name(name) or "file"
    plain = _UNSAFE_CHARACTERS.sub("_", name)
    extended = "" if plain == name else f"; filename*=UTF-8''{quote(name, safe='')}"
    return f'attachment; filename="{plain}"{extended}'
