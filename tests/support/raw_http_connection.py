"""HTTP on a raw socket: sends bytes unchanged, parses responses strictly."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

TIMEOUT = 60


@dataclass(frozen=True)
class RawResponse:
    """headers: names in lower case, with the last value of each."""

    status: int
    headers: dict[str, str]
    body: bytes


class RawConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        """Each in a packet of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.01 if len(pieces) > 1 else 0)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ")[1]), {name.lower(): value for name, value in headers.items()}

    async def read_response(self, *, head: bool = False) -> RawResponse:
        """The next answer; `head`: to a request that was HEAD."""
        status, headers = await self.read_head()
        if head or status in (204, 304) or status < 200:
            return RawResponse(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return RawResponse(status, headers, await self._read_chunks())
        if "content-length" in headers:
            return RawResponse(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        return RawResponse(status, headers, await self.reader.read())

    async def _read_chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readline() == b"\r\n"
        return body


@asynccontextmanager
async def open_connection(port: int) -> AsyncGenerator[RawConnection]:
    """A connection until the block is left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    try:
        async with asyncio.timeout(TIMEOUT):
            yield RawConnection(reader, writer)
    finally:
        writer.close()
