"""Files as downloads, whole or in part; imports `protocol` and siblings.

What is in them nobody here has written, so a browser that gets one is told to save it and to run nothing of it.
"""

import re
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import quote

from fumehood.gateway.exchange import Exchange, Vigil
from fumehood.protocol.errors import ApiError
from fumehood.protocol.file_types import media_type
from fumehood.protocol.names import clean_name
from fumehood.serving.exchange import Headers

# What would end or confuse a header, where every client has to understand it.
_UNPLAIN = re.compile(r"[^A-Za-z0-9 ._()+=@,-]")
_RANGE = re.compile(rb"\s*bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.IGNORECASE)


class RangeUnsatisfiable(ApiError):
    status = 416
    type = "invalid_request_error"
    code = "range_not_satisfiable"


@dataclass(frozen=True, slots=True)
class Download:
    """A file that a client may have, whole or in part.

    name: by which it is to be saved; paths lose all but their last part.
    read: the bytes from the first number up to the second, or to the last; it raises before the first piece.
    size: None where only reading tells; then it is sent whole.
    tag: names this content and no other.
    """

    name: str
    read: Callable[[int, int | None], AsyncGenerator[bytes]]
    size: int | None = None
    tag: str | None = None


async def send_download(exchange: Exchange, download: Download) -> int:
    """Answer with what the request asks for; how many bytes of content that were. Raises what reading does."""
    headers = _headers(download)
    if download.tag is not None and _names(exchange.headers.get(b"if-none-match"), download.tag):
        await exchange.begin(304, headers[1:])
        await exchange.send(b"", more=False)
        return 0
    part = _part(exchange, download)
    if part is None:
        return await _send(exchange, 200, headers, download.read(0, None), download.size)
    start, end = part
    headers.append((b"content-range", b"bytes %d-%d/%d" % (start, end - 1, download.size)))
    return await _send(exchange, 206, headers, download.read(start, end), end - start)


async def _send(
    exchange: Exchange, status: int, headers: Headers, content: AsyncGenerator[bytes], length: int | None
) -> int:
    """Nothing more is read for a caller who has left."""
    sent = 0
    async with aclosing(content) as pieces:
        first = await anext(pieces, b"")  # what can be refused is refused before the head
        second = await anext(pieces, None) if length is None else b""
        if second is None:
            length, second = len(first), b""
        if length is not None:
            headers = [*headers, (b"content-length", b"%d" % length)]
        await exchange.begin(status, headers)
        if exchange.method == "HEAD":
            await exchange.send(b"", more=False)
            return 0
        with Vigil(exchange, lambda: None) as vigil:
            async for piece in _chained((first, second), pieces):
                await exchange.send(piece)
                sent += len(piece)
                if vigil.left:
                    exchange.noted["outcome"] = "the client left"
                    return sent
    await exchange.send(b"", more=False)
    return sent


async def _chained(first: Iterable[bytes], rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    for piece in filter(None, first):
        yield piece
    async for piece in rest:
        yield piece


def _part(exchange: Exchange, download: Download) -> tuple[int, int] | None:
    """Where the part begins and ends that was asked for; None for all. Several parts at once are not served, so all
    is sent then, as to those who ask for what cannot be understood.
    """
    asked, size = exchange.headers.get(b"range"), download.size
    condition = exchange.headers.get(b"if-range")
    if asked is None or size is None:
        return None
    if condition is not None and (download.tag is None or condition.strip() != _quoted(download.tag)):
        return None
    found = _RANGE.fullmatch(asked)
    if found is None or found[1] == found[2] == b"":
        return None
    if found[1]:
        start, end = int(found[1]), int(found[2] or size) + (found[2] != b"")
        if end <= start and found[2]:  # which is no range at all
            return None
    else:
        start, end = max(size - int(found[2]), 0), size
    if start >= size or start >= end:
        exchange.extra.append((b"content-range", b"bytes */%d" % size))
        raise RangeUnsatisfiable(f"The file has {size} bytes; what was asked for is not among them.")
    return start, min(end, size)


def _names(header: bytes | None, tag: str) -> bool:
    """Whether a list of tags has this one."""
    if header is None:
        return False
    listed = [each.strip().removeprefix(b"W/") for each in header.split(b",")]
    return b"*" in listed or _quoted(tag) in listed


def _quoted(tag: str) -> bytes:
    return b'"%b"' % tag.encode()


def _headers(download: Download) -> Headers:
    name = download.name.rpartition("/")[2]
    headers: Headers = [
        (b"content-type", media_type(name).encode()),
        (b"content-disposition", _disposition(name).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"content-security-policy", b"sandbox; default-src 'none'"),
        (b"cache-control", b"private, no-cache"),
    ]
    if download.size is not None:
        headers.append((b"accept-ranges", b"bytes"))
    if download.tag is not None:
        headers.append((b"etag", _quoted(download.tag)))
    return headers


def _disposition(name: str) -> str:
    """As RFC 6266: a plain name for everybody, and the whole one for those who understand it."""
    name = clean_name(name) or "file"
    plain = _UNPLAIN.sub("_", name)
    extended = "" if plain == name else f"; filename*=UTF-8''{quote(name, safe='')}"
    return f'attachment; filename="{plain}"{extended}'
