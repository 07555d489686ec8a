"""/v1/containers/…/files: what code has left, for the client to fetch; imports `interfaces`, `protocol`, siblings."""

import contextlib
import re
from urllib.parse import quote

from msgspec import Raw

from fumehood.gateway.exchange import Exchange, encode
from fumehood.gateway.listing import page
from fumehood.interfaces import Caller, Containers
from fumehood.protocol.containers import file_on_the_wire
from fumehood.protocol.names import clean_name
from fumehood.serving.exchange import Headers

# What would end or confuse a header, where every client has to understand it.
_UNPLAIN = re.compile(r"[^A-Za-z0-9 ._()+=@,-]")
_BINARY = "application/octet-stream"
_OFFICE = "application/vnd.openxmlformats-officedocument."
# What code mostly writes; the same on every host.
_KINDS = {
    "csv": "text/csv; charset=utf-8",
    "docx": f"{_OFFICE}wordprocessingml.document",
    "gif": "image/gif",
    "htm": "text/html; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "jpeg": "image/jpeg",
    "jpg": "image/jpeg",
    "json": "application/json",
    "log": "text/plain; charset=utf-8",
    "md": "text/markdown; charset=utf-8",
    "mp3": "audio/mpeg",
    "mp4": "video/mp4",
    "pdf": "application/pdf",
    "png": "image/png",
    "pptx": f"{_OFFICE}presentationml.presentation",
    "py": "text/x-python; charset=utf-8",
    "svg": "image/svg+xml",
    "tsv": "text/tab-separated-values; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
    "wav": "audio/wav",
    "webp": "image/webp",
    "xlsx": f"{_OFFICE}spreadsheetml.sheet",
    "xml": "application/xml",
    "zip": "application/zip",
}


class ContainerFiles:
    def __init__(self, containers: Containers) -> None:
        self._containers = containers

    async def list(self, exchange: Exchange, caller: Caller) -> None:
        records = await self._containers.files(caller, exchange.parameters["container_id"])
        rows = [(record.id, record) for record in records]
        await exchange.answer_json(page(exchange, rows, lambda record: Raw(encode(file_on_the_wire(record)))))

    async def get(self, exchange: Exchange, caller: Caller) -> None:
        names = exchange.parameters
        record = await self._containers.file(caller, names["container_id"], names["file_id"])
        await exchange.answer_json(file_on_the_wire(record))

    async def content(self, exchange: Exchange, caller: Caller) -> None:
        container_id, file_id = exchange.parameters["container_id"], exchange.parameters["file_id"]
        record = await self._containers.file(caller, container_id, file_id)
        headers = _headers(record.path)
        async with contextlib.aclosing(self._containers.read(caller, container_id, file_id)) as pieces:
            first = await anext(pieces, b"")  # what can be refused is refused before the head
            second = await anext(pieces, None)
            if second is None:
                await exchange.begin(200, [*headers, (b"content-length", b"%d" % len(first))])
                await exchange.send(first, more=False)
                return
            await exchange.begin(200, headers)
            await exchange.send(first)
            await exchange.send(second)
            async for piece in pieces:
                await exchange.send(piece)
        await exchange.send(b"", more=False)


def _headers(path: str) -> Headers:
    """For a file that nobody should trust: it is downloaded, never shown as part of a page."""
    name = path.rpartition("/")[2]
    return [
        (b"content-type", _content_type(name).encode()),
        (b"content-disposition", _disposition(name).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"content-security-policy", b"sandbox; default-src 'none'"),
        (b"cache-control", b"private, no-cache"),
    ]


def _content_type(name: str) -> str:
    return _KINDS.get(name.rpartition(".")[2].lower(), _BINARY)


def _disposition(name: str) -> str:
    """As RFC 6266: a plain name for everybody, and the whole one for those who understand it."""
    name = clean_name(name) or "file"
    plain = _UNPLAIN.sub("_", name)
    extended = "" if plain == name else f"; filename*=UTF-8''{quote(name, safe='')}"
    return f'attachment; filename="{plain}"{extended}'
